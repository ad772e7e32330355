"""Peak memory of a rank against what its model needs, computed by hand."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from training import trained

from raypar import Data, Split, Workload
from raypar.errors import DoesNotFit
from raypar.measure import memory as memory_module
from raypar.measure.memory import MemoryMonitor
from raypar.run.ranks import RankEnd, trial_result
from raypar.run.runner import StoppedPoints, is_retried
from raypar.study.trial import Failure, FailureKind, TrialSpec, TrialState, result_from_json
from raypar.train import worker

WIDTH, BATCH, NUM_LAYERS = 256, 512, 6


def model(_):
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def data(_):
    inputs, targets = torch.randn(2 * BATCH, WIDTH), torch.zeros(2 * BATCH, dtype=torch.long)
    return Data(train=Split(inputs, targets), val=Split(inputs, targets))


WORKLOAD = Workload(name="w", model=model, data=data, defaults={"batch_size": BATCH, "optimizer": "adam", "lr": 1e-3})


def conditions_of(**config):
    return trained(WORKLOAD, **config)[0].conditions


def by_hand():
    weights = 4 * (NUM_LAYERS * (WIDTH * WIDTH + WIDTH) + WIDTH * 10 + 10)
    activation = 4 * BATCH * WIDTH
    # The batch and every ReLU's output are kept for the backward pass, in which two gradients of activations exist.
    return 3 * weights + activation * (1 + NUM_LAYERS + 2)


@pytest.mark.parametrize(
    "config",
    [*({"num_warmup_steps": num} for num in (1, 2, 5)), {"num_samples": BATCH}, {"eval_batch_size": 2 * BATCH}],
)
def test_the_peak_is_that_of_weights_optimizer_and_activations(config):
    assert conditions_of(**config).peak_memory_bytes == pytest.approx(by_hand(), rel=0.1)


def test_memory_that_a_thread_of_its_own_frees_does_not_add_up():
    monitor = MemoryMonitor(torch.device("cpu"), is_alone=False)
    with monitor.building():
        weights = torch.ones(250_000)
    with monitor.counting():
        for _ in range(3):
            messages = [torch.ones(1_000_000)]
            thread = threading.Thread(target=messages.clear)  # not profiled, as gloo's threads are not
            thread.start()
            thread.join()
    assert monitor.peak_bytes == pytest.approx(weights.nbytes + 4e6, rel=1e-3)


def test_nothing_is_counted_without_warm_up():
    assert conditions_of(num_warmup_steps=0).peak_memory_bytes is None


def test_a_training_above_its_limit_does_not_fit():
    assert conditions_of(max_memory="1GB").peak_memory_bytes
    with pytest.raises(DoesNotFit, match=r"needs .* MB of memory on a worker, more than max_memory=1.00 MB") as caught:
        conditions_of(max_memory="1MB")
    assert worker.failure_kind(caught.value) is FailureKind.DOES_NOT_FIT


class OutOfMemoryError(RuntimeError):
    """Stand-in for torch's, which only a GPU raises."""


REFUSED = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


@pytest.mark.parametrize(
    ("error", "is_alone", "kind"),
    [
        (OutOfMemoryError(REFUSED), True, FailureKind.DOES_NOT_FIT),
        (OutOfMemoryError(REFUSED), False, FailureKind.OUT_OF_MEMORY),
        (OutOfMemoryError(f"{REFUSED} of which 1.00 GiB is free; 8.00 GiB allowed;"), False, FailureKind.DOES_NOT_FIT),
        (MemoryError(), True, FailureKind.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True, FailureKind.OUT_OF_MEMORY),
    ],
)
def test_out_of_memory_is_a_result_if_nobody_else_uses_the_memory(monkeypatch, error, is_alone, kind):
    monkeypatch.setattr(memory_module, "has_gpu_alone", lambda: is_alone)
    assert worker.failure_kind(error) is kind


def spec(repeat=0):
    return TrialSpec("s", "w", {"batch_size": 64}, {"num_workers": 1}, repeat, repeat)


