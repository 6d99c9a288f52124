"""What runs beside hosts and processes waits for nothing without a deadline.

Walked by their syntax: calls that block until something else happens, and awaits of tasks and
futures. A wait has a deadline if it is given one or stands inside ``asyncio.timeout``. All others
are named here, each with what ends it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.package_graph import modules

PLACES = ("runtime", "node")

WITHOUT_ARGUMENTS = {"wait", "get", "join", "result", "acquire", "communicate"}
"""Methods that block for ever when nothing says how long."""
AWAITED = {"read", "readline", "readexactly", "readuntil", "drain", "exit_code", "shield"}
"""Methods of streams, which block for ever when awaited."""
SOCKETS = {"accept", "recv", "recv_into"}

ALLOWED: dict[str, str] = {
    # Streams to processes and hosts: what is read comes when it comes. Pings find a host that is
    # gone, exits a process that is, and then the stream is closed, which ends every read and write.
    "node/agent/agent_socket.py:bridge": "carries bytes until either side closes",
    "node/agent/main.py:_serve_connection": "requests of the controller, until it hangs up",
    "node/agent/main.py:_write": "a controller that reads no more is given up with its lease",
    "node/connections.py": "sockets that do not block; the selector says what is there",
    "runtime/agents/frozen_models.py": "the agent's own request; the end of its play closes it",
    "runtime/agents/nodes.py": "a stream of a node; a host that is lost closes it",
    "node/agent/lease/link.py:hear": "a socket that does not block",
    "runtime/episodes/workers.py:_why_it_ended": "a stream of a worker; its end closes it",
    "runtime/episodes/models_port.py": "a stream of a node; a host that is lost closes it",
    "runtime/processes/carried.py": "connections of such a stream, which end with it",
    "runtime/hosts/agent_connection.py": "attach has HELLO_S, the rest is ended by missed pings",
    "runtime/hosts/local.py": "pipes of a process; close() kills it",
    "runtime/hosts/ssh_channels.py": "channels; a connection that is lost closes them all",
    "runtime/processes/outbox.py": "writes of one stream, which its owner closes",
    "runtime/trainer/checkpoints.py:answer_of": "SERVE_S, or an export, which whoever waits ends",
    "runtime/doctor/remote_files.py:copy_file": "each read has the deadline of its transport",
    "runtime/agents/server.py:_json_of": "the agent's own request; the end of its play closes it",
    "runtime/tinker/service.py": "a client's own request; the end of the service closes it",
    # Queues of work: who waits here has nothing to do.
    "node/agent/main.py:serve": "the agent's life; the lease ends it",
    "runtime/driver.py:run": "the run's events; timers come from the machine",
    "runtime/hosts/threads.py:_serve": "a thread that waits for work; closing wakes it",
    "runtime/monitors/dispatch.py:_work": "a thread that waits for calls; closing wakes it",
    # Parts of something that has a deadline as a whole.
    "node/agent/host_facts/bandwidth.py": "sockets have a timeout of their own",
    "node/tls_stream.py:_await": "a socket that its owner gives a timeout",
    "node/fabric/chain.py:join": "a relay; a block that is not taken in STALL_S ends it",
    "node/fabric/chain.py:receive": "waited for at most STALL_S a block",
    "node/fabric/group.py:connect": "gloo's own timeout, STALL_S, ends the thread",
    "node/fabric/member.py:_join": "a relay, as above; the agent kills a member that is silent",
    "node/weights/fabric.py:_kill": "of a process that was killed",
    "runtime/weights/fabric.py:seat": "joining has its deadline on every host",
    "node/processes/supervisor.py:_reap": "of a process that has exited",
    "node/processes/supervisor.py:stop": "of a process that was verified to be gone",
    "runtime/agents/episodes.py:_next": "it begins when another play ends, each within its own",
    "runtime/agents/episodes.py:start": "it begins when another play ends, each within its own",
    "runtime/agents/play.py:_turn": "the machine answers every turn or fails it",
    "runtime/agents/runners.py": "AgentEpisodes._next gives the agent up, which kills it",
    "runtime/agents/server.py:answer": "results of futures that are done",
    "runtime/episodes/in_process.py": "a call to an environment: Calls.wait has its deadline",
    "runtime/episodes/performer.py:_answered": "an environment's answer, with the same deadline",
    "runtime/episodes/workers.py:_ask": "a call to an environment: Calls.wait has its deadline",
    "runtime/episodes/calls.py:run_on": "Calls.limit_s, or of an agent in a sandbox its own time",
    "runtime/processes/tasks.py:during": "its end cancels the work, which has deadlines of its own",
    "runtime/frozen/endpoint.py": "whoever asks has a limit, and its request ends with it",
    "runtime/frozen/models.py:_all_serve": "each server serves or fails within STARTUP_TIMEOUT_S",
    "runtime/frozen/processes.py:perform": "the server serves or fails within STARTUP_TIMEOUT_S",
    "runtime/frozen/processes.py:_stop": "the end of a task that was cancelled",
    "runtime/frozen/server.py:one_life": "the comparison of files has READ_S",
    "runtime/frozen/server.py": "results of futures that are done",
    "runtime/hosts/cluster.py:until_reached": "the run's life: its owner cancels it",
    "runtime/tinker/futures.py:outcome": "the result of a task that is done",
    "runtime/tinker/futures.py:_size": "the result of a task that is done",
    "runtime/tinker/sampling.py:sampled": "the results of tasks that are done",
    "runtime/tinker/hosts.py:until_failed": "the service's life; an interrupt ends it",
    "runtime/session.py:_leave_models": "exports, after the run; whoever waits ends them",
    "runtime/trainer/run_exports.py:leave": "exports, after the run; whoever waits ends them",
    "runtime/store/journal.py:close": "a thread that is told to stop, at the end of a flush",
    "runtime/supervision/background.py:_once": "work that its owner cancels",
    "runtime/trainer/processes.py:saved_or_not": "the trainer is asked, whose ranks are watched",
    "runtime/trainer/worker_processes.py:_give": "the end of the step cancels it",
    "runtime/weights/versions.py:on": "a pull: Host.pull has its deadline",
    # Phases of a rank, which the controller watches (core.progress.phases).
    "node/gradient/writer.py:finish": "computing gradients",
    "node/trainer/main.py:begin": "copying the weights",
    "node/model/shard_rows.py:_exchange": "copying the weights",
    "node/weights/publisher.py": "copying the weights",
    # Of a server that loads a version: the controller gives it the time of its size.
    "node/rollout/prepared.py:tensors": "loading; the server has answered that all is there",
    "node/rollout/prepared.py:_unlock": "a thread that waits for the reading of the same version",
}
"""A function or a whole file, and what ends the waits in it."""


def waits_in(tree: ast.Module) -> Iterator[str]:
    """The waits without a deadline, as ``function:what``."""
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        what = _what(node, above)
        if what and not _has_deadline(node, above):
            yield f"{_function(node, above)}:{what}"


def _what(node: ast.AST, above: dict[ast.AST, ast.AST]) -> str:
    if isinstance(node, ast.Await) and isinstance(node.value, ast.Name | ast.Attribute):
        return ast.unparse(node.value).rpartition(".")[2]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    if any("timeout" in (one.arg or "") for one in node.keywords):
        return ""
    name, awaited = node.func.attr, isinstance(above.get(node), ast.Await)
    found = (
        (name in WITHOUT_ARGUMENTS and not node.args and not node.keywords)
        or (name == "wait" and ast.unparse(node.func.value) == "asyncio")
        or (name in AWAITED and awaited)
        or name in SOCKETS
    )
    return name if found else ""


def _has_deadline(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    while node in above and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node = above[node]
        items = node.items if isinstance(node, ast.AsyncWith | ast.With) else []
        if any("timeout" in ast.unparse(one.context_expr) for one in items):
            return True
    return False


def _function(node: ast.AST, above: dict[ast.AST, ast.AST]) -> str:
    while node in above:
        node = above[node]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return node.name
    return ""


def test_every_wait_has_a_deadline_or_a_reason_for_none() -> None:
    looked_at = [one for one in modules() if one.path.parts[0] in PLACES]
    found = {f"{one}:{wait}" for one in looked_at for wait in waits_in(one.tree)}
    new = sorted(wait for wait in found if not reasons_for(wait))
    assert not new, "give these a deadline, or name here what ends them:\n" + "\n".join(new)
    used = {place for wait in found for place in reasons_for(wait)}
    assert not ALLOWED.keys() - used, "these are not there any more"


def reasons_for(wait: str) -> set[str]:
    path, function, _ = wait.split(":")
    return {path, f"{path}:{function}"} & ALLOWED.keys()


@pytest.mark.parametrize(
    "line",
    [
        "await queue.get()",
        "await task",
        "await asyncio.wait({task})",
        "await reader.readline()",
        "thread.join()",
        "future.result()",
        "sock.recv(1)",
    ],
)
def test_a_wait_without_a_deadline_is_found_and_one_inside_of_one_is_not(
    line: str,
) -> None:
    (found,) = waits_in(ast.parse(f"async def wait_here():\n    {line}\n"))
    assert found.startswith("wait_here:")
    within = f"async def wait_here():\n    async with asyncio.timeout(1.0):\n        {line}\n"
    assert list(waits_in(ast.parse(within))) == []


@pytest.mark.parametrize(
    "line",
    [
        "options.get('name')",
        "', '.join(parts)",
        "await asyncio.wait({task}, timeout=1.0)",
        "event.wait(2.0)",
        "await connection.ask('pull', timeout_s=3.0)",
    ],
)
def test_what_has_a_deadline_of_its_own_or_does_not_wait_is_no_wait(line: str) -> None:
    assert list(waits_in(ast.parse(f"async def wait_here():\n    {line}\n"))) == []
