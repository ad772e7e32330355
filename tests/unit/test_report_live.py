"""The view of a running study: consoles and threads. Its words stand in ``tests/golden/cases/live.txt``."""

import io
import threading

import pytest
from results import make_result, make_spec
from rich.console import Console

from raypar.report.live import REFRESH_PER_S, LiveView
from raypar.run.runner import GangStarting, Notice, TrialEnded, TrialStarted
from raypar.study.trial import Placement, TrialState

POINT = {"batch_size": 64, "num_workers": 2}


def terminal():
    return Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)


def test_a_pipe_is_flushed_after_every_line_and_without_unicode_gets_stand_ins():
    class Flushed(io.TextIOWrapper):
        num_flushed = 0

        def flush(self):
            super().flush()
            self.num_flushed += 1

    file = Flushed(buffer := io.BytesIO(), encoding="ascii")
    LiveView(Console(file=file, width=80), 1)(GangStarting(Placement(2, 1, "cpu")))
    assert buffer.getvalue() == b"starting a gang of 2 workers x 1 core\n" and file.num_flushed == 1


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_a_failure_stays_on_the_terminal_and_a_success_on_a_dumb_one(monkeypatch, kind):
    monkeypatch.setenv("TERM", kind)
    console = terminal()
    with LiveView(console, 3) as view:
        view(TrialEnded(make_result(POINT, 0)))
        view(TrialEnded(make_result(POINT, 1, state=TrialState.FAILED, failure="boom")))
    assert "FAILED: boom" in console.file.getvalue() and ("trained" in console.file.getvalue()) == (kind == "dumb")


def test_a_terminal_that_was_closed_stops_no_study():
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal)
        with LiveView(console, 3) as view:
            console.file = Closed()
            view(Notice("nobody reads it"))
            view(TrialEnded(make_result(POINT, 0)))
        assert view._num_done == 1


def test_events_may_come_from_many_threads_while_the_view_is_drawn():
    with LiveView(terminal(), 400) as view:

        def run(first):
            for repeat in range(first, first + 50):
                view(TrialStarted(make_spec(POINT, repeat), 1))
                view(Notice(f"at {repeat}"))
                view(TrialEnded(make_result(POINT, repeat)))

        def draw():
            for _ in range(300):  # a thread that draws on and on may keep the lock from the others: no deadlock
                view._live.refresh()

        threads = [threading.Thread(target=run, args=(50 * i,), daemon=True) for i in range(8)]
        threads.append(threading.Thread(target=draw, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads)
        assert (view._num_done, view._running) == (400, {})


def test_the_view_draws_seldom_and_events_draw_nothing(monkeypatch):
    assert REFRESH_PER_S <= 2
    drawn = []
    monkeypatch.setattr(LiveView, "_render", lambda self: drawn.append(self))
    view = LiveView(terminal(), 5000)  # not entered: no thread draws
    drawn.clear()
    for repeat in range(10):
        view(TrialStarted(make_spec(POINT, repeat), 1))
        view(TrialEnded(make_result(POINT, repeat)))
    assert not drawn
