"""The shipped problems are right, the calculator is exact and safe, and the reward is exact."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.envs.arithmetic import LARGEST_BITS, evaluate, shown
from libra_cli.envs.calculator import Calculator, number_in
from libra_cli.envs.protocol import Environment, ToolCall, ToolFailed
from libra_cli.envs.word_problems import STORIES, stories, word_problem

TASKS = Path(__file__).parents[3] / "recipes" / "tasks" / "calculator.jsonl"


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


def python_value(expression: str) -> Fraction:
    """By Python itself, on fractions: independent of the calculator under test."""
    assert not re.search(r"[^\d\s()+*/-]", expression)
    ast.parse(expression, mode="eval")
    value = eval(re.sub(r"(\d+)", r"Fraction(\1)", expression), {"Fraction": Fraction})
    assert isinstance(value, Fraction)
    return value


def test_every_shipped_problem_is_correct():
    tasks = [json.loads(line) for line in TASKS.read_text().splitlines()]
    assert len(tasks) >= 200
    assert len({task["question"] for task in tasks}) == len(tasks)
    for task in tasks:
        assert set(task) == {"question", "answer", "expression"}
        assert python_value(task["expression"]) == task["answer"] > 0


def test_every_shipped_problem_can_be_solved_from_its_text():
    # Beside the numbers of the text: 100 percent, 1000 g a kg, 2 sides, 4 games, 3 friends, and 1.
    constants = {1, 2, 3, 4, 100, 1000}
    for task in [json.loads(line) for line in TASKS.read_text().splitlines()]:
        in_text, used = set(numbers(task["question"])), set(numbers(task["expression"]))
        assert in_text <= used <= in_text | constants
        assert "{" not in task["question"]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.text[:40])
def test_every_story_makes_correct_problems(story):
    for index in range(100):
        task = word_problem(index, 5, [story])
        assert python_value(task["expression"]) == task["answer"] > 0
        assert "{" not in task["question"]


def test_a_problem_depends_on_nothing_but_index_and_seed():
    made = [Calculator().task(index, seed=3) for index in range(20)]
    again = [Calculator().task(index, seed=3) for index in reversed(range(20))]
    assert made == again[::-1]
    assert made != [Calculator().task(index, seed=4) for index in range(20)]
    assert len({task["question"] for task in made}) == 20


def test_steps_bound_the_problems():
    assert {story.steps for story in stories(2, 3)} == {2, 3}
    with pytest.raises(ValueError, match="there are 1 to 5"):
        Calculator(min_steps=9, max_steps=12)


def test_an_episode_can_be_played_and_won():
    environment = Calculator()
    assert isinstance(environment, Environment)
    task = environment.task(0, seed=1)
    (message,) = environment.reset(task, seed=1)
    assert task["question"] in message["content"]
    (tool,) = environment.tools
    json.dumps(tool)
    result = environment.step(ToolCall("calculator", {"expression": task["expression"]}))
    assert environment.score(f"It is {result}.") == 1.0
    assert environment.score(f"Answer: {int(result) + 1}") == 0.0
    assert environment.score("I do not know") == 0.0


def test_another_tool_or_a_bad_task_is_refused():
    with pytest.raises(ToolFailed, match="only calculator"):
        Calculator().step(ToolCall("search", {}))
    with pytest.raises(ValueError, match="a task is"):
        Calculator().reset({"question": "How many?"}, seed=0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333"),
        ("-7 // 2", "-4"),
        ("10 % 3", "1"),
        ("2 ** 10", "1024"),
        ("2^10", "1024"),
        ("2 ** -1", "0.5"),
        ("9 ** 0.5", "3"),
        ("sqrt(2)", "1.41421356237"),
        ("6 × 7 − 2 ÷ 2", "41"),
        ("round(2.5) + round(-2.5)", "0"),
        ("round(2.345, 2)", "2.35"),
        ("max(1, 2.5, 2)", "2.5"),
        ("1e3", "1000"),
        ("$12 * 2", "24"),
        ("12345678901234567890 + 1", "12345678901234567891"),
    ],
)
def test_the_calculator_is_exact(expression, value):
    assert shown(evaluate(expression)) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "not an arithmetic"),
        ("1 +", "not an arithmetic"),
        ("3 apples", "not an arithmetic"),
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** (1/1e-300)", "too large"),
        ("(10 ** -400) ** -0.5", "too large"),
        ("1e999", "too large"),
        (f"2 ** {LARGEST_BITS}", "too large"),
        ("(-1) ** 0.5", "negative"),
        ("1,000 + 1", "write 1000"),
        ("3(4)", r"write the \*"),
        ("x + 1", "'x' is not a number"),
        ("exec(1)", "no function 'exec'"),
        ("max()", "does not take 0"),
        ("__import__('os').system('x')", "only numbers"),
        ("(1).__class__", "only numbers"),
        ("[1 for _ in 2]", "only numbers"),
        ("1 if 1 else 2", "not an arithmetic"),
        ("lambda", "not an arithmetic"),
        ("1 << 2", "only numbers"),
        ("9" * 400, "longer than"),
        ("(" * 250, "not an arithmetic"),
    ],
)
def test_the_calculator_refuses_with_a_reason(expression, reason):
    with pytest.raises(ToolFailed, match=reason):
        evaluate(expression)


@given(
    st.text(max_size=310)
    | st.lists(
        st.sampled_from([*"0123456789.+-*/%()^,e ", "**", "sqrt(", "round(", "9**", "1e99"]),
        max_size=120,
    ).map("".join)
)
def test_any_expression_ends_in_a_value_or_a_refusal(expression):
    # Hypothesis' deadline of 200 ms a case stands for "no call takes long".
    with contextlib.suppress(ToolFailed):
        assert shown(evaluate(expression))


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("12", 12),
        ("Answer: 12", 12),
        ("**Answer:** 12 coins, of 300", 12),
        ("The answer is 1,250.", 1250),
        ("The final answer is $1250.00", 1250),
        ("Answer: 3 * 4 = 12", 12),
        ("Answer:\n12", 12),
        ("answer: 5, no. Answer: 12", 12),
        (r"So \boxed{12} and not 13", 12),
        (r"\boxed{7} \boxed{\text{12 km}}", 12),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        ("3 + 4 = 7", 7),
        ("it went from 10 to -5", -5),
        ("10-5", 5),
        ("it is −5", -5),
        ("a half is .5", Fraction(1, 2)),
        ("2500/2", 1250),
        ("1/0", None),
        ("nothing", None),
        ("Answer: none of the 3\n4", 3),
        ("9" * 5000, None),
    ],
)
def test_the_number_of_a_reply_is_found(reply, number):
    assert number_in(reply) == number


@given(st.text())
def test_looking_for_a_number_never_raises(text):
    number_in(text)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{:,}", "{}", "Answer: {}.", "${:,}"]))
def test_a_number_survives_being_written(value, form):
    assert number_in(form.format(value)) == value
