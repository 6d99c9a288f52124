"""What the controller asks listens where only this user can come."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from libra_cli.node.command_queue import BaseCommandQueue, RankServer
from libra_cli.node.unix_socket import LONGEST, bind_unix
from tests.control import ask
from tests.sockets import socket_path

TOKEN = "of-this-run"


def test_nobody_else_can_enter_the_directory_of_a_socket() -> None:
    directory = Path(socket_path()).parent / "sockets"
    before = os.umask(0)
    try:
        bind_unix(f"{directory}/one.sock").close()
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o711, 0o701, 0o710, 0o720, 0o750, 0o770], ids=oct)
def test_a_directory_that_others_may_enter_gets_no_socket(mode: int) -> None:
    path = socket_path()
    Path(path).parent.chmod(mode)
    with pytest.raises(OSError, match="others may enter it"):
        bind_unix(path)


def test_a_link_to_a_directory_of_ours_gets_no_socket() -> None:
    path = Path(socket_path())
    (path.parent / "link").symlink_to(path.parent)
    with pytest.raises(OSError, match="others may enter it"):
        bind_unix(str(path.parent / "link" / "s"))


def test_a_socket_that_a_killed_process_left_is_replaced() -> None:
    path = socket_path()
    bind_unix(path).close()
    assert os.path.lexists(path)
    RankServer(BaseCommandQueue(), path=path, token=TOKEN)
    assert ask(path, TOKEN, "check") == ("done", {})


def test_a_path_that_is_too_long_says_what_to_do() -> None:
    with pytest.raises(OSError, match=r"107 bytes at most; set a shorter TMPDIR"):
        bind_unix("/tmp/" + "x" * LONGEST)
