"""Stored speedup curves, points and final test of an execution."""

import io
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from results import make_result
from rich.console import Console

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.execution.best_model import FinalTest, chosen_point, last_final_test, with_final_test
from raypar.execution.results import note_of, point_runs, speedup_curves
from raypar.reporting.console import print_report
from raypar.reporting.export import answer_markdown
from raypar.reporting.html import Origin, html_report
from raypar.reporting.view import StudyView
from raypar.study.conditions import Conditions
from raypar.study.trial import TrialState

SEARCH = Question("s", {}, ("lr",), num_repeats=1, is_search=True)
QUESTION = Question("s", {"num_workers": 1}, ("batch_size", "num_workers"))


TIMES = {1: 8.0, 2: 5.0, 4: 3.5}


def timed(batch_sizes, repeats=3):
    return [
        make_result({"batch_size": b, "num_workers": n}, r, t * (1 + 0.01 * ((r + n) % 3)))
        for b in batch_sizes
        for n, t in TIMES.items()
        for r in range(repeats)
    ]


def test_a_speedup_curve_visits_both_ends_of_each_interval():
    analysis = analyse(QUESTION, timed((32, 64)))
    curves = speedup_curves(analysis)
    assert {key for key, _, _ in curves} == {"scaling/speedup bs 32", "scaling/speedup bs 64"}
    for key in ("scaling/speedup bs 32", "scaling/speedup bs 64"):
        points = [p for p in analysis.points if f"bs {p.point['batch_size']}" in key]
        expected = [(1.0, 1)]
        for p in points[1:]:
            of = p.speedup
            expected += [(value, p.num_workers) for value in (of.value, of.low, of.high, of.value)]
        assert [(value, step) for name, value, step in curves if name == key] == expected
    unconfirmed = speedup_curves(analyse(QUESTION, timed((32,), repeats=1)))
    assert [step for _, _, step in unconfirmed] == [1, 2, 4]


def test_at_most_six_curves_and_none_without_workers():
    assert len({key for key, _, _ in speedup_curves(analyse(QUESTION, timed(range(8, 16))))}) == 6
    results = [make_result({"batch_size": b}, r) for b in (32, 64) for r in range(3)]
    assert speedup_curves(analyse(Question("s", {"batch_size": 32}, ("batch_size",)), results)) == []


def test_intervals_that_are_only_noise_are_omitted():
    wild = [make_result({"batch_size": 32, "num_workers": 8}, r, t) for r, t in enumerate((0.1, 9.0, 80.0))]
    analysis = analyse(QUESTION, [*timed((32,)), *wild])
    runs = {run.name: run.metrics for run in point_runs(analysis)}
    ends = {"median_speedup_low", "median_speedup_high"}
    assert "median_speedup" in runs["bs=32 w=8"] and not ends & runs["bs=32 w=8"].keys()
    assert {step for _, _, step in speedup_curves(analysis)} == {1, 2, 4}


@pytest.mark.parametrize(
    ("disturbed", "sortable"),
    [
        ({}, {1, 2, 4}),
        ({4: 1}, {1, 2, 4}),  # a caveat
        ({4: 2}, {1, 2}),
        ({1: 2}, set()),  # all are compared with it
        ({1: 1, 2: 2, 4: 2}, set()),  # most trials of the study
    ],
)
def test_disturbed_points_have_no_speedup(disturbed, sortable):
    busy = Conditions.from_stored({"cores": [[0]], "foreign_cpu_share": [0.5]})
    results = [
        replace(r, conditions=busy) if r.spec.repeat < disturbed.get(r.spec.point["num_workers"], 0) else r
        for r in timed((32,))
    ]
    analysis = analyse(QUESTION, results)
    runs = {run.metrics["num_workers"]: run for run in point_runs(analysis)}
    of_comparisons = {f"median_{key}{end}" for key in ("speedup", "efficiency") for end in ("", "_low", "_high")}
    assert {n for n, run in runs.items() if of_comparisons & run.metrics.keys()} == sortable
    assert {n for n, run in runs.items() if not run.withdrawn} == sortable
    assert all(set(run.withdrawn) in (set(), of_comparisons) for run in runs.values())
    assert {step for _, _, step in speedup_curves(analysis)} == sortable
    assert all("median_train_time_s" in run.metrics for run in runs.values())
    notes = {n: run.tags["mlflow.note.content"] for n, run in runs.items()}
    assert {n for n in (2, 4) if "disturbed: " in notes[n]} == {2, 4} - sortable