def test_does_not_fit_is_a_result_and_ends_its_point():
    failure = Failure(FailureKind.DOES_NOT_FIT, "needs 2.00 GB of memory", 0)
    result = trial_result(spec(), {0: RankEnd(failure=failure)}, failure=failure)
    assert (result.state, result.is_complete, result.state.traits.is_unusable) == (TrialState.DOES_NOT_FIT, True, True)
    assert result_from_json(result.to_json()) == result
    assert not is_retried(failure, 1, 5)
    stopped = StoppedPoints()
    stopped.note(spec(), failure, has_reported=False)
    refusal = stopped.refusal(spec(1))
    assert trial_result(spec(1), {}, failure=refusal).state is TrialState.DOES_NOT_FIT


class GpuMemory:
    """Stand-in for torch.cuda's counters of one GPU: there is none where the tests run."""

    def __init__(self):
        self.allocated = self.peak = self.reserved = self.peak_reserved = 0

    def use(self, most, after):
        self.peak = max(self.peak, most)
        self.reserved = self.peak_reserved = max(self.reserved, most)
        self.allocated = after

    def is_initialized(self):
        return self.reserved > 0

    def reset_peak_memory_stats(self, _):
        assert self.is_initialized(), "as torch does"
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def max_memory_allocated(self, _):
        return self.peak

    def memory_reserved(self, _):
        return self.reserved

    def max_memory_reserved(self, _):
        return self.peak_reserved


def test_on_a_gpu_neither_warm_up_copies_nor_evaluations_count(monkeypatch):
    gpu = GpuMemory()
    monkeypatch.setattr(memory_module.torch, "cuda", gpu)
    monitor = MemoryMonitor(torch.device("cuda", 0))
    with monitor.counting():
        gpu.use(most=300, after=100)  # including 40 for the copy of the first weights
        monitor.exclude(40)
    assert monitor.peak_bytes == 260
    for most in (250, 270):
        monitor.start()
        gpu.use(most=most, after=100)
        monitor.stop()
        gpu.use(most=900, after=100)  # an evaluation
    peaks = monitor.summary()
    assert (peaks["peak_memory_bytes"], peaks["peak_reserved_bytes"]) == (270, 300)


def stochastic(config):
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))


@pytest.fixture
def one_thread():
    """Use one thread, as a rank does: with several, the order of summation changes the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def uncounted_block(**_):
    yield None


@pytest.mark.usefixtures("one_thread")
def test_counting_does_not_change_losses(monkeypatch):
    workload = Workload(name="stochastic", model=stochastic, data=data, defaults={"batch_size": 64, "lr": 1e-2})

    def losses():
        torch.manual_seed(0)  # of the data
        outcome, reports = trained(workload, epochs=2)
        values = [float(report[key]).hex() for report in reports for key in ("train_loss", "val_loss")]
        return values, outcome.conditions.peak_memory_bytes is not None

    counted, was_counted = losses()
    monkeypatch.setattr(memory_module, "allocations", uncounted_block)
    uncounted, is_counted = losses()
    assert counted == uncounted and len(counted) == 4
    assert (was_counted, is_counted) == (True, False)


# Run in a new process, because a thread that counting leaves behind would already be in this one.
LEFT_BEHIND = """
import os, torch
import test_measure_memory as tests
from raypar.measure import memory

def trained_threads():
    is_counted = tests.conditions_of().peak_memory_bytes is not None
    return is_counted, len(os.listdir("/proc/self/task"))

counted, memory.allocations = memory.allocations, tests.uncounted_block
print(*trained_threads())
memory.allocations = counted
print(*trained_threads(), torch.autograd._profiler_enabled())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts a process's threads, as Linux lists them")
def test_counting_leaves_no_thread_and_no_profiler_behind():
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    without, counted = (line.split() for line in done.stdout.splitlines())
    assert (without[0], counted[0]) == ("False", "True")
    assert counted[1:] == [without[1], "False"]
