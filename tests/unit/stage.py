"""Executions with fakes of the store, the recorder and the runner."""

import contextlib
import time
from types import SimpleNamespace

from raypar import Study, Workload, grid
from raypar.execution.best_model import final_test
from raypar.execution.execute import Services, execute, new_log_dir
from raypar.execution.flags import RunFlags, all_flags
from raypar.execution.options import Options
from raypar.run.cluster import Cluster
from raypar.run.runner import TrialEnded
from raypar.study.loader import LoadedStudy
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialState

TWO_CORES = Cluster(({"CPU": 2.0},), is_own=True)


def a_study(**changes):
    prepare = changes.pop("prepare", lambda config: None)
    workload = Workload(name="w", model=lambda c: None, data=lambda c: None, options={"width": 8}, prepare=prepare)
    fields = {"space": {"num_workers": grid(1, 2), "width": grid(4, 8)}, "baseline": {"num_workers": 1}, **changes}
    return Study(**{"workload": workload, "num_repeats": 2, "name": "s", **fields})


def finished(spec, **changes):
    time_s = 4.0 / spec.placement.num_workers
    fields = {"train_time_s": time_s, "wall_s": time_s + 1, "reports": ({"epoch": 1, "accuracy": 0.9},), **changes}
    return TrialResult(**{"spec": spec, "state": TrialState.FINISHED, **fields})


def failed(spec):
    return TrialResult(spec=spec, state=TrialState.FAILED, failure=Failure(FailureKind.ERROR, "no luck"))


def options_of(folder, **given):
    """Return the options of an execution in a folder, including run flags."""
    names = {flag.name for flag in all_flags()} - {"tracking_uri"}
    flags = RunFlags(**{name: value for name, value in given.items() if name in names})
    return Options(project_dir=folder, flags=flags, **{n: value for n, value in given.items() if n not in names})


class Stage:
    """Fake store, recorder and runner; `happened` lists their calls in order."""

    def __init__(self, tmp_path):
        self.happened, self.stored, self.shown, self.notices, self.code = [], [], [], [], {}
        self.origins = []
        self.trial, self.report = finished, lambda: "<html>"
        self.error, self.error_at = None, 1  # instead of a trial's result
        self.num_unsent, self.tmp_path, self.machine, self.load = 0, tmp_path, TWO_CORES, ""
        store = SimpleNamespace(
            check_writable=lambda: self.happened.append("checked"),
            results=lambda _: tuple(self.stored),
            artifact=lambda *_: None,
            origins=lambda _: iter(self.origins),
        )
        self.clock_s, self.page = time.monotonic, lambda *_: self.report()  # drawing takes seconds
        self.final_test, self.end_abandoned = final_test, lambda *_: None
        self.services = Services(
            store=lambda *_: store,
            recorder=self._recorder,
            cluster=lambda *_: contextlib.nullcontext(self.machine),
            other_load=lambda *_: self.load,
            prepared=self._prepared,
            runner=self._runner,
            final_test=lambda *given: self.final_test(*given),
            report_page=lambda *given: self.page(*given),
            end_abandoned=lambda *where: self.end_abandoned(*where),
            clock_s=lambda: self.clock_s(),
        )

    def _recorder(self, execution, **_):
        self.execution = execution
        note, is_open = self.happened.append, [True]

        def close(status):
            if is_open:
                is_open.clear()
                note(("closed", status))
            return self.num_unsent

        return SimpleNamespace(
            start=lambda **_: note("started"),
            connect=lambda: None,
            upload=lambda: None,
            flush=lambda: None,
            record=lambda result, *_, **__: note(("recorded", result.spec)),
            record_trial_metrics=lambda metrics: note(("metrics", metrics)),
            record_metrics=lambda points: note(("scaling", {(key, step): value for key, value, step in points})),
            record_summary=lambda answer, points: note(("summary", (answer, points))),
            add_artifact=lambda *artifact: note(("artifact", artifact)),
            close=close,
        )

    def _prepared(self, _loaded, _options, plan, log_dir, meanwhile):
        self.log_dir = log_dir
        meanwhile()
        return contextlib.nullcontext(plan)

    @contextlib.contextmanager
    def _runner(self, _ready, _options, plan, _recorder):
        self.cluster = plan.cluster
        self.happened.append("runner up")
        try:
            yield SimpleNamespace(run=self._run)
        finally:
            self.happened.append("runner down")

    def _run(self, study, specs, listener, more=None):
        self._run_specs(specs, listener)
        while more is not None and (specs := more()):
            self._run_specs(specs, listener)

    def _run_specs(self, specs, listener):
        self.happened.append(("ran", tuple(specs)))
        for i, spec in enumerate(specs):
            if i == self.error_at and self.error is not None:
                raise self.error
            listener(TrialEnded(self.trial(spec)))

    def execute(self, study, **options):
        path = self.tmp_path / "s.py"
        path.write_text("source")
        loaded = LoadedStudy(study, path, "source", "raypar_study_s", (), (), self.code)

        def show(event):
            self.happened.append("shown")
            self.shown.append(event)

        made = options_of(self.tmp_path, tracking_uri="sqlite:///x", **options)
        log_dir, view = new_log_dir(self.tmp_path), contextlib.nullcontext(show)
        notice = lambda event: self.notices.append(event.text)  # noqa: E731
        return execute(loaded, made, log_dir, lambda _: view, notice, self.services)

    def of(self, what):
        return [entry[1] for entry in self.happened if isinstance(entry, tuple) and entry[0] == what]
