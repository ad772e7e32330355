"""An execution runs what is missing, keeps each result before it shows it, and says how it ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypar import Study, Workload, grid
from raypar import execution as module
from raypar.errors import DataError, StoreError, StudyError
from raypar.execution import CHANGED_CODE, STOPPING, execute
from raypar.options import Options
from raypar.planning import check_data
from raypar.run.cluster import Cluster
from raypar.run.events import Event, Listener, Notice, TrialEnded
from raypar.run.interruption import Interrupted
from raypar.study.loader import LoadedStudy
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec, TrialState

TWO_CORES = Cluster(({"CPU": 2.0},), is_own=True)


def a_study(**changes: Any) -> Study:
    prepare = changes.pop("prepare", lambda config: None)
    workload = Workload(name="w", model=lambda c: None, data=lambda c: None, options={"width": 8}, prepare=prepare)
    fields = {"space": {"num_workers": grid(1, 2), "width": grid(4, 8)}, "baseline": {"num_workers": 1}, **changes}
    return Study(**{"workload": workload, "num_repeats": 2, "name": "s", **fields})


def finished(spec: TrialSpec, **changes: Any) -> TrialResult:
    time_s = 4.0 / spec.placement.num_workers
    fields = {"train_time_s": time_s, "wall_s": time_s + 1, "reports": ({"epoch": 1, "accuracy": 0.9},), **changes}
    return TrialResult(**{"spec": spec, "state": TrialState.FINISHED, **fields})


def failed(spec: TrialSpec) -> TrialResult:
    return TrialResult(spec=spec, state=TrialState.FAILED, failure=Failure(FailureKind.ERROR, "no luck"))


# ---- data


def test_data_is_asked_for_once_for_each_choice_of_the_workloads_own_options() -> None:
    asked: list[Any] = []
    check_data(a_study(prepare=lambda config: asked.append(config["width"])))
    assert sorted(asked) == [4, 8]


# ---- executions


class Stage:
    """Stands in for the store, the recorder and the runner; `happened` has what they were asked, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.happened: list[Any] = []
        self.stored: list[TrialResult] = []
        self.code: dict[str, str] = {}
        self.shown: list[Event] = []
        self.notices: list[str] = []
        self.trial: Callable[[TrialSpec], TrialResult] = finished
        self.error: BaseException | None = None  # instead of a trial's result
        self.error_at = 1
        self.num_unsent = 0
        self.report: Callable[[], str] = lambda: "<html>"
        self.tmp_path = tmp_path
        stage = self

        class Store:
            def __init__(self, uri: str, project_dir: Path) -> None:
                pass

            def check_writable(self) -> None:
                stage.happened.append("checked")

            def results(self, name: str) -> tuple[TrialResult, ...]:
                return tuple(stage.stored)

            def artifact(self, study_name: str, name: str) -> str | None:
                return None

        class Recorder:
            def __init__(self, execution: Any, **where: Any) -> None:
                stage.execution = execution

            def start(self, **_: Any) -> None:
                stage.happened.append("started")

            def record(self, result: TrialResult, artifact_dir: Path | None = None, system: Sequence[Any] = ()) -> None:
                stage.happened.append(("recorded", result.spec))

            def record_trial_metrics(self, metrics: dict[str, dict[str, float]]) -> None:
                stage.happened.append(("metrics", metrics))

            def record_metrics(self, points: Sequence[tuple[str, float, int]]) -> None:
                stage.happened.append(("scaling", {(key, step): value for key, value, step in points}))

            def add_artifact(self, path_in_run: str, text: str) -> None:
                stage.happened.append(("artifact", (path_in_run, text)))

            def close(self, status: str) -> int:
                stage.happened.append(("closed", status))
                return stage.num_unsent

        class Runner:
            def run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener) -> None:
                stage.happened.append(("ran", tuple(specs)))
                for i, spec in enumerate(specs):
                    if i == stage.error_at and stage.error is not None:
                        raise stage.error
                    listener(TrialEnded(stage.trial(spec)))

        @contextlib.contextmanager
        def runner(*given: Any) -> Iterator[Runner]:
            stage.log_dir = given[-1]
            stage.happened.append("runner up")
            try:
                yield Runner()
            finally:
                stage.happened.append("runner down")

        # Drawing takes seconds.
        monkeypatch.setattr("raypar.report.html.html_report", lambda *_: stage.report())
        monkeypatch.setattr(module, "Store", Store)
        monkeypatch.setattr(module, "Recorder", Recorder)
        monkeypatch.setattr(module, "runner_for", runner)
        monkeypatch.setattr(module, "this_machine", lambda: TWO_CORES)

    def execute(self, study: Study, **options: Any) -> module.Outcome:
        path = self.tmp_path / "s.py"
        path.write_text("source")
        loaded = LoadedStudy(study, path, "source", "raypar_study_s", (), (), self.code)

        def show(event: Event) -> None:
            self.happened.append("shown")
            self.shown.append(event)

        @contextlib.contextmanager
        def listener_of(plan: module.Plan) -> Iterator[Listener]:
            yield show

        def notice(event: Event) -> None:
            assert isinstance(event, Notice)
            self.notices.append(event.text)

        made = Options(project_dir=self.tmp_path, tracking_uri="sqlite:///x", **options)
        return execute(loaded, made, listener_of, notice)

    def of(self, what: str) -> list[Any]:
        return [entry[1] for entry in self.happened if isinstance(entry, tuple) and entry[0] == what]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path)


