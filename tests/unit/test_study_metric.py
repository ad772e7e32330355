"""Metrics that studies are judged by: units, declared or read from values, and display of values."""

import functools
import math
import random
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from results import make_result
from torch import nn
from torch.nn import functional

from raypar import Study, StudyError, Workload
from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question, question_from_dict, question_of
from raypar.analysis.recommend import Constraints, recommend
from raypar.study.metric import NUMBER, PERCENT, SHARE, Metric
from raypar.workloads import digits
from raypar.workloads.metrics import accuracy, default_metrics


@pytest.mark.parametrize(
    ("name", "values", "unit"),
    [
        ("accuracy", [0.8, 0.9321], SHARE),
        ("val/accuracy", [0.0, 1.0], SHARE),
        ("test_acc", [0.8, 12.5, 93.21], PERCENT),
        ("valAcc", [100.0], PERCENT),
        ("acc@1", [76.13], PERCENT),
        ("val_acc_epoch", [0.5], SHARE),
        ("test_accuracy_percent", [0.2, 0.6], PERCENT),
        ("error %", [6.79], PERCENT),
        ("load_percent", [140.0], NUMBER),
        ("acc", [9321.0, 0.5], NUMBER),
        ("accuracy", [-0.5, 0.5], NUMBER),
        ("accuracy", [math.nan, 0.5, math.inf], SHARE),
        ("accuracy", [], ""),
        ("perplexity", [12.5], NUMBER),
        ("val_loss", [0.25], NUMBER),
        ("f1", [0.81], NUMBER),
    ],
)
def test_the_unit_is_read_from_all_values(name, values, unit):
    assert Metric(name).read_from(values).unit == unit


@pytest.mark.parametrize(
    ("declared", "values", "unit"),
    [
        (SHARE, [0.9], SHARE),
        (SHARE, [81.0], PERCENT),
        (SHARE, [810.0], NUMBER),
        (PERCENT, [0.8], PERCENT),
        (NUMBER, [0.8], NUMBER),
    ],
)
def test_a_declared_unit_holds_unless_no_share_has_such_values(declared, values, unit):
    assert Metric("f1", "max", declared).read_from(values).unit == unit


SHOWN = {
    # unit: a value, an interval, a difference, a change, the margin
    SHARE: (0.9321, "93.2 %", "93.2 % [91.2, 95.2]", "93.2 points", "+93.2 points [+91.2, +95.2]", 0.005),
    PERCENT: (93.21, "93.21 %", "93.21 % [91.21, 95.21]", "93.21 points", "+93.21 points [+91.21, +95.21]", 0.5),
    NUMBER: (12.5, "12.50", "12.50 [10.50, 14.50]", "12.50", "+12.50 [+10.50, +14.50]", 0.125),
}


@pytest.mark.parametrize("unit", SHOWN)
def test_a_metric_shows_its_values_in_its_unit(unit):
    metric, (value, shown, interval, difference, change, margin) = Metric("acc", "max", unit), SHOWN[unit]
    half = 0.02 if unit == SHARE else 2
    of = SimpleNamespace(value=value, low=value - half, high=value + half)
    assert (metric.show(value), metric.show_interval(of)) == (shown, interval)
    assert (metric.show_difference(value), metric.show_change(of)) == (difference, change)
    assert metric.margin(value) == margin
    assert (metric.show(None), metric.show(math.nan)) == ("–", "–")
    wide = SimpleNamespace(value=value, low=value - 100, high=value + 100)
    assert ("[0.0" in metric.show_interval(wide)) == (unit != NUMBER)


@given(st.sampled_from(["", SHARE, PERCENT, NUMBER]), st.floats(-1e6, 1e6))
def test_no_share_above_1_is_shown_as_per_cent(unit, value):
    for metric in (Metric("accuracy", unit=unit), Metric("accuracy", unit=unit).read_from([value])):
        shown = metric.show(value)
        assert not shown.endswith("%") or -0.01 <= float(shown.removesuffix(" %")) <= 100


def model(_):
    return nn.Linear(3, 2)


def loss(outputs, targets):
    return functional.cross_entropy(outputs, targets)


def scores(outputs, targets):
    return torch.zeros(len(targets))


Own = functools.partial(Workload, name="w", model=model, data=model)
JUDGED = {
    "cross-entropy": ({}, ["accuracy"], Metric("accuracy", "max", SHARE)),
    "torch's function": ({"loss": functional.nll_loss}, ["accuracy"], Metric("accuracy", "max", SHARE)),
    "torch's class": ({"loss": nn.CrossEntropyLoss()}, ["accuracy"], Metric("accuracy", "max", SHARE)),
    "partial": ({"loss": functools.partial(functional.cross_entropy)}, ["accuracy"], Metric("accuracy", "max", SHARE)),
    "a loss of one's own": ({"loss": loss}, [], Metric("val_loss", "min")),
    "one logit": ({"loss": nn.BCEWithLogitsLoss()}, [], Metric("val_loss", "min")),
    "a regression": ({"loss": functional.mse_loss}, [], Metric("val_loss", "min")),
    "asked for": ({"loss": loss, "metric": "accuracy"}, ["accuracy"], Metric("accuracy", "max", SHARE)),
    "metrics": ({"metrics": {"f1": scores}}, ["f1"], Metric("val_loss", "min")),
    "accuracy among them": ({"metrics": {"f1": scores, "accuracy": scores}}, ["f1", "accuracy"], Metric("accuracy")),
    "a mode for the only one": ({"metrics": {"mae": scores}, "mode": "min"}, ["mae"], Metric("mae", "min")),
    "a metric": (
        {"metrics": {"f1": scores}, "metric": Metric("f1", "max", SHARE)},
        ["f1"],
        Metric("f1", "max", SHARE),
    ),
    "a loss by its name": ({"metric": "val_loss"}, ["accuracy"], Metric("val_loss", "min")),
}


