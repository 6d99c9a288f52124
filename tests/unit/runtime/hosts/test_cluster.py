"""What a cluster does about hosts that do not answer."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libra_cli.config.errors import HostError, HostLost
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.launch.accelerate import RENDEZVOUS
from libra_cli.core.launch.placement import initial_plan
from libra_cli.core.launch.process import ProcessSpec
from libra_cli.core.preflight.findings import ALL, Finding, Remedy
from libra_cli.core.preflight.host_report import NodeFacts
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    LeaseExpired,
    StartedProcess,
    StoppedProcess,
)
from libra_cli.runtime.hosts.cluster import Cluster, KeptCluster
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.lost_gpus import lost_gpus

RECIPE = Recipe.model_validate(
    {"nodes": [{"host": "n1"}, {"host": "n2"}], "model": {"path": "/m"}, "run": {"lease_s": 20}}
)

GPUS = Recipe.model_validate(
    {
        "nodes": [{"host": "n1", "gpus": 2, "slots": 2, "pool": ["train", "rollout"]}],
        "model": {"path": "/m"},
    }
)
HOSTS = Path(__file__).parents[3] / "fixtures/hosts"
BEGUN = NodeFacts.read(json.loads((HOSTS / "two-h100.json").read_text()))


class Away:
    """A host that does not answer the first times it is asked, and keeps a process as often."""

    def __init__(self, times: int, *, keeps: int = 0) -> None:
        self.left = times
        self.keeps = keeps
        self.let_go: list[int] = []

    async def stop(self, process: str, *, grace_s: float) -> StoppedProcess:
        self.left -= 1
        if self.left >= 0:
            raise HostLost("no answer")
        self.keeps -= 1
        return StoppedProcess((), ("pid 7 (D)",) if self.keeps >= 0 else ())

    async def start(self, *_: object, ports: list[int], **__: object) -> StartedProcess:
        self.let_go += ports
        return StartedProcess(1, 1, "log")


def cluster(host: Away, recipe: Recipe = RECIPE) -> Cluster:
    made = Cluster(
        recipe,
        initial_plan(recipe),
        run_id="r",
        secrets=RunSecrets.new(),
        save=list[Any]().append,
        clock=time.time,
    )
    made.hosts["n1"] = cast("Host", host)
    return made


class Telling(Away):
    """A host that tells of its GPUs, whichever it has at the moment."""

    python, workdir, run_dir, weights_dir, tmp_dir, life = "py", "/w", "/w/r", "/shm", "/tmp", "1"
    transport = SimpleNamespace(warnings=())
    gpus = BEGUN.gpus

    def __init__(self) -> None:
        super().__init__(0)

    async def open(self, *_: object, **__: object) -> None:
        """It answers."""

    async def running(self) -> frozenset[str]:
        return frozenset()

    async def facts(self, *_: object, **__: object) -> NodeFacts:
        return replace(BEGUN, gpus=self.gpus, gpus_present=tuple(gpu.uuid for gpu in self.gpus))


def test_gpus_keep_the_names_of_the_beginning_when_a_host_is_looked_at_again(
    tmp_path: Path,
) -> None:
    """Also for a controller that comes after this one: nvidia-smi has other numbers by then."""

    async def scene() -> None:
        host = Telling()
        begun = cluster(host, GPUS)
        await begun.look(GPUS.nodes[0], imports=None)
        kept = KeptCluster(**json.loads(json.dumps(asdict(begun.kept))))
        host.gpus = BEGUN.gpus[1:]
        after = cluster(host, GPUS)
        (tmp_path / "config.json").touch()
        await after.adopt(kept, tmp_path)
        await begun.look(GPUS.nodes[0], imports=None)
        for one in (begun, after):
            assert one.facts["n1"].devices == tuple(gpu.uuid for gpu in BEGUN.gpus)

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("seen", "told"), [("0,1", ["GPU 1 of n1"]), ("1", ["GPU 1 of n1"]), ("0", []), ("", [])]
)
def test_a_process_is_told_of_the_gpus_that_it_has_itself(seen: str, told: list[str]) -> None:
    async def scene() -> None:
        host = Telling()
        made = cluster(host, GPUS)
        await made.look(GPUS.nodes[0], imports=None)
        host.gpus = BEGUN.gpus[:1]
        names = [BEGUN.gpus[int(one)].uuid for one in seen.split(",") if one]
        process = ProcessSpec("n1", "server-0", (), {"CUDA_VISIBLE_DEVICES": ",".join(names)})
        found = await lost_gpus(made, [process])
        assert [str(one).partition(" (")[0] for one in found] == told

    asyncio.run(scene())


def test_of_a_host_that_does_not_answer_no_gpu_is_known_to_be_lost() -> None:
    async def scene() -> None:
        host = Telling()
        made = cluster(host, GPUS)
        await made.look(GPUS.nodes[0], imports=None)
        host.gpus = ()
        process = ProcessSpec("n1", "server-0", (), {"CUDA_VISIBLE_DEVICES": BEGUN.gpus[0].uuid})
        assert await lost_gpus(made, [process])
        made._happened(ConnectionLost("n1", "no answer"))
        assert await lost_gpus(made, [process]) == ()

    asyncio.run(scene())


def test_a_process_on_a_host_that_was_given_up_counts_as_stopped() -> None:
    async def scene() -> None:
        host = Away(1000)
        given_up = cluster(host)
        given_up._happened(LeaseExpired("n1", "given up"))
        async with asyncio.timeout(1.0):
            await given_up.stop("n1", "server-0")

    asyncio.run(scene())


def test_a_host_that_is_only_lost_is_asked_again() -> None:
    async def scene() -> None:
        host = Away(1)
        lost = cluster(host)
        lost._happened(ConnectionLost("n1", "no answer"))
        async with asyncio.timeout(5.0):
            await lost.stop("n1", "server-0")
        assert host.left == -1, "and then it did stop it"

    asyncio.run(scene())


class Refusing(Away):
    """A host whose sshd refuses the first times."""

    transport = SimpleNamespace(warnings=("a key that others can read",))

    async def open(self, *_: object, **__: object) -> None:
        self.left -= 1
        if self.left >= 0:
            refused = ConnectionRefusedError(111, "Connection refused")
            raise HostError("n1: refuses") from (refused if self.keeps else None)


@pytest.mark.parametrize(
    ("patience_s", "refuses", "may_pass", "asked"),
    [(60.0, 3, True, 4), (0.0, 3, True, 1), (60.0, 3, False, 1)],
)
def test_a_run_that_goes_on_asks_a_host_again_that_refuses_and_a_new_one_once(
    monkeypatch: pytest.MonkeyPatch,
    patience_s: float,
    refuses: int,
    may_pass: bool,
    asked: int,
) -> None:
    async def soon(_: float) -> None:
        return

    host, noted = Refusing(refuses, keeps=int(may_pass)), list[str]()
    made = cluster(host)
    made._note, made.patience_s = noted.append, patience_s
    monkeypatch.setattr("libra_cli.runtime.hosts.cluster.host_of", lambda node: host)
    monkeypatch.setattr(asyncio, "sleep", soon)
    opening = made.connect(RECIPE.nodes[0])
    if asked > 1:
        asyncio.run(opening)
        assert noted == [
            "n1: refuses; it is asked again for 60 s",
            "n1: a key that others can read",
        ]
    else:
        with pytest.raises(HostError, match="refuses"):
            asyncio.run(opening)
    assert refuses - host.left == asked


def test_a_process_that_outlives_sigkill_is_told_once_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def soon(_: float) -> None:
        return

    noted: list[str] = []
    host = Away(0, keeps=3)
    made = cluster(host)
    made._note = noted.append
    monkeypatch.setattr(asyncio, "sleep", soon)
    asyncio.run(made.stop("n1", "server-0"))
    assert host.keeps == -1
    (told,) = noted
    assert told.startswith("n1: server-0 does not end by SIGKILL and may hold its GPU: pid 7 (D)")


@pytest.mark.parametrize(("launcher", "let_go"), [(RENDEZVOUS, []), ("torchrun", [21000])])
def test_where_ranks_meet_is_let_go_for_launchers_that_need_it_alone(
    launcher: str, let_go: list[int]
) -> None:
    host = Away(0)
    ports = {"rendezvous": 21000, "side": 21001}
    spec = ProcessSpec("n1", "trainer-0", ("python", "-m", launcher), {}, ports=ports)
    asyncio.run(cluster(host).start(spec))
    assert host.let_go == let_go


def test_waiting_for_a_host_ends_when_it_is_given_up() -> None:
    async def scene() -> None:
        lost = cluster(Away(1000))
        lost._happened(ConnectionLost("n1", "no answer"))
        stopping = asyncio.create_task(lost.stop("n1", "server-0"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.shield(stopping)
        lost._happened(LeaseExpired("n1", "given up"))
        async with asyncio.timeout(5.0):
            await stopping

    asyncio.run(scene())


def test_what_forbids_to_start_is_raised_with_what_mends_it_and_the_rest_is_noted() -> None:
    noted: list[str] = []
    made = cluster(Away(0))
    made._note = noted.append
    warns = Finding("gpus", "n1", "warns", "busy", "why")
    made._judge([warns, Finding("reach", ALL, "fine", "2 answer")])
    assert noted == ["n1: busy (why)"]
    stops = Finding("model", "n2", "stops", "no model", "why", Remedy("here", "libra setup R"))
    with pytest.raises(HostError) as caught:
        made._judge([warns, stops])
    assert str(caught.value) == "n2: no model\n  next: libra setup R"
    assert caught.value.hint == "libra doctor RECIPE"


@pytest.mark.parametrize(
    ("hints", "text", "hint"),
    [
        (("fix a", "fix b"), "n1 is bad\n  next: fix a\nn2 is bad\n  next: fix b", ""),
        (("fix it", "fix it"), "n1 is bad\nn2 is bad", "fix it"),
        (("fix a", ""), "n1 is bad\nn2 is bad", "fix a"),
    ],
)
def test_of_several_broken_hosts_each_says_what_to_do(
    hints: tuple[str, str], text: str, hint: str
) -> None:
    async def check(node: NodeSpec) -> None:
        raise HostError(f"{node.name} is bad", hint=hints[node.name == "n2"])

    with pytest.raises(HostError) as caught:
        asyncio.run(cluster(Away(0))._on_all(check))
    assert (str(caught.value), caught.value.hint) == (text, hint)


def test_a_sandbox_is_asked_for_only_where_workers_have_them() -> None:
    asked: list[object] = []

    class Asked(Telling):
        async def facts(self, *_: object, **words: object) -> NodeFacts:
            asked.append(words["sandbox"])
            return BEGUN

    async def look(sandbox: dict[str, Any] | None) -> None:
        workers = {"processes": 2, "nodes": ["n1"]}
        told = {"name": "shell", "sandbox": sandbox, "workers": workers}
        nodes = [{"host": "n1"}, {"host": "n2"}]
        recipe = Recipe.model_validate(
            {"nodes": nodes, "model": {"path": "/m"}, "environment": told}
        )
        there = cluster(Asked(), recipe)
        there.hosts["n2"] = there.hosts["n1"]
        for node in recipe.nodes:
            await there.look(node, imports=None)

    asyncio.run(look({}))
    asyncio.run(look({"backend": "none"}))
    asyncio.run(look(None))
    assert asked == [True, False, *[False] * 4]
