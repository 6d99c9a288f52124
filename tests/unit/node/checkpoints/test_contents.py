"""A damaged checkpoint is known for one, whatever is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.errors import TrainerError
from libra_cli.node.checkpoints.contents import about_bytes, about_of, damaged, listed
from libra_cli.node.checkpoints.verify import verified

FILES = {"__0_0.distcp": b"weights" * 100, ".metadata": b"m", "ledger.json": b'{"step": 3}'}


@pytest.fixture
def part(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    about = {"step": 3, "score": None, "files": listed(tmp_path, FILES, "gpu-01")}
    (tmp_path / "checkpoint.json").write_bytes(about_bytes(about))
    return tmp_path


def about(part: Path) -> dict[str, Any]:
    return about_of((part / "checkpoint.json").read_bytes(), part)


def test_a_whole_part_has_no_damage(part: Path) -> None:
    assert damaged(part, about(part)) == []
    told = verified(part)
    assert (told["here"], told["damaged"], told["ledger"]) == (sorted(FILES), [], {"step": 3})
    assert told["about"]["files"]["__0_0.distcp"]["host"] == "gpu-01"


def test_one_other_byte_is_damage(part: Path) -> None:
    data = bytearray(FILES["__0_0.distcp"])
    data[123] ^= 1
    (part / "__0_0.distcp").write_bytes(data)
    assert damaged(part, about(part)) == ["__0_0.distcp has other bytes"]


def test_a_half_written_file_is_damage(part: Path) -> None:
    (part / "__0_0.distcp").write_bytes(FILES["__0_0.distcp"][:350])
    assert verified(part)["damaged"] == ["__0_0.distcp has 350 bytes of 700"]


def test_what_another_host_has_is_no_damage(part: Path) -> None:
    (part / "__0_0.distcp").unlink()
    assert damaged(part, about(part)) == []
    assert "__0_0.distcp" not in verified(part)["here"]


@pytest.mark.parametrize("name", ["checkpoint.json", "ledger.json"])
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"step": "x"}'])
def test_a_damaged_small_file_is_a_value_and_no_crash(part: Path, name: str, text: bytes) -> None:
    (part / name).write_bytes(text)
    told = verified(part)
    assert told["damaged"]


def test_a_part_without_its_last_file_is_none(part: Path) -> None:
    (part / "checkpoint.json").unlink()
    assert verified(part)["about"] is None


def test_one_of_an_older_libra_is_taken_as_it_is() -> None:
    assert about_of(b'{"step": 3, "world_size": 1, "score": 0.5}', "x")["step"] == 3


@given(st.binary(max_size=60))
def test_no_bytes_are_taken_for_a_checkpoint_or_crash(data: bytes) -> None:
    try:
        told = about_of(data, "checkpoint.json")
    except TrainerError:
        return
    assert int(told["step"]) == told["step"] or told["step"]


@given(st.data())
def test_every_flipped_bit_of_what_a_checkpoint_says_is_noticed(data: st.DataObject) -> None:
    entry = {"bytes": 700, "sha256": "ab", "host": "a"}
    said = {"step": 3, "score": 0.5, "files": {"__0_0.distcp": entry}}
    text = bytearray(about_bytes(said))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = about_of(bytes(text), "checkpoint.json")
    except TrainerError:
        return
    # White space and the spelling of a number may differ; what is said may not.
    assert json.dumps(found, sort_keys=True) == json.dumps(said, sort_keys=True)
