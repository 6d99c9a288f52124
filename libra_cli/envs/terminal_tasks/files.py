"""Tasks about files: names, duplicates, permissions, links, archives and checksums."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping
from random import Random

from libra_cli.envs.terminal_tasks.made_task import MadeTask
from libra_cli.envs.terminal_tasks.words import NAMES, NOUNS, sentence

_TIME = 1_700_000_000
"""When what lies in archives was written, in seconds since 1970."""
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


def rename(rng: Random, number: int) -> MadeTask:
    """Files whose names hold a date are renamed so that they sort by it."""
    separator = "-_."[number % 3]
    expected, files = {}, {}
    for index in range(rng.randrange(8, 16)):
        word, year, month, day = (
            f"{rng.choice(NOUNS)}{index}",
            rng.randrange(1998, 2030),
            rng.randrange(1, 13),
            rng.randrange(1, 29),
        )
        text = sentence(rng)
        files[f"scans/{word} {day:02} {_MONTHS[month - 1]} {year}.txt"] = text
        expected[f"{year}{separator}{month:02}{separator}{day:02}_{word}.txt"] = text
    files["scans/README.txt"] = expected["README.txt"] = "Scans of the archive.\n"
    shown = f"2004{separator}07{separator}31_letter3.txt"
    return MadeTask(
        "Every file in `/app/scans` whose name is of the form `letter3 31 Jul 2004.txt` (a word, "
        f"a day, a month, a year) is to be renamed to the form `{shown}`. Leave other files and "
        "all contents as they are.",
        files,
        f"""
cd scans
for file in *' '*.txt; do
    read -r word day month year <<< "${{file%.txt}}"
    number=$(date -d "$day $month $year" +%Y{separator}%m{separator}%d)
    mv "$file" "${{number}}_${{word}}.txt"
done
""",
        "found = {one.name: one.read_text() for one in (APP / 'scans').iterdir()}\n"
        "assert found == EXPECTED, found",
        expected,
    )


def duplicates(rng: Random, number: int) -> MadeTask:
    """Sets of equal files are reduced to one of each, by a rule."""
    by = ("first", "shortest")[number % 2]
    rules = {
        "first": "the one whose path comes first in byte order",
        "shortest": "the one with the shortest path, and of equally short ones the first",
    }
    contents = [sentence(rng) for _ in range(rng.randrange(4, 8))]
    groups: dict[str, list[str]] = {text: [] for text in contents}
    files: dict[str, str] = {}
    for index, text in enumerate([*contents, *rng.choices(contents, k=rng.randrange(6, 12))]):
        place = rng.choice(("", "old/", "old/very/", "new/"))
        path = f"photos/{place}{rng.choice(NOUNS)}{index}{'x' * rng.randrange(3)}.txt"
        files[path] = text
        groups[text].append(path)
    order = {"first": lambda path: path, "shortest": lambda path: (len(path), path)}
    expected = sorted(min(paths, key=order[by]) for paths in groups.values())
    key = {"first": "lambda p: p", "shortest": "lambda p: (len(p), p)"}[by]
    return MadeTask(
        "Under `/app/photos` (with all directories below it) some files have the same content. "
        f"Of each set of equal files keep {rules[by]}, and delete the others. Paths are meant "
        "relative to `/app`, such as `photos/old/cat3.txt`. Do not change what you keep.",
        files,
        f"""
python3 - <<'END'
import collections, pathlib
groups = collections.defaultdict(list)
for path in pathlib.Path("photos").rglob("*"):
    if path.is_file():
        groups[path.read_bytes()].append(str(path))
for paths in groups.values():
    keep = min(paths, key={key})
    for path in paths:
        if path != keep:
            pathlib.Path(path).unlink()
