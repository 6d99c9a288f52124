"""Environments of other packages: full marks for the reference, none for nothing, no surprises."""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from libra_cli.config.environment import EnvironmentSpec
from libra_cli.config.errors import EnvironmentBroken
from libra_cli.core.types import TrajectoryId
from libra_cli.envs import registry
from libra_cli.envs.gyms import bfcl, reasoning, tau2, textworld
from libra_cli.envs.protocol import Finished, Task, ToolCall, ToolFailed
from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer
from libra_cli.runtime.episodes.player import Episodes
from libra_cli.runtime.episodes.renderer import Renderer
from tests import gyms
from tests.gyms import Move, Script, nothing, play

# The packages warn of much that is theirs, some of it while they are compiled.
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

JSON_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}


@pytest.mark.parametrize("category", bfcl.CATEGORIES)
def test_the_reference_gets_full_marks_in_all_of_bfcl_and_nothing_none(category: str) -> None:
    def make() -> bfcl.Bfcl:
        return bfcl.Bfcl(categories=[category])

    tasks = [make().task(index, 0) for index in range(200)]
    assert len({task["id"] for task in tasks}) == 200
    assert {play(make, task, gyms.bfcl_reference).reward for task in tasks} == {1.0}
    assert {play(make, task, nothing).reward for task in tasks} == {0.0}


def test_a_bfcl_task_is_the_same_episode_every_time() -> None:
    for index in range(40):
        task = bfcl.Bfcl().task(index, 3)
        assert task == bfcl.Bfcl().task(index, 3)
        once, again = (play(bfcl.Bfcl, task, gyms.bfcl_reference) for _ in range(2))
        assert once == again


def test_the_verdict_of_bfcl_is_what_its_own_checker_gives() -> None:
    checker = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
    draw = random.Random(2)
    verdicts = []
    for index in range(160):
        environment = bfcl.Bfcl()
        task = environment.task(index, 11)
        turns = [_changed(list(calls), draw) for calls in bfcl.reference_calls(task)]

        def script(task: Task, turns: list[list[ToolCall]] = turns) -> Iterator[Move]:
            for calls in turns:
                if calls:
                    yield calls
                yield "Done."

        ours = play(bfcl.Bfcl, task, script).reward
        category = task["id"].removeprefix("multi_turn_").rpartition("_")[0]
        theirs = checker.multi_turn_checker(
            [[[_written(call)] for call in calls] for calls in turns],
            bfcl._truths(category)[task["id"]],
            bfcl._tasks(category)[task["id"]],
            category,
            f"run{index}",
        )
        assert ours == float(theirs["valid"]), (task, theirs)
        verdicts.append(ours)
    assert 80 < sum(verdicts) < 140


def _changed(calls: list[ToolCall], draw: random.Random) -> list[ToolCall]:
    """Sometimes one call less, one twice, or the other way round."""
    if calls and draw.random() < 0.2:
        kind, place = draw.choice(["drop", "double", "turn"]), draw.randrange(len(calls))
        if kind == "drop":
            del calls[place]
        elif kind == "double":
            calls.insert(place, calls[place])
        else:
            calls.reverse()
    return calls


def _written(call: ToolCall) -> str:
    return (
        f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
    )


def test_a_bfcl_turn_with_one_call_too_many_that_changes_the_state_loses() -> None:
    task = {"id": "multi_turn_base_0"}

    def meddling(task: Task) -> Iterator[Move]:
        yield [*bfcl.reference_calls(task)[0], ToolCall("mkdir", {"dir_name": "more"})]
        yield "Done."

    played = play(bfcl.Bfcl, task, meddling)
    assert (played.reward, played.turns) == (0.0, 2)  # it ends there
    assert played.metrics == {"right_turns": 0.0}


def test_bfcl_withholds_a_tool_until_the_user_hands_it_out() -> None:
    environment = bfcl.Bfcl()
    task = {"id": "multi_turn_miss_func_0"}
    environment.reset(task, 0)
    names = lambda: {tool["function"]["name"] for tool in environment.tools}  # noqa: E731
    assert "sort" not in names()
    with pytest.raises(ToolFailed, match="no tool 'sort'"):
        environment.step(ToolCall("sort", {"file_name": "final_report.pdf"}))
    handed_out = None
    for calls in bfcl.reference_calls(task)[:3]:
        for call in calls:
            environment.step(call)
        handed_out = environment.reply("Done.")
    assert handed_out is not None
    assert bfcl.MORE_TOOLS in handed_out[0]["content"]
    assert '"name": "sort"' in handed_out[0]["content"]
    assert "sort" in names()


