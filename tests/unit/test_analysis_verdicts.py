"""Verdicts: what the intervals show and nothing else; where along a hyperparameter something starts to pay."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import PointSamples, Question
from raypar.analysis.stats import Estimate, Method
from raypar.analysis.verdicts import MAX_LINES, CrossingKind, break_even_lines, crossing_of, crossings_of
from raypar.study.space import Value
from raypar.study.trial import TrialResult

STUDY = Question("mnist", {"num_workers": 1}, ("batch_size", "num_workers"), num_repeats=3)


def trials(point: dict[str, Value], times: Sequence[float], **more: Any) -> list[TrialResult]:
    return [make_result(point, repeat, time_s, **more) for repeat, time_s in enumerate(times)]


def scaling(*, one: Sequence[float], two: Sequence[float], **more: Any) -> list[TrialResult]:
    both = ({"batch_size": 64, "num_workers": n} for n in (1, 2))
    return [r for point, times in zip(both, (one, two), strict=True) for r in trials(point, times, **more)]


@pytest.mark.parametrize(
    ("one", "two", "accuracy", "expected"),
    [
        (
            (4.0, 4.04, 4.0),
            (2.0, 2.0, 2.04),
            0.95,
            (
                "2 workers train 2.00× * as fast as 1 at batch_size=64 (efficiency 100 %).",
                "batch_size=64 num_workers=2 is the fastest: 2.00 s *, 2.00× * as fast as the next, *num_workers=1.",
                "accuracy: 95.0 % * the same at all 2 points.",
            ),
        ),
        (
            (4.0, 4.4, 3.9),
            (4.1, 4.0, 4.2),
            None,
            ("* that can't be told from 1×.", "Can't tell * as the fastest: their intervals overlap."),
        ),
        (
            (4.0,),
            (2.0,),
            None,
            ("*, by one trial each: no interval.", "* was the fastest *: no interval tells it from *"),
        ),
    ],
)
def test_verdicts_say_what_the_intervals_show(
    one: tuple[float, ...], two: tuple[float, ...], accuracy: float | None, expected: tuple[str, ...]
) -> None:
    sentences = analyse(STUDY, scaling(one=one, two=two, accuracy=accuracy)).verdicts
    assert len(sentences) == len(expected)
    for sentence, pattern in zip(sentences, expected, strict=True):
        assert fnmatchcase(sentence.replace("[", "("), pattern), sentence


def test_verdicts_of_other_baselines_name_what_differs() -> None:
    question = Question("s", {"optimizer": "sgd"}, ("optimizer", "lr"))
    results = [
        *trials({"optimizer": "sgd", "lr": 0.1}, (4.0, 4.0, 4.1)),
        *trials({"optimizer": "adam", "lr": 0.1}, (8.0, 8.0, 8.1)),
    ]
    verdict = analyse(question, results).verdicts[0]
    assert verdict.startswith("optimizer=adam trains 0.50× [")
    assert verdict.endswith("as fast as optimizer=sgd at lr=0.1.")


@pytest.mark.parametrize("num_worker_counts", [2, 3, 9])
def test_many_points_are_summed_up_in_six_lines(num_worker_counts: int) -> None:
    noise = random.Random(3)
    results = [
        make_result({"batch_size": b, "num_workers": w}, r, 8 / w**0.8 * noise.uniform(0.99, 1.01))
        for b in (32, 64, 128, 256, 512)
        for w in range(1, num_worker_counts + 1)
        for r in range(3)
    ]
    verdicts = analyse(STUDY, results).verdicts
    assert 2 <= len(verdicts) <= 6
    assert any("as fast as 1" in v for v in verdicts)


def test_the_best_metric_follows_the_mode_and_tells_its_ties() -> None:
    results = [
        make_result({"x": x}, r, accuracy=value + (r - 1) * 0.001)
        for x, value in ((1, 0.90), (2, 0.95), (3, 0.95))
        for r in range(3)
    ]
    best = analyse(Question("s", {}, ("x",)), results).verdicts[-1]
    assert best.startswith("Best accuracy: 95.0 %")
    assert best.endswith("x=3 can't be told from it.")
    worst = analyse(Question("s", {}, ("x",), mode="min"), results).verdicts[-1]
    assert worst.startswith("Best accuracy: 90.0 %")
    assert worst.endswith("at x=1.")


def test_of_many_points_a_group_of_one_is_told_by_itself() -> None:
    points = [{"batch_size": b, "num_workers": w} for b in (32, 64, 128, 256) for w in (1, 2)]
    points.append({"batch_size": 32, "num_workers": 4})
    results = [
        make_result(p, r, 40.0 / p["num_workers"] * (1 + r / 1000) * (64 / p["batch_size"]))
        for p in points
        for r in (0, 1, 2)
    ]
    told = analyse(STUDY, results).verdicts
    assert any(v.startswith("2 workers train from ") for v in told)
    assert any(v.startswith("4 workers train 4.00× ") and "at batch_size=32" in v for v in told)


# ---- break-even

QUESTION = Question("s", {"num_workers": 1}, ("hidden_size", "num_samples", "num_workers"))


def known(value: float, width: float = 1e-3) -> Estimate:
    """A speedup with an interval of so much to both sides, as a factor."""
    return Estimate(value, value / (1 + width), value * (1 + width), 3, 0.95, Method.T_LOG)


def tied(value: float) -> Estimate:
    return Estimate(value, 0.5, 2.0, 3, 0.95, Method.T_LOG)


def alone(value: float) -> Estimate:
    return Estimate(value, None, None, 1, None, Method.SINGLE)


def a_point(point: Mapping[str, Value], speedup: Estimate | None) -> PointAnalysis:
    return PointAnalysis(PointSamples(point), is_baseline=point.get("num_workers") == 1, speedup=speedup)


def points(speedups: Mapping[float, Estimate | None], **rest: Value) -> list[PointAnalysis]:
    """Two workers against one along hidden_size."""
    found = []
    for size, speedup in speedups.items():
        found.append(a_point({"hidden_size": size, **rest, "num_workers": 1}, known(1.0)))
        found.append(a_point({"hidden_size": size, **rest, "num_workers": 2}, speedup))
    return found


def lines(*curves: Sequence[PointAnalysis], question: Question = QUESTION) -> list[str]:
    return break_even_lines(question, [p for curve in curves for p in curve])


VALUES = st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True).map(sorted)


@given(values=VALUES, where=st.floats(0.01, 0.99), power=st.floats(0.2, 3) | st.floats(-3, -0.2), data=st.data())
def test_a_power_law_gives_back_where_it_crosses(
    values: list[int], where: float, power: float, data: st.DataObject
) -> None:
    i = data.draw(st.integers(0, len(values) - 2))
    left, right = values[i], values[i + 1]
    at = left * (right / left) ** where
    curve = [(float(v), known((v / at) ** power, width=1e-12)) for v in values]
    crossing = crossing_of(curve)
    assert crossing.kind is (CrossingKind.STARTS if power > 0 else CrossingKind.STOPS)
    assert crossing.between == (left, right)
    assert crossing.at == pytest.approx(at, rel=1e-6)


@given(values=VALUES, speedups=st.data())
def test_a_crossing_lies_between_the_nearest_points_that_are_clear(values: list[int], speedups: st.DataObject) -> None:
    low, high = st.floats(0.1, 0.9).map(known), st.floats(1.1, 9).map(known)
    middle = st.floats(0.6, 1.9).map(tied)
    curve = [(float(v), speedups.draw(low | middle | high)) for v in values]
    crossing = crossing_of(curve)
    if crossing.between is None:
        assert crossing.at is None
        return
    assert crossing.at is not None and crossing.between[0] < crossing.at < crossing.between[1]
    clear = {v: s.value > 1 for v, s in curve if s.excludes(1.0)}
    starts = crossing.kind is CrossingKind.STARTS
    assert max(v for v, pays in clear.items() if pays is not starts) == crossing.between[0]
    assert min(v for v, pays in clear.items() if pays is starts) == crossing.between[1]


@given(values=VALUES, speedups=st.data())
def test_where_all_is_clear_and_on_one_side_it_always_or_never_paid(values: list[int], speedups: st.DataObject) -> None:
    slow = [(float(v), known(speedups.draw(st.floats(0.1, 0.9)))) for v in values]
    fast = [(v, known(1 / s.value)) for v, s in slow]
    assert crossing_of(slow).kind is CrossingKind.NEVER
    assert crossing_of(fast).kind is CrossingKind.ALWAYS


@pytest.mark.parametrize(
    ("speedups", "why"),
    [
        ([known(0.5), known(2), known(0.5)], "the speedups go up and down"),
        ([known(0.5), known(2), tied(0.9)], "the speedups go up and down"),
        ([tied(1.2), known(0.5), known(2)], "the speedups go up and down"),
        ([known(0.5), tied(0.9)], "1 of 2 speedups can't be told from 1×"),
        ([tied(0.9), tied(1.1), known(2)], "2 of 3 speedups can't be told from 1×"),
        ([alone(0.5), alone(2)], "one trial each has no interval"),
    ],
)
def test_what_the_intervals_do_not_show_is_not_said(speedups: list[Estimate], why: str) -> None:
    crossing = crossing_of([(float(2**i), s) for i, s in enumerate(speedups)])
    assert (crossing.kind, crossing.why, crossing.at) == (CrossingKind.UNCLEAR, why, None)


def test_ties_widen_the_bracket_and_one_beyond_it_has_to_fit() -> None:
    curve = [(1.0, tied(0.8)), (2.0, known(0.5)), (4.0, tied(1.1)), (8.0, known(2.0)), (16.0, tied(1.9))]
    crossing = crossing_of(curve)
    assert (crossing.kind, crossing.between) == (CrossingKind.STARTS, (2.0, 8.0))
    assert crossing.at == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("speedups", "rest", "line"),
    [
        (
            {256: known(0.6), 512: known(0.85), 1024: known(1.5)},
            {"num_samples": 20_000},
            "2 workers start to pay at about hidden_size=620 (between 512 and 1024) for num_samples=20000.",
        ),
        # The rounded crossing stays between its neighbours.
        (
            {1000: known(0.9), 1004: known(1.1)},
            {},
            "2 workers start to pay at about hidden_size=1002 (between 1000 and 1004).",
        ),
        ({64: known(0.5), 1024: known(0.9)}, {}, "2 workers never paid up to hidden_size=1024."),
        ({64: known(1.2), 1024: known(1.9)}, {}, "2 workers paid from hidden_size=64, the smallest, on."),
        (
            {64: known(1.9), 1024: known(0.5)},
            {},
            "2 workers stop paying at about hidden_size=240 (between 64 and 1024).",
        ),
        (
            {64: tied(0.9), 1024: known(1.5)},
            {},
            "The study can't tell at which hidden_size 2 workers start to pay: 1 of 2 speedups can't be told from 1×.",
        ),
    ],
)
def test_a_curve_has_a_sentence(speedups: dict[float, Estimate | None], rest: dict[str, Value], line: str) -> None:
    assert lines(points(speedups, **rest)) == [line]


def test_curves_of_one_comparison_share_a_line() -> None:
    told = lines(
        points({64: known(0.5), 256: known(2.0)}, num_samples=100),
        points({64: known(0.5), 256: known(0.9)}, num_samples=200),
        points({64: known(0.5), 256: known(0.7)}, num_samples=300),
        points({64: known(0.5), 256: tied(1.1)}, num_samples=400),
    )
    assert told[0] == (
        "2 workers start to pay at about hidden_size=130 (between 64 and 256) for num_samples=100; "
        "never paid up to hidden_size=256 for num_samples=200 or num_samples=300; can't be told for num_samples=400."
    )
    assert told[1:] == [
        "2 workers never paid up to num_samples=400 for hidden_size=64; can't be told for hidden_size=256."
    ]


def test_many_curves_that_say_the_same_are_counted() -> None:
    curves = [points({64: known(0.5), 256: known(0.9)}, num_samples=n) for n in range(1, 6)]
    assert lines(*curves)[0] == "2 workers never paid up to hidden_size=256, whatever num_samples (5 settings)."
    curves = [points({64: known(0.5), 256: known(2.0)}, num_samples=n) for n in range(1, 6)]
    assert lines(*curves)[0].endswith("for num_samples=3 and 2 more.")


def test_there_are_few_lines_and_those_with_a_crossing_come_first() -> None:
    question = Question("s", {"num_workers": 1}, ("hidden_size", "num_workers"))
    found = []
    for workers in range(2, 9):
        top = known(2.0) if workers == 8 else known(0.9)
        found += [
            a_point({"hidden_size": 64, "num_workers": workers}, known(0.5)),
            a_point({"hidden_size": 256, "num_workers": workers}, top),
        ]
    told = lines(found, question=question)
    assert told == [
        "8 workers start to pay at about hidden_size=130 (between 64 and 256).",
        "2 workers, 3 workers, 4 workers and 3 more never paid up to hidden_size=256.",
    ]


def test_no_more_than_a_few_crossings_are_reported() -> None:
    question = Question("s", {"num_workers": 1}, ("hidden_size", "num_workers"))
    crossings = [
        a_point({"hidden_size": size, "num_workers": workers}, known(speedup))
        for workers in range(2, 9)
        for size, speedup in ((64, 0.5), (256, 1.0 + workers))
    ]
    assert len(lines(crossings, question=question)) == MAX_LINES


def test_other_baselines_are_named_and_workers_can_be_what_it_runs_along() -> None:
    question = Question("s", {"device": "cpu"}, ("device", "num_workers"))
    found = [
        a_point({"device": "cuda", "num_workers": n}, speedup)
        for n, speedup in ((2, known(0.5)), (3, known(1.5)), (4, known(2.5)))
    ]
    assert lines(found, question=question) == ["device=cuda starts to pay at about num_workers=2.6 (between 2 and 3)."]


def test_zero_has_no_logarithm_but_neighbours() -> None:
    question = Question("s", {"num_workers": 1}, ("weight_decay", "num_workers"))
    found = [a_point({"weight_decay": w, "num_workers": 2}, s) for w, s in ((0.0, known(0.5)), (0.1, known(2.0)))]
    assert lines(found, question=question) == ["2 workers start to pay between weight_decay=0 and 0.1."]


def test_only_numbers_make_a_curve_and_one_point_makes_none() -> None:
    question = Question("s", {"num_workers": 1}, ("x", "num_workers"))
    for values in (("a", "b"), (True, False), ((1,), (2,)), (None, 5)):
        found = [a_point({"x": x, "num_workers": 2}, known(0.5)) for x in values]
        assert crossings_of(question, found) == []
    assert crossings_of(question, points({64: None, 128: known(2.0)})) == []


def test_a_study_without_a_baseline_has_no_break_even() -> None:
    assert crossings_of(Question("s", {}, ("hidden_size",)), [a_point({"hidden_size": h}, None) for h in (1, 2)]) == []


def test_the_verdicts_of_a_study_say_where_it_starts_to_pay() -> None:
    question = Question("s", {"num_workers": 1}, ("hidden_size", "num_workers"), num_repeats=3)
    results = []
    for hidden_size, ratio in ((128, 0.5), (512, 2.0)):
        for repeat, noise in enumerate((1.0, 1.01, 0.99)):
            for workers, time_s in ((1, 4.0), (2, 4.0 / ratio * noise)):
                results.append(make_result({"hidden_size": hidden_size, "num_workers": workers}, repeat, time_s))
    told = analyse(question, results).verdicts
    assert "2 workers start to pay at about hidden_size=260 (between 128 and 512)." in told


def test_an_optimizer_is_no_investment_that_has_to_pay() -> None:
    curve = [a_point({"optimizer": "adam", "lr": lr}, known(speedup)) for lr, speedup in ((0.01, 0.5), (0.1, 2.0))]
    compared = Question("s", {"optimizer": "sgd"}, ("optimizer", "lr"))
    assert break_even_lines(compared, curve) == []
