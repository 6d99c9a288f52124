"""Tasks about text: logs, patterns, encodings, dates and settings."""

from __future__ import annotations

import configparser
from collections import Counter
from datetime import UTC, datetime, timedelta
from random import Random

from libra_cli.envs.terminal_tasks.made_task import MadeTask
from libra_cli.envs.terminal_tasks.words import NAMES, NOUNS, sentence


def log_counts(rng: Random, number: int) -> MadeTask:
    """Lines of a log are counted by service or by hour, for one level."""
    by = ("service", "hour")[number % 2]
    level = ("ERROR", "WARN", "INFO")[number % 3]
    at = datetime(2026, rng.randrange(1, 13), rng.randrange(1, 28), tzinfo=UTC)
    lines, counts = [], Counter[str]()
    for _ in range(rng.randrange(80, 160)):
        at += timedelta(seconds=rng.randrange(20, 900))
        service, seen = rng.choice(NAMES[:6]), rng.choice(("ERROR", "WARN", "INFO", "DEBUG"))
        lines.append(f"{at:%Y-%m-%dT%H:%M:%SZ} [{service}] {seen}: {sentence(rng).strip()}")
        if rng.random() < 0.1:
            lines.append(f"    at {level} in {rng.choice(NOUNS)}.py")
        if seen == level:
            counts[service if by == "service" else f"{at:%H}"] += 1
    expected = [f"{key} {count}" for key, count in sorted(counts.items(), key=_most_first)]
    what = {"service": "service (the word in brackets)", "hour": "hour of the day (`00` to `23`)"}
    field = {"service": r"{gsub(/[][]/,x,$2); print $2}", "hour": "{print substr($1,12,2)}"}[by]
    return MadeTask(
        f"Each entry of `/app/app.log` has a time, a service in brackets, a level and a message; "
        f"indented lines belong to the entry above them and are no entries. Count the entries of "
        f"level {level} for each {what[by]}, and write `/app/counts.txt`: one line `KEY COUNT` "
        "for each key that occurs, highest count first, equal counts by key.",
        {"app.log": "\n".join(lines) + "\n"},
        f"""
awk '$3 == "{level}:" && /^[0-9]/ {field}' app.log |
    sort | uniq -c | sort -k1,1nr -k2,2 | awk '{{print $2, $1}}' > counts.txt
""",
        "assert (APP / 'counts.txt').read_text().split('\\n')[:-1] == EXPECTED",
        expected,
        category="text",
    )


def _most_first(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


_PATTERNS = (
    (
        (
            "IPv4 addresses (four decimal numbers from 0 to 255 between dots, without leading "
            "zeros; not part of a longer number or of a fifth one)"
        ),
        ("10.0.3.7", "192.168.255.1", "8.8.8.8", "255.255.255.255", "1.20.30.41", "0.0.0.7"),
        ("256.1.1.1", "1.2.3", "1.2.3.4.5", "10.00.1.1", "300.2.2.2", "1.2.3.04"),
        (
            r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}"
            r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)(?![\d.])"
        ),
    ),
    (
        (
            "order numbers (two capital letters, a dash, six digits, a dash and one more digit, "
            "which is the sum of the six modulo 10; not part of a longer word)"
        ),
        ("AB-123456-1", "QX-000019-0", "ZZ-999999-4", "KL-100200-3", "MN-555555-0"),
        ("AB-123456-2", "ab-123456-1", "AB-12345-5", "XAB-123456-1", "KL-100200-4", "AB-123456-11"),
        r"\b[A-Z]{2}-\d{6}-\d\b",
    ),
    (
        (
            "times of day on a 24-hour clock with seconds (`HH:MM:SS`, each part of two digits; "
            "not part of a longer number)"
        ),
        ("00:00:00", "23:59:59", "07:30:15", "12:05:09", "19:47:01"),
        ("24:00:00", "7:30:15", "12:60:00", "12:05:9", "112:05:09", "12:05:090"),
        r"(?<![\d:])(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?![\d:])",
    ),
    (
        (
            "colours (`#` and three or six hexadecimal digits in any case; no letter or digit may "
            "follow)"
        ),
        ("#fff", "#A0b1C2", "#000000", "#9aF", "#123456"),
        ("#ff", "#12345", "#ggg", "#1234567", "#abcx", "#12"),
        r"#(?:[0-9A-Fa-f]{6}|[0-9A-Fa-f]{3})(?![0-9A-Za-z])",
    ),
)


