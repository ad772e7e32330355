"""However an execution ends, it says how, and what has ended by then is kept and reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage import Stage, a_study, failed, finished

from raypar import Study
from raypar.errors import StoreError
from raypar.execution import execute as module
from raypar.execution.execute import STOPPING
from raypar.run.runner import Notice
from raypar.signals import Interrupted
from raypar.study.trial import TrialResult, TrialSpec


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path)


def test_failed_trials_are_counted_and_the_execution_is_closed_as_failed(stage: Stage) -> None:
    study = a_study()
    bad = study.trials()[2]
    stage.trial = lambda spec: failed(spec) if spec == bad else finished(spec)
    outcome = stage.execute(study)
    assert [result.spec for result in outcome.failures] == [bad] and outcome.num_failed == 1
    assert len(stage.of("recorded")) == 8 and stage.of("closed") == ["failed"]


@pytest.mark.parametrize("error", [Interrupted(), KeyboardInterrupt()], ids=["by its runner", "anywhere"])
def test_an_interrupted_execution_keeps_what_ended_and_is_closed_as_killed(stage: Stage, error: BaseException) -> None:
    stage.error = error
    outcome = stage.execute(a_study())
    assert outcome.was_interrupted and outcome.analysis.num_trials == 1
    assert len(stage.of("recorded")) == 1 and stage.of("closed") == ["killed"]
    assert "runner down" in stage.happened


def test_no_checkpoint_outlives_the_trial_that_might_have_gone_on_from_it(stage: Stage) -> None:
    def leaves(spec: TrialSpec) -> TrialResult:
        assert not list(stage.log_dir.glob("*/checkpoints"))  # of the failed trial before
        (stage.log_dir / spec.identity / "checkpoints").mkdir(parents=True)
        if spec.order == 2:
            raise Interrupted
        return failed(spec)

    stage.trial = leaves
    outcome = stage.execute(a_study())
    assert outcome.was_interrupted and outcome.num_done == 2
    assert len(list(stage.log_dir.iterdir())) == 3 and not list(stage.log_dir.glob("*/checkpoints"))


def test_a_runner_that_breaks_closes_the_execution_and_is_told_with_what_has_ended(stage: Stage) -> None:
    stage.error = StoreError("the disk is full", hint="free some space")
    outcome = stage.execute(a_study())
    assert str(outcome.broke_off) == "the disk is full\n  → free some space"
    assert outcome.partial == "Partial: broke off when 1 of 8 trials were done." and not outcome.was_interrupted
    assert len(stage.of("recorded")) == 1 and outcome.analysis.num_trials == 1
    assert stage.of("closed") == ["failed"] and "runner down" in stage.happened


def test_the_report_is_stored_with_the_execution(stage: Stage) -> None:
    stage.execute(a_study())
    assert stage.of("artifact") == [("report.html", "<html>")]


def test_a_report_that_fails_is_told_and_loses_nothing(stage: Stage) -> None:
    def fails() -> str:
        raise ValueError("no such font")

    stage.report = fails
    outcome = stage.execute(a_study())
    told = [event.text for event in stage.shown if isinstance(event, Notice)]
    assert told == [
        "the report was not stored as HTML, ValueError: no such font; `raypar report s --html FILE` makes it"
    ]
    assert stage.of("closed") == ["finished"] and outcome.num_failed == 0 and len(stage.of("recorded")) == 8


def test_the_report_of_an_interrupted_execution_says_that_it_is_partial(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "raypar.report.html.html_report", lambda _, __, origin: asked.append(origin.partial) or "<html>"
    )
    stage.execute(a_study(name="t"))
    stage.error = Interrupted(15)
    outcome = stage.execute(a_study())
    assert asked == ["", "Partial: interrupted when 1 of 8 trials were done."]
    assert outcome.partial == asked[1] and outcome.interrupted_by == 15
    assert [event.text for event in stage.shown if isinstance(event, Notice)] == [STOPPING]


def test_no_report_is_made_where_no_trial_has_ended(stage: Stage) -> None:
    stage.error = Interrupted()
    stage.error_at = 0
    outcome = stage.execute(a_study())
    assert stage.of("artifact") == [] and stage.of("closed") == ["killed"] and outcome.num_done == 0


def test_a_study_interrupted_before_its_final_test_is_tested_when_it_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = a_study(config={"keep_model": True})
    tested = replace(study, workload=replace(study.workload, has_test=True))

    def final_test(study: Study, analysis: Any, results: Any, store: Any, recorder: Any) -> Any:
        recorder.add_artifact("test.json", "{}")
        return analysis

    monkeypatch.setattr(module, "final_test", final_test)
    stage.stored = [finished(spec) for spec in tested.trials()]
    stage.execute(tested)
    assert stage.of("ran") == [] and ("test.json", "{}") in stage.of("artifact")
    assert stage.of("closed") == ["finished"]
    stage.happened.clear()
    stage.stored = [finished(spec) for spec in study.trials()]
    stage.execute(study)
    assert stage.happened == ["checked"]  # nothing to test


def test_what_the_store_did_not_take_is_counted(stage: Stage) -> None:
    stage.num_unsent = 3
    assert stage.execute(a_study()).num_unsent == 3
