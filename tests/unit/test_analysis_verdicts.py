"""Verdicts: what the intervals show and nothing else; where along a hyperparameter something starts to pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import Question
from raypar.analysis.stats import Estimate, Method
from raypar.analysis.verdicts import MAX_LINES, CrossingKind, break_even_lines, crossing_of, crossings_of
from raypar.study.space import Value
from raypar.study.trial import TrialResult

STUDY = Question("mnist", {"num_workers": 1}, ("batch_size", "num_workers"), num_repeats=3)


def trials(point: dict[str, Value], *times: float, **more: Any) -> list[TrialResult]:
    return [make_result(point, repeat, time_s, **more) for repeat, time_s in enumerate(times)]


ONE, TWO = ({"batch_size": 64, "num_workers": n} for n in (1, 2))
SGD, ADAM = ({"optimizer": name, "lr": 0.1} for name in ("sgd", "adam"))
OPTIMIZERS = Question("s", {"optimizer": "sgd"}, ("optimizer", "lr"))
X, LEAST_X = (Question("s", {}, ("x",), mode=mode) for mode in ("max", "min"))
SCORES = [
    make_result({"x": x}, r, accuracy=value + (r - 1) * 0.001)
    for x, value in ((1, 0.90), (2, 0.95), (3, 0.95))
    for r in range(3)
]


@pytest.mark.parametrize(
    ("question", "results", "expected"),
    [
        (
            STUDY,
            [*trials(ONE, 4.0, 4.04, 4.0, accuracy=0.95), *trials(TWO, 2.0, 2.0, 2.04, accuracy=0.95)],
            """2 workers train 2.00× * as fast as 1 at batch_size=64 (efficiency 100 %).
            batch_size=64 num_workers=2 is the fastest: 2.00 s *, 2.00× * as fast as the next, *num_workers=1.
            accuracy: 95.0 % * the same at all 2 points.""",
        ),
        (
            STUDY,
            [*trials(ONE, 4.0, 4.4, 3.9, accuracy=None), *trials(TWO, 4.1, 4.0, 4.2, accuracy=None)],
            """* that can't be told from 1×.
            Can't tell * as the fastest: their intervals overlap.""",
        ),
        (
            STUDY,
            [*trials(ONE, 4.0, accuracy=None), *trials(TWO, 2.0, accuracy=None)],
            """*, by one trial each: no interval.
            * was the fastest *: no interval tells it from *""",
        ),
        (OPTIMIZERS, [*trials(SGD, 4.0, 4.1), *trials(ADAM, 8.0, 8.2)], "optimizer=adam trains 0.50× * optimizer=s*"),
        (X, SCORES, "*\nBest accuracy: 95.0 % * x=3 can't be told from it."),
        (LEAST_X, SCORES, "*\nBest accuracy: 90.0 % * at x=1."),
    ],
)
def test_verdicts_say_what_the_intervals_show(question: Question, results: list[TrialResult], expected: str) -> None:
    lines = "\n".join(analyse(question, results).verdicts).replace("[", "(")
    assert fnmatchcase(lines, expected.replace("\n            ", "\n")), lines


@pytest.mark.parametrize(
    ("num_worker_counts", "expected"),
    [
        (2, "2 workers train from *\n10 workers train 6.* at batch_size=32 *"),
        (3, "2 workers train from *\n3 workers train from *\n10 workers train 6.* at batch_size=32 *"),
        (9, "Of 41 points, the most: 10 workers *\nThe least: 2 workers *"),
    ],
)
def test_many_points_are_summed_up_in_six_lines(num_worker_counts: int, expected: str) -> None:
    counts = range(1, num_worker_counts + 1)
    points = [{"batch_size": b, "num_workers": w} for b in (32, 64, 128, 256, 512) for w in counts]
    points.append({"batch_size": 32, "num_workers": 10})  # a group of one is reported by itself
    results = [r for i, p in enumerate(points) for r in trials(p, *(8 / p["num_workers"] ** 0.8 + i / 1e3,) * 3)]
    verdicts = analyse(STUDY, results).verdicts
    assert 2 <= len(verdicts) <= 6 and fnmatchcase("\n".join(verdicts), expected)


# ---- break-even