END
""",
        "found = {str(one.relative_to(APP)): one.read_text() for one in (APP / 'photos').rglob('*')"
        " if one.is_file()}\nassert found == EXPECTED, found",
        {path: files[path] for path in expected},
        difficulty="medium",
    )


def permissions(rng: Random, number: int) -> MadeTask:
    """Modes of files are set by rules upon what the files are."""
    script, secret, other = ((0o755, 0o600, 0o644), (0o750, 0o400, 0o640), (0o700, 0o440, 0o444))[
        number % 3
    ]
    files: dict[str, str] = {}
    expected: dict[str, int] = {}
    modes: list[str] = []
    for index in range(rng.randrange(9, 15)):
        kind = rng.choice(("script", "secret", "other"))
        place = rng.choice(("", "bin/", "etc/", "etc/more/"))
        ending = {"script": "", "secret": ".key", "other": ".txt"}[kind]
        path = f"service/{place}{rng.choice(NOUNS)}{index}{ending}"
        files[path] = ("#!/bin/sh\n" if kind == "script" else "") + sentence(rng)
        expected[path] = {"script": script, "secret": secret, "other": other}[kind]
        modes.append(f"chmod {rng.choice(('777', '666', '600', '755'))} '{path}'")
    return MadeTask(
        f"Set the permissions of all files under `/app/service`: files that begin with `#!` get "
        f"{script:o}, files whose name ends in `.key` get {secret:o}, all other files {other:o}. "
        "Leave directories and contents as they are.",
        files,
        f"""
find service -type f | while read -r file; do
    if [ "$(head -c 2 "$file")" = '#!' ]; then chmod {script:o} "$file"
    elif [[ $file == *.key ]]; then chmod {secret:o} "$file"
    else chmod {other:o} "$file"
    fi
done
""",
        "found = {str(one.relative_to(APP)): one.stat().st_mode & 0o777\n"
        "         for one in (APP / 'service').rglob('*') if one.is_file()}\n"
        "assert found == EXPECTED, found",
        expected,
        build="\n".join(modes),
    )


def links(rng: Random, number: int) -> MadeTask:
    """Symbolic links that a move has broken are mended."""
    names = rng.sample(NOUNS, 8)
    old, new = rng.sample(("data", "store", "attic", "library", "depot"), 2)
    files = {f"{new}/{name}.txt": sentence(rng) for name in names}
    broken, dangling = names[:5], names[5:7]
    build = ["mkdir -p links"]
    build += [f"ln -s ../{old}/{name}.txt links/{name}" for name in broken]
    build += [f"ln -s ../{old}/lost-{name}.txt links/lost-{name}" for name in dangling]
    build += [f"ln -s ../{new}/{names[7]}.txt links/{names[7]}"]
    remove = number % 2 == 0
    kept = {name: f"../{new}/{name}.txt" for name in (*broken, names[7])}
    lost = {f"lost-{name}": f"../{old}/lost-{name}.txt" for name in dangling}
    expected = kept if remove else kept | lost
    what = "delete the link" if remove else "leave the link as it is"
    return MadeTask(
        f"The directory `/app/{old}` was renamed to `/app/{new}`, so most symbolic links in "
        f"`/app/links` are broken. Make each broken link point to the file of the same name in "
        f"`/app/{new}`, again by a relative path (`../{new}/NAME`). Where there is no such file, "
        f"{what}. Leave links that work as they are.",
        files,
        f"""
cd links
for link in *; do
    [ -e "$link" ] && continue
    target=../{new}/$(basename "$(readlink "$link")")
    if [ -e "$target" ]; then ln -sfn "$target" "$link"
    {'else rm "$link"' if remove else ""}
    fi
done
""",
        "import os\n"
        "found = {one.name: os.readlink(one) for one in (APP / 'links').iterdir()}\n"
        "assert found == EXPECTED, found",
        expected,
        build="\n".join(build),
        difficulty="medium",
    )


def archives(rng: Random, number: int) -> MadeTask:
    """Archives within an archive are unpacked, and what matters is packed again."""
    wanted = {f"{name}.csv": sentence(rng) for name in rng.sample(NOUNS, 5)}
    others = {f"{name}.log": sentence(rng) for name in rng.sample(NAMES, 4)}
    split = list(wanted.items())
    inner = {
        "one.zip": _zip(dict(split[:2]) | dict(list(others.items())[:2])),
        "two.tar.gz": gzip.compress(_tar(dict(split[2:] + list(others.items())[2:])), mtime=0),
    }
    kind = ("tar.gz", "zip", "tar.xz")[number % 3]
    pack = {"tar.gz": "'w:gz'", "tar.xz": "'w:xz'"}.get(kind, "")
    return MadeTask(
        "`/app/delivery.tar` holds two archives. Unpack them, and pack all their `.csv` files, "
        f"and no other files, into `/app/tables.{kind}`. The files are to lie at the top of that "
        "archive, without directories.",
        {"delivery.tar": _tar(inner)},
        f"""