def test_bfcl_shows_only_types_of_json_schema() -> None:
    def types(schema: object) -> Iterator[object]:
        if isinstance(schema, dict):
            found = schema.get("type")
            yield from found if isinstance(found, list) else [found] if found else []
            for one in (*schema.get("properties", {}).values(), schema.get("items")):
                yield from types(one)

    for index in range(0, 200, 5):
        environment = bfcl.Bfcl(categories=["base"])
        environment.reset(environment.task(index, 0), 0)
        for tool in environment.tools:
            assert set(types(tool["function"]["parameters"])) <= JSON_TYPES


def test_bfcl_refuses_numbers_that_would_compute_for_ever() -> None:
    environment = bfcl.Bfcl()
    environment.reset({"id": "multi_turn_base_1"}, 0)
    for index in itertools.count():
        environment.reset(environment.task(index, 0), 0)
        if any(tool["function"]["name"] == "power" for tool in environment.tools):
            break
    with pytest.raises(ToolFailed, match="exponent is at most"):
        environment.step(ToolCall("power", {"base": 9, "exponent": 10**9}))


def test_reasoning_gym_scores_what_its_reference_says_and_nothing_else() -> None:
    names = reasoning.names()
    assert len(names) == 102

    def make() -> reasoning.ReasoningGym:
        return reasoning.ReasoningGym(names)

    tasks = [make().task(index, 1) for index in range(len(names))]
    assert [task["dataset"] for task in tasks] == names
    stated = [task for task in tasks if gyms.has_reference(task)]
    assert len(stated) >= 99
    lost = [t for t in stated if play(make, t, gyms.reasoning_reference).reward != 1.0]
    assert lost == []
    assert {play(make, task, nothing).reward for task in tasks} == {0.0}


def test_a_problem_of_reasoning_gym_is_the_same_every_time() -> None:
    names = [name for name in reasoning.names() if name not in ("knight_swap", "zebra_puzzles")]

    def questions(indices: range) -> dict[int, str]:
        environment = reasoning.ReasoningGym(names)
        return {i: environment.reset(environment.task(i, 7), 0)[0]["content"] for i in indices}

    count = len(names)
    once = questions(range(count, 2 * count))
    reasoning._data.cache_clear()
    assert once == questions(range(2 * count - 1, count - 1, -1))


@pytest.mark.parametrize("name", sorted(reasoning.REFUSED))
def test_a_dataset_that_rewards_one_answer_always_is_refused(name: str) -> None:
    with pytest.raises(EnvironmentBroken, match=f"{name!r} is refused"):
        reasoning.ReasoningGym([name])


@pytest.mark.parametrize("name", ["countdown", "simple_integration", "n_queens", "spiral_matrix"])
def test_no_answer_runs_as_python_in_a_scorer_of_reasoning_gym(name: str, tmp_path: Path) -> None:
    file = tmp_path / "written"
    answer = f"__import__('os').system('touch {file}')"
    environment = reasoning.ReasoningGym([name], threshold=None)
    environment.reset(environment.task(0, 0), 0)
    environment._data.score_answer(answer, environment._problem)
    assert file.exists(), "the package became safe; the fence can go"
    file.unlink()
    assert environment.score(f"<answer>{answer}</answer>") == 0.0
    assert not file.exists()


def test_the_unsolved_integral_is_no_answer() -> None:
    environment = reasoning.ReasoningGym(["simple_integration"])
    environment.reset(environment.task(0, 0), 0)
    known = environment._problem["metadata"]
    trick = f"Integral({known['integrand']}, {known['variable']})"
    assert environment._data.score_answer(trick, environment._problem) == 1.0
    assert environment.score(f"<answer>{trick}</answer>") == 0.0