def test_every_result_is_recorded_before_it_is_shown_and_the_end_is_said(stage: Stage) -> None:
    study = a_study()
    outcome = stage.execute(study)
    assert stage.of("ran") == [study.trials()]
    assert tuple(stage.of("recorded")) == study.trials()
    for i, entry in enumerate(stage.happened):
        if isinstance(entry, tuple) and entry[0] == "recorded":
            later = stage.happened[i + 1 :]
            assert "shown" in later and stage.happened[:i].count("shown") == stage.of("recorded").index(entry[1])
    assert stage.happened[:3] == ["checked", "started", "runner up"]
    assert stage.happened[-1] == ("closed", "finished")
    assert not outcome.was_interrupted and outcome.num_failed == 0 and outcome.analysis.num_trials == 8


def test_speedups_of_pairs_go_to_their_trials_as_soon_as_both_are_there_and_once(stage: Stage) -> None:
    study = a_study()
    stage.execute(study)
    specs = {spec.identity: spec for spec in study.trials()}
    told = [(identity, values) for metrics in stage.of("metrics") for identity, values in metrics.items()]
    assert len(told) == len({identity for identity, _ in told}) == 8
    for identity, values in told:
        two = specs[identity].placement.num_workers == 2
        assert values == {"speedup": pytest.approx(2.0 if two else 1.0), "efficiency": pytest.approx(1.0)}
    (scaling,) = stage.of("scaling")
    for width in (4, 8):
        curve = {num_workers: v for (key, num_workers), v in scaling.items() if key == f"scaling/speedup width {width}"}
        assert curve == {1: 1.0, 2: pytest.approx(2.0)}


def test_what_is_stored_is_not_run_again_unless_asked(stage: Stage) -> None:
    study = a_study()
    stage.stored = [finished(spec) for spec in study.trials()[:5]]
    outcome = stage.execute(study)
    assert stage.of("ran") == [study.trials()[5:]] and outcome.analysis.num_trials == 8
    stage.happened.clear()
    stage.execute(study, rerun_all=True)
    assert stage.of("ran") == [study.trials()]


def test_a_fresh_execution_that_goes_on_takes_only_results_of_its_own(stage: Stage) -> None:
    study = a_study()
    stage.stored = [finished(spec, started_at=100.0 + i) for i, spec in enumerate(study.trials())]
    stage.execute(study, rerun_all=True)
    since = json.loads(stage.execution.tags["raypar.resume"])["not_before"]
    assert since == stage.execution.started_at > 1e9
    stage.happened.clear()
    stage.execute(study, not_before=103.0)
    assert stage.of("ran") == [study.trials()[:3]]
    assert json.loads(stage.execution.tags["raypar.resume"])["not_before"] == 103.0


def test_where_nothing_is_missing_nothing_is_started(stage: Stage) -> None:
    study = a_study()
    stage.stored = [finished(spec) for spec in study.trials()]
    outcome = stage.execute(study)
    assert stage.happened == ["checked"]
    assert outcome.analysis.num_trials == 8 and not outcome.log_dir.exists()


def test_changed_code_is_told_where_trials_of_the_old_one_are_kept(stage: Stage) -> None:
    study = a_study()
    stage.code = {"s.py: model": "1", "s.py: WIDTH": "1"}
    old = {"s.py: model": "0", "s.py: WIDTH": "1"}
    stage.execute(study)
    assert stage.notices == []  # nothing is kept
    stage.stored = [finished(spec, code=old) for spec in study.trials()[:2]]
    stage.execute(study)
    assert stage.notices == [CHANGED_CODE.format("2 trials", "model in s.py has")]
    stage.notices = []
    stage.execute(study, rerun_all=True)
    stage.stored = [finished(study.trials()[0], code=stage.code), finished(study.trials()[1])]
    stage.execute(study)
    assert stage.notices == []


def test_every_result_is_kept_with_the_code_that_it_ran(stage: Stage) -> None:
    stage.code = {"s.py: model": "1"}
    stage.execute(a_study())
    shown = [event.result.code for event in stage.shown if isinstance(event, TrialEnded)]
    assert shown == [stage.code] * 8


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


def test_missing_data_stops_the_execution_before_anything_is_started(stage: Stage) -> None:
    def prepare(config: Any) -> None:
        raise DataError("no such folder")

    with pytest.raises(DataError):
        stage.execute(a_study(prepare=prepare))
    assert stage.happened == []


def test_a_placement_that_can_never_run_stops_the_execution_before_anything_is_started(stage: Stage) -> None:
    with pytest.raises(StudyError, match="needs 64 CPUs"):
        stage.execute(a_study(space={"num_workers": grid(1, 64)}))
    assert stage.happened == ["checked"]
