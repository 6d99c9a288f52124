"""All hosts of a run, from the first connection until nothing of the run is left on them.

All hosts start up in parallel, and each phase reports *every* problem of every host at once, before
a single GPU is busy:

    connect     reach the host, check its key, upload our code, start the agent
    check       what hosts tell of themselves, by the rules of ``core.preflight.checks``
    ports       reserve them on the host, for everything the plan will start there
    model       build it on the first train node if the recipe says so, and copy it to the others
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from libra_cli.config.errors import NONSENSE, HostError, HostLost, LibraError, ProcessError
from libra_cli.config.recipe import NodeSpec, Recipe
from libra_cli.core.costs.memory import GIB
from libra_cli.core.launch.accelerate import RENDEZVOUS
from libra_cli.core.launch.ports import ports_needed
from libra_cli.core.launch.process import HostFacts, ProcessSpec
from libra_cli.core.preflight.case import PreflightCase
from libra_cli.core.preflight.checks import examine
from libra_cli.core.preflight.episode_places import HostsThatPlay
from libra_cli.core.preflight.findings import ALL, Finding, stopping, warning
from libra_cli.core.preflight.host_report import HostReport
from libra_cli.core.preflight.lost_gpus import RunGpu, gpus_of_run
from libra_cli.core.records import NodeRecord, ProcessRecord, Record
from libra_cli.core.types import Plan, Seconds, node_of
from libra_cli.runtime.credentials.run_secrets import RunSecrets
from libra_cli.runtime.hosts.agent_messages import (
    ConnectionLost,
    Exited,
    HostEvent,
    LeaseExpired,
    Reconnected,
    Rejoined,
)
from libra_cli.runtime.hosts.event_bus import HostEventBus
from libra_cli.runtime.hosts.host import Host
from libra_cli.runtime.hosts.local import LocalTransport
from libra_cli.runtime.hosts.model_copies import ModelCopies
from libra_cli.runtime.hosts.preflight import look, open_files
from libra_cli.runtime.hosts.probes import names_of, torch_of
from libra_cli.runtime.hosts.ssh import SshTransport
from libra_cli.runtime.hosts.ssh_target import HostBusy
from libra_cli.runtime.hosts.transport import ByteStream, Endpoint, Transport

STOP_GRACE_S = 10.0
PATIENCE_S = 60.0
"""How long a run that goes on asks a host again that refuses: as long as sshd or a small host takes
to start again; chosen. A new run asks once, for a name may be misspelt."""
ASK_AGAIN_S = 2.0
MODEL_TIMEOUT_S = 3600.0


def transport_to(node: NodeSpec) -> Transport:
    """Return the transport to a node: pipes for this machine, SSH for any other."""
    if node.is_local:
        return LocalTransport()
    return SshTransport(
        node.host, user=node.user, port=node.port, identity=node.identity, jump=node.jump
    )


def host_of(node: NodeSpec) -> Host:
    """Return the controller's handle of a node; nothing is opened yet."""
    return Host(node.name, transport_to(node), workdir=node.workdir, python=node.python)


def _may_pass(error: LibraError) -> bool:
    """Whether a host may be reached a while later: nothing answered there, or it hung up. Not where
    it was reached, and its key, a login or what it has is the trouble."""
    cut = isinstance(error.__cause__, OSError | EOFError)
    return isinstance(error, HostLost | HostBusy) or (isinstance(error, HostError) and cut)


def _outlives(node: str, process: str, leftovers: Sequence[str]) -> str:
    return (
        f"{node}: {process} does not end by SIGKILL and may hold its GPU: {', '.join(leftovers)}; "
        "state D in `ps` waits for a disk or a driver, which `dmesg` on that host may name"
    )


def _let_go(spec: ProcessSpec) -> list[int]:
    """The reserved ports that a process binds without ``SO_REUSEPORT``: where ranks meet that the
    launcher of a backend plugin starts. ``node.rendezvous`` takes the port while it is reserved."""
    if RENDEZVOUS in spec.argv:
        return []
    return [port for what, port in spec.ports.items() if what == "rendezvous"]