@pytest.mark.parametrize(("fields", "names", "metric"), JUDGED.values(), ids=JUDGED)
def test_a_workload_is_judged_by_accuracy_only_where_that_is_certain_or_asked_for(fields, names, metric):
    workload = Own(**fields)
    assert list(default_metrics(workload)) == list(workload.metric_names) == names
    assert workload.metric_of() == Study(workload=workload).judged_by == metric
    question = question_of(Study(workload=workload))
    assert question.judged_by == metric and question_from_dict(asdict(question)) == question


def test_classes_that_the_loss_ignores_are_not_counted():
    for ignoring in (nn.CrossEntropyLoss(ignore_index=0), functools.partial(functional.nll_loss, ignore_index=0)):
        (of,) = default_metrics(Own(loss=ignoring)).values()
        right, counted = of(torch.eye(3), torch.tensor([0, 1, 1]))
        assert (int(right), int(counted)) == (1, 2)
    assert default_metrics(Own(loss=functools.partial(functional.nll_loss)))["accuracy"] is accuracy


def test_a_study_may_judge_by_another_metric_with_its_own_direction():
    assert Study(workload=digits, metric="val_loss").judged_by == Metric("val_loss", "min")
    assert Study(workload=digits, metric="accuracy", mode="min").judged_by == Metric("accuracy", "min", SHARE)
    f1 = Own(metrics={"f1": scores}, metric=Metric("f1", "max", SHARE))
    assert Study(workload=f1, metric="f1").judged_by == Metric("f1", "max", SHARE)
    assert Study(workload=f1, metric=Metric("val_loss")).judged_by == Metric("val_loss", "min")


def test_commands_and_train_loops_are_judged_by_what_they_report_in_its_unit():
    def of(metric, pattern):
        return Workload.from_command("x", metrics={metric: pattern}, metric=metric).metric_of()

    in_per_cent = (r"acc: ([0-9.]+)%", r"(?:acc|a): ([0-9)%]+(?:\.\d+)?)\s*%", r"acc \((\d+) %\)")
    for pattern in (*in_per_cent, r"(?<!test )acc (\S+)(?:%)", r"acc (?P<x>\d+)%"):
        assert of("acc", pattern) == Metric("acc", "max", PERCENT)
    for pattern in (r"acc: ([0-9.]+)", r"100% acc: ([0-9.%]+)", r"acc: (\S+) at ([0-9.]+)%", "acc: ["):
        assert of("acc", pattern) == Metric("acc", "max")
    assert of("cost", r"cost: (\S+)") == Metric("cost", "min")
    assert Workload.from_command("x").metric_of() == Metric("loss", "min")
    assert Workload.from_train_loop(model).metric_of() == Metric("accuracy", "max")
    assert Workload.from_train_loop(model, metric="test_loss").metric_of() == Metric("test_loss", "min")


@pytest.mark.parametrize(
    ("study", "words"),
    [
        ({"workload": Own(loss=loss), "metric": "accuracy"}, "metric = 'accuracy': is not reported by workload w"),
        ({"workload": Own(metrics={"f1": scores}, metric="f2")}, "it reports f1, val_loss, train_loss"),
        ({"workload": Own(loss=loss, mode="max")}, "is given without metric=, so it would apply to val_loss"),
        ({"workload": Own(metric=Metric("val_loss", "most"))}, 'must be "max" or "min"'),
        ({"workload": Own(metric=Metric("val_loss", "min", "%"))}, "its unit must be one of share, percent, number"),
        ({"workload": digits, "metric": Metric("val_loss", "min", "%")}, "its unit must be one of share"),
        ({"workload": digits, "metric": Metric(3)}, "must be the name of a metric"),
        ({"workload": digits, "metric": 3}, "must be text"),
    ],
)
def test_a_metric_that_no_trial_reports_or_shows_is_refused(study, words):
    with pytest.raises(StudyError) as caught:
        Study(**study)
    assert words in str(caught.value)


@pytest.mark.parametrize("seed", range(5))
def test_a_study_in_per_cent_is_judged_as_the_same_one_in_shares(seed):
    drawn, advice = random.Random(seed), {}
    scores = {(w, r): drawn.uniform(0.9, 0.93) for w in (1, 2, 4) for r in range(4)}
    for unit, factor in ((SHARE, 1), (PERCENT, 100)):
        results = [make_result({"num_workers": w}, r, 4 / w + r / 99, factor * x) for (w, r), x in scores.items()]
        question = Question("s", {"num_workers": 1}, ("num_workers",))
        advice[unit] = recommend(question, results, Constraints())
        analysis = analyse(question, results)
        assert advice[unit].question.unit == analysis.question.unit == unit
        assert len([p for p in analysis.points if p.metric]) == 3
    share, percent = advice.values()
    assert percent.metric_margin == 100 * share.metric_margin
    kinds = [
        [(c.point, c.is_metric_worse, c.is_close_call, bool(c.exclusion)) for c in of.candidates]
        for of in (share, percent)
    ]
    assert kinds[0] == kinds[1] and share.decision is percent.decision


def test_a_stored_question_without_a_unit_gets_it_from_its_results():
    question = question_from_dict({"study_name": "s", "baseline": {}, "space_keys": [], "metric": "acc", "mode": "max"})
    results = [replace(make_result({}, i), reports=({"acc": value},)) for i, value in enumerate((0.7, 93.2))]
    assert question.unit == "" and question.with_unit(results).judged_by == Metric("acc", "max", PERCENT)
    assert Question("s", {}, ()).with_unit([]).unit == ""
