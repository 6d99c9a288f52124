"""Tasks about git repositories, which the image makes commit by commit."""

from __future__ import annotations

import shlex
from random import Random

from libra_cli.envs.terminal_tasks.made_task import MadeTask
from libra_cli.envs.terminal_tasks.words import NAMES, NOUNS, sentence

_BEGIN = """
git init -q -b main repo
cd repo
git config user.name libra
git config user.email libra@example.com
"""
_GIT = (
    "import subprocess\n"
    "def git(*words):\n"
    "    return subprocess.run(['git', '-c', 'safe.directory=*', '-C', str(APP / 'repo'), *words],"
    " check=True, capture_output=True, text=True).stdout.strip()\n"
)


def _commit(message: str, files: dict[str, str], minute: int) -> str:
    at = f"2026-03-01T10:{minute:02}:00Z"
    lines = [f"printf %s {shlex.quote(text)} > {name}" for name, text in files.items()]
    dated = f"GIT_AUTHOR_DATE={at} GIT_COMMITTER_DATE={at}"
    return "\n".join([*lines, "git add -A", f"{dated} git commit -q -m {shlex.quote(message)}"])


def history(rng: Random, number: int) -> MadeTask:
    """A repository's history is asked, or a commit of it is undone or brought back."""
    return (_introduced, _restored, _reverted, _branched)[number % 4](rng)


def _introduced(rng: Random) -> MadeTask:
    """The commit that first brought a word into a file is found."""
    count, at = rng.randrange(12, 20), rng.randrange(4, 9)
    lines, build = [sentence(rng)], [_BEGIN]
    word = f"{rng.choice(NAMES)}_{rng.randrange(1000)}"
    for minute in range(count):
        lines.append(f"{word} = {minute}\n" if minute == at else sentence(rng))
        if minute == at + 2:
            lines[-2:] = [lines[-1]]
        build.append(_commit(f"Edit {minute}", {"notes.txt": "".join(lines)}, minute))
    return MadeTask(
        f"In the git repository `/app/repo`, which commit first brought `{word}` into "
        "`notes.txt`? Write its subject line to `/app/commit.txt`.",
        {},
        f"cd repo\ngit log --reverse -S{word} --format=%s -- notes.txt | head -n 1 > ../commit.txt",
        "assert (APP / 'commit.txt').read_text().strip() == EXPECTED",
        f"Edit {at}",
        category="git",
        difficulty="medium",
        build="\n".join(build),
    )


def _restored(rng: Random) -> MadeTask:
    """A file that was deleted is brought back as it was last."""
    lost, build, text = f"{rng.choice(NOUNS)}.cfg", [_BEGIN], ""
    gone = rng.randrange(5, 9)
    for minute in range(gone):
        text = sentence(rng)
        build.append(_commit(f"Edit {minute}", {lost: text, "log.txt": sentence(rng)}, minute))
    build.append(f"git rm -q {lost}\n" + _commit("Tidy up", {"log.txt": sentence(rng)}, gone))
    later = range(gone + 1, gone + 4)
    build += [_commit(f"Edit {minute}", {"log.txt": sentence(rng)}, minute) for minute in later]
    return MadeTask(
        f"In the git repository `/app/repo` the file `{lost}` was deleted by mistake, in some "
        "earlier commit. Bring it back with the content that it had last, in one new commit on "
        "`main` whose subject is `Restore the settings`. Change nothing else.",
        {},
        f"cd repo\nlast=$(git rev-list -n 1 HEAD -- {lost})\ngit checkout -q $last~1 -- {lost}\n"
        "git commit -q -m 'Restore the settings'",
        _GIT + f"assert git('show', 'main:{lost}') == EXPECTED.strip()\n"
        "assert git('log', '-1', '--format=%s', 'main') == 'Restore the settings'\n"
        f"assert git('diff', '--name-only', 'main~1', 'main') == '{lost}'\n"
        "assert git('log', '-1', '--format=%s', 'main~1').startswith('Edit')",
        text,
        category="git",
        difficulty="medium",
        build="\n".join(build),
    )


def _reverted(rng: Random) -> MadeTask:
    """One commit in the middle is reverted, and the later ones stay."""
    names = [f"{one}.txt" for one in rng.sample(NOUNS, 4)]
    build, now = [_BEGIN], {name: sentence(rng) for name in names}
    build.append(_commit("Begin", now, 0))
    bad, before = rng.randrange(3, 6), {}
    for minute in range(1, 9):
        name = names[minute % 4]
        if minute == bad:
            before = {name: now[name]}
        elif name in before:
            name = next(one for one in names if one not in before)
        now[name] = sentence(rng)
        subject = "Speed up the start" if minute == bad else f"Edit {minute}"
        build.append(_commit(subject, {name: now[name]}, minute))
    return MadeTask(
        "In the git repository `/app/repo` the commit with the subject `Speed up the start` broke "
        "something. Undo what it changed with one new commit on `main`, made as `git revert` "
        "makes it. Keep all other commits.",
        {},
        "cd repo\ngit revert --no-edit $(git log --format=%h --grep='Speed up the start')",
        _GIT + "found = {name: git('show', f'main:{name}') for name in EXPECTED}\n"
        "assert found == {name: text.strip() for name, text in EXPECTED.items()}, found\n"
        "assert git('rev-list', '--count', 'main') == '10'\n"
        "assert git('log', '-1', '--format=%s').startswith('Revert')",
        now | before,
        category="git",
        build="\n".join(build),
    )


def _branched(rng: Random) -> MadeTask:
    """Two branches that changed the same line are merged, by a rule."""
    word, both = rng.choice(NOUNS), rng.sample(range(10, 99), 2)
    keys = rng.sample(NOUNS, 5)
    base = [f"{key} = {n}\n" for n, key in enumerate(keys)]
    main, side = list(base), list(base)
    main[2], side[2] = f"{keys[2]} = {both[0]}\n", f"{keys[2]} = {both[1]}\n"
    main[0], side[4] = f"{keys[0]} = main\n", f"{keys[4]} = side\n"
    merged = [main[0], base[1], f"{keys[2]} = {max(both)}\n", base[3], side[4]]
    build = [
        _BEGIN,
        _commit("Begin", {"limits.ini": "".join(base)}, 0),
        f"git switch -q -c {word}",
        _commit("Raise a limit", {"limits.ini": "".join(side)}, 1),
        "git switch -q main",
        _commit("Set limits", {"limits.ini": "".join(main)}, 2),
    ]
    return MadeTask(
        f"Merge the branch `{word}` of the git repository `/app/repo` into `main` with a merge "
        "commit. Both changed `limits.ini`: where they disagree on a number, take the larger one; "
        "keep what only one of them changed.",
        {},
        f"cd repo\ngit merge -q {word} || true\n"
        f"printf %s {shlex.quote(''.join(merged))} > limits.ini\n"
        "git add -A\ngit commit -q -m 'Merge the limits'",
        _GIT + "assert git('show', 'main:limits.ini') == EXPECTED.strip()\n"
        "assert len(git('log', '-1', '--format=%P', 'main').split()) == 2\n"
        f"git('merge-base', '--is-ancestor', '{word}', 'main')",
        "".join(merged),
        category="git",
        difficulty="hard",
        build="\n".join(build),
    )
