"""Tasks that ask for a program in the shell, which hidden tests run."""

from __future__ import annotations

from random import Random

from libra_cli.envs.terminal_tasks.made_task import MadeTask
from libra_cli.envs.terminal_tasks.words import NOUNS, sentence

_RUN = (
    "import subprocess\n"
    "def run(*words, text=''):\n"
    "    done = subprocess.run([str(APP / 'tool.sh'), *words], input=text, capture_output=True,"
    " text=True, timeout=10)\n"
    "    return done.returncode, done.stdout\n"
)


def script(rng: Random, number: int) -> MadeTask:
    """A shell script with arguments and exit statuses is written."""
    return (_longest, _backup, _columns, _watch)[number % 4](rng)


def _longest(rng: Random) -> MadeTask:
    """The script prints the longest lines of its input."""
    count = rng.randrange(2, 5)
    texts = ["\n".join(sentence(rng) * rng.randrange(1, 4) for _ in range(9)) for _ in range(3)]
    expected = []
    for text in texts:
        lines = [line for line in text.split("\n") if line]
        expected.append(sorted(lines, key=len, reverse=True)[:count])
    return MadeTask(
        f"Write an executable script `/app/tool.sh`. It reads lines from its standard input and "
        f"prints the {count} longest that are not empty, longest first, equally long ones in the "
        "order of the input. With any argument it prints nothing to standard output and exits "
        "with status 2.",
        {},
        f"""
cat > tool.sh <<'END'
#!/bin/bash
[ $# -eq 0 ] || exit 2
awk 'length > 0 {{ print length "\\t" $0 }}' | sort -s -k1,1nr | head -n {count} | cut -f 2-
END
chmod +x tool.sh
""",
        _RUN + "for text, lines in EXPECTED:\n"
        "    found = run(text=text)\n"
        "    assert found == (0, ''.join(line + '\\n' for line in lines)), found\n"
        "assert run('x', text='a') == (2, '')",
        [[text, lines] for text, lines in zip(texts, expected, strict=True)],
        category="shell",
        difficulty="medium",
    )


def _backup(rng: Random) -> MadeTask:
    """The script copies a file to a numbered name that is free."""
    ending, names = rng.choice(("bak", "old", "orig")), rng.sample(NOUNS, 3)
    return MadeTask(
        f"Write an executable script `/app/tool.sh FILE`, which copies FILE to `FILE.{ending}.1`, "
        f"or where that exists to `FILE.{ending}.2`, and so on: the first number that is free. It "
        "prints the name of the copy as FILE was given, and keeps mode and time of the file. "
        "Without exactly one argument it exits with status 2, and with status 1 if FILE is no "
        "regular file; then it copies nothing. Names may have spaces.",
        {},
        f"""
cat > tool.sh <<'END'
#!/bin/bash
[ $# -eq 1 ] || exit 2
[ -f "$1" ] || exit 1
number=1
while [ -e "$1.{ending}.$number" ]; do number=$((number + 1)); done
cp -p -- "$1" "$1.{ending}.$number"
echo "$1.{ending}.$number"
END
chmod +x tool.sh
""",
        _RUN + "import os, tempfile\n"
        "for name in EXPECTED:\n"
        "    path = Path(tempfile.mkdtemp()) / f'my {name}.txt'\n"
        "    path.write_text(name)\n"
        "    path.chmod(0o640)\n"
        "    os.utime(path, (10**9, 10**9))\n"
        "    for number in (1, 2, 3):\n"
        f"        copy = f'{{path}}.{ending}.{{number}}'\n"
        "        assert run(str(path)) == (0, copy + '\\n'), run(str(path))\n"
        "        assert Path(copy).read_text() == name\n"
        "        found = os.stat(copy)\n"
        "        assert found.st_mtime == 10**9 and found.st_mode & 0o777 == 0o640\n"
        "    assert run(str(path.parent))[0] == 1\n"
        "assert run()[0] == 2 and run('a', 'b')[0] == 2",
        names,
        category="shell",
        difficulty="medium",
    )


def _columns(rng: Random) -> MadeTask:
    """The script picks columns of separated lines by their names."""
    separator = rng.choice((";", "|", ":"))
    header = rng.sample(NOUNS, 5)
    rows = [[str(rng.randrange(100)) for _ in header] for _ in range(6)]
    text = "\n".join(separator.join(row) for row in [header, *rows]) + "\n"
    cases = []
    for _ in range(4):
        picked = rng.sample(header, rng.randrange(1, 4))
        where = [header.index(name) for name in picked]
        lines = [separator.join(row[n] for n in where) for row in [header, *rows]]
        cases.append([picked, "".join(f"{line}\n" for line in lines)])
    return MadeTask(
        f"Write an executable script `/app/tool.sh NAME...`. Its standard input is a table whose "
        f"columns are separated by `{separator}` and whose first line has their names. It prints "
        "the table with only the named columns, in the order of the arguments, header included. "
        "If a name is unknown it prints nothing to standard output and exits with status 3.",
        {"example.txt": text},
        f"""
cat > tool.sh <<'END'
#!/usr/bin/env python3
import sys
rows = [line.rstrip("\\n").split("{separator}") for line in sys.stdin]
if not set(sys.argv[1:]) <= set(rows[0]):
    sys.exit(3)
where = [rows[0].index(name) for name in sys.argv[1:]]
for row in rows:
    print("{separator}".join(row[n] for n in where))
END
chmod +x tool.sh
""",
        _RUN + "text = EXPECTED['text']\n"
        "for names, out in EXPECTED['cases']:\n"
        "    assert run(*names, text=text) == (0, out), run(*names, text=text)\n"
        "assert run('nothing', text=text) == (3, '')",
        {"text": text, "cases": cases},
        category="shell",
        difficulty="medium",
    )


def _watch(rng: Random) -> MadeTask:
    """The script repeats a command until it succeeds, or until it has had enough tries."""
    tries = rng.randrange(3, 7)
    return MadeTask(
        f"Write an executable script `/app/tool.sh COMMAND [ARGUMENT...]`, which runs the command "
        f"until it succeeds, at most {tries} times, without waiting in between. It prints nothing "
        "of its own to standard output; what the command prints goes there. It exits with status "
        "0 once the command has succeeded, else with the status of the last try. Without a "
        "command it exits with status 64.",
        {},
        f"""
cat > tool.sh <<'END'
#!/bin/bash
[ $# -gt 0 ] || exit 64
for try in $(seq {tries}); do
    "$@" && exit 0
    status=$?
done
exit $status
END
chmod +x tool.sh
""",
        _RUN + "import tempfile\n"
        "def succeeds_at(number):\n"
        "    count = Path(tempfile.mkdtemp()) / 'a count'\n"
        "    count.write_text('0')\n"
        '    line = \'n=$(($(cat "$1") + 1)); echo $n > "$1"; echo try; [ $n -ge $2 ] || exit 7\'\n'
        "    done = run('bash', '-c', line, 'x', str(count), str(number))\n"
        "    return *done, int(count.read_text())\n"
        "for number in range(1, EXPECTED + 1):\n"
        "    assert succeeds_at(number) == (0, 'try\\n' * number, number), succeeds_at(number)\n"
        "assert succeeds_at(99) == (7, 'try\\n' * EXPECTED, EXPECTED)\n"
        "assert run()[0] == 64",
        tries,
        category="shell",
        difficulty="medium",
    )
