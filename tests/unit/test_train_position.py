"""A rank reports its position once it has waited in torch's code for a while."""

import dis
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from raypar.train import position as module
from raypar.train.position import EVERY_S, STANDS_S, Position, PositionWatch, calls

WAIT = "def {name}(wait):\n    wait()\n"
STEP = "def step(wait):\n    operation(wait)\n"


@pytest.fixture
def look(monkeypatch):
    """Return a function that starts a thread waiting in a file, and returns the watch's positions over time."""
    threads, held = [], threading.Lock()
    held.acquire()

    def start(file, name="all_reduce", on_cpu=True, is_observed=False):
        names, scope = {}, {}
        exec(compile(WAIT.format(name=name), f"/x/site-packages/{file}", "exec"), names)
        exec(compile(WAIT.format(name="hook"), f"{module.OBSERVER}/communication.py", "exec"), names)
        exec(compile(STEP, "/home/me/train.py", "exec"), scope)
        scope["operation"] = names[name]
        wait, innermost = held.acquire, names[name]
        if is_observed:
            wait, innermost = partial(names["hook"], wait), names["hook"]
        thread = threading.Thread(target=scope["step"], args=(wait,))
        threads.append(thread)
        thread.start()
        call = next(i.offset for i in dis.get_instructions(innermost) if i.opname == "CALL")
        while (frame := sys._current_frames().get(thread.ident)) is None or frame.f_code is not innermost.__code__:
            pass
        while frame.f_lasti != call:
            pass
        watch = PositionWatch(lambda _: None, on_cpu=on_cpu)
        watch._main = thread.ident
        clock = SimpleNamespace(now_s=100.0, cpu_s=5.0)
        monkeypatch.setattr(
            module, "time", SimpleNamespace(monotonic=lambda: clock.now_s, process_time=lambda: clock.cpu_s)
        )

        def after(seconds, cpu_s=0.0, begun=1):
            monkeypatch.setattr(module, "calls", lambda: {"0": begun})
            clock.now_s += seconds
            clock.cpu_s += cpu_s
            return watch._look()

        assert after(0.0) is None
        return after

    yield start
    for thread in threads:
        held.release()
        thread.join()


@pytest.mark.parametrize("is_observed", [False, True])
def test_a_rank_that_waits_in_an_operation_reports_repeatedly_until_it_moves(look, is_observed):
    after = look("torch/distributed/distributed_c10d.py", is_observed=is_observed)
    assert after(STANDS_S - 1) is None
    said = after(1)
    assert said == Position({"0": 1}, False, False, STANDS_S, "all_reduce", "train.py:2")
    assert after(EVERY_S).stands_s == STANDS_S + EVERY_S
    assert after(EVERY_S, begun=2) == Position({"0": 2})  # it moves
    assert after(EVERY_S, begun=3) is None


@pytest.mark.parametrize("file", ["torch/serialization.py", "urllib3/response.py", "torch/utils/data/dataloader.py"])
def test_a_rank_that_waits_elsewhere_or_works_does_not_stand(look, file):
    after = look(file)
    assert all(after(STANDS_S) is None for _ in range(3))


def test_a_rank_that_works_in_an_operation_does_not_stand(look):
    after = look("torch/autograd/graph.py", "_engine_run_backward")
    assert all(after(EVERY_S, cpu_s=EVERY_S / 2) is None for _ in range(30))
    after(EVERY_S)
    assert after(STANDS_S).operation == "backward"


def test_a_rank_on_a_gpu_may_wait_in_any_code_and_use_its_core(look):
    after = look("numpy/x.py", on_cpu=False)
    said = after(STANDS_S, cpu_s=STANDS_S)
    assert (said.stands_s, said.operation) == (STANDS_S, "")


def test_a_process_without_groups_has_begun_no_operation():
    assert calls() == {}
