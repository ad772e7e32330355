"""A stage on which an execution is played without a store, a recorder and a runner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from raypar import Study, Workload, grid
from raypar.execution import execute as module
from raypar.execution.execute import execute
from raypar.execution.options import Options
from raypar.run.cluster import Cluster
from raypar.run.runner import Event, Listener, Notice, TrialEnded
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
                self.is_closed = False

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
                if not self.is_closed:
                    stage.happened.append(("closed", status))
                self.is_closed = True
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

    def execute(self, study: Study, **options: Any) -> module.ExecutionOutcome:
        path = self.tmp_path / "s.py"
        path.write_text("source")
        loaded = LoadedStudy(study, path, "source", "raypar_study_s", (), (), self.code)

        def show(event: Event) -> None:
            self.happened.append("shown")
            self.shown.append(event)

        @contextlib.contextmanager
        def listener_of(plan: module.ExecutionPlan) -> Iterator[Listener]:
            yield show

        def notice(event: Event) -> None:
            assert isinstance(event, Notice)
            self.notices.append(event.text)

        made = Options(project_dir=self.tmp_path, tracking_uri="sqlite:///x", **options)
        return execute(loaded, made, listener_of, notice)

    def of(self, what: str) -> list[Any]:
        return [entry[1] for entry in self.happened if isinstance(entry, tuple) and entry[0] == what]
