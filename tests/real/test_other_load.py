"""Other load on the machine while a trial is timed is measured, and the report says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from loops import acting, train_func
from telling import settings_at

from raypar import Study, Workload
from raypar.analysis.analyse import analyse
from raypar.run.local import LocalRunner
from raypar.run.runner import Event, Runner, TrialEnded, TrialReported
from raypar.study.trial import TrialResult, TrialState
from raypar.track.runs import result_from_tags, result_tags
from raypar.train.affinity import allowed_cores

SPIN = "print(flush=True)\nwhile True: pass"
MIN_LOAD_CORES = 0.2  # of the whole core that each process would take if nothing else ran


class Neighbours:
    """Processes that spin, one for every core, bound to none, from a trial's first report until its end."""

    def __init__(self) -> None:
        self.spinning: list[subprocess.Popen[bytes]] = []
        self.result: TrialResult | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrialReported) and not self.spinning:
            command = [sys.executable, "-c", SPIN]
            self.spinning = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in allowed_cores()]
            for process in self.spinning:
                assert process.stdout is not None
                process.stdout.readline()
        if isinstance(event, TrialEnded):
            self.result = event.result
            self.end()

    def end(self) -> None:
        for process in self.spinning:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def told_by(runner: Runner, study: Study) -> TrialResult:
    """The study's trial as a store gives it back."""
    neighbours = Neighbours()
    try:
        runner.run(study, study.trials(), neighbours)
    finally:
        neighbours.end()
    result = neighbours.result
    assert neighbours.spinning and result is not None
    assert (result.state, result.failure) == (TrialState.FINISHED, None)
    stored = result_from_tags(result_tags(result) or {})
    assert stored is not None
    return stored


def said_of(study: Study, result: TrialResult) -> str:
    """Return the report's sentence about other load."""
    return next((f.detail for f in analyse(study, [result]).warnings if f.check == "other_load"), "")


# Long enough for the ticks in which the system counts; evaluated seldom, so that most of it is timed.
STEPS = Study(
    workload=acting, name="busy", num_repeats=1, config={"epochs": 400, "eval_every_steps": 160, "num_workers": 1}
)


def check(result: TrialResult) -> None:
    assert result.other_load_cores is not None and result.other_load_cores > MIN_LOAD_CORES
    sentence = said_of(STEPS, result)
    assert sentence.startswith("Other work ran while 1 of 1 trial") and " busy." in sentence


def test_a_busy_machine_is_measured_and_told(tmp_path: Path) -> None:
    with LocalRunner(settings_at(tmp_path)) as runner:
        check(told_by(runner, STEPS))


def test_a_train_loop_is_watched_from_outside(tmp_path: Path) -> None:
    config = {"lr": 0.1, "num_epochs": 20, "batch": 8, "num_workers": 1}
    study = Study(workload=Workload.from_train_loop(train_func), name="loop", num_repeats=1, config=config)
    with LocalRunner(settings_at(tmp_path)) as runner:
        result = told_by(runner, study)
    assert result.train_time_s is None
    assert result.other_load_cores is not None and result.other_load_cores > MIN_LOAD_CORES
    assert said_of(study, result)
