"""A host gives the files of one checkpoint, whole or in part, to those that carry the token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from libra_cli.node.checkpoints.server import serve
from tests import credentials
from tests.credentials import TOKEN, credentials_of, url_of

Ask = Callable[..., tuple[int, bytes]]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    root = tmp_path / "step-000010-e1"
    root.mkdir()
    (root / "__0_0.distcp").write_bytes(b"0123456789")
    (root / ".metadata").write_bytes(b"about")
    (root / "empty").touch()
    (tmp_path / "secret").write_text("secret")
    (root / "link").symlink_to(tmp_path / "secret")
    server = serve(root, "127.0.0.1", range(1), credentials_of())

    def one(path: str, bytes_: str = "", token: str = TOKEN) -> tuple[int, bytes]:
        headers = {"Range": bytes_} if bytes_ else {}
        url = url_of(server.server_address[1])
        return credentials.ask(url, path, token=token, headers=headers)

    yield one
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "asked", "found"),
    [
        ("/__0_0.distcp", "", (200, b"0123456789")),
        ("/__0_0.distcp", "bytes=3-5", (206, b"345")),
        ("/__0_0.distcp", "bytes=9-9", (206, b"9")),
        ("/__0_0.distcp", "bytes=9-10", (416, b"")),
        ("/.metadata", "", (200, b"about")),
        ("/empty", "", (200, b"")),
        ("/missing", "", (404, b"")),
        ("/../secret", "", (404, b"")),
        ("/..", "", (404, b"")),
        ("/link", "", (404, b"")),
    ],
)
def test_plain_files_of_the_directory_are_given_and_nothing_else(
    ask: Ask, path: str, asked: str, found: tuple[int, bytes]
) -> None:
    assert ask(path, asked) == found


def test_nothing_is_given_without_the_token(ask: Ask) -> None:
    assert ask("/.metadata", token="another") == (401, b"")
