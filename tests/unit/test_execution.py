"""An execution runs missing trials, records each result before showing it, and reports how it ended."""

import contextlib
import io
import json
import math
import os
import re
import signal
import tempfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import nvml
import pytest
from nvml import Card
from rich.console import Console
from stage import Stage, a_study, failed, finished

from raypar import choice, grid
from raypar.analysis.question import question_from_dict
from raypar.cli.study import print_outcome
from raypar.errors import DataError, RayparError, StoreError, StudyError, WorkloadError
from raypar.execution import results
from raypar.execution.execute import CHANGED_CODE, STOPPED_BEFORE, report_page
from raypar.execution.machine import OTHER_LOAD, num_gpus, other_load
from raypar.execution.plan import make_plan
from raypar.execution.prepare import rank_environment
from raypar.execution.results import BESIDE
from raypar.execution.running import STOPPING
from raypar.gpus import visible_gpus
from raypar.measure.cpu import CpuMonitor, CpuTimes
from raypar.run import locks
from raypar.run.cluster import Cluster
from raypar.run.locks import Holder, leased_cores, leased_gpus, present
from raypar.run.runner import Notice, TrialEnded, TrialsAdded, TrialStarted
from raypar.scratch import LOCK_FILE, PREFIX
from raypar.signals import Interrupted, handle_signals
from raypar.study.conditions import Conditions
from raypar.study.options import Auto
from raypar.study.profile import PARTS, Breakdown, Profile
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialState, result_from_json
from raypar.train.affinity import Core


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_results_are_recorded_before_they_are_shown(stage):
    study = a_study()
    stage.num_unsent = 3
    stage.code = {"s.py": "py3.11:1"}
    outcome = stage.execute(study)
    assert stage.of("ran") == [study.trials()]
    assert tuple(stage.of("recorded")) == study.trials()
    for i, entry in enumerate(stage.happened):
        if isinstance(entry, tuple) and entry[0] == "recorded":
            later = stage.happened[i + 1 :]
            assert "shown" in later and stage.happened[:i].count("shown") == stage.of("recorded").index(entry[1])
    assert stage.happened[:3] == ["checked", "started", "runner up"]
    assert stage.happened[-1] == ("closed", "finished")
    assert stage.of("artifact") == [("report.html", "<html>")]
    assert not outcome.was_interrupted and outcome.analysis.num_trials == 8
    assert outcome.num_unsent == 3
    assert [event.result.code for event in stage.shown if isinstance(event, TrialEnded)] == [stage.code] * 8


def test_a_profile_that_can_not_be_written_to_a_file_loses_no_result(stage):
    step = Breakdown(0.1, dict.fromkeys(PARTS, 0.0125), 0.0)
    profile = Profile((step,), 10, 0.1, 0.0)

    def trial(spec):
        artifacts = stage.log_dir / spec.identity / "artifacts"
        artifacts.mkdir(parents=True)
        (artifacts / "profile").touch()  # so that no folder of that name can be made
        return finished(spec, profile=profile)

    stage.trial = trial
    outcome = stage.execute(a_study())
    assert len(stage.of("recorded")) == 8 and outcome.status == "finished"


def test_speedups_are_recorded_once_when_a_pair_is_complete(stage):
    study = a_study()
    stage.execute(study)
    specs = {spec.identity: spec for spec in study.trials()}
    recorded = [(identity, values) for metrics in stage.of("metrics") for identity, values in metrics.items()]
    assert len(recorded) == len({identity for identity, _ in recorded}) == 8
    for identity, values in recorded:
        two = specs[identity].placement.num_workers == 2
        assert values == {"speedup": pytest.approx(2.0 if two else 1.0), "efficiency": pytest.approx(1.0)}
    (scaling,) = stage.of("scaling")
    for width in (4, 8):
        curve = {num_workers: v for (key, num_workers), v in scaling.items() if key == f"scaling/speedup width {width}"}
        assert curve == {1: 1.0, 2: pytest.approx(2.0)}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_disturbed_trial_has_no_speedup_in_the_store_nor_has_one_compared_with_it(stage, num_workers):
    busy = Conditions.from_stored({"cores": [[0]], "foreign_cpu_share": [0.5]})

    def trial(spec):
        is_disturbed = spec.placement.num_workers == num_workers and spec.repeat == 0
        return finished(spec, **({"conditions": busy} if is_disturbed else {}))

    stage.trial = trial
    study = a_study()
    stage.execute(study)
    recorded = {identity for metrics in stage.of("metrics") for identity in metrics}
    left_out = [s for s in study.trials() if s.identity not in recorded]
    assert {s.repeat for s in left_out} == {0}
    assert {s.placement.num_workers for s in left_out} == ({1, 2} if num_workers == 1 else {2})


