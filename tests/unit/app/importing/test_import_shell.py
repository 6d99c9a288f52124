"""The arguments of shell scripts, read without running them."""

from __future__ import annotations

import pytest

from libra_cli.app.importing.shell import COMPUTED, assigned_in_branches, commands


def last(text: str) -> list[str]:
    return list(commands(text))[-1]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("x=3\nrun a=$x b=${x}0 'c=$x'", ["run", "a=3", "b=30", "c=3"]),
        ("x=${x:-4}\nx=${x:-5}\nrun ${x}", ["run", "4"]),
        ("a=2 \nb=3\nrun $((a + b * 2)) $(((a + b) * 1024))", ["run", "8", "5120"]),
        ("run \\\n  one \\\n  two", ["run", "one", "two"]),
        (
            'A=(\n x=1  # first\n "y=2 3"\n)\nA+=(z=4)\nrun "${A[@]}" "$@"',
            ["run", "x=1", "y=2 3", "z=4"],
        ),
        ("run a > log 2>&1", ["run", "a"]),
        ("cd /there && run a 2>&1 | tee log", ["run", "a"]),
        ("set -x ; run a || exit 1", ["exit", "1"]),
        ("source venv/bin/activate; run a='b;c'", ["run", "a=b;c"]),
        ('LR=1\nexport LR=2 && run a=$LR b="$(x; y)"', ["run", "a=2", f"b={COMPUTED}"]),
        ("cd there; run a=1;  # and; so on", ["run", "a=1"]),
        ("run a=1 & ", ["run", "a=1"]),
        ("run $((7 / 2)) $((2 ** 20))", ["run", "3", "1048576"]),
        ("export HOME_OF=$HOME/data\nrun $HOME_OF", ["run", "~/data"]),
        ("run \"['$HOME/a', 'b']\"", ["run", "['~/a', 'b']"]),
    ],
)
def test_words_of_a_command(script, words):
    assert last(script) == words


@pytest.mark.parametrize(
    "word",
    [
        "$(date)",
        "`date`",
        "$1",
        "${UNSET}/x",
        "${A##*/}",
        "$((a + 1))",
        "$((9 ** 9 ** 9 ** 9))",
    ],
)
def test_what_only_running_tells_is_marked(word):
    assert COMPUTED in last(f"run {word}")[1]


def test_the_branch_of_a_case_that_fits_is_read():
    script = 'case "{}" in\n  a|b)\n    x=1\n    ;;\n  *)\n    x=2\n    ;;\nesac\nrun $x'
    assert last(script.format("b"))[1] == "1"
    assert last(script.format("c"))[1] == "2"
    assert last(script.format("$(which gpu)"))[1] == "1"


def test_cases_in_cases():
    script = """
case "$(probe)" in
    gpu)
        case "${MACHINE:-}" in
            gb200)
                n=4
                ;;
            *)
                n=${n:-8}
                ;;
        esac
        m=$n
        ;;
    npu)
        m=16
        ;;
esac
run $m
"""
    assert last(script)[1] == "8"


def test_no_branch_of_an_if_is_read():
    script = 'x=1\nif [ "$y" = 2 ]; then\n  x=2\nfi\nfor i in 1 2; do\n  x=3\ndone\nrun $x'
    assert last(script) == ["run", "1"]
    assert assigned_in_branches(script) == ["x"]


def test_an_if_on_one_line_ends_there():
    script = "if [ -z $x ]; then x=2; fi\ny=3\nrun $y"
    assert last(script) == ["run", "3"]
    assert assigned_in_branches(script) == []