def test_partial_credit_is_kept_only_on_request() -> None:
    for threshold, reward in ((1.0, 0.0), (None, 0.05)):
        environment = reasoning.ReasoningGym(["countdown"], threshold=threshold)
        environment.reset(environment.task(0, 0), 0)
        assert environment.score("<answer>1 + 1</answer>") == reward
        assert environment.metrics() == {"answered": 1.0, "credit": 0.05}


def test_an_unknown_dataset_is_told_with_the_one_that_was_meant() -> None:
    with pytest.raises(EnvironmentBroken, match="did you mean 'leg_counting'"):
        reasoning.ReasoningGym(["leg_counter"])


def test_the_reference_gets_full_marks_in_telecom_and_neither_nothing_nor_done_any() -> None:
    def make() -> tau2.Tau2:
        return tau2.Tau2(split="base")

    def done_at_once(task: Task) -> Iterator[Move]:
        yield [ToolCall("done")]

    tasks = [make().task(index, 0) for index in range(114)]
    assert len({task["id"] for task in tasks}) == 114
    assert {play(make, task, gyms.alone_reference).reward for task in tasks} == {1.0}
    assert {play(make, task, nothing).reward for task in tasks} == {0.0}
    assert {play(make, task, done_at_once).reward for task in tasks} == {0.0}


def test_a_telecom_task_is_the_same_episode_every_time() -> None:
    for index in range(10):
        task = tau2.Tau2().task(index, 5)
        once, again = (play(tau2.Tau2, task, gyms.alone_reference) for _ in range(2))
        assert once == again


def test_the_reward_of_tau2_is_what_its_own_evaluator_gives() -> None:
    evaluator = importlib.import_module("tau2.evaluator.evaluator_env").EnvironmentEvaluator
    world = importlib.import_module("tau2.domains.telecom.environment").get_environment
    rewards = []
    for index in range(40):
        environment = tau2.Tau2(split="full")
        task = environment.task(index, 8)
        environment.reset(task, 0)
        actions = tau2.reference_actions("telecom", task["id"])
        for _, call in actions[: len(actions) - index % 2]:  # every other one stops short
            environment.step(call)
        with pytest.raises(Finished):
            environment.step(ToolCall("done"))
        ours = environment.score("")
        theirs = evaluator.calculate_reward(
            world, environment._task, environment._told, solo_mode=True
        )
        bases = {basis.value for basis in environment._criteria.reward_basis}
        if "ACTION" not in bases:
            assert ours == theirs.reward
            rewards.append(ours)
    assert 0.0 in rewards
    assert 1.0 in rewards


@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_a_served_customer_asks_hears_and_ends_the_conversation(domain: str) -> None:
    with gyms.served_customer() as url:
        user = {"url": url, "model": "customer"}

        def make() -> tau2.Tau2:
            return tau2.Tau2(domain=domain, split="test", user=user)

        for index in range(6):
            task = make().task(index, 0)
            played = play(make, task, gyms.served_reference(domain))
            assert played.reward == 1.0, task
            assert played.messages[1:3] == (tau2.GREETING, "Please help me.")


@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_tau2_refuses_powers_that_would_compute_for_ever(domain: str) -> None:
    with gyms.served_customer() as url:
        environment = tau2.Tau2(domain=domain, split="test", user={"url": url, "model": "customer"})
        environment.reset(environment.task(0, 0), 0)
        sums = environment.step(ToolCall("calculate", {"expression": "(2 + 3) * 4"}))
        assert sums == "20.0"
        with pytest.raises(ToolFailed, match=r"no operator \*\*"):
            environment.step(ToolCall("calculate", {"expression": "9**9**7"}))


def test_a_served_customer_of_telecom_uses_its_own_phone() -> None:
    for index in range(8):
        task = tau2.Tau2(split="test").task(index, 0)
        with gyms.served_customer(gyms.customers_calls("telecom", task)) as url:
            user = {"url": url, "model": "customer"}
            make = functools.partial(tau2.Tau2, split="test", user=user)
            played = play(make, task, gyms.served_reference("telecom"))
        assert played.reward == 1.0, task
        assert not any("toggle" in tool["function"]["name"] for tool in make().tools)


def test_a_domain_with_a_customer_needs_one_and_says_how() -> None:
    with pytest.raises(EnvironmentBroken, match="needs a model that plays the customer") as caught:
        tau2.Tau2(domain="retail")
    assert "environment.args.user" in caught.value.hint


