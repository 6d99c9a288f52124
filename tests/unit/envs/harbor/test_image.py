from __future__ import annotations

from pathlib import Path

import pytest

from libra_cli.config.errors import EnvironmentBroken
from libra_cli.envs.harbor.dockerfile import instructions, substituted, words
from libra_cli.envs.harbor.image import CopyStep, Image, RunStep, read_image


def image(directory: Path, text: str, files: tuple[str, ...] = ()) -> Image:
    for name in files:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (directory / "Dockerfile").write_text(text)
    return read_image(directory)


def test_lines_go_on_over_comments_and_keep_their_spaces(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("# syntax=docker/dockerfile:1\n\nFROM x\nRUN a && \\\n  # why\n\n  b 'c  d'\n")
    first, second = instructions(path)
    assert (first.where, first.keyword, first.text) == (f"{path}:3", "FROM", "x")
    assert (second.where, second.text) == (f"{path}:4", "a &&   b 'c  d'")


def test_the_escape_directive_changes_how_lines_go_on(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text("# escape=`\nFROM x\nRUN a `\nb\n")
    assert [one.text for one in instructions(path)] == ["x", "a b"]


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("$A/${A}b", "1/1b"),
        ("${NO:-x$A}", "x1"),
        ("${EMPTY:-y}|${EMPTY-y}", "y|"),
        ("${A:+set}${NO:+set}", "set"),
        (r"\$A", "$A"),
        ("$NO", ""),
    ],
)
def test_variables_are_replaced_as_docker_does(text: str, replaced: str) -> None:
    assert substituted(text, {"A": "1", "EMPTY": ""}) == replaced


def test_words_lose_their_quotes() -> None:
    assert words(r"""A="b c" D=e\ f 'x y' "q\"r" """) == ["A=b c", "D=e f", "x y", 'q"r']


def test_variables_and_places_are_carried_from_line_to_line(tmp_path: Path) -> None:
    made = image(
        tmp_path,
        "ARG V=3.12\nFROM --platform=linux/amd64 python:${V}-slim AS base\nARG WHO=me\n"
        'ENV A=1 B="two words"\nENV C $A and more\nWORKDIR /app\nWORKDIR sub/$A\nUSER root\n'
        'SHELL ["/bin/bash", "-ec"]\nRUN make it\nRUN ["ls", "-l"]\nCMD ["x"]\nEXPOSE 80\n',
    )
    assert (made.base, made.workdir) == ("python:3.12-slim", "/app/sub/1")
    assert made.directories == ("/app", "/app/sub/1")
    assert made.env == {"A": "1", "B": "two words", "C": "1 and more"}
    shell, plain = made.steps
    assert isinstance(shell, RunStep)
    assert isinstance(plain, RunStep)
    assert shell.command == ("/bin/bash", "-ec", "make it")
    assert (shell.cwd, shell.env["WHO"], shell.env["B"]) == ("/app/sub/1", "me", "two words")
    assert plain.command == ("ls", "-l")


def test_here_documents_are_scripts_and_files(tmp_path: Path) -> None:
    made = image(
        tmp_path,
        "FROM x\nENV A=1\nRUN <<'END'\nset -e\necho $A\nEND\nRUN cat <<EOF > /a\nb\nEOF\n"
        "COPY --chmod=755 <<EOF /app/run.sh\necho $A\nEOF\n",
    )
    script, redirected, copied = made.steps
    assert isinstance(script, RunStep)
    assert isinstance(redirected, RunStep)
    assert isinstance(copied, CopyStep)
    assert script.command[-1] == "set -e\necho $A\n"
    assert redirected.command[-1] == "cat <<EOF > /a\nb\nEOF\n"
    assert (copied.documents, copied.target, copied.mode) == (
        (("EOF", "echo 1\n"),),
        "/app/run.sh",
        0o755,
    )


@pytest.mark.parametrize(
    ("line", "target", "names"),
    [
        ("COPY a.txt b.txt /x/", "/x/", ["a.txt", "b.txt"]),
        ("COPY *.txt .", "/app/", ["a.txt", "b.txt"]),
        ('COPY ["a.txt", "with space"]', "/app/with space", ["a.txt"]),
        ("ADD --chown=u:u dir ../y", "/y", ["dir"]),
        ("COPY . /app", "/app", [""]),
    ],
)
def test_copies_find_their_files(tmp_path: Path, line: str, target: str, names: list[str]) -> None:
    made = image(tmp_path, f"FROM x\nWORKDIR /app\n{line}\n", ("a.txt", "b.txt", "dir/c"))
    (step,) = made.steps
    assert isinstance(step, CopyStep)
    assert step.target == target
    assert list(step.sources) == [tmp_path / name for name in names]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("FROM y", "a second stage"),
        ("COPY --from=build /a /b", "--from is not played"),
        ("ADD https://example.com/x /x", "nothing is fetched"),
        ("ADD a.tar.gz /x", "archives are not unpacked"),
        ("COPY ../../etc/passwd /x", "is not in"),
        ("COPY nothing /x", "nothing is not in"),
        ("COPY --chmod=u+x a.txt /x", "is not an octal number"),
        ('ENTRYPOINT ["x"]', "no program is started"),
        ("RUN --mount=type=secret,id=x cat x", "--mount is not played"),
        ("ONBUILD RUN x", "no other image"),
        ("FLY away", "is not known"),
        ("ENV", "is not ENV NAME=VALUE"),
        ("SHELL bash", "is not SHELL"),
    ],
)
def test_what_cannot_be_played_is_refused_with_its_line(
    tmp_path: Path, line: str, reason: str
) -> None:
    with pytest.raises(EnvironmentBroken, match=r"Dockerfile:2: ") as caught:
        image(tmp_path, f"FROM x\n{line}\n", ("a.txt", "a.tar.gz"))
    assert reason in str(caught.value)


def test_a_directory_is_not_copied_where_files_of_it_might_be_left_out(tmp_path: Path) -> None:
    files = (".dockerignore", "a.txt", "dir/c")
    assert image(tmp_path, "FROM x\nCOPY a.txt /x\n", files).steps
    with pytest.raises(EnvironmentBroken, match=r":2: COPY dir /x: \.dockerignore is not read"):
        image(tmp_path, "FROM x\nCOPY dir /x\n", files)


def test_a_link_out_of_the_task_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "task/link").symlink_to(tmp_path / "outside")
    with pytest.raises(EnvironmentBroken, match="link is not in"):
        image(tmp_path / "task", "FROM x\nCOPY link /x\n")


def test_a_here_document_needs_its_end(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match="here-document END has no end"):
        image(tmp_path, "FROM x\nRUN <<END\nls\n")


@pytest.mark.parametrize("text", ["", "# nothing\n", "WORKDIR /app\n"])
def test_an_image_begins_with_from(tmp_path: Path, text: str) -> None:
    with pytest.raises(EnvironmentBroken, match="FROM"):
        image(tmp_path, text)


def test_the_digest_follows_files_modes_and_commands(tmp_path: Path) -> None:
    text = "FROM x\nCOPY dir /app\nRUN ls\n"
    first = image(tmp_path, text, ("dir/a",)).digest
    assert image(tmp_path, text, ("dir/a",)).digest == first
    (tmp_path / "dir/a").write_text("other")
    second = read_image(tmp_path).digest
    (tmp_path / "dir/a").chmod(0o755)
    third = read_image(tmp_path).digest
    fourth = image(tmp_path, text.replace("ls", "ls -l")).digest
    assert len({first, second, third, fourth}) == 4
