"""Tasks that nobody awaits."""

from __future__ import annotations

import ast
import asyncio

from libra_cli.runtime.supervision.background import Background
from tests.package_graph import modules_with

DEADLINE_S = 5


def test_work_without_an_end_begins_again_after_every_exception(caplog):
    done = asyncio.Event()
    tries = []

    async def work() -> None:
        tries.append(1)
        if len(tries) < 4:
            raise ValueError("broken")
        done.set()
        await asyncio.sleep(DEADLINE_S)

    async def main() -> None:
        background = Background(first_pause_s=0.001)
        background.keep("reading", work)
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        await background.close()

    asyncio.run(main())
    assert len(tries) == 4
    assert caplog.text.count("reading failed and begins again: ValueError: broken") == 3


def test_an_exception_of_work_with_an_end_is_logged_and_given_on(caplog):
    failures: list[Exception] = []

    async def work() -> None:
        raise ValueError("broken")

    async def main() -> None:
        await Background().start("asking", work(), failed=failures.append)

    asyncio.run(main())
    assert [str(error) for error in failures] == ["broken"]
    assert "asking failed: ValueError: broken" in caplog.text


def test_closing_from_within_a_task_does_not_wait_for_itself():
    async def main() -> None:
        background = Background()
        task = background.start("closing", background.close())
        await asyncio.wait_for(task, DEADLINE_S)

    asyncio.run(main())


LOOKED_AT = {
    "agents/episodes.py": "the play of an agent catches everything and ends in an event",
    "agents/runners.py": "awaited where it is made",
    "agents/server.py": "awaited where it is made, and looked at when the client has gone",
    "driver.py": "catches everything and ends in an event",
    "episodes/calls.py": "awaited where it is made, and looked at when it was abandoned",
    "episodes/places.py": "gathered where they are made",
    "evaluation/standalone.py": "of a task group, which raises what they raise",
    "hosts/agent_connection.py": "awaited where they are made",
    "hosts/host.py": "kept connected until it is closed",
    "hosts/local.py": "awaited when the process ends",
    "hosts/ssh.py": "awaited where it is made",
    "processes/tasks.py": "awaited where it is made",
    "session.py": "awaited where it is made",
    "supervision/background.py": "catches everything",
    "teacher.py": "gathered where they are made",
    "tinker/futures.py": "told to the client that asks for the outcome",
    "tinker/hosts.py": "of a task group, which raises what they raise",
    "tinker/sampling.py": "of a task group, which raises what they raise",
    "trainer/rank_watch.py": "awaited at this look or a later one, which takes what it raised",
    "weights/fabric.py": "awaited by all who ask for a seat; sending catches what a host raises",
    "weights/versions.py": "awaited by everybody who wants the version",
}
"""Modules that make tasks of asyncio by themselves, and who sees their exceptions."""


def test_no_task_is_made_whose_exception_nobody_sees():
    making = {
        str(module.path.relative_to("runtime"))
        for module in modules_with("create_task", "ensure_future")
        if module.path.parts[0] == "runtime"
        for node in module.nodes
        if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future")
    }
    assert making == set(LOOKED_AT)