QUESTION = Question("s", {"num_workers": 1}, ("hidden_size", "num_samples", "num_workers"))


def clear(value: float, width: float = 1e-3) -> Estimate:
    """A speedup with an interval of so much to both sides, as a factor."""
    return Estimate(value, value / (1 + width), value * (1 + width), 3, 0.95, Method.T_LOG)


def tied(value: float) -> Estimate:
    return Estimate(value, 0.5, 2.0, 3, 0.95, Method.T_LOG)


def alone(value: float) -> Estimate:
    return Estimate(value, None, None, 1, None, Method.SINGLE)


def points(
    speedups: Mapping[Any, Estimate | float | None], key: str = "hidden_size", workers: int = 2, **rest: Value
) -> list[PointAnalysis]:
    """So many workers against one along a hyperparameter; a plain number is a clear speedup."""
    analysed = []
    for value, speedup in speedups.items():
        estimate = clear(speedup) if isinstance(speedup, float) else speedup
        for n, ratio in ((1, clear(1.0)), (workers, estimate)):
            point = {key: value, **rest, "num_workers": n}
            analysed.append(PointAnalysis(point, is_baseline=n == 1, speedup=ratio))
    return analysed


def lines(*curves: Sequence[PointAnalysis], question: Question = QUESTION) -> list[str]:
    return break_even_lines(question, [p for curve in curves for p in curve])


VALUES = st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True).map(sorted)
LOW, MIDDLE, HIGH = st.floats(0.1, 0.9).map(clear), st.floats(0.6, 1.9).map(tied), st.floats(1.1, 9).map(clear)


@given(values=VALUES, where=st.floats(0.01, 0.99), power=st.floats(0.2, 3) | st.floats(-3, -0.2), data=st.data())
def test_a_power_law_gives_back_where_it_crosses(
    values: list[int], where: float, power: float, data: st.DataObject
) -> None:
    i = data.draw(st.integers(0, len(values) - 2))
    left, right = values[i], values[i + 1]
    at = left * (right / left) ** where
    curve = [(float(v), clear((v / at) ** power, width=1e-12)) for v in values]
    crossing = crossing_of(curve)
    assert crossing.kind is (CrossingKind.STARTS if power > 0 else CrossingKind.STOPS)
    assert crossing.between == (left, right)
    assert crossing.at == pytest.approx(at, rel=1e-6)


@given(values=VALUES, data=st.data())
def test_a_crossing_lies_between_the_nearest_points_that_are_clear(values, data):
    curve = [(float(v), data.draw(LOW | MIDDLE | HIGH)) for v in values]
    crossing = crossing_of(curve)
    pays = {v: s.value > 1 for v, s in curve if s.excludes(1.0)}
    if len(pays) == len(curve) and len(set(pays.values())) == 1:
        assert crossing.kind is (CrossingKind.ALWAYS if pays[curve[0][0]] else CrossingKind.NEVER)
    assert (crossing.at is None) == (crossing.between is None)
    if crossing.between:
        low, high = crossing.between
        starts = crossing.kind is CrossingKind.STARTS
        assert low < crossing.at < high
        assert (
            max(v for v in pays if pays[v] is not starts) == low and min(v for v in pays if pays[v] is starts) == high
        )


@pytest.mark.parametrize(
    ("speedups", "why"),
    [
        ([clear(0.5), clear(2), clear(0.5)], "the speedups go up and down"),
        ([clear(0.5), clear(2), tied(0.9)], "the speedups go up and down"),
        ([tied(1.2), clear(0.5), clear(2)], "the speedups go up and down"),
        ([clear(0.5), tied(0.9)], "1 of 2 speedups can't be told from 1×"),
        ([tied(0.9), tied(1.1), clear(2)], "2 of 3 speedups can't be told from 1×"),
        ([alone(0.5), alone(2)], "one trial each has no interval"),
    ],
)
def test_what_the_intervals_do_not_show_is_not_said(speedups: list[Estimate], why: str) -> None:
    crossing = crossing_of([(float(2**i), s) for i, s in enumerate(speedups)])
    assert (crossing.kind, crossing.why, crossing.at) == (CrossingKind.UNCLEAR, why, None)