def test_the_answer_is_stored_during_the_run_and_at_the_end(stage, monkeypatch):
    study = a_study(description="Does it pay? At all.")
    stage.execute(study)
    assert len(stage.of("summary")) == 1, "a study of seconds is not interrupted for it"
    stage.happened.clear()
    monkeypatch.setattr(results, "SUMMARY_AFTER_S", 0.0)
    monkeypatch.setattr(results, "MAX_SUMMARY_SHARE", math.inf)
    stage.execute(study)
    assert stage.execution.answer == "Does it pay?"
    assert stage.execution.about.startswith("At all.\n\n- **Trains:**")
    counts = [answer.count("\n| ") for answer, _ in stage.of("summary")]
    assert len(counts) > 1 and counts[-1] == 2 + 4, "the table's rows"
    answers = [answer for answer, _ in stage.of("summary")]
    assert [answer for answer in answers if not answer.startswith("Does it pay?")] == []
    assert [len(points) for _, points in stage.of("summary")][-1] == 4
    places = [i for i, entry in enumerate(stage.happened) if isinstance(entry, tuple) and entry[0] == "summary"]
    assert stage.of("summary")[0][1] != []
    recorded = [i for i, entry in enumerate(stage.happened) if isinstance(entry, tuple) and entry[0] == "recorded"]
    assert recorded[0] < places[0] < recorded[-1] < places[-1], "the first before the last trial"
    stage.stored = [finished(spec) for spec in study.trials()[:5]]
    stage.execute(study)
    assert stage.execution.answer.startswith("Does it pay? ") and "| 1&emsp; |" in stage.execution.answer


def test_with_many_points_only_the_answer_is_updated_during_the_run(stage, monkeypatch):
    monkeypatch.setattr(results, "SUMMARY_AFTER_S", 0.0)
    monkeypatch.setattr(results, "MAX_NOTE_POINTS", 3)
    stage.execute(a_study())
    assert [len(points) for _, points in stage.of("summary")][-1] == 4
    assert {len(points) for _, points in stage.of("summary")[:-1]} == {0}


def test_an_error_in_the_answer_loses_nothing_else(stage, monkeypatch):
    def broken(_):
        raise ZeroDivisionError

    monkeypatch.setattr("raypar.execution.results.note_of", broken)
    outcome = stage.execute(a_study())
    assert (stage.of("summary"), stage.of("closed"), outcome.num_done) == ([], ["finished"], 8)


def test_stored_trials_are_only_run_again_with_fresh(stage):
    study = a_study()
    stage.stored = [finished(spec) for spec in study.trials()[:5]]
    outcome = stage.execute(study)
    assert stage.of("ran") == [study.trials()[5:]] and outcome.analysis.num_trials == 8
    stage.happened.clear()
    stage.execute(study, fresh=True)
    assert stage.of("ran") == [study.trials()]


def test_continuing_a_fresh_execution_only_uses_its_results(stage):
    study = a_study()
    stage.stored = [finished(spec, started_at=100.0 + i) for i, spec in enumerate(study.trials())]
    stage.execute(study, fresh=True)
    since = json.loads(stage.execution.tags["raypar.resume"])["not_before"]
    assert since == stage.execution.started_at > 1e9
    stage.happened.clear()
    stage.execute(study, not_before=103.0)
    assert stage.of("ran") == [study.trials()[:3]]
    assert json.loads(stage.execution.tags["raypar.resume"])["not_before"] == 103.0