def test_points_have_rounded_medians_their_outcome_and_one_is_recommended():
    analysis = analyse(replace(QUESTION, text="Does it pay?"), timed((32,)))
    runs = {run.name: run for run in point_runs(analysis)}
    assert list(runs) == ["bs=32 w=1", "bs=32 w=2", "bs=32 w=4"]
    two = runs["bs=32 w=2"]
    assert two.params["num_workers"] == "2" and two.metrics["num_workers"] == 2
    estimates = {p.num_workers: p for p in analysis.points}
    assert two.metrics["median_speedup"] == float(f"{estimates[2].speedup.value:.4g}")
    assert two.metrics["median_speedup_low"] < two.metrics["median_speedup"] < two.metrics["median_speedup_high"]
    assert two.metrics["num_trials"] == 3
    of_trials = {"train_time_s", "wall_s", "speedup", "efficiency", "accuracy", "throughput_samples_per_s"}
    assert not of_trials & two.metrics.keys()
    notes = {name: run.tags["mlflow.note.content"] for name, run in runs.items()}
    assert notes["bs=32 w=1"].endswith("baseline") and notes["bs=32 w=2"].startswith("faster: 1.6")
    recommended = [name for name, run in runs.items() if run.tags["raypar.recommended"] == "yes"]
    assert recommended == [name for name, note in notes.items() if note.startswith("recommended")]
    assert len(recommended) == 1 and "Recommended: " in note_of(analysis)
    assert len({run.identity for run in runs.values()}) == 3


def test_points_without_results_have_no_run():
    of_diverged = [replace(r, state=TrialState.DIVERGED) for r in timed((64,), 1)]
    question = replace(QUESTION, points=({"batch_size": 9, "num_workers": 1},))
    runs = point_runs(analyse(question, [*timed((32,)), *of_diverged]))
    assert len(runs) == 6
    assert "diverged" in runs[-1].tags["mlflow.note.content"] and "median_train_time_s" not in runs[-1].metrics


def test_a_search_has_no_point_runs_and_its_best_trials_are_first():
    results = [make_result({"lr": float(i)}, 0, accuracy=0.01 * i) for i in range(1, 50)]
    analysis = analyse(SEARCH, results)
    assert point_runs(analysis) == []
    lines = [line for line in note_of(analysis).splitlines() if line.startswith("| ")]
    assert lines[2].startswith("| 49&emsp; |") and len(lines) == 2 + 30
    assert "... and 19 more points." in note_of(analysis)


def test_the_note_has_the_question_and_all_points():
    analysis = analyse(replace(QUESTION, text="Does it *pay*?"), timed((32, 64)))
    first, table, *rest = note_of(analysis).split("\n\n")
    assert first == f"Does it *pay*? {analysis.verdict.answer}"
    assert [line.split("&emsp; | ")[:2] for line in table.splitlines()[2:]] == [
        [f"| {b}", str(n)] for b in (32, 64) for n in TIMES
    ]
    assert set(table.splitlines()[1]) == set("| -:"), "a rule, or it is no table"
    assert rest[0].startswith(("Recommended: ", "Leading: "))


# ---- the final test

FINAL = FinalTest({"lr": 2.0}, "accuracy", ({"loss": 0.5, "accuracy": 0.8}, {"loss": 0.4, "accuracy": 0.9}))


def analysis_of(mode, **accuracies):
    results = [
        make_result({"lr": float(name[1:])}, repeat, accuracy=value)
        for name, values in accuracies.items()
        for repeat, value in enumerate(values)
    ]
    return analyse(Question("s", {}, ("lr",), mode=mode), results)


def read(stored):
    return last_final_test(SimpleNamespace(artifact=lambda *_: stored), "s")


CHOICES = [("max", (0.5, 0.6, 0.7), 2.0), ("min", (0.5,), 1.0), ("max", (0.2,), 1.0), ("max", (), 0)]


@pytest.mark.parametrize(("mode", "second", "lr"), CHOICES)
def test_the_first_point_with_the_best_median_is_chosen(mode, second, lr):
    point = chosen_point(analysis_of(mode, x1=(0.1, 0.2, 0.99), x2=second) if second else analysis_of(mode))
    assert (point and point.point) == ({"lr": lr} if lr else None)


def test_a_stored_final_test_is_reported():
    analysis = with_final_test(analysis_of("max", x1=(0.5,)), read(json.dumps(asdict(FINAL))))
    sentence = analysis.verdict.final_test
    view = StudyView(analysis)
    print_report(view, console := Console(file=io.StringIO(), width=300))
    page = html_report(view, [], Origin({})).replace("\N{NO-BREAK SPACE}", " ")
    assert all(sentence in text for text in (console.file.getvalue(), answer_markdown(view), page))
    assert "seen once, by the 2 models" in sentence and "lr=2" in sentence and "85.0 %" in sentence
    again = replace(FINAL, look=2, metric="val_loss").sentence()
    assert "seen once" not in again and "used 2 times" in again and "loss 0.45" in again


UNSCORED = '{"point": {}, "metric": "f1", "scores": [{"loss": 1}], "look": 1}'


DAMAGED = ["", "{", "{}", "[]", "[" * 100_000]
DAMAGED += [UNSCORED.replace('{"loss": 1}', score) for score in ("1", '{"f1": "x"}', '{"f1": NaN}')]


@pytest.mark.parametrize("stored", [None, UNSCORED, *DAMAGED], ids=lambda text: str(text)[:60])
def test_without_a_stored_final_test_none_is_reported(stored):
    analysis = analysis_of("max", x1=(0.5,))
    assert with_final_test(analysis, read(stored)) == analysis