def test_ties_widen_the_bracket_and_one_beyond_it_has_to_fit() -> None:
    curve = [(1.0, tied(0.8)), (2.0, clear(0.5)), (4.0, tied(1.1)), (8.0, clear(2.0)), (16.0, tied(1.9))]
    crossing = crossing_of(curve)
    assert (crossing.kind, crossing.between, crossing.at) == (CrossingKind.STARTS, (2.0, 8.0), pytest.approx(4.0))


@pytest.mark.parametrize(
    ("curve", "line"),
    [
        (points({256: 0.6, 512: 0.85, 1024: 1.5}), "start to pay at about hidden_size=620 (between 512 and 1024)."),
        # The rounded crossing stays between its neighbours.
        (points({1000: 0.9, 1004: 1.1}), "start to pay at about hidden_size=1002 (between 1000 and 1004)."),
        (points({64: 0.5, 1024: 0.9}, num_samples=20), "never paid up to hidden_size=1024 for num_samples=20."),
        (points({64: 1.2, 1024: 1.9}), "paid from hidden_size=64, the smallest, on."),
        (points({64: 1.9, 1024: 0.5}), "stop paying at about hidden_size=240 (between 64 and 1024)."),
        (points({64: tied(0.9), 1024: 1.5}), "start to pay: 1 of 2 speedups can't be told from 1×."),
        # Zero has no logarithm, but neighbours.
        (points({0: 0.5, 1: 2.0}, key="num_samples"), "start to pay between num_samples=0 and 1."),
    ],
)
def test_a_curve_has_a_sentence(curve: list[PointAnalysis], line: str) -> None:
    which = "The study can't tell at which hidden_size " if "told" in line else ""
    assert lines(curve) == [f"{which}2 workers {line}"]


def test_curves_of_one_comparison_share_a_line() -> None:
    text = lines(
        points({64: 0.5, 256: 2.0}, num_samples=100),
        points({64: 0.5, 256: 0.9}, num_samples=200),
        points({64: 0.5, 256: 0.7}, num_samples=300),
        points({64: 0.5, 256: tied(1.1)}, num_samples=400),
    )
    assert text == [
        "2 workers start to pay at about hidden_size=130 (between 64 and 256) for num_samples=100; "
        "never paid up to hidden_size=256 for num_samples=200 or num_samples=300; can't be told for num_samples=400.",
        "2 workers never paid up to num_samples=400 for hidden_size=64; can't be told for hidden_size=256.",
    ]
    alike = [points({64: 0.5, 256: 0.9}, num_samples=n) for n in range(1, 6)]
    assert lines(*alike)[0] == "2 workers never paid up to hidden_size=256, whatever num_samples (5 settings)."
    crossing = [points({64: 0.5, 256: 2.0}, num_samples=n) for n in range(1, 6)]
    assert lines(*crossing)[0].endswith("for num_samples=3 and 2 more.")


def test_there_are_few_lines_and_those_with_a_crossing_come_first() -> None:
    curves = [points({64: 0.5, 256: 2.0 if w == 8 else 0.9}, workers=w) for w in range(2, 9)]
    assert lines(*curves) == [
        "8 workers start to pay at about hidden_size=130 (between 64 and 256).",
        "2 workers, 3 workers, 4 workers and 3 more never paid up to hidden_size=256.",
    ]
    crossing = [points({64: 0.5, 256: 1.0 + w}, workers=w) for w in range(2, 9)]
    assert len(lines(*crossing)) == MAX_LINES


@pytest.mark.parametrize(("key", "is_resource"), [("device", True), ("lr", False)])
def test_resources_alone_have_to_pay(key, is_resource):
    curve = [PointAnalysis({key: "new", "num_workers": n}, speedup=clear(n - 1.5)) for n in (2, 3, 4)]
    told = [f"{key}=new starts to pay at about num_workers=2.6 (between 2 and 3)."] if is_resource else []
    assert lines(curve, question=Question("s", {key: "old"}, (key, "num_workers"))) == told


def test_only_two_numbers_or_more_against_a_baseline_make_a_curve() -> None:
    for values in (("a", "b"), (True, False), ((1,), (2,)), (None, 5)):
        assert crossings_of(QUESTION, points(dict.fromkeys(values, clear(0.5)))) == []
    assert crossings_of(QUESTION, points({64: None, 128: 2.0})) == []
