"""States of a trial and their traits, and when a trial has diverged."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ray.tune import TuneError
from results import make_result
from stage import TWO_CORES
from torch import nn

from raypar import Data, Split, Study, Workload, grid
from raypar.analysis.analyse import analyse, pair_speedups
from raypar.analysis.compare import Side, compare
from raypar.analysis.progress import Leader
from raypar.analysis.question import Question
from raypar.analysis.recommend import Constraints, front_of, recommend
from raypar.analysis.time_to_target import Target
from raypar.errors import WorkloadError
from raypar.execution.best_model import chosen_point
from raypar.execution.plan import make_plan
from raypar.parallel.strategy import DistContext
from raypar.run.ranks import RankEnd, trial_result
from raypar.run.runner import Notice, ends_training
from raypar.run.tune import BrokeredTrial, TrialFailed, TuneRunner
from raypar.study.options import resolve
from raypar.study.trial import (
    Failure,
    FailureKind,
    TrialResult,
    TrialState,
    bad_losses,
    best_first,
    end_state,
    point_label,
    result_from_json,
)
from raypar.train import loop, training
from raypar.train.job import RankOutcome, RunSettings
from raypar.train.saved_model import WEIGHTS_FILE, BestWeights
from raypar.workloads import digits

NAN, INF = math.nan, math.inf
FINISHED, STOPPED, DIVERGED, DOES_NOT_FIT, FAILED = TrialState
ALONE = DistContext(0, 1, torch.device("cpu"))


def test_every_state_has_its_traits_and_only_finished_trials_are_measured():
    assert [state for state in TrialState if state.traits.is_measured] == [FINISHED]
    assert [state for state in TrialState if state.traits.is_usable] == [FINISHED, STOPPED]
    assert [state for state in TrialState if not state.traits.is_result] == [FAILED]


@pytest.mark.parametrize(
    ("report", "metric", "bad"),
    [
        ({"train_loss": NAN, "val_loss": 0.5, "accuracy": 0.1}, "accuracy", ["train_loss"]),
        ({"train_loss": 0.1, "val_loss": INF}, "accuracy", ["val_loss"]),
        ({"train_loss": -INF, "val_loss": NAN}, "", ["train_loss", "val_loss"]),
        ({"loss": NAN}, "accuracy", ["loss"]),
        ({"eval/loss": NAN}, "accuracy", ["eval/loss"]),
        ({"Loss/train": NAN}, "accuracy", ["Loss/train"]),
        ({"valLoss": NAN}, "accuracy", ["valLoss"]),
        ({"loss_epoch": NAN}, "accuracy", ["loss_epoch"]),
        ({"discriminator_loss": NAN}, "accuracy", ["discriminator_loss"]),
        # These are not losses of the report's epoch.
        ({"best_val_loss": INF, "loss_scale": INF, "loss": 1.0}, "accuracy", []),
        ({"glossary": NAN}, "accuracy", []),
        # The study's metric stands for the loss only if there is none.
        ({"mse": NAN, "lr": 0.1}, "mse", ["mse"]),
        ({"macro_f1": NAN, "train_loss": 0.1}, "macro_f1", []),
        ({"accuracy": 0.1, "grad_norm": NAN}, "accuracy", []),
        ({"epoch": 1, "loss": 3}, "accuracy", []),
        ({}, "accuracy", []),
    ],
)
def test_a_report_has_diverged_by_its_losses(report, metric, bad):
    assert list(bad_losses(report, metric)) == bad


def test_a_trial_is_diverged_by_its_last_report_unless_it_failed():
    finite, bad = {"train_loss": 1.0}, {"train_loss": NAN}
    ends = [end_state(state, [finite, bad]) for state in TrialState]
    assert ends == [DIVERGED, DIVERGED, DIVERGED, DOES_NOT_FIT, FAILED]
    assert [end_state(state, [bad, finite]) for state in TrialState] == list(TrialState)
    assert end_state(FINISHED, []) is FINISHED


@pytest.mark.parametrize("state", [FINISHED, STOPPED])
def test_a_stored_trial_whose_last_loss_is_not_finite_reads_as_diverged(state):
    stored = replace(make_result({"lr": 1e9}, state=state), reports=({"train_loss": NAN, "accuracy": 0.1},))
    assert json.loads(stored.to_json())["state"] == state.value
    read = result_from_json(stored.to_json())
    assert read.state is DIVERGED and read.is_complete and not read.is_measured
    assert read.spec.identity == stored.spec.identity


def test_stop_on_nan_changes_a_trials_identity_only_if_it_is_off():
    spec = make_result({"lr": 0.1}).spec
    with_option = [replace(spec, config={**spec.config, "stop_on_nan": value}).identity for value in (True, False)]
    assert with_option[0] == spec.identity != with_option[1]
    assert ends_training(spec, {"loss": NAN}, "") and not ends_training(spec, {"loss": 1.0}, "")
    assert not ends_training(replace(spec, config={"stop_on_nan": False}), {"loss": NAN}, "")


@pytest.mark.parametrize("kind", [None, FailureKind.KILLED, FailureKind.CRASH, FailureKind.PEER_LOST])
def test_the_loss_of_stopped_ranks_does_not_fail_a_diverged_trial(kind):
    failure = kind and Failure(kind, "gone")
    ends = {0: RankEnd(RankOutcome(stopped=True)), 1: RankEnd(failure=failure)}
    result = trial_result(make_result({"lr": 1.0}).spec, ends, reports=[{"loss": NAN}], failure=failure)
    assert result.state is DIVERGED and result.failure is None
    by_metric = trial_result(result.spec, ends, metric="mse", reports=[{"mse": NAN}], failure=failure)
    assert by_metric.state is DIVERGED


def test_an_error_of_a_diverged_trial_is_a_failure():
    failure = Failure(FailureKind.ERROR, "assert not loss.isnan()")
    ends = {0: RankEnd(failure=failure)}
    result = trial_result(make_result({"lr": 1.0}).spec, ends, reports=[{"loss": NAN}], failure=failure)
    assert result.state is FAILED


def test_a_diverged_trial_has_no_best_model():
    good = replace(make_result({"lr": 0.1}), reports=({"accuracy": 0.5},))
    diverged = replace(make_result({"lr": 1e9}, state=DIVERGED), reports=({"accuracy": 0.9}, {"loss": NAN}))
    assert best_first([diverged, good], "accuracy", "max") == [good]


def test_a_metric_that_is_not_finite_is_not_the_best(tmp_path):
    best, model = BestWeights(digits, {}, tmp_path), nn.Linear(1, 1, bias=False)
    for weight, accuracy in enumerate((NAN, 0.5, 0.9, INF, NAN)):
        nn.init.constant_(model.weight, weight)
        best.update(model, {"accuracy": accuracy})
    best.save(model)
    assert torch.load(tmp_path / WEIGHTS_FILE)["weight"].item() == 2


# ---- claims

POINTS = [{"batch_size": b, "num_workers": w} for b in (32, 64) for w in (1, 2)]
QUESTION = Question("s", {"num_workers": 1}, ("batch_size", "num_workers"), points=tuple(POINTS), num_repeats=3)
NAN_REPORT = {"epoch": 1, "train_loss": NAN, "val_loss": NAN, "accuracy": 0.99}


def diverged(point, repeat, time_s=0.1):
    return replace(make_result(point, repeat, time_s, 0.99, state=DIVERGED), reports=(NAN_REPORT,))


def trials(*times, num_diverged=(0, 0, 0, 0)):
    """Return three trials of each point. The last `num_diverged` of them diverged, the fastest and most accurate."""
    return [
        diverged(point, r) if r >= 3 - num else make_result(point, r, time_s * (1 + r / 100), 0.9)
        for point, time_s, num in zip(POINTS, times, num_diverged, strict=True)
        for r in range(3)
    ]


ALL_OF_ONE = trials(4.0, 1.0, 3.0, 2.0, num_diverged=(0, 3, 0, 0))
ONE_OF_ONE = trials(4.0, 1.0, 3.0, 2.0, num_diverged=(0, 1, 0, 0))


@pytest.mark.parametrize(("results", "why"), [(ALL_OF_ONE, "diverged"), (ONE_OF_ONE, "diverged in 1 of 3")])
def test_a_point_that_diverged_is_neither_recommended_nor_the_fastest_nor_the_best(results, why):
    advice, analysis = recommend(QUESTION, results, Constraints()), analyse(QUESTION, results)
    assert advice.chosen.point == POINTS[3]
    assert {c.exclusion for c in advice.candidates if c.point == POINTS[1]} == {why}
    assert front_of(analysis.points, "max", analysis.family) == {3}
    assert chosen_point(analysis).point != POINTS[1]
    (fastest,) = [text for text in analysis.statements if " is the fastest" in text]
    assert fastest.startswith("batch_size=64 num_workers=2")
    findings = [finding.detail for finding in analysis.warnings if finding.check == "diverged_trials"]
    assert findings and point_label(POINTS[1]) in findings[0]
    reached = recommend(QUESTION, results, Constraints(target=Target("accuracy", 0.85)))
    assert reached.chosen.point == POINTS[3]


def test_a_diverged_trial_counts_in_no_time_speedup_scaling_effect_or_metric():
    analysis = analyse(QUESTION, ALL_OF_ONE)
    one = analysis.points[1]
    assert (one.time_s, one.speedup, one.metric, one.samples, one.outcome) == (None, None, None, {}, DIVERGED)
    assert [group.label for group in analysis.worker_groups] == ["batch_size=64"]
    without = analyse(QUESTION, [r for r in ALL_OF_ONE if r.is_measured])
    assert analysis.effects == without.effects and Leader(QUESTION, ALL_OF_ONE).best.point == POINTS[3]
    assert pair_speedups(QUESTION, ALL_OF_ONE).keys() == {r.spec.identity for r in ALL_OF_ONE if r.is_measured}
    partly = analyse(QUESTION, ONE_OF_ONE).points[1]
    assert sorted(partly.times.values()) == [1.0, 1.01] and partly.metric.value == 0.9


def test_a_baseline_that_diverged_leaves_its_points_without_a_speedup():
    analysis = analyse(QUESTION, trials(4.0, 1.0, 3.0, 2.0, num_diverged=(3, 0, 0, 0)))
    assert [p.speedup is None for p in analysis.points] == [True, True, False, False]
    assert "baseline_missing" in {finding.check for finding in analysis.warnings}


def test_a_comparison_has_no_time_of_a_diverged_point():
    sides = [Side(QUESTION, tuple(results), {}) for results in (trials(4.0, 1.0, 3.0, 2.0), ALL_OF_ONE)]
    matched = compare(*sides).matched[1]
    assert (matched.time.estimate, matched.num_finished, matched.outcomes) == (None, (3, 0), (None, DIVERGED))


def test_a_continued_study_does_not_rerun_a_diverged_trial():
    study = Study(workload=digits, space={"lr": grid(0.1, 1e9)}, num_repeats=1, name="s")
    specs = study.trials()
    stored = [TrialResult(specs[0], FINISHED), TrialResult(specs[1], DIVERGED, reports=(NAN_REPORT,))]
    plan = make_plan(study, TWO_CORES, stored)
    assert plan.num_missing == 0 and len(plan.done) == 2


# ---- searchers and schedulers


class Followed(BrokeredTrial):
    """A Tune trial whose broker gives these answers to `follow`, in order."""

    def __init__(self, answers, *, in_lockstep):
        self.config = {"in_lockstep": in_lockstep, "study_metric": "accuracy"}
        self.asked, self._trial_info = [], SimpleNamespace(trial_id="t")

        def follow(_, after):
            self.asked.append(after)
            return answers.pop(0)

        self._broker = SimpleNamespace(follow=SimpleNamespace(remote=follow))
        self.reset_config(self.config)


GOOD, BAD = {"loss": 1.0, "accuracy": 0.5}, {"loss": NAN, "accuracy": 0.1}
FIRST = {"training_iteration": 1, "trained_s": 0.0}  # of the first finite report; these have no times
NO_METRIC = {"loss": 1.0, "accuracy": NAN}


@pytest.fixture(autouse=True)
def answers_are_there_at_once(monkeypatch):
    monkeypatch.setattr("raypar.run.tune.ray.get", lambda answer: answer)


@pytest.mark.parametrize("state", [DIVERGED, FAILED])
@pytest.mark.parametrize("in_lockstep", [True, False])
def test_a_trial_that_diverged_is_an_error_to_searchers_and_schedulers(state, in_lockstep):
    trial = Followed([([GOOD], None), ([BAD], None), ([], state.value)], in_lockstep=in_lockstep)
    if in_lockstep:
        assert trial.step() == {**GOOD, **FIRST, "done": False}
    with pytest.raises(TrialFailed):
        trial.step()
    assert trial.asked == [0, 1, 2]


@pytest.mark.parametrize("bad", [BAD, NO_METRIC])
def test_searchers_and_schedulers_see_only_finite_reports(bad):
    trial = Followed([([GOOD, bad], None), ([], "finished")], in_lockstep=False)
    assert trial.step() == {**GOOD, **FIRST, "done": True}
    scheduled = Followed([([bad], None), ([GOOD], None), ([], "finished")], in_lockstep=True)
    second = {**GOOD, **FIRST, "training_iteration": 2}
    assert scheduled.step() == {**second, "done": False}
    assert scheduled.step() == {**second, "done": True} and scheduled.asked == [0, 1, 2]  # what a searcher learns from


# ---- training


class Reports(list):
    def report(self, metrics):
        self.append(metrics)
        return not ends_training(SPEC, metrics, "accuracy")


def blobs(_):
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    split = Split(inputs, inputs.argmax(1))
    return Data(train=split, val=split)


WORKLOAD = Workload(
    name="blobs",
    model=lambda config: nn.Linear(4, 4),
    data=blobs,
    loss=lambda outputs, targets: outputs.square().mean(),
    defaults={"epochs": 4, "lr": 1e30, "batch_size": 32, "keep_model": True},
)
SPEC = make_result({}).spec


@pytest.mark.parametrize(("stop_on_nan", "num_reports"), [(True, 1), (False, 4)])
def test_a_diverging_training_stops_at_its_first_such_report_and_keeps_no_model(
    monkeypatch, tmp_path, stop_on_nan, num_reports
):
    config, reports = resolve(WORKLOAD, {"stop_on_nan": stop_on_nan}), Reports()
    monkeypatch.setitem(globals(), "SPEC", replace(SPEC, config=config))
    outcome = loop.train(WORKLOAD, config, 0, ALONE, reports, start_s=0.0, artifact_dir=tmp_path)
    assert (len(reports), outcome.stopped) == (num_reports, stop_on_nan)
    assert bad_losses(reports[-1]) and not list(tmp_path.rglob("*.pt"))


def test_a_step_skipped_by_loss_scaling_is_not_a_divergence(monkeypatch):
    class Scaled(training.Stepper):
        """The scaler skips the second of every 3 steps."""

        num_steps = 0

        def step(self, batch):
            self.skips_overflows = True
            type(self).num_steps += 1
            return torch.tensor(INF if self.num_steps % 3 == 2 else 2.0)

    monkeypatch.setattr(training, "Stepper", Scaled)
    reports = Reports()
    outcome = loop.train(WORKLOAD, resolve(WORKLOAD, {"num_warmup_steps": 0}), 0, ALONE, reports, start_s=0.0)
    assert [report["train_loss"] for report in reports] == [2.0] * 4 and not outcome.stopped
    assert outcome.num_samples == 4 * 96


# ---- what ends a run


def test_an_error_of_the_driver_is_raised_without_tunes_wrapper(monkeypatch):
    wrong = WorkloadError("workload mine: 1 mistake")

    def listener(event):
        raise wrong

    broker = SimpleNamespace(events=SimpleNamespace(remote=lambda after: [("", Notice("hello"))]))
    monkeypatch.setattr("raypar.run.tune.ray.wait", lambda replies, timeout: (replies, []))

    class Tuner:
        def __init__(self, *args, run_config, **kwargs):
            (self.callback,) = run_config.callbacks

        def fit(self):
            try:
                self.callback.pass_on(timeout_s=0)
            except WorkloadError as error:
                raise TuneError("Traceback") from error

    monkeypatch.setattr("raypar.run.tune.tune.Tuner", Tuner)
    runner = TuneRunner(RunSettings(Path("/logs")), owns_cluster=True)
    study = Study(workload=digits, space={"lr": grid(0.1, 0.2)}, num_repeats=1, name="s")
    with pytest.raises(WorkloadError) as caught:
        runner._tune(study, study.trials(), "broker", broker, 1, listener, None)
    assert caught.value is wrong