def patterns(rng: Random, number: int) -> MadeTask:
    """What matches a description is found in a text, and what nearly does is not."""
    what, right, wrong, expression = _PATTERNS[number % len(_PATTERNS)]
    given = rng.choices(right, k=10) + rng.choices(wrong, k=10)
    rng.shuffle(given)
    lines = []
    for one in given:
        before, after = sentence(rng).split()[:3], sentence(rng).split()[1:3]
        lines.append(" ".join([*before, f"{rng.choice(('', '(', '<'))}{one},", *after]))
    seen = [one for one in given if one in right]
    test = " and sum(map(int, one[3:9])) % 10 == int(one[-1])" if "order" in what else ""
    return MadeTask(
        f"Find all {what} in `/app/letters.txt`. Write them to `/app/found.txt`, one on a line, "
        "each only once, in the order of where they stand first.",
        {"letters.txt": "\n".join(lines) + "\n"},
        f"""
python3 - <<'END'
import re
text = open("letters.txt").read()
found = dict.fromkeys(re.findall(r"{expression}", text))
with open("found.txt", "w") as out:
    out.writelines(one + "\\n" for one in found if True{test})
END
""",
        "assert (APP / 'found.txt').read_text().split() == EXPECTED",
        list(dict.fromkeys(seen)),
        category="regular expressions",
        difficulty="medium",
    )


def encodings(rng: Random, number: int) -> MadeTask:
    """Files of several encodings and line ends become UTF-8 with the line ends of Unix."""
    files: dict[str, bytes] = {}
    expected: dict[str, str] = {}
    codes = (("latin-1", "utf-16"), ("cp1252", "utf-8-sig"), ("cp437", "utf-16"))[number % 3]
    listed = []
    for index in range(rng.randrange(6, 10)):
        name = f"{rng.choice(NOUNS)}{index}.txt"
        code = rng.choice((*codes, "utf-8"))
        text = f"Café, Straße, niño: {sentence(rng)}{sentence(rng)}"
        files[f"notes/{name}"] = text.replace("\n", rng.choice(("\r\n", "\n"))).encode(code)
        listed.append(f"{name}\t{code}")
        expected[name] = text
    return MadeTask(
        "`/app/encodings.tsv` names the encoding of each file in `/app/notes`, as Python spells "
        "it. Convert each of them, in place, to UTF-8 without a byte order mark and with `\\n` as "
        "the end of lines.",
        files | {"encodings.tsv": "\n".join(listed).encode() + b"\n"},
        """
python3 - <<'END'
import pathlib
for line in open("encodings.tsv"):
    name, code = line.split()
    path = pathlib.Path("notes", name)
    text = path.read_bytes().decode(code).replace("\\r\\n", "\\n")
    path.write_bytes(text.encode("utf-8"))
END
""",
        "found = {one.name: one.read_bytes().decode() for one in (APP / 'notes').iterdir()}\n"
        "assert found == EXPECTED, found",
        expected,
        category="text",
    )


