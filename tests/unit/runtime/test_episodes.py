"""What happens to a turn, whatever the environment does with it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from types import ModuleType

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.core.types import ToolOutcome, TrajectoryId
from libra_cli.envs import registry
from libra_cli.envs.protocol import ToolFailed, function
from libra_cli.envs.returns import LONGEST_OBSERVATION
from libra_cli.node.model.tokenizer import build_tokenizer, observation_text, save_tokenizer
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.hosts.threads import Threads

ONE = TrajectoryId(group=0, member=0)
TWO = TrajectoryId(group=0, member=1)
DEADLINE_S = 10.0
"""Far more than anything here takes; a test that needs it has failed."""


class Scripted:
    """Each tool does what it is called; ``World`` holds what the tests see and steer."""

    tools = ()

    def __init__(self, *, reward=1.0, tools=(), secrets=None, fail="", hang=""):
        World.made.append(self)
        self.reward, self.tools, self.secrets = reward, tools, secrets
        self.fail, self.hang = fail, hang
        self.log = []

    def _enter(self, name):
        World.entered.add(name)
        self.log.append(name)
        if self.hang == name:
            World.scheduler.wait(DEADLINE_S)
        if self.fail == name:
            raise RuntimeError(f"no {name} today")

    def task(self, index, seed):
        return {"text": f"start ab hops {index}", "seed": seed}

    def reset(self, task, seed):
        self._enter("reset")
        self.seeds = (task.get("seed"), seed)
        return [{"role": "user", "content": task["text"]}]

    def step(self, call):
        with World.lock:
            World.inside += 1
            World.most_inside = max(World.most_inside, World.inside)
        try:
            self.log.append(f"step {call.name}")
            return self._act(call)
        finally:
            with World.lock:
                World.inside -= 1

    def _act(self, call):
        match call.name:
            case "say":
                return str(call.arguments.get("text", "said"))
            case "refuse":
                raise ToolFailed("no")
            case "hang":
                World.scheduler.wait(DEADLINE_S)
                return "late"
            case "break":
                raise KeyError("gone")
            case "exit":
                raise SystemExit(3)
            case "number":
                return 12
            case _:
                raise AssertionError(call)

    def score(self, answer):
        self._enter("score")
        self.log.append(f"answer {answer}")
        return self.reward

    def close(self):
        self.log.append("close")
        World.closed.set()


class World:
    """Reset for every test by the fixture below."""

    made: list[Scripted]
    entered: set[str]
    scheduler: threading.Event
    closed: threading.Event
    lock = threading.Lock()
    inside = 0
    most_inside = 0


@pytest.fixture(autouse=True)
def world(monkeypatch):
    module = ModuleType("scripted_environments")
    module.Scripted = Scripted  # type: ignore[attr-defined]
    module.Incomplete = dict  # type: ignore[attr-defined]
    module.NUMBER = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    World.made, World.entered = [], set()
    World.scheduler, World.closed = threading.Event(), threading.Event()
    World.inside = World.most_inside = 0
    yield
    World.scheduler.set()  # let go of whatever still hangs


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_tokenizer(build_tokenizer(), directory, max_len=256)
    return Renderer(directory)


@pytest.fixture
def play(renderer):
    """Run ``scene(episodes)`` with a deadline; the environment's arguments come as keywords."""

    def run(scene, *, timeout_s=5.0, concurrency=8, tasks=None, secrets=None, **args):
        spec = EnvironmentSpec.model_validate(
            {
                "name": "scripted_environments:Scripted",
                "args": args,
                "tasks": tasks,
                "tool_timeout_s": timeout_s,
                "concurrency": concurrency,
                "secrets": secrets or {},
            }
        )

        async def main():
            episodes = Episodes([spec], ["scripted"], renderer)
            try:
                return await asyncio.wait_for(scene(episodes), DEADLINE_S)
            finally:
                await episodes.close()

        return asyncio.run(main())

    return run


@pytest.fixture
def turn(renderer):
    """The tokens of a turn that calls these tools, or says this text."""

    def make(*parts, closed=True):
        texts = [
            part
            if isinstance(part, str)
            else f"<tool_call>\n{json.dumps({'name': part[0], 'arguments': part[1]})}\n</tool_call>"
            for part in parts
        ]
        end = [renderer.end_of_turn] if closed else []
        return [*renderer.encode("".join(texts)), *end]

    return make


