"""benchmarks/gpu_check.py passes a dry run on the CPU, and each of its checks can fail."""

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from results import stored_conditions
from workload_parts import tiny_image_set

from raypar.measure.breakdown import profile_of
from raypar.measure.spans import RecordedSteps
from raypar.run.runner import TrialEnded, TrialReported
from raypar.study.observation import ObservedRank
from raypar.study.profile import PARTS, Breakdown
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialState

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REPORT = {"epoch": 1, "train_loss": 2.0, "accuracy": 0.9}
FIELDS = {"wall_s": 0.5, "startup_s": 0.1, "train_time_s": 1.0, "step_times_s": ((1.0,),), "reports": (REPORT,)}
CRASH = Failure(FailureKind.CRASH, "rank 1 was killed by SIGSEGV", 1)


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_check")


@pytest.fixture
def stand_in(gpu_check):
    return gpu_check.StandIn()


def runner(outcome=lambda config: {}):
    """Return a runner whose trials report once and end with these fields of their results."""

    def run(study, specs, listener):
        for spec in specs:
            fields = {**FIELDS, **outcome(spec.config)}
            for report in fields["reports"]:
                listener(TrialReported(spec, report))
            state = TrialState.FINISHED
            if failure := fields.get("failure"):
                is_too_large = failure.kind is FailureKind.DOES_NOT_FIT
                state = TrialState.DOES_NOT_FIT if is_too_large else TrialState.FAILED
            listener(TrialEnded(TrialResult(spec, state, **fields)))

    return SimpleNamespace(run=run)


def bench(device, **runners):
    """Return a bench without processes or deadline."""
    return SimpleNamespace(device=device, deadline_s=float("inf"), **runners)


@pytest.mark.timeout(900)
def test_a_dry_run_passes_every_check_without_ray_and_mlflow(gpu_check, tmp_path):
    for name in ("ray", "mlflow"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not needed')")
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{BENCHMARKS.parent}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["check"] for line in lines] == ["environment", *gpu_check.CHECKS, "total"], done.stderr
    assert all(line["ok"] is True and line["seconds"] >= 0 for line in lines), done.stdout
    assert done.returncode == 0
    by_name = {line["check"]: line for line in lines}
    assert "two_ranks" not in by_name["nccl"] and by_name["nccl"]["pipeline_loss"] > 0
    assert set(by_name["precisions"]) > {each.name for each in gpu_check.StandIn.combinations}


def test_checks_are_chosen_by_name_and_failures_are_counted(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "CHECKS", {"good": lambda _: (True, {}), "bad": lambda _: (False, {}), "off": None})
    monkeypatch.setattr(gpu_check.torch, "set_num_threads", lambda _: None)  # of the tests
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry-run", "--only", "bad", "good"])
    assert gpu_check.main() == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["check"] for line in lines] == ["environment", "good", "bad", "total"]
    assert lines[-1]["ok"] is False and lines[-1]["failed"] == ["bad"] and lines[-1]["seconds"] > 0


def test_an_error_fails_only_its_check(gpu_check, capsys):
    assert gpu_check.run_check("unknown", lambda: (True, {"ratio": float("nan"), "steps_s": [0.123456, 1]}))
    line = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert line["ratio"] is None and line["steps_s"] == [0.1235, 1]
    assert not gpu_check.run_check("broken", lambda: 1 / 0)
    line = json.loads(capsys.readouterr().out)
    assert line["check"] == "broken" and line["ok"] is False and "ZeroDivisionError" in line["error"]
    assert "ValueError" in gpu_check.in_fork(lambda: int("one"))["error"]
    assert "exit code 3" in gpu_check.in_fork(lambda: os._exit(3))["error"]
    assert gpu_check.in_fork(lambda: {"bad_fork": False}) == {"bad_fork": False}


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA has no bad forks")
def test_fork_after_cuda_was_queried_fails_the_check(gpu_check):
    def check():
        torch.cuda.is_available()
        return {"ok": gpu_check.fork_hygiene(bench(gpu_check.StandIn()))[0]}

    assert gpu_check.in_fork(check) == {"ok": False}


