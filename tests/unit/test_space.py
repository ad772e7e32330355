"""What a hyperparameter may be."""

from __future__ import annotations

import pytest

from raypar.study.space import Domain, Value, choice, examples, grid, loguniform, problem, randint, uniform


@pytest.mark.parametrize(
    ("domain", "values"),
    [
        (grid(1, 2, 4), (1, 2, 4)),
        (grid("sgd"), ("sgd",)),
        (choice("sgd", "adam"), ("sgd", "adam")),
        (uniform(0.1, 0.9), (0.1, 0.9)),
        (loguniform(1e-4, 1e-1), (1e-4, 1e-1)),
        (randint(1, 9), (1, 8)),
    ],
)
def test_a_domain_is_judged_by_all_of_its_values_or_by_both_ends(domain: Domain, values: tuple[Value, ...]) -> None:
    assert problem(domain) is None
    assert examples(domain) == values


@pytest.mark.parametrize(
    ("domain", "told"),
    [
        (grid(), "is empty"),
        (choice(), "is empty"),
        (grid(1, 2, 1), "duplicate values: 1"),
        (grid("a", "b", "b", "a"), "duplicate values: a, b"),
        (uniform(1.0, 1.0), "low < high"),
        (uniform(2.0, 1.0), "has 2.0 and 1.0"),
        (randint(5, 5), "low < high"),
        (loguniform(0.0, 1.0), "0 < low < high"),
        (loguniform(-1.0, 1.0), "has -1.0 and 1.0"),
        (loguniform(1.0, 0.1), "0 < low < high"),
        (uniform("a", 1), "needs two numbers, has 'a' and 1"),  # type: ignore[arg-type]
        (uniform(0, float("inf")), "needs two numbers"),
        (loguniform(float("nan"), 1), "needs two numbers"),
        (randint(1, 2.5), "needs two whole numbers"),  # type: ignore[arg-type]
    ],
)
def test_a_domain_that_holds_nothing_or_doubles_says_so(domain: Domain, told: str) -> None:
    assert told in (problem(domain) or "")


def test_true_and_one_are_different_values() -> None:
    assert problem(grid(True, 1)) is None


def test_a_choice_may_repeat_a_value_to_make_it_likelier() -> None:
    assert problem(choice(1, 1, 2)) is None