def say(text):
    return ("say", {"text": text})


def outcomes(advanced):
    return [(returned.tool, returned.outcome) for returned in advanced.returns]


def test_an_episode_from_prompt_to_reward(play, turn, renderer):
    async def scene(episodes):
        prompt = await episodes.start(ONE, 3, task_seed=0, seed=7)
        middle = await episodes.advance(ONE, turn(say("cd")), "stop")
        return prompt, middle, await episodes.advance(ONE, turn("it is cd"), "stop")

    prompt, middle, end = play(scene, reward=0.5)
    assert renderer.decode(prompt) == (
        "<|im_start|>user\nstart ab hops 3<|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.decode(middle.observation_ids) == observation_text("cd")
    assert outcomes(middle) == [("say", ToolOutcome.OK)]
    assert (middle.done, middle.reward) == (False, None)
    assert (end.done, end.reward, end.returns, list(end.observation_ids)) == (True, 0.5, (), [])
    assert World.made[0].seeds == (0, 7)
    assert World.made[0].log[:4] == ["reset", "step say", "score", "answer it is cd"]


def test_several_calls_of_a_turn_run_in_order_and_are_told_apart(play, turn, renderer):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        calls = turn(say("one"), ("refuse", {}), "<tool_call>hm</tool_call>", say("four"))
        return await episodes.advance(ONE, calls, "stop")

    advanced = play(scene)
    assert outcomes(advanced) == [
        ("say", ToolOutcome.OK),
        ("refuse", ToolOutcome.ERROR),
        ("invalid", ToolOutcome.ERROR),
        ("say", ToolOutcome.OK),
    ]
    assert [returned.characters for returned in advanced.returns][:2] == [3, 2]
    text = renderer.decode(advanced.observation_ids)
    assert text.count("<tool_response>") == 4
    assert "\none\n" in text
    assert "\nno\n" in text
    assert "invalid tool call: not JSON" in text


def test_a_call_that_does_not_fit_the_schema_never_reaches_the_environment(play, turn, renderer):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        return await episodes.advance(ONE, turn(("break", {}), ("say", {})), "stop")

    advanced = play(scene, tools=[function("say", "", {"text": {"type": "string"}})])
    assert outcomes(advanced) == [("invalid", ToolOutcome.ERROR)] * 2
    text = renderer.decode(advanced.observation_ids)
    assert "no tool 'break', only say" in text
    assert "say needs text" in text


def test_a_hung_tool_is_abandoned_and_the_next_call_does_not_wait_or_run(play, turn, renderer):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        advanced = await episodes.advance(ONE, turn(("hang", {}), say("x")), "stop")
        return advanced, episodes.hung

    started = time.monotonic()
    advanced, hung = play(scene, timeout_s=0.1)
    assert time.monotonic() - started < DEADLINE_S / 2
    assert outcomes(advanced) == [("hang", ToolOutcome.TIMEOUT), ("say", ToolOutcome.TIMEOUT)]
    assert advanced.returns[0].latency_s == pytest.approx(0.1)
    assert renderer.decode(advanced.observation_ids).count("tool timed out") == 2
    assert hung == 1
    assert World.most_inside == 1


async def until(condition):
    """Wait for something another thread does; the scene's deadline bounds it."""
    while not condition():  # noqa: ASYNC110  a thread cannot set an asyncio.Event
        await asyncio.sleep(0.001)


def test_an_environment_that_comes_back_is_used_again(play, turn):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        await episodes.advance(ONE, turn(("hang", {})), "stop")
        World.scheduler.set()
        await until(lambda: episodes.hung == 0)
        return await episodes.advance(ONE, turn(say("x")), "stop")

    assert outcomes(play(scene, timeout_s=0.1)) == [("say", ToolOutcome.OK)]


def test_the_score_waits_for_a_hung_call_and_then_counts(play, turn):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        await episodes.advance(ONE, turn(("hang", {})), "stop")
        scoring = asyncio.create_task(episodes.advance(ONE, turn("done"), "stop"))
        await asyncio.sleep(0)
        World.scheduler.set()
        return await scoring

    assert play(scene, timeout_s=0.5).reward == 1.0
    assert World.most_inside == 1


def test_what_cannot_be_scored_because_it_hangs_is_an_error_and_not_a_zero(play, turn):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        await episodes.advance(ONE, turn(("hang", {})), "stop")
        await episodes.advance(ONE, turn("done"), "stop")

    with pytest.raises(EnvironmentBroken, match=r"broke in score: it did not end within 0\.05 s"):
        play(scene, timeout_s=0.05)
    assert "score" not in World.entered


@pytest.mark.parametrize("tool", ["break", "exit", "number"])
def test_an_environment_that_breaks_in_a_tool_is_an_error(play, turn, tool):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        await episodes.advance(ONE, turn((tool, {})), "stop")

    with pytest.raises(EnvironmentBroken, match=rf"broke in step\({tool}\)"):
        play(scene)


@pytest.mark.parametrize("part", ["reset", "score"])
@pytest.mark.parametrize("how", ["fail", "hang"])
def test_an_environment_that_breaks_elsewhere_is_an_error(play, turn, part, how):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        await episodes.advance(ONE, turn("answer"), "stop")

    why = f"RuntimeError: no {part} today" if how == "fail" else "did not end"
    with pytest.raises(EnvironmentBroken, match=f"broke in {part}: .*{why}"):
        play(scene, timeout_s=0.1, **{how: part})


@pytest.mark.parametrize("reward", ["nan", "many", None])
def test_a_reward_that_is_no_number_is_an_error(play, turn, reward):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        await episodes.advance(ONE, turn("answer"), "stop")

    with pytest.raises(EnvironmentBroken, match="broke in score"):
        play(scene, reward=reward)


def test_a_turn_cut_by_its_length_ends_the_episode(play, turn):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        cut = turn('so 12 <tool_call>\n{"name": "say", "argu', closed=False)
        return await episodes.advance(ONE, cut, "length")

    assert play(scene).done
    assert "answer so 12" in World.made[0].log


def test_a_complete_call_in_a_cut_turn_is_run_and_the_turn_closed(play, turn, renderer):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        cut = turn(say("cd"), '<tool_call>\n{"na', closed=False)
        return await episodes.advance(ONE, cut, "length")

    advanced = play(scene)
    assert outcomes(advanced) == [("say", ToolOutcome.OK)]
    text = renderer.decode(advanced.observation_ids)
    assert text == f"<|im_end|>{observation_text('cd')}"


def test_a_limit_scores_what_the_last_turn_says_without_its_calls(play, turn):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        await episodes.advance(ONE, turn("perhaps 12 ", say("99")), "stop")
        return await episodes.finish(ONE)

    finished = play(scene)
    assert finished.done
    assert finished.reward == 1.0
    assert "answer perhaps 12" in World.made[0].log


def test_no_more_calls_run_at_once_than_there_are_places(play, turn):
    async def scene(episodes):
        for member in range(6):
            await episodes.start(TrajectoryId(0, member), 0, task_seed=0, seed=0)
        turns = [
            asyncio.create_task(
                episodes.advance(TrajectoryId(0, member), turn(("hang", {})), "stop")
            )
            for member in range(6)
        ]
        await until(lambda: World.inside == 2)
        for _ in range(20):
            await asyncio.sleep(0.001)
        World.scheduler.set()
        await asyncio.gather(*turns)

    play(scene, concurrency=2)
    assert World.most_inside == 2


def test_what_a_trajectory_waits_for_its_place_is_told(play, turn):
    async def scene(episodes):
        for one in (ONE, TWO):
            await episodes.start(one, 0, task_seed=0, seed=0)
        hangs = asyncio.create_task(episodes.advance(ONE, turn(("hang", {})), "stop"))
        await until(lambda: World.inside == 1)
        waits = asyncio.create_task(episodes.advance(TWO, turn(say("x")), "stop"))
        await asyncio.sleep(0.2)
        World.scheduler.set()
        await asyncio.gather(hangs, waits)
        return episodes.waited_of(ONE), episodes.waited_of(TWO)

    first, second = play(scene, concurrency=1)
    assert first < 0.1
    assert 0.15 < second < DEADLINE_S


def test_an_abandoned_call_gives_up_its_place(play, turn):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        await episodes.start(TWO, 0, task_seed=0, seed=0)
        await episodes.advance(ONE, turn(("hang", {})), "stop")
        return await episodes.advance(TWO, turn(say("x")), "stop")

    assert outcomes(play(scene, timeout_s=0.1, concurrency=1)) == [("say", ToolOutcome.OK)]


def test_a_cancelled_turn_leaves_its_environment_to_the_thread_in_it(play, turn):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        task = asyncio.create_task(episodes.advance(ONE, turn(("hang", {})), "stop"))
        await until(lambda: World.inside == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        episodes.forget(ONE)
        assert not World.closed.is_set()
        World.scheduler.set()
        await until(World.closed.is_set)
        return episodes.running

    assert play(scene) == 0
    assert World.made[0].log == ["reset", "step hang", "close"]


def test_an_environment_whose_reset_came_too_late_is_closed(play):
    async def scene(episodes):
        with pytest.raises(EnvironmentBroken, match="broke in reset"):
            await episodes.start(ONE, 0, task_seed=0, seed=0)
        World.scheduler.set()
        await until(World.closed.is_set)
        return episodes.running

    assert play(scene, timeout_s=0.05, hang="reset") == 0


def test_every_trajectory_has_an_environment_of_its_own(play):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        await episodes.start(TWO, 0, task_seed=0, seed=0)
        episodes.forget(ONE)
        episodes.forget(ONE)
        return episodes.running

    assert play(scene) == 1
    assert len(World.made) == 2


def test_tasks_come_from_the_file_in_order_and_again(play, renderer, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"text": "first"}\n\n{"text": "second"}\n')

    async def scene(episodes):
        who = [TrajectoryId(group, 0) for group in range(3)]
        starts = [await episodes.start(w, w.group, task_seed=0, seed=0) for w in who]
        return [renderer.decode(prompt) for prompt in starts]

    prompts = play(scene, tasks=str(path))
    assert ["first" in text for text in prompts] == [True, False, True]


def test_secrets_reach_the_factory_by_name(play):
    async def scene(episodes):
        await episodes.check(seed=0)

    play(scene, secrets={"KEY": "hidden"})
    assert World.made[0].secrets == {"KEY": "hidden"}


def test_the_check_begins_one_episode_and_forgets_it(play):
    async def scene(episodes):
        length = await episodes.check(seed=0)
        return length, episodes.running

    length, running = play(scene)
    assert length > 0
    assert running == 0


def test_a_long_text_is_shortened_but_its_size_is_kept(play, turn, renderer):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)
        return await episodes.advance(ONE, turn(say("x" * (LONGEST_OBSERVATION + 7))), "stop")

    advanced = play(scene)
    assert advanced.returns[0].characters == LONGEST_OBSERVATION + 7
    assert "[7 characters left out]" in renderer.decode(advanced.observation_ids)


def test_an_argument_the_environment_does_not_take_is_named(play):
    async def scene(episodes):
        await episodes.start(ONE, 0, task_seed=0, seed=0)

    with pytest.raises(EnvironmentBroken, match="unexpected keyword argument 'rewad'") as caught:
        play(scene, rewad=1)
    assert "reward" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("calculatr", "did you mean 'calculator'"),
        ("zzz", "there is no environment 'zzz'$"),
        ("no_such_package.module:Env", "importing no_such_package.module failed"),
        ("scripted_environments:Script", "did you mean 'Scripted'"),
        ("scripted_environments:NUMBER", "not callable"),
    ],
)
def test_an_environment_that_cannot_be_found_says_what_there_is(name, message):
    with pytest.raises(EnvironmentBroken, match=message) as caught:
        registry.find(name)
    assert caught.value.hint or "callable" in message


def test_an_object_that_is_no_environment_is_refused():
    factory = registry.find("scripted_environments:Incomplete")
    with pytest.raises(EnvironmentBroken, match="has no tools, task, reset, step, score"):
        registry.make("incomplete", factory, {})


@pytest.mark.parametrize("name", ["calculator", "pointer-chase"])
def test_environments_of_our_own_are_found_and_made(name):
    environment = registry.make(name, registry.find(name), {})
    task = environment.task(0, 1)
    assert environment.task(0, 1) == task
    json.dumps(task)
    assert environment.reset(task, 1)


def test_threads_are_reused_and_end_when_closed():
    threads = Threads("reused")
    ran: list[int] = []
    done = threading.Semaphore(0)

    def work():
        ran.append(threading.get_ident())
        done.release()

    for _ in range(50):
        threads.run(work)
        assert done.acquire(timeout=DEADLINE_S)
    assert len(set(ran)) <= 3
    threads.close()
    for thread in threading.enumerate():
        if thread.name == "reused":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