def test_step_times_in_another_unit_fail_the_check(gpu_check, stand_in):
    stand_in.elapsed_s = lambda first, last: (last - first) * 1e3
    ok, figures = gpu_check.step_timer(bench(stand_in))
    assert not ok and figures["host_bound_median_ratio"] < 0.01


FREED, KEPT, UNUSED = [100, 500, 103, 500, 101, 500, 100], [100, 500, 100, 500, 160, 500, 160], [100] * 7


@pytest.mark.parametrize(("memory_mb", "passes"), [(FREED, True), (KEPT, False), (UNUSED, False)])
def test_memory_must_rise_and_be_freed(gpu_check, monkeypatch, memory_mb, passes):
    monkeypatch.setattr(gpu_check, "MEMORY_SETTLE_S", 0.0)
    readings = map(float, memory_mb)
    device = SimpleNamespace(name="cpu", num_trials=2, memory_mb=lambda: next(readings))
    ok, figures = gpu_check.memory_after_trials(bench(device, warm=runner()))
    assert ok is passes and len(figures["left_mb"]) == 3 and figures["trial_s"] == [0.5, 0.5]


STEADY, SLOW_START = [1.0] * 100, [2.0] * 25 + [1.0] * 75


@pytest.mark.parametrize(
    ("after_a_second", "of_trial", "passes"),
    [(STEADY, STEADY, True), (SLOW_START, STEADY, False), (STEADY, SLOW_START, False)],
)
def test_steps_must_be_steady_after_a_warm_up(gpu_check, stand_in, monkeypatch, after_a_second, of_trial, passes):
    loops = iter([SLOW_START, after_a_second])

    def measured(timer, step, num_steps):
        return next(loops) if num_steps == gpu_check.NUM_STEPS else []

    monkeypatch.setattr(gpu_check, "_steps", measured)
    monkeypatch.setattr(gpu_check, "WARMUPS_S", dict.fromkeys(gpu_check.WARMUPS_S, 0.0))
    stand_in.max_slow_start = 0.05
    warm = runner(lambda _: {"step_times_s": (tuple(of_trial),), "warmup_s": 1.0})
    ok, figures = gpu_check.warm_up(bench(stand_in, warm=warm))
    assert ok is passes and figures["10_steps_ratio"] == 2 and figures["trial_warmup_s"] == 1


@pytest.mark.parametrize(
    ("energy_j", "reason", "passes"),
    [(100.0, "", True), (160.0, "", False), (0.1, "", False), (None, "no counter", False)],
)
def test_energy_must_be_power_times_time(gpu_check, stand_in, monkeypatch, energy_j, reason, passes):
    samples = [(0.0, 1e6)]  # before the first report, like the warm-up

    @contextmanager
    def sampled(read):
        yield samples

    def outcome(config):
        samples.append((time.monotonic(), 50.0))
        return {"train_time_s": 2.0, "energy_j": energy_j, "conditions": stored_conditions({"no_energy": reason})}

    reports = runner(outcome)

    def run(study, specs, listener):
        """Report before and after the power is read."""
        listener(TrialReported(specs[0], REPORT))
        reports.run(study, specs, listener)

    monkeypatch.setattr(gpu_check, "sampled", sampled)
    ok, figures = gpu_check.energy(bench(stand_in, warm=SimpleNamespace(run=run)))
    assert ok is passes and figures["power_w"] == 50 and figures.get("no_energy", "") == reason


@pytest.mark.parametrize(
    ("strategy", "change", "passes"),
    [
        ("fsdp", {}, True),
        ("fsdp", {"reports": ({**REPORT, "train_loss": 2.1},)}, False),
        ("local_sgd", {"reports": ({**REPORT, "train_loss": 2.05},)}, True),  # its ranks diverge between averages
        ("local_sgd", {"reports": ({**REPORT, "train_loss": float("nan")},)}, False),
        ("pipeline", {"failure": CRASH}, False),
    ],
)
def test_each_strategy_must_have_the_loss_of_one_rank(gpu_check, stand_in, strategy, change, passes):
    warm = runner(lambda config: change if config["num_workers"] == 2 and config["strategy"] == strategy else {})
    ok, figures = gpu_check.nccl(bench(stand_in, warm=warm))
    assert ok is passes
    assert figures["one_rank_loss"] == figures["tensor_loss"] == 2.0
    assert figures.get(strategy, "") == ("failed: rank 1 was killed by SIGSEGV" if "failure" in change else "")


