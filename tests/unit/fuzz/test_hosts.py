"""Hosts, their agents and their files say anything: the host fails by name, or is read."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.config.errors import HostError, WeightsError
from libra_cli.core.events import PublishedVersion
from libra_cli.core.types import WeightVersion
from libra_cli.node.checkpoints.verify import verified
from libra_cli.runtime.hosts.agent_connection import AgentConnection
from libra_cli.runtime.hosts.agent_messages import Exited, ProcessState, PulledVersion
from libra_cli.runtime.hosts.remote_files import fetch_tokenizer, names_in
from libra_cli.runtime.hosts.transport import CommandResult
from libra_cli.runtime.hosts.upload import check_python
from libra_cli.runtime.supervision.answers import built, understood
from libra_cli.runtime.trainer.checkpoints import find_checkpoints
from libra_cli.runtime.trainer.whole_checkpoints import WholeCheckpoint, newest_whole
from libra_cli.runtime.weights.versions import Weights
from tests.unit.fuzz import nonsense

ABOUT = {"step": 3, "world_size": 1, "score": 0.5}
PROBE = {"probe": {"token_ids": [1, 2, 3], "logprobs": [-0.1, -0.2]}, "files": []}
EVENT = {
    "event": "exited",
    "process": "server-0",
    "pid": 3,
    "exit_code": -9,
    "tail": "killed",
    "requested": False,
}
ANSWER = {"id": 1, "ok": True, "result": {"processes": []}}
REFUSED = {"id": 1, "ok": False, "kind": "start", "error": "no such file"}
STATE = {
    "process": "server-0",
    "pid": 3,
    "started": 4,
    "state": "running",
    "exit_code": None,
    "log": "/logs/server-0.log",
    "tail": "",
    "requested": False,
}
PULLED = {"path": "/v", "kind": "full", "sent_by": {"a": 3}, "seconds": 0.1, "detail": ""}


class AnyFiles:
    """A transport to a host on which every command and every file has this content."""

    home, target = "/home/x", "a"

    def __init__(self, listed: bytes, content: bytes) -> None:
        self.listed = listed
        self.content = content
        self.asked: list[str] = []

    async def run(self, argv: Any, *, stdin: bytes = b"", timeout_s: float) -> CommandResult:
        return CommandResult(0, self.listed, b"")

    async def get(self, path: str) -> bytes:
        self.asked.append(path)
        return self.content


class AnyHost:
    def __init__(self, listed: bytes, content: bytes) -> None:
        self.transport = AnyFiles(listed, content)
        self.run_dir = "/run"


names = st.lists(
    st.one_of(
        st.sampled_from(
            [b"step-3", b"tokenizer.json", b"../../.ssh/x.json", b"/etc/x.json", b"-x"]
        ),
        st.binary(max_size=12),
    ),
    max_size=4,
).map(b"\n".join)


@given(listed=names, content=nonsense.json_like(ABOUT))
def test_checkpoints_are_found_or_passed_over(listed, content):
    host: Any = AnyHost(listed, content)
    with nonsense.thrown_at("checkpoints of hosts"):
        for found in asyncio.run(find_checkpoints({"a": host})):
            assert isinstance(found.step, int)
            assert "/" not in found.name


class Lines:
    """A stream of an agent that says these lines, and hangs up."""

    errors = ""
    link_silent_s = math.inf

    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines

    async def readline(self) -> bytes:
        await asyncio.sleep(0)
        return self.lines.pop(0) if self.lines else b""

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


class AnyPart(AnyHost):
    """A host with one checkpoint, of which it says this."""

    def __init__(self, said: bytes) -> None:
        super().__init__(b"step-3-e1\n../../x\n", b"")
        self.said = said
        self.transport.open_stream = self.open_stream  # type: ignore[attr-defined]

    def module_argv(self, module: str) -> list[str]:
        return [module]

    async def open_stream(self, argv: Any) -> Lines:
        return Lines([b"a login script\n", self.said.replace(b"\n", b"") + b"\n"])


PART = {
    "about": {"step": 3, "files": {"model.safetensors": {"host": "a", "bytes": 3}}},
    "here": ["model.safetensors"],
    "damaged": [],
    "ledger": {"step": 3},
}


def found_on(*said: bytes) -> WholeCheckpoint:
    hosts: Any = {f"h{number}": AnyPart(one) for number, one in enumerate(said)}
    return asyncio.run(newest_whole(hosts, ["step-3-e1"], 1, note=lambda text: None))


def test_a_whole_checkpoint_is_found():
    assert found_on(nonsense.as_json(PART)).position == {"step": 3}


@given(said=nonsense.json_like(PART))
def test_a_checkpoint_is_whole_or_passed_over(said):
    with nonsense.thrown_at("parts of checkpoints"):
        assert isinstance(found_on(said).position, dict)


@given(about=nonsense.json_like({"step": 3, "files": {}}), ledger=nonsense.json_like({"step": 3}))
def test_a_part_is_read_through_or_damaged(about, ledger, tmp_path_factory):
    directory = tmp_path_factory.mktemp("part")
    (directory / "checkpoint.json").write_bytes(about)
    (directory / "ledger.json").write_bytes(ledger)
    with nonsense.thrown_at("parts of checkpoints"):
        nonsense.as_json(verified(directory))


@given(content=nonsense.json_like(PROBE))
def test_a_manifest_has_a_probe_or_is_damaged(content):
    host: Any = AnyHost(b"", content)
    weights = Weights({"a": host}, {}, {"a": "/v"}, {}, origin="a", keep=2, timeout_s=1.0)
    with nonsense.thrown_at("manifests"):
        probe = asyncio.run(weights.probe(PublishedVersion(WeightVersion(1, 2), 10, 0.0)))
        assert abs(sum(probe.logprobs)) < float("inf")


def test_a_probe_that_is_no_numbers_is_the_fault_of_the_manifest():
    host: Any = AnyHost(b"", b'{"probe": {"token_ids": [1, 2], "logprobs": ["x"]}}')
    weights = Weights({"a": host}, {}, {"a": "/v"}, {}, origin="a", keep=2, timeout_s=1.0)
    with pytest.raises(WeightsError, match="damaged"):
        asyncio.run(weights.probe(PublishedVersion(WeightVersion(1, 2), 10, 0.0)))


@given(listed=names | st.binary(max_size=60))
def test_no_name_of_a_host_leaves_the_directory(listed, tmp_path_factory):
    with nonsense.thrown_at("listed names"):
        files: Any = AnyFiles(listed, b"{}")
        told = asyncio.run(names_in(files, "/m"))
        assert all("/" not in name and name[0] not in ".-" for name in told)
        target = tmp_path_factory.mktemp("model") / "inner"
        asyncio.run(fetch_tokenizer(files, "/m", target))
        assert [path.name for path in target.parent.rglob("*") if path.parent != target] == [
            "inner"
        ]


@given(said=nonsense.json_like([3, 11]))
def test_a_python_that_says_anything_is_no_python(said):
    with nonsense.thrown_at("interpreters"):
        transport: Any = AnyFiles(said, b"")
        asyncio.run(check_python(transport, "a", "python", "/code"))


agent_lines = st.lists(
    st.one_of(*(nonsense.json_like(one) for one in (EVENT, ANSWER, REFUSED))).map(
        lambda line: line.replace(b"\n", b"") + b"\n"
    ),
    max_size=4,
)


@given(lines=agent_lines)
def test_whatever_an_agent_says_a_request_is_answered_or_the_stream_is_lost(lines):
    events: list[Any] = []

    async def main() -> None:
        connection = AgentConnection("a", events.append)
        connection._stream = Lines(lines)  # type: ignore[assignment]
        asked = asyncio.ensure_future(connection.ask("list", timeout_s=5.0))
        await asyncio.sleep(0)
        try:
            assert isinstance(await connection.until_lost(10.0, 60.0), str)
        finally:
            connection.fail(HostError("gone"))
            answers: Any = await asyncio.gather(asked, return_exceptions=True)
        if isinstance(answers[0], BaseException):
            raise answers[0]

    with nonsense.thrown_at("agents of hosts"):
        asyncio.run(main())


@given(told=nonsense.changed(EVENT), state=nonsense.changed(STATE), pulled=nonsense.changed(PULLED))
def test_what_is_built_of_an_answer_has_the_types_that_it_says(told, state, pulled):
    for kind, found in ((Exited, {**EVENT, "node": "a"}), (ProcessState, STATE)):
        assert built(kind, found)
    with nonsense.thrown_at("rows of agents"), understood(HostError, "it"):
        assert isinstance(built(ProcessState, state).pid, int)
    with nonsense.thrown_at("rows of agents"), understood(HostError, "it"):
        assert isinstance(built(PulledVersion, pulled).sent_bytes, int)
    with nonsense.thrown_at("rows of agents"), understood(HostError, "it"):
        exited = built(Exited, told)
        assert isinstance(exited.exit_code, int | None)
