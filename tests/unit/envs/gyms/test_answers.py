"""What the answer of a text is, and which answers a scorer that runs them as Python may see."""

from __future__ import annotations

import time

import pytest

from libra_cli.envs.gyms.reasoning import harmless, last_answer


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("countdown", "94*4 - 61 - 6"),
        ("countdown", "(3 + 4) / 2"),
        ("intermediate_integration", "-4*(-2*x - 8)**(3/2)/3 + C"),
        ("simple_integration", "-34*x**8/15 - 5*x/4 + C"),
        ("intermediate_integration", "exp(2*x)*sin(x) + log(x)/2 + asinh(x)"),
        ("polynomial_multiplication", "3584*x**5 + 2240*x**3 - 896*x**2"),
        ("spiral_matrix", "4 6 7 3 9"),
        ("n_queens", "_ _ Q\n_ Q _"),
        ("string_insertion", "['A', 'B']"),
        ("leg_counting", "anything at all: __import__('os')"),
    ],
)
def test_an_honest_answer_is_shown_to_the_scorer(dataset: str, answer: str) -> None:
    assert harmless(dataset, answer)


@pytest.mark.parametrize("dataset", ["countdown", "polynomial_multiplication"])
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('id')",
        "().__class__.__bases__",
        "x.diff",
        "9**9**9**9",
        "9**999999",
        "((9**99)**99)**99",
        "9**(99*99)",
        "9**-(9**9)",
        "Integral(x, x)",
        "factorial(99999)",
        "[1 for x in y]",
        "lambda: 1",
        "'a' * 9",
        "9" * 13,
        "1 +" * 400 + "1",
        "(" * 300 + ")" * 300,
        "99999!",
        "",
    ],
)
def test_an_expression_that_is_not_small_arithmetic_is_not(dataset: str, answer: str) -> None:
    assert not harmless(dataset, answer)


@pytest.mark.parametrize(
    "answer", ["exit()", "[1] * 9", "{1: 2}", "a.b", "x := 1", "f'{a}'", "1 @ 2", "'\\x41'"]
)
def test_a_list_that_could_run_is_not(answer: str) -> None:
    assert not harmless("binary_matrix", answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so <answer>\n7\n</answer>.", "\n7\n"),
        ("<answer>1</answer> no, <answer>2</answer> </answer> <answer>", "2"),
        ("<answer>1<answer>2</answer>", "1<answer>2"),
        ("<answer></answer>", ""),
        ("</answer> 3 <answer>", None),
    ],
)
def test_the_last_answer_is_between_its_tags(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer


def test_an_answer_that_is_begun_for_ever_is_read_at_once() -> None:
    began = time.thread_time()
    assert last_answer("<answer>" * 16_000) is None
    assert time.thread_time() - began < 1.0