def test_strategies_are_skipped_where_two_ranks_cannot_share_a_device(gpu_check, stand_in):
    refusal = Failure(FailureKind.ERROR, "DistBackendError: Duplicate GPU detected :\n rank 1 and rank 0", 0)
    refused = runner(lambda config: {"failure": refusal} if config["num_workers"] == 2 else {})
    ok, figures = gpu_check.nccl(bench(stand_in, warm=refused))
    assert ok and figures["two_ranks"] == "skipped: DistBackendError: Duplicate GPU detected : rank 1 and rank 0"
    with pytest.raises(SystemExit, match="SIGSEGV"):  # a single rank must work
        gpu_check.nccl(bench(stand_in, warm=runner(lambda _: {"failure": CRASH})))


@pytest.mark.parametrize(("share", "limit", "passes"), [(1.05, 1.0, True), (1.2, 1.0, False), (1.0, 0.5, False)])
def test_peak_memory_must_match_the_computed_peak_and_its_limit(gpu_check, stand_in, share, limit, passes):
    by_hand = gpu_check.peak_memory(bench(stand_in, warm=runner()))[1]["expected_bytes"]

    def outcome(config):
        is_too_large = float((config["max_memory"] or "inf").rstrip("B")) < limit * by_hand
        failure = {"failure": Failure(FailureKind.DOES_NOT_FIT, "needs more")} if is_too_large else {}
        return {"conditions": stored_conditions({"peak_memory_bytes": [share * by_hand]}), **failure}

    ok, figures = gpu_check.peak_memory(bench(stand_in, warm=runner(outcome)))
    assert ok is passes and figures["deviation"] == pytest.approx(share - 1)


TOO_LARGE = Failure(FailureKind.OUT_OF_MEMORY, "OutOfMemoryError: CUDA out of memory", 0)


@pytest.mark.parametrize(
    ("failure", "left_mb", "passes"),
    [(TOO_LARGE, 0, True), (CRASH, 0, False), (None, 0, False), (TOO_LARGE, 60, False)],
)
def test_running_out_of_memory_must_be_classified_and_leave_nothing(gpu_check, monkeypatch, failure, left_mb, passes):
    monkeypatch.setattr(gpu_check, "MEMORY_SETTLE_S", 0.0)
    readings = iter([100.0, 100.0 + left_mb, 100.0])
    device = SimpleNamespace(name="cpu", limits_memory=True, memory_mb=lambda: next(readings))
    warm = runner(lambda config: {"failure": failure} if "is_limited" in config else {})
    ok, figures = gpu_check.out_of_memory(bench(device, warm=warm))
    assert ok is passes and figures["left_mb"] == [left_mb, 0.0]


def recorded(*parts, peak_flops=1e12):
    """Return a rank's record of two steps with these parts, each of a tenth of a second."""
    spans = [("step", float(i), i + 1.0) for i in range(2)]
    spans += [(part, i + 0.1 * k, i + 0.1 * k + 0.1) for i in range(2) for k, part in enumerate(parts)]
    return RecordedSteps(spans, [1.0, 1.0], [1.0, 1.0], True, peak_flops, flop_per_sample=1e6)