@dataclass(frozen=True, slots=True)
class KeptCluster:
    """Where the processes of a run listen and its model lies, by node, for another controller."""

    ports: Mapping[str, Mapping[str, int]]
    model_dirs: Mapping[str, str]
    lives: Mapping[str, str]
    """What each host calls the time since the run began there; another after its lease."""
    gpus: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Name and place of each GPU of the run, as in ``Cluster.gpus``."""


class Cluster:
    """All hosts of a run. ``facts``, ``ports`` and ``model_dirs`` are complete after ``open``."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        *,
        run_id: str,
        secrets: RunSecrets,
        save: Callable[[Record], None],
        clock: Callable[[], Seconds],
        recipe_path: str = "RECIPE",
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._recipe = recipe
        self._recipe_path = recipe_path
        self._plan = plan
        self.run_id = run_id
        self.secrets = secrets
        self.clock = clock
        self.hosts: dict[str, Host] = {node.name: host_of(node) for node in recipe.nodes}
        self.facts: dict[str, HostFacts] = {}
        self.ports: dict[str, dict[str, int]] = {}
        #: The GPUs of the run on each node, as they were when it began.
        self.gpus: dict[str, tuple[RunGpu, ...]] = {}
        self.models = ModelCopies(
            recipe,
            node_of(plan.train[0]),
            self.hosts,
            self.facts,
            partial(self.run_to_end, timeout_s=MODEL_TIMEOUT_S),
        )
        self.events = HostEventBus()
        self._save = save
        self._note = note
        self.reports: dict[str, HostReport] = {}
        #: How long ``connect`` asks a host again that does not answer.
        self.patience_s = 0.0
        #: The nodes that do not answer now, and those that did not answer within their lease.
        self.lost: set[str] = set()
        self._gone: set[str] = set()
        self._changed = asyncio.Event()
        self._waiting: dict[tuple[str, str], asyncio.Future[Exited]] = {}

    # -- opening --------------------------------------------------------------------------------

    async def open(self, model_copy: Path) -> None:
        """Go through the four phases; ``model_copy`` receives the tokenizer's files.

        Raises:
            HostError: the hosts have problems; the message has a line for each.
        """
        await self._on_all(self.connect)
        await self._on_all(self._stop_what_runs)
        await self._on_all(self._look_quickly)
        self._judge(examine(self.case(), quick=True))
        await self._on_all(self._reserve)
        await self.models.place()
        await self.models.fetch_tokenizer(model_copy)

    async def adopt(self, kept: KeptCluster, model_copy: Path) -> dict[str, frozenset[str] | None]:
        """Attach to the hosts of a run whose controller was killed; nothing on them is examined.

        Returns:
            The names of the run's processes that run on each node; None where its lease was over,
            or it was started again.

        Raises:
            HostError: a host cannot be reached; what runs there goes on until its lease is over.
        """
        await self._on_all(self.connect)
        self.models.directories = dict(kept.model_dirs)
        self.gpus = {node: tuple(RunGpu(*one) for one in some) for node, some in kept.gpus.items()}
        await self._on_all(partial(self._adopt, kept))
        if not (model_copy / "config.json").exists():
            await self.models.fetch_tokenizer(model_copy)
        return {
            name: await host.running() if host.life == kept.lives.get(name) else None
            for name, host in self.hosts.items()
        }

    async def _adopt(self, kept: KeptCluster, node: NodeSpec) -> None:
        if self.hosts[node.name].life != kept.lives.get(node.name):
            await self.restore(node.name)
            return
        await self.look(node, imports=None)
        self.ports[node.name] = dict(kept.ports.get(node.name, {}))
        self._save_node(node.name, "ready")

    @property
    def kept(self) -> KeptCluster:
        """What a controller that comes after this one must know."""
        lives = {name: host.life for name, host in self.hosts.items()}
        return KeptCluster(self.ports, self.model_dirs, lives, self.gpus)

    async def _on_all(self, phase: Callable[[NodeSpec], Coroutine[Any, Any, None]]) -> None:
        nodes = self._recipe.nodes
        results = await asyncio.gather(*(phase(node) for node in nodes), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, LibraError):
                raise failure
        known = [failure for failure in failures if isinstance(failure, LibraError)]
        if len(known) == 1:
            raise known[0]
        if known:
            raise _joined(known)

    async def connect(self, node: NodeSpec) -> None:
        """Reach a node and attach to its agent, which is started. Raises HostError."""
        self._save_node(node.name, "connecting")
        began, told = time.monotonic(), False
        while True:
            try:
                await self._open(node)
                break
            except LibraError as error:
                if not _may_pass(error) or time.monotonic() - began >= self.patience_s:
                    self._save_node(node.name, "failed", detail=str(error))
                    raise
                if not told:
                    told = True
                    self._note(f"{error}; it is asked again for {self.patience_s:.0f} s")
            await asyncio.sleep(ASK_AGAIN_S)
            self.hosts[node.name] = host_of(node)
        for text in self.hosts[node.name].transport.warnings:
            self._note(f"{node.name}: {text}")

    async def _open(self, node: NodeSpec) -> None:
        await self.hosts[node.name].open(
            self.run_id,
            token=self.token,
            credentials=self.secrets.credentials_of(node.name),
            lease_s=self._recipe.run.lease_s,
            weights_dir=self._recipe.weight_sync.directory or "",
            on_event=self._happened,
        )

    async def _stop_what_runs(self, node: NodeSpec) -> None:
        """A controller that does not go on with what another has left there begins without it."""
        for process in sorted(await self.hosts[node.name].running()):
            await self.stop(node.name, process)

    @property
    def token(self) -> str:
        """What every request to a process of this run must bring."""
        return self.secrets.token

    @property
    def reached(self) -> dict[str, tuple[Host, NodeSpec]]:
        """The hosts that answer now, by node, each with what the recipe says of it."""
        away = self.lost | self._gone
        return {n: (host, self._recipe.node(n)) for n, host in self.hosts.items() if n not in away}

    @property
    def gpu_names(self) -> frozenset[str]:
        """Names of the GPUs that the recipe uses, as the open hosts gave them."""
        used = {node.name: node.gpus for node in self._recipe.nodes}
        return frozenset(
            gpu.name
            for node, report in self.reports.items()
            for gpu in (report.facts.gpus if report.facts else ())
            if gpu.index < used[node]
        )

    @property
    def that_play(self) -> HostsThatPlay:
        """What is known of the hosts for environments."""
        facts = {node: one.facts for node, one in self.reports.items() if one.facts is not None}
        with_slots = {node.name for node in self._recipe.slot_nodes}
        return HostsThatPlay(self._recipe.all_environments, facts, with_slots)

    async def look(self, node: NodeSpec, *, imports: Sequence[str] | None) -> None:
        """Ask a node for its report; with ``imports``, load torch and these packages there too.

        Raises:
            HostError: it does not answer.
        """
        host = self.hosts[node.name]
        report = self.reports[node.name] = await look(host, self._recipe, node)
        seen = report.facts
        assert seen is not None, "a host that answered has told"
        if not self.gpus.get(node.name):
            self.gpus[node.name] = gpus_of_run(seen, node.gpus)
        self.facts[node.name] = HostFacts(
            node=node.name,
            python=host.python,
            workdir=host.workdir,
            run_dir=host.run_dir,
            weights_dir=host.weights_dir,
            tmp_dir=host.tmp_dir,
            address=node.address or seen.address,
            data_address=node.data_address or "",
            own_address=seen.address,
            interface=seen.interface,
            cpus=seen.cpus,
            devices=tuple(gpu.name for gpu in self.gpus[node.name]),
            gpu_gib=min((gpu.mem_total for gpu in seen.gpus[: node.gpus]), default=0) / GIB,
            memory_gib=seen.mem_total / GIB,
        )
        if imports is not None and "torch" in seen.packages:
            packages = tuple(name for name in imports if name in seen.packages)
            self.reports[node.name] = await self._tried(node, report, packages)

    async def _look_quickly(self, node: NodeSpec) -> None:
        await self.look(node, imports=() if node.gpus else None)

    async def _tried(
        self, node: NodeSpec, report: HostReport, packages: tuple[str, ...]
    ) -> HostReport:
        """Load torch there, and on the head try the names of the model's files."""
        facts, path = self.facts[node.name], self._recipe.model.path

        async def ask(spec: ProcessSpec, seconds: Seconds) -> Any:
            return await self.answer_of(spec, timeout_s=seconds)

        report = replace(report, torch=await torch_of(ask, node, facts, packages))
        if path is None or report.model is None or node.name != node_of(self._plan.train[0]):
            return report
        return replace(report, names=await names_of(ask, node, facts, path))

    def case(self) -> PreflightCase:
        """What ``core.preflight.checks`` look at, as far as it is known."""
        return PreflightCase(
            self._recipe,
            self._plan,
            self.reports,
            recipe_path=self._recipe_path,
            open_files=open_files(),
        )

    def _judge(self, findings: Sequence[Finding]) -> None:
        """Raise HostError for findings that forbid to start; note the others."""
        for one in warning(findings):
            self._note(f"{one.line} ({one.why})")
        stops = stopping(findings)
        for node in self._recipe.nodes:
            mine = "; ".join(one.what for one in stops if one.host in (node.name, ALL))
            self._save_node(node.name, "failed" if mine else "ready", detail=mine)
        if stops:
            lines = [
                f"{one.line}\n  next: {one.remedy.command}" if one.remedy else one.line
                for one in stops
            ]
            raise HostError("\n".join(lines), hint=f"libra doctor {self._recipe_path}")

    async def _reserve(self, node: NodeSpec) -> None:
        names = ports_needed(self._recipe, self._plan).get(node.name, ())
        first, last = node.port_range
        ports = await self.hosts[node.name].ports(first, last, len(names))
        self.ports[node.name] = dict(zip(names, ports, strict=True))

    @property
    def model_dirs(self) -> Mapping[str, str]:
        """The model's directory on each node, by its name."""
        return self.models.directories

    async def restore(self, node: str) -> None:
        """Make a host that has rejoined ready again: its facts, its ports, its model.

        Raises:
            LibraError: it lacks something, or does not answer any more.
        """
        await self.look(self._recipe.node(node), imports=None)
        await self._reserve(self._recipe.node(node))
        has_policy = any(one.name == node for one in self._recipe.planned_nodes)
        if has_policy and await self.models.architecture(node) is None:  # its disk is another now
            await self.models.place_again(node, hint=f"libra doctor {self._recipe_path}")
        self._gone.discard(node)
        self.events.ready(node)
        self._save_node(node, "ready", detail="with a new agent")
        self._wake()

    # -- processes ------------------------------------------------------------------------------

    async def start(self, spec: ProcessSpec) -> None:
        """Start a process. Its exit will be reported as an event."""
        host = self.hosts[spec.node]
        started = await host.start(
            spec.process,
            spec.argv,
            env=dict(spec.env),
            files=dict(spec.files),
            ports=_let_go(spec),
        )
        self._save_process(spec.node, spec.process, started.pid, "running", log=started.log)

    async def dial(self, spec: ProcessSpec) -> Endpoint:
        """Where a process answers the controller; nothing need listen there yet."""
        path = self.facts[spec.node].socket_of(spec.process)
        return await self.hosts[spec.node].dial(path)

    async def answer_of(self, spec: ProcessSpec, *, timeout_s: float) -> Any:
        """Run a process to its end and return the JSON of its last line. Raises as below."""
        event = await self.run_to_end(spec, timeout_s=timeout_s)
        try:
            return json.loads(event.tail.splitlines()[-1])
        except NONSENSE as error:
            raise ProcessError(f"{spec.node}: {spec.process}: no answer: {event.tail}") from error

    async def run_to_end(self, spec: ProcessSpec, *, timeout_s: float) -> Exited:
        """Start a process and wait until it has succeeded.

        Raises:
            ProcessError: it failed, or ran over ``timeout_s``; the message has the end of its log.
            HostLost: its host was given up.
        """
        key = (spec.node, spec.process)
        ended: asyncio.Future[Exited] = asyncio.get_running_loop().create_future()
        self._waiting[key] = ended
        try:
            await self.start(spec)
            event = await asyncio.wait_for(ended, timeout_s)
        except TimeoutError as error:
            raise ProcessError(f"{spec.node}: {spec.process} ran over {timeout_s:.0f} s") from error
        finally:
            del self._waiting[key]
        if event.exit_code != 0:
            raise ProcessError(
                f"{spec.node}: {spec.process} ended with {event.exit_code}:\n{event.tail}"
            )
        return event

    async def stop(self, node: str, process: str) -> None:
        """Stop a process and all that it started.

        On a host that stays unreachable, the agent does so when the lease is over. What outlives
        SIGKILL (a process in the kernel, waiting for a disk or a driver) is waited for as long, and
        told.
        """
        give_up = time.monotonic() + self._recipe.run.lease_s + STOP_GRACE_S
        told = False
        while time.monotonic() < give_up and node not in self._gone:
            with suppress(HostError):
                stopped = await self.hosts[node].stop(process, grace_s=STOP_GRACE_S)
                if stopped.stopped:
                    return
                if not told:
                    told = True
                    self._note(_outlives(node, process, stopped.leftovers))
            await asyncio.sleep(1.0)

    async def open_stream(self, node: str, process: str, module: str) -> ByteStream:
        """Run a module of ours for as long as the stream to it is open.

        It has the marks of the run, so that the host's agent ends it with the run in any case, and
        its temporary files are among those of the run, which go with it even if it is killed.

        Raises:
            HostError: the host cannot be reached.
        """
        host, (spec,) = self.hosts[node], [one for one in self._recipe.nodes if one.name == node]
        marks = {"LIBRA_RUN": self.run_id, "LIBRA_NODE": node, "LIBRA_PROCESS": process}
        env = {"TMPDIR": host.tmp_dir, **spec.env, **marks}
        return await host.transport.open_stream(host.module_argv(module, env))

    # -- what hosts report ----------------------------------------------------------------------

    def _happened(self, event: HostEvent) -> None:
        if isinstance(event, Exited):
            self._exited(event)
        elif isinstance(event, ConnectionLost):
            self.lost.add(event.node)
            self._save_node(event.node, "unreachable", detail=event.reason)
        elif isinstance(event, Reconnected):
            self.lost.discard(event.node)
            self._save_node(event.node, "ready", detail=f"was away for {event.seconds:.0f} s")
        elif isinstance(event, LeaseExpired):
            self.lost.discard(event.node)
            self._gone.add(event.node)
            self._give_up_waiting(event)
            self._save_node(event.node, "failed", detail=event.reason)
        elif isinstance(event, Rejoined):
            self._save_node(event.node, "connecting", detail="answers again")
        self._wake()
        self.events.publish(event)

    def _wake(self) -> None:
        """Let go on who waits for a node."""
        self._changed.set()
        self._changed.clear()

    def _give_up_waiting(self, event: LeaseExpired) -> None:
        for (node, process), ended in self._waiting.items():
            if node == event.node and not ended.done():
                ended.set_exception(HostLost(f"{node}: {process}: {event.reason}"))

    def _exited(self, event: Exited) -> None:
        log = f"{self.hosts[event.node].run_dir}/logs/{event.process}.log"
        self._save_process(
            event.node, event.process, event.pid, "exited", exit_code=event.exit_code, log=log
        )
        ports = self.ports.get(event.node, {})
        ports |= {what: event.moved_ports.get(port, port) for what, port in ports.items()}
        waiting = self._waiting.get((event.node, event.process))
        if waiting is not None and not waiting.done():
            waiting.set_result(event)

    def _save_process(
        self,
        node: str,
        process: str,
        pid: int,
        state: str,
        *,
        exit_code: int | None = None,
        log: str,
    ) -> None:
        since = self.clock()
        self._save(ProcessRecord(node, process, pid, state, since, exit_code, log))

    def _save_node(self, name: str, state: str, *, detail: str = "") -> None:
        report = self.reports.get(name)
        seen = report.facts if report else None
        self._save(
            NodeRecord(
                node=name,
                host=self._recipe.node(name).reach,
                state=state,
                since=self.clock(),
                facts_json=json.dumps(asdict(seen)) if seen else "",
                detail=detail,
            )
        )

    async def until_back(self, node: str) -> None:
        """Wait while the node does not answer, at most until its lease is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._recipe.run.lease_s + STOP_GRACE_S):
                while node in self.lost:
                    await self._changed.wait()

    async def until_reached(self, node: str) -> None:
        """Wait until the node answers, and is ready again if it was given up."""
        while node in self.lost | self._gone:
            await self._changed.wait()

    # -- closing --------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Disconnect; what runs there goes on until its lease is over."""
        await asyncio.gather(*(host.close() for host in self.hosts.values()))

    async def close(self, *, remove_logs: bool = False) -> list[str]:
        """Stop all agents and their processes; return a line for each that may be left."""
        results = await asyncio.gather(
            *(self._release(name, host, remove_logs) for name, host in self.hosts.items())
        )
        return [line for lines in results for line in lines]

    async def _release(self, name: str, host: Host, remove_logs: bool) -> list[str]:
        try:
            left = await host.shutdown(grace_s=STOP_GRACE_S, remove_logs=remove_logs)
        except LibraError as error:
            return [f"{name}: {error}"]
        if name in self.facts:
            self._save_node(name, "released")
        return [f"{name}: {line}" for line in left]


def _joined(failures: Sequence[LibraError]) -> HostError:
    """Join the failures of all hosts; each keeps its own hint unless they have the same one."""
    hints = {failure.hint for failure in failures if failure.hint}
    if len(hints) < 2:
        return HostError("\n".join(map(str, failures)), hint=next(iter(hints), ""))
    lines = [f"{each}\n  next: {each.hint}" if each.hint else str(each) for each in failures]
    return HostError("\n".join(lines))