def dates(rng: Random, number: int) -> MadeTask:
    """Days between dates, weekdays, or times of other zones are worked out."""
    begin = datetime(2020, 1, 1, 8, tzinfo=UTC)
    lines, expected = [], []
    kind = ("workdays", "weekday", "zones")[number % 3]
    for _ in range(rng.randrange(12, 20)):
        one = begin + timedelta(minutes=rng.randrange(5 * 525600))
        other = one + timedelta(days=rng.randrange(60))
        offset = rng.randrange(-11, 13)
        if kind == "workdays":
            lines.append(f"{one:%Y-%m-%d} {other:%Y-%m-%d}")
            days = ((one + timedelta(days=n)).weekday() < 5 for n in range((other - one).days))
            expected.append(str(sum(days)))
        elif kind == "weekday":
            lines.append(f"{one:%d.%m.%Y}")
            expected.append(f"{one:%A}, day {one:%j}")
        else:
            lines.append(f"{one:%Y-%m-%dT%H:%M}{offset:+03d}:00")
            expected.append(f"{one - timedelta(hours=offset):%Y-%m-%d %H:%M}")
    told, compute = _DATES[kind]
    return MadeTask(
        f"{told} Write the answers to `/app/answers.txt`, one line for each line of "
        "`/app/dates.txt`, in the same order.",
        {"dates.txt": "\n".join(lines) + "\n"},
        f"""
python3 - <<'END'
from datetime import date, datetime, timedelta, timezone
with open("answers.txt", "w") as out:
    for line in open("dates.txt"):
        line = line.strip()
        {compute}
        print(answer, file=out)
END
""",
        "assert (APP / 'answers.txt').read_text().splitlines() == EXPECTED",
        expected,
        category="dates",
    )


_DATES = {
    "workdays": (
        (
            "Each line of `/app/dates.txt` has two dates. Count the days from Monday to Friday "
            "from the first date on, and before the second."
        ),
        (
            "one, other = map(date.fromisoformat, line.split())\n"
            "        days = range((other - one).days)\n"
            "        answer = sum((one + timedelta(n)).isoweekday() < 6 for n in days)"
        ),
    ),
    "weekday": (
        (
            "Each line of `/app/dates.txt` is a date as `31.12.2024`. The answer to it is the "
            "English name of the weekday and the number of the day in its year in three digits, "
            "as `Tuesday, day 366`."
        ),
        'answer = datetime.strptime(line, "%d.%m.%Y").strftime("%A, day %j")',
    ),
    "zones": (
        (
            "Each line of `/app/dates.txt` is a time with its offset from UTC. The answer to it is "
            "the time in UTC, as `2024-12-31 23:59`."
        ),
        'answer = datetime.fromisoformat(line).astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M")',
    ),
}


def settings(rng: Random, number: int) -> MadeTask:
    """Keys of an INI file are changed, and its comments and order are kept."""
    sections = rng.sample(NOUNS, 4)
    lines: list[str] = []
    changes: list[tuple[str, str, str]] = []
    for section in sections:
        lines += [f"# About the {section}.", f"[{section}]"]
        keys = rng.sample(("port", "host", "timeout", "retries", "path", "level"), 4)
        for key in keys:
            lines += [f"{key} = {rng.randrange(1000)}  ; {rng.choice(NAMES)} chose it"][:1]
        changes.append((section, rng.choice(keys), str(rng.randrange(1000, 9999))))
        lines.append("")
    changes = changes[: 2 + number % 3]
    wanted, within = [], ""
    for line in lines:
        within = line[1:-1] if line.startswith("[") else within
        for section, key, value in changes:
            if within == section and line.startswith(f"{key} ="):
                line = f"{key} = {value}  ;{line.partition(';')[2]}"
        wanted.append(line)
    told = "\n".join(f"- `{key}` of section `{section}`: {v}" for section, key, v in changes)
    expected = "\n".join(wanted)
    configparser.ConfigParser(inline_comment_prefixes=";").read_string(expected)
    code = f"changes = {changes!r}"
    return MadeTask(
        "Change these settings in `/app/service.ini`, and not a character of anything else (the "
        f"comments behind the values stay, with the two spaces before them):\n\n{told}",
        {"service.ini": "\n".join(lines)},
        f"""
python3 - <<'END'
import re
{code}
out, within = [], ""
for line in open("service.ini").read().split("\\n"):
    if line.startswith("["):
        within = line.strip("[]")
    for section, key, value in changes:
        if within == section:
            line = re.sub(rf"^({{key}} = )\\d+", rf"\\g<1>{{value}}", line)
    out.append(line)
open("service.ini", "w").write("\\n".join(out))
END
""",
        "assert (APP / 'service.ini').read_text() == EXPECTED",
        expected,
        category="text",
    )