def test_a_study_keeps_its_device_unless_fresh(stage):
    study, on_gpus = a_study(), Auto("cuda", 4)
    stage.stored = [finished(spec) for spec in study.trials()[:5]]
    stage.machine = Cluster(({"CPU": 8, "GPU": 2},), is_own=True)
    stage.execute(study)
    assert stage.of("ran") == [study.trials()[5:]]
    assert stage.notices == ["device=auto: cpu, to match 5 stored trials; --fresh chooses again"]
    assert json.loads(stage.execution.tags["raypar.question"])["config"]["device"] == "cpu"
    stage.happened.clear()
    stage.execute(study, fresh=True)
    assert stage.of("ran") == [study.trials(auto=on_gpus)]
    stored = question_from_dict(json.loads(stage.execution.tags["raypar.question"]))
    assert (stored.config["device"], stored.config["cpus_per_worker"]) == ("cuda", 4)


def test_without_missing_trials_nothing_starts_but_abandoned_folders_go(stage, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    left = tmp_path / "temporary" / f"{PREFIX}left"
    left.mkdir(parents=True)
    (left / LOCK_FILE).touch()
    study = a_study()
    stage.stored = [finished(spec) for spec in study.trials()]
    outcome = stage.execute(study)
    assert stage.happened == ["checked"]
    assert outcome.analysis.num_trials == 8 and not outcome.log_dir.exists() and not left.exists()


def test_the_next_execution_ends_killed_ones_in_the_store(stage):
    stage.end_abandoned = lambda *where: stage.happened.append(("ended those in", where))
    study = a_study()
    stage.execute(study)
    assert stage.happened[-2:] == [("closed", "finished"), ("ended those in", (stage.tmp_path, "sqlite:///x"))]
    stage.happened.clear()
    stage.stored = [finished(spec) for spec in study.trials()]
    stage.execute(study)
    assert len(stage.of("ended those in")) == 1
    stage.happened.clear()
    stage.stored, stage.error = [], Interrupted(15)
    stage.execute(study)
    assert stage.of("ended those in") == []


def test_kept_trials_of_changed_code_cause_a_notice(stage):
    first, second, *_ = a_study().trials()
    stage.code = {"model.py": "py3.11:1", "s.py": "py3.11:1"}
    old = {**stage.code, "model.py": "py3.11:0"}

    def notices(*stored, **options):
        stage.stored, stage.notices = list(stored), []
        stage.execute(a_study(), **options)
        return stage.notices

    kept = finished(first, code=old), finished(second, code=old)
    of_functions = finished(first, code={"s.py: model": "0123456789ab", "s.py: study": "ba9876543210"})
    assert notices(*kept) == [CHANGED_CODE.format("2 trials", "model.py")]
    assert notices() == notices(*kept, fresh=True) == []
    stage.stored = [finished(spec, code=old) for spec in a_study().trials()]
    (finding,) = [each for each in stage.execute(a_study()).analysis.warnings if each.check == "other_code"]
    assert finding.subject == "8 of 8 trials ran other code than the study has now"
    assert notices(finished(first, code=stage.code), finished(second)) == []
    assert notices(result_from_json(of_functions.to_json())) == []  # of an earlier store: unknown, not changed


def test_missing_data_and_impossible_placements_are_refused_before_anything_starts(stage):
    with pytest.raises(DataError):
        stage.execute(a_study(prepare=Mock(side_effect=DataError("no such folder"))))
    assert stage.happened == []
    with pytest.raises(StudyError, match="needs 64 CPUs"):
        stage.execute(a_study(space={"num_workers": grid(1, 64)}))
    assert stage.happened == ["checked"]


# ---- ends


def test_failed_trials_are_counted_and_the_execution_is_closed_as_failed(stage):
    study = a_study()
    bad = study.trials()[2]
    stage.trial = lambda spec: failed(spec) if spec == bad else finished(spec)
    outcome = stage.execute(study)
    assert [result.spec for result in outcome.failures] == [bad]
    assert len(stage.of("recorded")) == 8 and stage.of("closed") == ["failed"]


def test_a_stopped_point_only_runs_again_on_request(stage):
    study = a_study(num_repeats=3)
    stage.code = {"s.py": "py3.11:1"}
    is_bad = {spec.identity for spec in study.trials() if spec.config["width"] == 8}
    stage.trial = lambda spec: failed(spec) if spec.identity in is_bad else finished(spec)
    stage.stored = list(stage.execute(study).results.values())
    stage.happened.clear()
    outcome = stage.execute(study)
    assert stage.happened == ["checked"] and outcome.status == "failed" and outcome.analysis.num_trials == 12
    assert stage.notices == [STOPPED_BEFORE.format("2 points", "6 trials")]
    console = Console(file=io.StringIO(), width=200)
    print_outcome(console, outcome, "raypar store resume s")
    (error,) = re.findall("^failed: .*", console.file.getvalue(), re.MULTILINE)
    assert error.endswith(" width=8 #1 and 2 more: no luck")
    for asked in ({"retry_failed": True}, {"fresh": True}):
        stage.happened.clear()
        stage.execute(study, **asked)
        (ran,) = stage.of("ran")
        assert len(ran) == (6 if "retry_failed" in asked else 12) and is_bad <= {spec.identity for spec in ran}


def test_an_invalid_workload_ends_the_study_with_one_message(stage):
    message = "workload w: 1 mistake in its data and model\n  data.val = 0 samples: is empty"
    failure = Failure(FailureKind.INVALID, message)
    stage.trial = lambda spec: TrialResult(spec, TrialState.FAILED, failure=failure)
    with pytest.raises(WorkloadError) as caught:  # no BrokeOff: exit code 2
        stage.execute(a_study())
    assert str(caught.value) == message
    assert not stage.of("recorded") and not stage.shown and stage.of("closed") == ["failed"]


@pytest.mark.parametrize(("error", "number"), [(Interrupted(15), 15), (KeyboardInterrupt(), 2)], ids=repr)
def test_an_interrupted_execution_keeps_its_results_and_is_closed_as_killed(stage, monkeypatch, error, number):
    notes = []
    monkeypatch.setattr("raypar.reporting.html.html_report", lambda _, __, origin: notes.append(origin.partial) or "")
    stage.page, stage.error = report_page, error
    outcome = stage.execute(a_study())
    assert outcome.interrupted_by == number and outcome.was_interrupted and outcome.analysis.num_trials == 1
    assert len(stage.of("recorded")) == 1 and stage.of("closed") == ["killed"]
    assert "runner down" in stage.happened
    assert notes == ["Partial: interrupted when 1 of 8 trials were done."] == [outcome.partial]
    assert [event.text for event in stage.shown if isinstance(event, Notice)] == [STOPPING]


def test_a_swallowed_signal_ends_the_execution_before_the_first_trial(stage):
    with handle_signals():
        with contextlib.suppress(KeyboardInterrupt):  # as Python does where it came in a callback at a fork
            signal.raise_signal(signal.SIGINT)
        outcome = stage.execute(a_study())
    assert (outcome.interrupted_by, outcome.num_done) == (signal.SIGINT, 0)
    assert not stage.of("recorded") and stage.of("closed") == ["killed"]


def test_a_signal_during_the_report_does_not_abort_it(stage):
    stage.report = lambda: os.kill(os.getpid(), signal.SIGTERM) or "<html>"
    with handle_signals():
        outcome = stage.execute(a_study())
    assert (outcome.interrupted_by, outcome.partial) == (signal.SIGTERM, "")
    assert stage.of("artifact") == [("report.html", "<html>")] and stage.of("closed") == ["finished"]
    console = Console(file=io.StringIO(), width=200)
    print_outcome(console, outcome, "raypar store resume s")
    assert "8 trials" in console.file.getvalue() and "interrupted after the last trial" in console.file.getvalue()


def test_checkpoints_are_removed_with_their_trial(stage):
    def leaves(spec):
        assert not list(stage.log_dir.glob("*/checkpoints"))  # of the failed trial before
        (stage.log_dir / spec.identity / "checkpoints").mkdir(parents=True)
        if spec.order == 2:
            raise Interrupted
        return failed(spec)

    stage.error, stage.error_at = Interrupted(), 0
    assert stage.execute(a_study()).num_done == 0 and stage.of("artifact") == []  # nothing to report
    stage.trial, stage.error = leaves, None
    outcome = stage.execute(a_study())
    assert outcome.was_interrupted and outcome.num_done == 2
    assert len(list(stage.log_dir.iterdir())) == 3 and not list(stage.log_dir.glob("*/checkpoints"))


def test_a_broken_runner_closes_the_execution_as_failed(stage):
    stage.error = StoreError("the disk is full", hint="free some space")
    outcome = stage.execute(a_study())
    assert str(outcome.broke_off) == "the disk is full\n  → free some space"
    assert outcome.partial == "Partial: broke off when 1 of 8 trials were done." and not outcome.was_interrupted
    assert len(stage.of("recorded")) == 1 and outcome.analysis.num_trials == 1
    assert stage.of("closed") == ["failed"] and "runner down" in stage.happened


def test_an_error_in_the_report_is_a_notice(stage):
    stage.report = Mock(side_effect=ValueError("no such font"))
    stage.execute(a_study())
    (notice,) = [event.text for event in stage.shown if isinstance(event, Notice)]
    assert notice.startswith("the report was not stored as HTML, ValueError: no such font; `raypar report s --html")
    assert stage.of("closed") == ["finished"] and len(stage.of("recorded")) == 8


def test_a_missing_final_test_is_made_up_for(stage):
    study = a_study(config={"keep_model": True})
    tested = replace(study, workload=replace(study.workload, has_test=True))

    def final_test(study, analysis, results, store, recorder):
        recorder.add_artifact("test.json", "{}")
        return analysis

    stage.final_test = final_test
    stage.stored = [finished(spec) for spec in tested.trials()]
    stage.execute(tested)
    assert stage.of("ran") == [] and ("test.json", "{}") in stage.of("artifact")
    assert stage.of("closed") == ["finished"]
    stage.happened.clear()
    stage.stored = [finished(spec) for spec in study.trials()]
    stage.execute(study)
    assert stage.happened == ["checked"]  # nothing to test


def test_an_error_in_the_final_test_is_a_notice(stage):
    study = a_study(config={"keep_model": True})
    stage.final_test = Mock(side_effect=ValueError("the data has no test split"))
    outcome = stage.execute(replace(study, workload=replace(study.workload, has_test=True)))
    (notice,) = [event.text for event in stage.shown if isinstance(event, Notice)]
    assert "not evaluated on the test set, ValueError: the data has no test split;" in notice
    assert (outcome.num_done, stage.of("closed")) == (8, ["finished"]) and stage.of("artifact")


# ---- other studies on the machine

CORES = [Core(number, 0, number) for number in range(4)]
OTHER = Holder("other", os.getppid(), "", "")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Function that lets another study hold the machine's four cores or GPUs; `close` of the result ends that study."""
    monkeypatch.setenv(locks.FOLDER_VARIABLE, str(tmp_path / "locks"))
    with contextlib.ExitStack() as stack:
        shown = []

        def hold(*, gpus=(), share=False):
            if not shown:
                shown.append(stack.enter_context(present(OTHER)))
            study = stack.enter_context(contextlib.ExitStack())
            if gpus:
                study.enter_context(leased_gpus(OTHER, gpus, len(gpus), len(gpus), print))
            else:
                study.enter_context(leased_cores(OTHER, CORES, print, share=share))
            return study

        yield hold


@pytest.fixture
def on_four_cores(stage):
    stage.machine = Cluster(({"CPU": 4},), is_own=True, cores=tuple(CORES))
    return stage


def test_a_study_leases_the_machine_and_uses_the_cores_of_its_largest_trial(on_four_cores, machine):
    def trial(spec):
        assert not any(locks.Lock(f"core-{number}").acquire() for number in range(4))
        return finished(spec)

    on_four_cores.trial = trial
    outcome = on_four_cores.execute(a_study())
    assert (on_four_cores.cluster.num_cpus, on_four_cores.cluster.cores) == (2, tuple(CORES[:2]))
    assert on_four_cores.notices == [] and not any(
        "shared_with" in r.conditions.to_stored() for r in outcome.results.values()
    )
    on_four_cores.execute(a_study(name="again"))  # they are free again


def test_other_load_causes_a_notice(on_four_cores):
    on_four_cores.load = "busy"
    on_four_cores.execute(a_study())
    assert on_four_cores.notices == ["busy"] and len(on_four_cores.of("recorded")) == 8


class Cores(CpuMonitor):
    """Monitor of two cores whose clock and counters come from a list."""

    def __init__(self, *times):
        super().__init__((0, 1))
        self.times = list(times)
        self.start()

    def _read(self):
        return CpuTimes(**self.times.pop(0))


def test_other_load_excludes_this_process_and_is_recent():
    slept = []
    load = partial(other_load, sleep=slept.append)
    before, after = {"at_s": 10.0, "busy_s": 5.0, "own_s": 1.0}, {"at_s": 11.0, "busy_s": 6.9, "own_s": 1.44}
    text = OTHER_LOAD.format("73 %")
    assert len(text) <= 80
    assert load(Cores(before, after), 1.0) == text
    assert load(Cores(before, {**after, "own_s": 2.8}), 0.2) == ""
    assert load(Cores({"at_s": 1.0}, before, after), 60.0) == text
    assert slept == [0.0, pytest.approx(0.3), 0.5]


def test_a_study_waits_for_the_machine(on_four_cores, machine, monkeypatch):
    holds, waits = machine(), on_four_cores.notices.append

    def notice(text):
        waits(text)
        assert on_four_cores.happened == ["checked"]
        holds.close()

    monkeypatch.setattr(locks, "POLL_S", 0.0)
    monkeypatch.setattr(on_four_cores, "notices", SimpleNamespace(append=notice))
    on_four_cores.execute(a_study())
    assert len(on_four_cores.of("recorded")) == 8


def test_a_study_runs_only_once_at_a_time(stage):
    def again(spec):
        with pytest.raises(RayparError, match=f"study `s` is already running in process {os.getpid()} "):
            stage.execute(a_study())
        return finished(spec)

    stage.trial = again
    assert stage.execute(a_study()).num_done == 8
    stage.trial = finished
    stage.execute(a_study())


def test_trials_on_a_shared_machine_are_marked(on_four_cores, machine):
    machine()
    outcome = on_four_cores.execute(a_study(), share_machine=True)
    assert {result.conditions.shared_with for result in outcome.results.values()} == {"other"}
    notices = [event.text for event in on_four_cores.shown if isinstance(event, Notice)]
    assert notices == [BESIDE.format(f"study `other` (process {os.getppid()} of )")] and on_four_cores.notices == []


def test_trials_are_marked_once_another_study_joins(on_four_cores, machine):
    def joined(spec):
        if spec.order == 5:
            machine(share=True)
        return finished(spec)

    on_four_cores.trial = joined
    outcome = on_four_cores.execute(a_study())
    marked = [order for order, r in enumerate(outcome.results.values()) if r.conditions.shared_with]
    assert marked == [5, 6, 7]
    notices = [event.text for event in on_four_cores.shown if isinstance(event, Notice)]
    assert notices == [BESIDE.format(f"study `other` (process {os.getppid()} of )")]


@pytest.fixture
def on_two_gpus(stage, machine, monkeypatch):
    """Stage with two fake GPUs; `visible` has the GPUs that its processes see."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(locks, "POLL_S", 0.0)
    nvml.install(monkeypatch, Card(1), Card(2))
    stage.machine = Cluster(({"CPU": 4, "GPU": 2},), is_own=True, cores=tuple(CORES))
    stage.visible = []

    def trial(spec):
        stage.visible.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return finished(spec)

    stage.trial = trial
    return stage


def on_gpus(num_workers=(1, 2), **changes):
    changes = {"config": {"device": "cuda"}, "space": {"num_workers": grid(*num_workers)}, **changes}
    return a_study(baseline={"num_workers": num_workers[0]}, **changes)


def test_a_study_leases_the_gpus_of_its_largest_trial_and_hides_the_others(on_two_gpus, machine):
    holds = machine(gpus=visible_gpus()[:1])
    on_two_gpus.execute(on_gpus((1,)))
    assert on_two_gpus.cluster.nodes[0]["GPU"] == 1 and {*on_two_gpus.visible} == {"GPU-2234"}
    assert {core.number for core in on_two_gpus.cluster.cores} <= {2, 3}  # the share of the second GPU
    holds.close()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ and on_two_gpus.notices == []
    on_two_gpus.visible.clear()
    on_two_gpus.execute(on_gpus(name="again"))
    assert on_two_gpus.cluster.nodes[0]["GPU"] == 2 and {*on_two_gpus.visible} == {None}  # there is nothing to hide


def test_a_gpu_study_waits_only_for_gpus(on_two_gpus, machine, monkeypatch):
    holds_gpu, _ = machine(gpus=visible_gpus()[:1]), machine()

    def notice(text):
        assert text.startswith("waiting for GPUs: study `other` (process ") and "has 1 of 2 GPUs" in text
        assert on_two_gpus.happened == ["checked"]
        holds_gpu.close()

    monkeypatch.setattr(on_two_gpus, "notices", SimpleNamespace(append=notice))
    outcome = on_two_gpus.execute(on_gpus())
    assert len(on_two_gpus.of("recorded")) == 4
    assert {result.conditions.shared_with for result in outcome.results.values()} == {"other"}


def test_a_study_on_gpus_and_the_cpu_waits_for_both(on_two_gpus, machine, monkeypatch):
    holds, told = {"GPUs": machine(gpus=visible_gpus()), "cores": machine()}, []

    def notice(text):
        told.append(text.removeprefix("waiting for ").partition(":")[0])
        holds[told[-1]].close()

    monkeypatch.setattr(on_two_gpus, "notices", SimpleNamespace(append=notice))
    on_two_gpus.execute(a_study(space={"device": grid("cpu", "cuda")}, baseline={"device": "cpu"}))
    assert told == ["GPUs", "cores"]


@pytest.mark.parametrize("device", ["cpu", None])
def test_a_study_on_the_cpu_leaves_gpus_alone(on_two_gpus, machine, monkeypatch, device):
    holds = machine(gpus=visible_gpus())
    monkeypatch.setattr("raypar.execution.machine.visible_gpus", lambda: pytest.fail("GPUs were looked for"))
    if device is None:  # "auto", on a machine without
        on_two_gpus.machine = replace(on_two_gpus.machine, nodes=({"CPU": 4},))
    on_two_gpus.execute(on_gpus(config={} if device is None else {"device": device}))
    assert len(on_two_gpus.of("recorded")) == 4 and on_two_gpus.notices == []
    holds.close()


def test_a_search_counts_the_gpus_of_any_draw(on_two_gpus):
    study = a_study(
        space={"num_workers": choice(1, 2), "width": choice(4, 8)}, baseline={}, num_trials=2, num_repeats=1
    )
    plan = make_plan(study, on_two_gpus.machine, ())
    assert num_gpus(plan) == (2, 3)
    assert num_gpus(make_plan(replace(study, config={"device": "cpu"}), on_two_gpus.machine, ())) == (0, 0)


def until_settled(**changes):
    return a_study(**{"until": "settled", "space": {"width": grid(4, 6, 8)}, "baseline": {"width": 4}, **changes})


def wavering(open_for, spread=0.01):
    """Return a trial function: width 6 is 1.05 times as fast as 4, 8 is twice; 6 is open for `open_for` blocks."""

    def trial(spec):
        width = spec.config["width"]
        by = spread if spec.repeat < open_for else 0.0
        time_s = {4: 4.2, 6: 4.0, 8: 2.0}[width] * (1 + by * ((spec.repeat + width // 2) % 3 - 1))
        return finished(spec, train_time_s=time_s, wall_s=10.0)

    return trial


def labels_of(ran):
    return [sorted((spec.config["width"], spec.repeat) for spec in specs) for specs in ran]


FIRST_BLOCKS = [(n, repeat) for n in (4, 6, 8) for repeat in range(3)]


def test_open_points_get_blocks_until_they_are_settled(stage):
    stage.trial = wavering(2)
    outcome = stage.execute(until_settled())
    first, *later = labels_of(stage.of("ran"))
    assert first == FIRST_BLOCKS
    assert later and later == [[(4, 3 + i), (6, 3 + i)] for i in range(len(later))]
    assert stage.happened.count("runner up") == 1
    num_trials = 9 + 2 * len(later)
    assert (outcome.plan.num_trials, outcome.num_done, outcome.status) == (num_trials, num_trials, "finished")
    assert outcome.analysis.statements[0] == f"Settled after {num_trials} trials."
    added = [event for event in stage.shown if isinstance(event, TrialsAdded)]
    assert [tuple(event.specs) for event in added] == stage.of("ran")[1:]
    assert added[0].reason.startswith("1 point open: width=6 1.05") and "more" in added[0].reason


def test_an_unsettled_study_continues(stage):
    stage.trial = wavering(2)
    whole = stage.execute(until_settled())
    every = sorted(whole.results.values(), key=lambda result: (result.spec.repeat, result.spec.order))
    for num_stored in (4, 9, 10, 11, 12):
        stage.happened.clear()
        stage.shown.clear()
        stage.stored = every[:num_stored]
        outcome = stage.execute(until_settled())
        assert outcome.results.keys() == whole.results.keys()
        first = next(event for event in stage.shown if isinstance(event, TrialsAdded))
        assert not first.specs and "open: width=" in first.reason and first.later_s is not None
        assert sum(map(len, stage.of("ran"))) == len(every) - num_stored
    stage.happened.clear()
    stage.stored = every
    assert stage.execute(until_settled()).analysis.statements == whole.analysis.statements
    assert stage.of("ran") == []


def test_no_block_starts_that_would_exceed_the_budget(stage):
    stage.trial = wavering(30)
    passed_s = [0.0]

    def trial(spec, make=stage.trial):
        passed_s[0] += 10.0
        return make(spec)

    stage.trial = trial
    stage.clock_s = lambda: passed_s[0]
    outcome = stage.execute(until_settled(budget=130))
    assert [len(specs) for specs in stage.of("ran")] == [9, 2, 2]
    sentence = outcome.analysis.statements[0]
    assert sentence.startswith("Stopped after 13 trials, as the budget allows no further block; still open: width=6")


@pytest.mark.parametrize(("waited_s", "between_s"), [(0.0, 0.0), (1000.0, 0.0), (1000.0, 400.0)])
def test_the_budget_starts_with_the_first_trial(stage, waited_s, between_s):
    wavers, passed_s = wavering(30), [0.0]
    stage.clock_s = lambda: passed_s[0]

    def run(specs, listener):
        if not stage.of("ran"):
            listener(Notice("starting Ray"))
            passed_s[0] += waited_s
        stage.happened.append(("ran", tuple(specs)))
        for spec in specs:
            listener(TrialStarted(spec, 1))
            passed_s[0] += 10.0 + between_s * (spec.order == 8)  # of the first blocks' last trial
            listener(TrialEnded(wavers(spec)))

    stage._run_specs = run
    outcome = stage.execute(until_settled(budget=130))
    blocks = [9] if between_s else [9, 2, 2]
    assert [len(specs) for specs in stage.of("ran")] == blocks
    assert outcome.analysis.verdict.status == "not settled (budget spent)"


def test_a_failed_point_is_only_tried_again_in_the_next_execution(stage):
    wavers = wavering(30)
    stage.trial = lambda spec: failed(spec) if spec.repeat == 2 else wavers(spec)
    outcome = stage.execute(until_settled())
    assert [len(specs) for specs in stage.of("ran")] == [9]
    assert "as more of them would not help" in outcome.analysis.statements[0]
    stage.stored, stage.trial = list(outcome.results.values()), wavering(2)
    stage.happened.clear()
    outcome = stage.execute(until_settled())
    assert labels_of(stage.of("ran"))[0] == [(n, 2) for n in (4, 6, 8)]
    assert outcome.analysis.statements[0].startswith("Settled after")


def test_other_nodes_get_the_network_variables_but_no_home():
    everywhere = {"RAYPAR_DATA_DIR": "/data", "NCCL_DEBUG": "INFO", "TORCH_NCCL_TRACE_BUFFER_SIZE": "1"}
    everywhere |= {"GLOO_SOCKET_IFNAME": "eth1", "FI_PROVIDER": "efa"}
    here = {"HOME": "/home/me", "XDG_CACHE_HOME": "/cache", "HF_TOKEN": "hf_0123456789"}
    environment = {**everywhere, **here, "PATH": "/bin", "MY_NCCL_DEBUG": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert rank_environment(environment, is_own=False) == everywhere
    assert rank_environment(environment, is_own=True) == {**everywhere, **here}
    assert rank_environment({}, is_own=True) == {}
