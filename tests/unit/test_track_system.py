"""Load of a trial's machines, sampled by MLflow's monitors and recorded with its result."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from results import make_spec

from raypar.run.ranks import RankEnd, RankProcess, supervise, trial_result
from raypar.study.trial import result_from_json
from raypar.track import system_metrics
from raypar.track.system_metrics import system_sampled
from raypar.train.job import RankContext, RankOutcome, RunSettings, TrialJob

CPU = ("cpu_utilization_percentage", "system_memory_usage_megabytes", "system_memory_usage_percentage")
DISK = ("disk_usage_percentage", "disk_usage_megabytes", "disk_available_megabytes")
NETWORK = ("network_receive_megabytes", "network_transmit_megabytes")
KEYS = {f"system/{socket.gethostname()}/{key}" for key in (*CPU, *DISK, *NETWORK)}


def test_all_metrics_are_sampled_at_steps_from_0(monkeypatch):
    monkeypatch.setattr(system_metrics, "INTERVAL_S", 0.001)
    sampled, real = threading.Event(), system_metrics._values
    calls = iter(range(10**6))
    monkeypatch.setattr(system_metrics, "_values", lambda m: (real(m), next(calls) > 3 and sampled.set())[0])
    with system_sampled() as points:
        assert sampled.wait(30)
    assert {point.key for point in points} == KEYS
    steps = [point.step for point in points if point.key.endswith("cpu_utilization_percentage")]
    assert steps == list(range(len(steps))) and len(steps) >= 2
    assert [p.time_ms for p in points] == sorted(p.time_ms for p in points)
    assert all(0 <= point.value <= 100 for point in points if point.key.endswith("_percentage"))


def test_even_an_empty_block_has_a_sample():
    with system_sampled() as points:
        pass
    assert {point.step for point in points} == {0} and {point.key for point in points} == KEYS


def test_gpus_are_sampled(monkeypatch):
    from mlflow.system_metrics.metrics import gpu_monitor

    figures = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=2e9, total=8e9),
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=50),
        "nvmlDeviceGetPowerUsage": lambda _: 300_000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 600_000,
    }
    nvml = SimpleNamespace(NVMLError=RuntimeError, **figures)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_monitor, "pynvml", nvml, raising=False)
    with system_sampled() as points:
        pass
    shown = {point.key.rpartition("/")[2]: point.value for point in points}
    assert shown["gpu_0_utilization_percentage"] == 50 and shown["gpu_0_power_usage_watts"] == 300


@contextlib.contextmanager
def sampling():
    load = [("system/n/cpu", 50.0, 1000, 0)]
    yield load
    load.append(("system/n/cpu", 60.0, 2000, 1))


@pytest.mark.parametrize(("local_rank", "num_samples"), [(0, 2), (1, 0)])
def test_the_first_rank_of_a_machine_samples_to_the_end(local_rank, num_samples, tmp_path):
    job = TrialJob(make_spec({}), 1, b"", RunSettings(tmp_path, sampling=sampling))
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    context = RankContext(local_rank, 2, local_rank, 2, 0, ("", 0), 0.0)
    end = supervise(RankProcess(child.pid, ours, child.wait), job, context, lambda *_: True, [].append)
    assert len(end.load) == num_samples


def test_the_load_of_all_machines_is_in_a_result_and_not_in_its_json():
    ends = {
        rank: RankEnd(RankOutcome(train_time_s=1.0), load=((f"system/{node}/cpu", 50.0, 1000, 0),))
        for rank, node in enumerate(("a", "b"))
    }
    result = trial_result(make_spec({"num_workers": 2}), ends)
    assert [key for key, *_ in result.load] == ["system/a/cpu", "system/b/cpu"]
    assert "load" not in json.loads(result.to_json()) and result_from_json(result.to_json()).load == ()