@pytest.mark.parametrize(
    ("of_rank", "passes"),
    [
        (recorded("forward", "backward", "optimizer"), True),
        (recorded("forward", "optimizer"), False),
        (recorded("forward", "backward", "optimizer", peak_flops=1e8), False),  # below 5.12e8 FLOP in a second
        (recorded("forward", "backward", "optimizer", peak_flops=0.0), False),
    ],
)
def test_a_profile_needs_each_part_of_a_step_and_fewer_flops_than_the_peak(gpu_check, stand_in, of_rank, passes):
    stand_in.max_utilisation = 1.0
    warm = runner(lambda config: {"profile": profile_of([of_rank], config)})
    assert gpu_check.profile(bench(stand_in, warm=warm))[0] is passes


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({"reports": ({**REPORT, "train_loss": 2.05},)}, True),
        ({"reports": ({**REPORT, "train_loss": 2.5},)}, False),
        ({"reports": ({**REPORT, "train_loss": float("nan")},)}, False),
        ({"failure": CRASH}, False),
    ],
)
def test_each_precision_must_have_the_loss_of_fp32(gpu_check, stand_in, change, passes):
    def outcome(config):
        step_s = 0.5 if config["compile"] else 1.0
        return {"step_times_s": ((step_s,),), **(change if config["precision"] == "bf16" else {})}

    ok, figures = gpu_check.precisions(bench(stand_in, warm=runner(outcome)))
    assert ok is passes and list(figures["failures"]) == ([] if passes else ["cnn_bf16"])
    assert figures["mlp_fp32_compiled"]["speedup"] == 2 and not figures["not_run"]


@pytest.mark.parametrize("name", ["mnist_mlp", "mnist_cnn", "fashion_small"])
@pytest.mark.parametrize(("accuracy", "passes"), [(0.9, True), (0.1, False)])
def test_published_comparisons_run_their_study_on_both_devices(
    gpu_check, name, accuracy, passes, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))  # a study's folder stays on it
    tiny_image_set("FashionMNIST" if name == "fashion_small" else "MNIST", tmp_path, monkeypatch)
    (comparison,) = (each for each in gpu_check.COMPARISONS if each.name == name)

    def outcome(config):
        train_time_s = {"cpu": 3.0, "cuda": 2.0}[config["device"]]
        return {"train_time_s": train_time_s, "reports": ({**REPORT, "accuracy": accuracy},)}

    ok, figures = gpu_check.compare(comparison, runner(outcome), "cuda")
    assert ok is passes and figures["speedup"] == 1.5 and figures["gpu_train_s"] == 2.0
    assert (BENCHMARKS.parent / figures["study"]).is_file()
    with pytest.raises(SystemExit, match="SIGSEGV"):
        gpu_check.compare(comparison, runner(lambda _: {"failure": CRASH}), "cpu", is_dry_run=True)


ON_GPU = {"num_item_calls": 0.995, "num_blocking_copies": 1.99}
BY_HAND = {"forward": 0.004, "backward": 0.006, "optimizer": 0.0}


@pytest.mark.parametrize(
    ("device", "of_script", "of_rank", "passes"),
    [
        ("cpu", {}, {}, True),
        ("cpu", {"step_s": 0.02}, {}, False),
        ("cpu", {}, {"losses": ()}, False),
        ("cpu", {}, {"problems": ("torch: ValueError: none",)}, False),
        ("cpu", {}, ON_GPU, False),
        ("cuda", {}, ON_GPU, True),
        ("cuda", {}, {}, False),
        ("cuda", {"parts": BY_HAND | {"forward": 0.005}}, ON_GPU, False),
        ("cuda", {"num_graphs": 2}, ON_GPU, False),
    ],
)
def test_what_is_observed_must_be_what_the_script_measures(gpu_check, monkeypatch, device, of_script, of_rank, passes):
    own = {"step_s": 0.01, "parts": BY_HAND, "num_graphs": 1, **of_script}
    breakdown = Breakdown(0.01, {**dict.fromkeys(PARTS, 0.0), **BY_HAND}, 0.0)
    losses = tuple((step, 2.0) for step in range(1, 201))
    rank = ObservedRank(**{"breakdown": breakdown, "losses": losses, **of_rank})
    monkeypatch.setattr(gpu_check, "_observed_run", lambda *_: (own, rank))
    assert gpu_check.observed_script(bench(SimpleNamespace(name=device)))[0] is passes