mkdir /tmp/unpacked
tar -xf delivery.tar -C /tmp/unpacked
cd /tmp/unpacked
python3 -m zipfile -e one.zip .
tar -xzf two.tar.gz
{f"tar -caf /app/tables.{kind} *.csv" if pack else "python3 -m zipfile -c /app/tables.zip *.csv"}
""",
        _READ_ZIP if kind == "zip" else _READ_TAR.format(kind=kind),
        wanted,
        category="archives",
        difficulty="medium",
    )


_READ_ZIP = """
import zipfile
with zipfile.ZipFile(APP / "tables.zip") as archive:
    found = {name: archive.read(name).decode() for name in archive.namelist()}
assert found == EXPECTED, found
"""
_READ_TAR = """
import tarfile
with tarfile.open(APP / "tables.{kind}") as archive:
    found = {{one.name.removeprefix("./"): archive.extractfile(one).read().decode()
             for one in archive if one.isfile()}}
assert found == EXPECTED, found
"""


def _zip(files: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return made.getvalue()


def _tar(files: Mapping[str, str | bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in files.items():
            body = content if isinstance(content, bytes) else content.encode()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(body), 0o644, _TIME
            archive.addfile(entry, io.BytesIO(body))
    return made.getvalue()


def checksums(rng: Random, number: int) -> MadeTask:
    """Files that differ from the list of their checksums are told."""
    kind = ("sha256", "md5", "sha1")[number % 3]
    files: dict[str, str] = {}
    listed, state = [], {}
    for index in range(rng.randrange(10, 18)):
        name, text = f"{rng.choice(NOUNS)}{index}.dat", sentence(rng)
        listed.append(f"{hashlib.new(kind, text.encode()).hexdigest()}  {name}")
        state[name] = rng.choice(("good", "good", "changed", "missing"))
        if state[name] != "missing":
            files[f"backup/{name}"] = text + ("." if state[name] == "changed" else "")
    files[f"backup/{kind.upper()}SUMS"] = "\n".join(listed) + "\n"
    files["backup/extra.dat"] = sentence(rng)
    expected = {
        kind: sorted(name for name, is_ in state.items() if is_ == kind)
        for kind in ("changed", "missing")
    } | {"unlisted": ["extra.dat"]}
    return MadeTask(
        f"`/app/backup/{kind.upper()}SUMS` lists what was in `/app/backup`, as `{kind}sum` writes "
        "it. Write `/app/report.json`, an object with three sorted lists of file names: `changed` "
        "(the content is another), `missing`, and `unlisted` (files in that directory that the "
        "list does not have; the list itself is none of them).",
        files,
        f"""
cd backup
{kind}sum -c {kind.upper()}SUMS 2>/dev/null > /tmp/checked || true
python3 - <<'END'
import json, pathlib
listed = {{line.split()[1] for line in open("{kind.upper()}SUMS")}}
there = {{path.name for path in pathlib.Path(".").iterdir()}} - {{"{kind.upper()}SUMS"}}
failed = {{line.split(":")[0] for line in open("/tmp/checked") if "FAILED" in line}}
report = {{"changed": sorted(failed & there), "missing": sorted(listed - there),
          "unlisted": sorted(there - listed)}}
pathlib.Path("/app/report.json").write_text(json.dumps(report))
END
""",
        "found = json.loads((APP / 'report.json').read_text())\nassert found == EXPECTED, found",
        expected,
        difficulty="medium",
    )
