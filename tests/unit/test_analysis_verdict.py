"""Verdicts and break-even points; the sentences are in tests/golden/cases/verdicts.txt."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import clear, curve_of, make_result, stored_conditions, tied

from raypar.analysis.analyse import analyse
from raypar.analysis.comparison import Outcome
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import Question
from raypar.analysis.recommend import Decision
from raypar.analysis.stats import Estimate, Method
from raypar.analysis.verdict import CrossingKind, break_even_lines, crossing_of, crossings_of

QUESTION = Question("s", {"num_workers": 1}, ("hidden_size", "num_samples", "num_workers"))


def alone(value):
    return Estimate(value, None, None, 1, None, Method.SINGLE)


VALUES = st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True).map(sorted)
LOW, MIDDLE, HIGH = st.floats(0.1, 0.9).map(clear), st.floats(0.6, 1.9).map(tied), st.floats(1.1, 9).map(clear)


@given(values=VALUES, where=st.floats(0.01, 0.99), power=st.floats(0.2, 3) | st.floats(-3, -0.2), data=st.data())
def test_the_crossing_of_a_power_law_is_exact(values, where, power, data):
    i = data.draw(st.integers(0, len(values) - 2))
    left, right = values[i], values[i + 1]
    at = left * (right / left) ** where
    curve = [(float(v), clear((v / at) ** power, width=1e-12)) for v in values]
    crossing = crossing_of(curve)
    assert crossing.kind is (CrossingKind.STARTS if power > 0 else CrossingKind.STOPS)
    assert crossing.between == (left, right)
    assert crossing.at == pytest.approx(at, rel=1e-6)


@given(values=VALUES, data=st.data())
def test_a_crossing_lies_between_the_nearest_clear_points(values, data):
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
        ([clear(0.5), tied(0.9)], "1 of 2 intervals includes 1"),
        ([tied(0.9), tied(1.1), clear(2)], "2 of 3 intervals include 1"),
        ([alone(0.5), alone(2)], "one trial each gives no interval"),
    ],
)
def test_an_inconclusive_crossing_has_a_reason(speedups, why):
    crossing = crossing_of([(float(2**i), s) for i, s in enumerate(speedups)])
    assert (crossing.kind, crossing.why, crossing.at) == (CrossingKind.UNCLEAR, why, None)


def test_ties_widen_the_bracket_and_must_fit_beyond_it():
    curve = [(1.0, tied(0.8)), (2.0, clear(0.5)), (4.0, tied(1.1)), (8.0, clear(2.0)), (16.0, tied(1.9))]
    crossing = crossing_of(curve)
    assert (crossing.kind, crossing.between, crossing.at) == (CrossingKind.STARTS, (2.0, 8.0), pytest.approx(4.0))


@pytest.mark.parametrize(("key", "is_resource"), [("device", True), ("lr", False)])
def test_only_resources_have_a_break_even(key, is_resource):
    curve = [PointAnalysis({key: "new", "num_workers": n}, speedup=clear(n - 1.5)) for n in (2, 3, 4)]
    expected = [f"{key}=new starts to pay at about num_workers=2.6 (between 2 and 3)."] if is_resource else []
    assert break_even_lines(Question("s", {key: "old"}, (key, "num_workers")), curve) == expected


def test_a_curve_needs_two_numbers_and_a_baseline():
    for values in (("a", "b"), (True, False), ((1,), (2,)), (None, 5)):
        assert crossings_of(QUESTION, curve_of(dict.fromkeys(values, clear(0.5)))) == []
    assert crossings_of(QUESTION, curve_of({64: None, 128: 2.0})) == []


# ---- trials in few blocks, or with other hyperparameters


def test_comparisons_that_differ_only_in_unswept_hyperparameters_are_counted():
    """In an older store without settings, trials of an earlier space keep its hyperparameters."""
    speedups = {(32, 1): 1.0, (32, 2): 2.0, (64, 1): 1.0, (64, 2): 0.9}
    results = [
        make_result({"batch_size": b, "num_workers": n}, r, 8.0 / speedup * (1 + 0.001 * ((r + n) % 3)))
        for (b, n), speedup in speedups.items()
        for r in range(4)
    ]
    answer = analyse(Question("s", {"num_workers": 1}, ("num_workers",)), results).verdict.answer
    assert answer == "Of 2 comparisons with 1 worker: 1 faster, 1 slower; highest: 2.00×, 2 workers."


def test_points_without_a_common_block_are_not_called_the_same():
    results = [
        make_result({"lr": lr}, r, 8.0 + 0.01 * r, value) for lr, r, value in ((1, 0, 0.95), (1, 1, 0.95), (2, 2, 0.9))
    ]
    analysis = analyse(Question("s", {}, ("lr",)), results)
    assert analysis.statements == (
        "lr=1 leads: 8.00 s [7.94, 8.07] (others have 1 trial, unconfirmed).",
        "Best accuracy: 95.0 % [95.0, 95.0] at lr=1, inconclusive against lr=2.",
    )
    assert analysis.verdict.recommendation.candidates[1].exclusion == "accuracy 5.0 points worse (1 trial, unconfirmed)"


# ---- the metric


def metric_study(values, num_repeats=6, spread=0.0005):
    """Analyse a study with these accuracies by (lr, workers)."""
    results = [
        make_result({"lr": lr, "num_workers": n}, r, 4.0 / n, value + spread * ((r * (n + 1)) % 3 - 1))
        for (lr, n), value in values.items()
        for r in range(num_repeats)
    ]
    return analyse(Question("s", {"num_workers": 1}, ("lr", "num_workers")), results)


def test_an_equivalent_metric_is_not_called_inconclusive():
    for more in ({}, {(0.3, 1): 0.9, (0.3, 2): 0.9002}):
        said = " ".join(metric_study({(0.1, 1): 0.95, (0.1, 2): 0.9501, **more}).statements)
        assert "accuracy is equivalent within 0.5 points for all numbers of workers." in said
        assert ", equivalent within 0.5 points to lr=0.1 num_workers=" in said
        assert "inconclusive against" not in said
    noisy = " ".join(metric_study({(0.1, 1): 0.95, (0.1, 2): 0.951}, spread=0.02).statements)
    assert ", inconclusive against lr=0.1 num_workers=" in noisy and "equivalent" not in noisy


@given(st.lists(st.floats(0.9, 0.95), min_size=2, max_size=6), st.floats(1e-5, 0.01))
def test_no_report_calls_one_pair_equivalent_and_inconclusive(values, spread):
    analysis = metric_study({(0.1, 2**i): v for i, v in enumerate(values)}, spread=spread)
    said = " ".join(analysis.statements)
    assert not ("accuracy is equivalent" in said and "inconclusive against" in said)


# ---- doubt

WORKERS = tuple({"num_workers": n} for n in (1, 2))
DISTURBED, CALM = ({"cores": [[0]], "foreign_cpu_share": [share]} for share in (0.5, 0.001))


def study_of(num_disturbed, **changes):
    results = [
        make_result(point, repeat, 4.0 / point["num_workers"] * (1 + repeat / 100), environment=CALM)
        for repeat in range(6)
        for point in WORKERS
    ]
    results = [replace(r, conditions=stored_conditions(DISTURBED)) for r in results[:num_disturbed]] + results[
        num_disturbed:
    ]
    return analyse(
        Question("s", {"num_workers": 1}, ("num_workers",), points=WORKERS, num_repeats=6, **changes), results
    )


def test_no_view_has_a_claim_on_times_if_most_trials_were_disturbed():
    analysis = study_of(7)
    assert analysis.verdict.answer.startswith("Inconclusive: other processes used up to 50 % of the cores in 7 of 12 t")
    assert [c.outcome for c in analysis.verdict.comparisons] == [Outcome.DISTURBED]
    advice = analysis.verdict.recommendation
    assert (advice.decision, advice.settling, advice.doubt) == (Decision.UNCLEAR, None, analysis.verdict.doubt)
    assert not any("faster" in text or "fastest" in text for text in analysis.statements)
    assert (analysis.worker_groups, analysis.effects, analysis.batches) == ((), None, ())
    # A study that seemed settled is not.
    assert study_of(7, max_repeats=30).verdict.status == "not settled (disturbed)"


def test_a_little_load_in_most_trials_is_a_caveat(monkeypatch):
    monkeypatch.setitem(DISTURBED, "foreign_cpu_share", [0.2])  # two cores have as much of raypar's own processes
    analysis = study_of(12)
    assert analysis.verdict.answer.startswith("2 workers are faster than 1: 2.00×") and not analysis.verdict.doubt
    assert [w.check for w in analysis.warnings if w.check == "other_load"] == ["other_load"]


def test_much_load_in_half_of_the_trials_is_a_caveat():
    analysis = study_of(6)
    assert analysis.verdict.answer.startswith("2 workers are faster than 1: 2.00×") and not analysis.verdict.doubt
    assert [c.outcome for c in analysis.verdict.comparisons] == [Outcome.FASTER]
    assert analysis.verdict.recommendation.decision is Decision.CLEAR
    assert analysis.worker_groups and "other_load" in {finding.check for finding in analysis.warnings}
    assert study_of(6, max_repeats=30).verdict.status == "settled"


def test_other_load_does_not_affect_a_search():
    results = [make_result({"lr": lr}, 0, accuracy=lr, environment=DISTURBED) for lr in (0.1, 0.3, 0.2)]
    analysis = analyse(Question("s", {}, ("lr",), num_repeats=1, is_search=True), results)
    assert analysis.verdict.answer == "Leading: accuracy 30.0 % with lr=0.3 (best of 3, one trial each, unconfirmed)."
    assert [p.point["lr"] for p in analysis.points] == [0.3, 0.2, 0.1]
