"""What is found is the least error that no negative coefficient helps to: its conditions hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_cli.core.costs.nnls import non_negative_least_squares

KINDS = ("normal", "positive", "sparse", "far apart", "dependent")


def problem(kind: str, seed: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix and a right side of some more rows than columns."""
    random = np.random.default_rng(seed)
    rows = columns + int(random.integers(0, 40))
    matrix = random.random((rows, columns))
    if kind == "normal":
        matrix = random.normal(size=(rows, columns))
    if kind == "sparse":
        matrix = matrix * (random.random((rows, columns)) < 0.4)
    if kind == "far apart":
        matrix = matrix * 10.0 ** random.integers(-3, 4, columns)
    if kind == "dependent":
        matrix[:, -1] = 3 * matrix[:, 0]
    right = matrix @ np.maximum(random.normal(size=columns), 0) + random.normal(0, 0.1, rows)
    return matrix, right


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(2, 9))
def test_nothing_that_is_allowed_would_lower_the_error(kind: str, seed: int, columns: int) -> None:
    """Karush, Kuhn and Tucker: above 0 no slope is left, and at 0 none that falls."""
    matrix, right = problem(kind, seed, columns)
    x = np.array(non_negative_least_squares(matrix, right))
    assert (x >= 0).all()
    slope = matrix.T @ (matrix @ x - right)
    rounding = 1e-10 * np.linalg.norm(matrix, axis=0) * (1 + np.linalg.norm(right))
    assert (slope >= -rounding).all()
    assert (np.abs(slope[x > 0]) <= rounding[x > 0]).all()


def test_a_solution_without_negative_coefficients_is_found_exactly() -> None:
    matrix, wanted = problem("positive", 0, 5)[0], np.array([1.0, 0.0, 2.5, 0.0, 1e-3])
    assert non_negative_least_squares(matrix, matrix @ wanted) == pytest.approx(wanted, abs=1e-12)


def test_what_only_negative_coefficients_would_explain_is_0() -> None:
    assert non_negative_least_squares([[1.0, 2.0], [3.0, 1.0]], [-1.0, -1.0]) == (0.0, 0.0)


def test_a_column_that_must_leave_again_does() -> None:
    """The steepest column enters first, and is negative once the better one is in."""
    matrix = [[1.0, 0.5], [1.0, 0.0], [1.0, 3.0]]
    right = [0.0, -0.4, 3.0]
    assert non_negative_least_squares(matrix, right) == pytest.approx((0.0, 9.0 / 9.25))


def test_numbers_near_the_largest_there_are_do_no_harm() -> None:
    (x,) = non_negative_least_squares([[1.0], [1.0]], [2e170, 2e170])
    assert x == pytest.approx(2e170)
