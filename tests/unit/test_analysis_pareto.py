"""Which points are worth considering: nothing beats them in every respect, as far as the data can tell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raypar.analysis.candidates import dominates, pareto_front

ROWS = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 5).map(float), min_size=width, max_size=width), max_size=12)
)


def is_beaten(row: list[float], by: list[float]) -> bool:
    return all(b <= a for a, b in zip(row, by, strict=True)) and by != row


@given(rows=ROWS)
def test_no_point_of_the_front_is_dominated_by_any(rows: list[list[float]]) -> None:
    for i in pareto_front(rows):
        assert not any(is_beaten(rows[i], other) for other in rows)


@given(rows=ROWS)
def test_whatever_is_left_out_is_dominated_by_a_point_of_the_front(rows: list[list[float]]) -> None:
    front = pareto_front(rows)
    for i in set(range(len(rows))) - set(front):
        assert any(is_beaten(rows[i], rows[j]) for j in front)


@given(rows=ROWS, told=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11), st.integers(0, 2))))
def test_the_less_the_data_can_tell_the_more_points_stay(
    rows: list[list[float]], told: set[tuple[int, int, int]]
) -> None:
    some = pareto_front(rows, lambda one, other, k: (one, other, k) in told)
    assert set(pareto_front(rows)) <= set(some)
    assert pareto_front(rows, lambda one, other, k: False) == tuple(range(len(rows)))
    assert bool(some) == bool(rows)


def test_a_point_is_dominated_only_where_the_data_can_tell() -> None:
    rows = [[1.0, 0.02], [2.0, 0.02], [1.1, 0.03]]
    only_large = lambda one, other, k: abs(rows[one][k] - rows[other][k]) > 0.5  # noqa: E731
    assert pareto_front(rows) == (0,)
    assert pareto_front(rows, only_large) == (0, 2)
    assert dominates(rows, 0, 1, only_large) and not dominates(rows, 0, 2, only_large)


def test_a_median_that_is_worse_in_one_respect_keeps_a_point_from_dominating() -> None:
    assert not dominates([[1.0, 0.021], [9.0, 0.02]], 0, 1, lambda one, other, k: k == 0)


def test_equal_points_are_both_on_the_front() -> None:
    assert pareto_front([[1.0, 1.0], [1.0, 1.0]]) == (0, 1)
