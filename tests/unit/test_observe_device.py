"""Times on a GPU, with a stand-in for torch's: no GPU is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from raypar.observe import device, events
from raypar.observe.events import EventKind, EventRecorder


class Stream:
    """Stand-in for a GPU that is `lag_s` behind the host, and for the host's clock."""

    def __init__(self, lag_s: float) -> None:
        self.now_s, self.lag_s, self.is_passed, self.is_capturing = 100.0, lag_s, True, False
        self.num_events = 0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, _: float) -> None:
        self.now_s += 0.3


class Event:
    stream: Stream

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.stream.num_events += 1

    def record(self) -> None:
        assert not self.stream.is_capturing
        self.at_s = self.stream.now_s + self.stream.lag_s

    def synchronize(self) -> None:
        self.stream.now_s = self.at_s

    def query(self) -> bool:
        return self.stream.is_passed

    def elapsed_time(self, other: Event) -> float:
        return (other.at_s - self.at_s) * 1e3


class Tensor:
    def __init__(self, *, is_cuda: bool = False, is_pinned: bool = False, ndim: int = 1) -> None:
        self.is_cuda, self._is_pinned, self.ndim = is_cuda, is_pinned, ndim

    def is_pinned(self) -> bool:
        return self._is_pinned

    def item(self) -> float:
        return 1.0

    tolist = __float__ = __bool__ = item

    def to(self, *args: object, **kwargs: object) -> Tensor:
        return Tensor(is_cuda="cuda" in args)

    def cuda(self, **kwargs: object) -> Tensor:
        return Tensor(is_cuda=True)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Start a recorder in a process that trains on a stand-in for a GPU."""
    stream = Stream(lag_s=2.0)
    monkeypatch.setattr(Event, "stream", stream, raising=False)
    monkeypatch.setattr(device, "clock", stream.clock)
    monkeypatch.setattr(device.time, "sleep", stream.sleep)
    monkeypatch.setattr(events, "clock", stream.clock)
    tensor = type("Tensor", (Tensor,), {})
    cuda = SimpleNamespace(
        is_initialized=lambda: True, Event=Event, is_current_stream_capturing=lambda: stream.is_capturing
    )
    torch = SimpleNamespace(cuda=cuda, Tensor=tensor, compiler=SimpleNamespace(is_compiling=lambda: False))
    recorder = EventRecorder(tmp_path)
    device.HOOKS["torch"](torch, recorder)
    recorder.call(recorder.at_optimizer)
    assert not recorder.facts["problems"]
    return SimpleNamespace(recorder=recorder, stream=stream, tensor=tensor)


def read(training: SimpleNamespace) -> list[events.Event]:
    """Return the events that a write would record."""
    training.recorder.call(training.recorder.at_write)
    assert not training.recorder.facts["problems"]
    return list(training.recorder.rows)


def test_a_moment_gets_the_time_at_which_the_gpu_gets_there(training: SimpleNamespace) -> None:
    asked_s = training.stream.now_s
    training.recorder.at_moment(asked_s)
    assert read(training) == [(EventKind.DEVICE, asked_s, asked_s + 2.0, 0.0, 0.0, 0.0)]


def test_a_moment_that_the_gpu_has_not_reached_is_read_later(training: SimpleNamespace) -> None:
    training.stream.is_passed = False
    training.recorder.at_moment(training.stream.now_s)
    assert not read(training)
    training.stream.is_passed = True
    assert len(read(training)) == 1


def test_events_are_used_again_and_times_stay_exact(training: SimpleNamespace) -> None:
    for _ in range(5):
        for _ in range(3):
            training.stream.now_s += 1.0
            training.recorder.at_moment(training.stream.now_s)
        read(training)
    assert training.stream.num_events == 4
    assert all(row[2] == pytest.approx(row[1] + 2.0) for row in training.recorder.rows)


def test_a_gpu_can_not_be_ahead_of_the_host(training: SimpleNamespace) -> None:
    for lag_s in (-1.0, 0.5):  # its clock has drifted, and later it is behind again
        training.stream.lag_s = lag_s
        training.stream.now_s += 10.0
        training.recorder.at_moment(training.stream.now_s)
    first, second = read(training)
    assert first[2] == first[1] and second[2] == pytest.approx(second[1] + 1.5)


def test_the_end_waits_for_the_gpu_but_not_for_one_that_hangs(training: SimpleNamespace) -> None:
    training.stream.is_passed = False
    training.recorder.at_moment(training.stream.now_s)
    begun_s = training.stream.now_s
    training.recorder.close()
    assert 1.0 <= training.stream.now_s - begun_s < 2.0 and not training.recorder.facts["problems"]


def test_nothing_is_recorded_into_a_cuda_graph(training: SimpleNamespace) -> None:
    training.stream.is_capturing = True
    training.recorder.at_moment(training.stream.now_s)
    training.stream.is_capturing = False
    assert not read(training)


def test_reads_and_blocking_copies_of_a_step_are_counted(training: SimpleNamespace) -> None:
    tensor, recorder = training.tensor, training.recorder
    for each in (tensor(is_cuda=True), tensor()):
        assert each.item() == each.tolist() == 1.0
    recorder.counts_reads = False
    assert tensor(is_cuda=True).item() == 1.0
    tensor().to("cuda")
    tensor(is_pinned=True).to("cuda")
    tensor(is_pinned=True).to("cuda", non_blocking=True)
    tensor(is_pinned=True).cuda(non_blocking=True)
    tensor().to("cpu")
    tensor(ndim=0).to("cuda")
    for end_s in (5.0, 6.0):
        recorder.last_step_s = end_s
        recorder.call(recorder.at_step)
    assert recorder.rows[4:] == [(EventKind.COUNTS, 5.0, 5.0, 0.0, 2, 2)]
    assert [row[0] for row in recorder.rows[:4]] == [EventKind.COPY] * 4


@pytest.mark.parametrize("target", ["cuda:1", 0, SimpleNamespace(type="cuda"), SimpleNamespace(is_cuda=True)])
def test_a_copy_lasts_until_the_gpu_has_made_it(training: SimpleNamespace, target: object) -> None:
    training.tensor(ndim=2).to(target)
    copied, *moments = read(training)
    assert copied[0] == EventKind.COPY
    assert {row[1] for row in moments} == {copied[1], copied[2]}


@pytest.mark.parametrize("target", ["cpu", "float16", SimpleNamespace(type="cpu"), True])
def test_other_conversions_are_no_copies_to_a_gpu(training: SimpleNamespace, target: object) -> None:
    training.tensor(ndim=2).to(target)
    assert not read(training)


def test_nothing_is_counted_before_the_script_trains_on_a_gpu(tmp_path: Path) -> None:
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False), Tensor=Tensor)
    recorder = EventRecorder(tmp_path)
    before = Tensor.item
    device.HOOKS["torch"](torch, recorder)
    recorder.call(recorder.at_optimizer)
    assert Tensor.item is before and not recorder.at_step and not recorder.facts["problems"]