def test_the_walkthrough_wins_a_game_and_nothing_does_not(tmp_path: Path) -> None:
    def make() -> textworld.TextWorld:
        return textworld.TextWorld(rooms=2, objects=4, quest_length=2, games=str(tmp_path))

    for index in range(3):
        task = make().task(index, 0)
        assert play(make, task, nothing).reward == 0.0
        assert play(make, task, gyms.textworld_reference(tmp_path)).reward == 1.0


def test_a_game_that_is_made_twice_is_the_same(tmp_path: Path) -> None:
    task = textworld.TextWorld().task(0, 1)

    def played(games: Path) -> gyms.Played:
        def make() -> textworld.TextWorld:
            return textworld.TextWorld(games=str(games))

        return play(make, task, gyms.textworld_reference(games))

    assert played(tmp_path / "a") == played(tmp_path / "b")
    assert sorted(file.suffix for file in (tmp_path / "a").glob("[!.]*")) == [".json", ".z8"]


def test_a_group_that_begins_at_once_makes_its_game_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = textworld.TextWorld().task(0, 1)
    made: list[str] = []
    compiler = importlib.import_module("textworld.generator")
    compiled = compiler.compile_game

    def counted(*of: Any) -> Any:
        made.append("one")
        return compiled(*of)

    monkeypatch.setattr(compiler, "compile_game", counted)
    games = [textworld.TextWorld(games=str(tmp_path)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        prompts = set(pool.map(lambda game: game.reset(task, 0)[0]["content"], games))
    assert len(prompts) == 1
    assert made == ["one"]
    for game in games:
        game.close()


def test_games_that_are_played_side_by_side_do_not_mix(tmp_path: Path) -> None:
    games = [textworld.TextWorld(games=str(tmp_path)) for _ in range(2)]
    tasks = [games[0].task(index, 2) for index in range(2)]
    for game, task in zip(games, tasks, strict=True):
        game.reset(task, 0)
    scripts = [list(gyms.textworld_reference(tmp_path)(task)) for task in tasks]
    for moves in itertools.zip_longest(*scripts, fillvalue=()):
        for game, calls in zip(games, moves, strict=True):
            for call in calls:
                assert isinstance(call, ToolCall)
                game.step(call)
    assert [game.score("") for game in games] == [1.0, 1.0]
    with pytest.raises(ToolFailed, match="not a command of the game"):
        games[0].step(ToolCall("command", {"text": "restore\nfile"}))
    for game in games:
        game.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_player_of_a_run_plays_them_as_a_model_would(workers: int, tmp_path: Path) -> None:
    """Tokens in, tokens out, in this process and in a worker's."""
    save_tokenizer(build_tokenizer(), tmp_path, max_len=100_000)
    renderer = Renderer(tmp_path)
    cases: list[tuple[str, dict[str, Any], Script]] = [
        ("bfcl", {"categories": ["miss_func"]}, gyms.bfcl_reference),
        ("reasoning-gym", {"datasets": ["leg_counting"]}, gyms.reasoning_reference),
        ("tau2", {}, gyms.alone_reference),
        ("textworld", {"games": str(tmp_path)}, gyms.textworld_reference(tmp_path)),
    ]
    for name, arguments, script in cases:
        told = {"name": name, "args": arguments, "tool_timeout_s": 30, "workers": workers or None}
        spec = EnvironmentSpec.model_validate(told)
        task = registry.make(name, registry.find(name), arguments).task(0, 5)
        assert asyncio.run(_played(spec, renderer, script, task)) == 1.0, name


async def _played(spec: EnvironmentSpec, renderer: Renderer, script: Script, task: Task) -> float:
    one = TrajectoryId(group=0, member=0)
    episodes = Episodes([spec], ["gym"], renderer)
    try:
        await episodes.start(one, 0, task_seed=5, seed=0)
        for move in script(task):
            text = move if isinstance(move, str) else "".join(map(_generated, move))
            turn = await episodes.advance(
                one, [*renderer.encode(text), renderer.end_of_turn], "stop"
            )
            if turn.done:
                assert turn.reward is not None
                return turn.reward
        raise AssertionError("the script ended before the episode")
    finally:
        await episodes.close()


def _generated(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{body}\n</tool_call>"
