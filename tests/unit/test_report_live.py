"""What a person sees while a study runs."""

from __future__ import annotations

import io
import threading

import pytest
from results import make_result, make_spec
from rich.console import Console

from raypar.analysis.question import Question
from raypar.report.live import MAX_SHOWN, REFRESH_PER_S, LiveView
from raypar.run.runner import (
    GangReady,
    GangStarting,
    Notice,
    TrialEnded,
    TrialReported,
    TrialRetried,
    TrialStarted,
)
from raypar.study.trial import Placement, TrialState

TWO = Placement(2, 1, "cpu")
POINT = {"batch_size": 64, "num_workers": 2}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def piped() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80), file


def terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def picture(view: LiveView, width: int = 100) -> str:
    """What the view would draw now."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(view._render())
    return console.file.getvalue()


def test_a_pipe_gets_one_line_per_trial_gang_and_notice() -> None:
    console, file = piped()
    with LiveView(console, 12) as view:
        view(GangStarting(TWO))
        view(GangReady(TWO, 14.26))
        view(TrialStarted(make_spec(POINT), 1))
        view(TrialReported(make_spec(POINT), {"epoch": 1, "train_loss": 0.5}))
        view(TrialEnded(make_result(POINT, 0, 3.2, 0.971)))
        view(TrialEnded(make_result(POINT, 1, state=TrialState.FAILED, failure="rank 1: boom\nTraceback")))
        view(TrialRetried(make_spec(POINT, 2), "node lost"))
        view(Notice("waiting for [2] nodes"))
    assert file.getvalue().splitlines() == [
        "starting a gang of 2 workers × 1 core",
        "gang of 2 workers × 1 core is ready after 14.3 s",
        "[ 1/12] batch_size=64 num_workers=2 #1  trained 3.20 s  in all 4.20 s  accuracy 97.1 %; 46.0 s left",
        "[ 2/12] batch_size=64 num_workers=2 #2  FAILED: rank 1: boom",
        "batch_size=64 num_workers=2 #3  starting again: node lost",
        "waiting for [2] nodes",
    ]


def test_a_pipe_is_flushed_after_every_line() -> None:
    class Flushed(io.StringIO):
        seen = ""

        def flush(self) -> None:
            self.seen = self.getvalue()

    file = Flushed()
    view = LiveView(Console(file=file, width=80), 1)
    view(Notice("first"))
    assert file.seen == "first\n"


def test_a_pipe_without_unicode_gets_stand_ins() -> None:
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding="ascii")
    LiveView(Console(file=file, width=80), 1)(GangStarting(TWO))
    assert buffer.getvalue() == b"starting a gang of 2 workers x 1 core\n"


def test_trials_done_before_are_counted_and_told() -> None:
    console, file = piped()
    with LiveView(console, 5, done=[make_result(POINT, repeat) for repeat in range(3)]) as view:
        view(TrialEnded(make_result(POINT, 3)))
    lines = file.getvalue().splitlines()
    assert lines[0] == "3 trials of 5 done before"
    assert lines[1].startswith("[4/5]")


def test_a_terminal_shows_counts_and_the_running_trial() -> None:
    view = LiveView(terminal(), 10)
    view(TrialEnded(make_result(POINT, 1)))
    view(TrialStarted(make_spec(POINT), 1))
    report = {"epoch": 2, "train_loss": 0.2134, "accuracy": 0.971, "throughput_samples_per_s": 114_321.0}
    view(TrialReported(make_spec(POINT), report))
    text = picture(view)
    assert "1/10 trials, 1 running, 8 queued" in text
    assert "failed" not in text
    assert "batch_size=64 num_workers=2 #1  epoch 2/3  loss 0.213  accuracy 97.1 %  114k samples/s" in text


def test_a_terminal_shows_a_gang_only_while_it_starts() -> None:
    clock = Clock()
    view = LiveView(terminal(), 10, clock=clock)
    view(GangStarting(TWO))
    clock.now_s = 12.0
    assert "starting a gang of 2 workers × 1 core, 12.0 s" in picture(view)
    view(GangReady(TWO, 13.0))
    assert "gang" not in picture(view)


def test_an_ended_or_retried_trial_is_not_running() -> None:
    view = LiveView(terminal(), 3)
    for repeat in range(3):
        view(TrialStarted(make_spec(POINT, repeat), 1))
    view(TrialRetried(make_spec(POINT, 0), "node lost"))
    view(TrialEnded(make_result(POINT, 1, state=TrialState.FAILED)))
    assert "1/3 trials, 1 running, 1 queued, 1 failed" in picture(view)


def test_many_running_trials_are_summed_up() -> None:
    view = LiveView(terminal(), 50)
    for repeat in range(MAX_SHOWN + 3):
        view(TrialStarted(make_spec(POINT, repeat), 1))
    assert "and 3 more" in picture(view)


@pytest.mark.parametrize("width", [40, 80])
def test_the_view_never_wraps(width: int) -> None:
    view = LiveView(terminal(width), 10)
    view(TrialStarted(make_spec({**POINT, "optimizer": "momentum", "lr": 0.1}), 1))
    view(TrialReported(make_spec({**POINT, "optimizer": "momentum", "lr": 0.1}), {"epoch": 1, "train_loss": 0.2}))
    lines = picture(view, width).rstrip("\n").splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= width


def test_the_time_left_goes_by_the_median_of_the_ended_trials() -> None:
    clock = Clock()
    view = LiveView(terminal(), 10, clock=clock)
    assert view.remaining_s() is None
    for repeat, wall_s in enumerate((10.0, 12.0, 100.0)):
        view(TrialEnded(make_result(POINT, repeat, wall_s=wall_s)))
    assert view.remaining_s() == 7 * 12.0
    view(TrialStarted(make_spec(POINT, 3), 1))
    clock.now_s = 5.0
    assert view.remaining_s() == 6 * 12.0 + 7.0
    clock.now_s = 500.0  # far over its time: no negative rest
    assert view.remaining_s() == 6 * 12.0
    assert "1 min 12 s left" in picture(view)


def test_the_time_left_goes_by_trials_alike_and_by_how_many_run_at_once() -> None:
    view = LiveView(terminal(), 9, clock=Clock())
    view(TrialEnded(make_result(POINT, 0, wall_s=10.0)))
    for repeat in (1, 2):
        view(TrialStarted(make_spec(POINT, repeat), 1))
    assert view.remaining_s() == 40.0
    one, two = {"num_workers": 1}, {"num_workers": 2}
    queued = [make_spec(one, 1), make_spec(two, 1), make_spec(two, 2)]
    done = [make_result(one, 0, wall_s=40.0), make_result(two, 0, wall_s=10.0)]
    view = LiveView(terminal(), 5, done=done, queued=queued, clock=Clock())
    assert view.remaining_s() == 60.0
    view(TrialEnded(make_result(one, 1, wall_s=40.0)))
    assert view.remaining_s() == 20.0


def test_pauses_between_trials_and_gangs_to_start_are_reckoned_with() -> None:
    clock = Clock()
    one, two = {"num_workers": 1}, {"num_workers": 2}
    queued = [*(make_spec(one, repeat) for repeat in range(4)), make_spec(two, 0)]
    view = LiveView(terminal(), 5, queued=queued, clock=clock)
    view(GangStarting(Placement(1, 1, "cpu")))
    view(GangReady(Placement(1, 1, "cpu"), 20.0))
    for repeat, pause_s in enumerate((30.0, 2.0)):  # the first holds the first use of the store
        view(TrialStarted(queued[repeat], 1))
        clock.now_s += 10.0
        view(TrialEnded(make_result(one, repeat, wall_s=9.0)))
        clock.now_s += pause_s - 1.0
    view(TrialStarted(queued[2], 1))
    assert view.remaining_s() == 9.0 + 2 * (9.0 + 2.0) + 20.0
    view(GangStarting(TWO))
    assert view.remaining_s() == 9.0 + 2 * (9.0 + 2.0)


def test_the_best_point_so_far_is_told_in_the_view_and_in_plain_lines() -> None:
    question = Question("s", {"num_workers": 1}, ("num_workers",))
    console, file = piped()
    views = [LiveView(made, 9, question=question) for made in (console, terminal())]
    told = ["best so far", "at num_workers=2 (by one trial)", "(not yet told from the baseline)", "at num_workers=2"]
    for repeat, time_s in enumerate((2.0, 2.2)):
        for view in views:
            view(TrialEnded(make_result({"num_workers": 1}, repeat, 4.0 + repeat * 0.001)))
            assert repeat or told[0] not in picture(view)
            view(TrialEnded(make_result({"num_workers": 2}, repeat, time_s)))
            assert f"best so far {['2.00', '1.91'][repeat]}×" in picture(view) and told[1 + repeat] in picture(view)
    for view in views:
        for repeat in (2, 3, 4):
            view(TrialEnded(make_result({"num_workers": 1}, repeat, 4.0)))
            view(TrialEnded(make_result({"num_workers": 2}, repeat, 2.0)))
        assert "best so far 2.00× at num_workers=2\n" in picture(view)
    assert file.getvalue().splitlines()[3].endswith(f"best so far 1.91× {told[1][:16]} {told[2]}")


def test_a_failure_stays_on_the_terminal_and_a_success_does_not() -> None:
    console = terminal()
    with LiveView(console, 3) as view:
        view(TrialEnded(make_result(POINT, 0)))
        view(TrialEnded(make_result(POINT, 1, state=TrialState.FAILED, failure="boom")))
    text = console.file.getvalue()
    assert "FAILED: boom" in text
    assert "trained" not in text


def test_a_terminal_that_was_closed_stops_no_study() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal)
        with LiveView(console, 3) as view:
            console.file = Closed()
            view(Notice("nobody reads it"))
            view(TrialEnded(make_result(POINT, 0)))
        assert view._num_done == 1


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = terminal()
    with LiveView(console, 1) as view:
        view(TrialEnded(make_result(POINT, 0)))
    assert console.file.getvalue().startswith("[1/1] batch_size=64")


def test_events_may_come_from_many_threads() -> None:
    console = terminal()
    with LiveView(console, 400) as view:

        def run(first: int) -> None:
            for repeat in range(first, first + 50):
                view(TrialStarted(make_spec(POINT, repeat), 1))
                view(Notice(f"at {repeat}"))
                view(TrialEnded(make_result(POINT, repeat)))

        threads = [threading.Thread(target=run, args=(50 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
        assert "400/400 trials, 0 running, 0 queued" in picture(view)


def test_drawing_and_printing_do_not_wait_for_each_other() -> None:
    with LiveView(terminal(), 10) as view:
        # Both end: a thread that draws on and on may keep the lock from the other, which is no deadlock.
        def draw() -> None:
            for _ in range(300):
                view._live.refresh()

        def tell() -> None:
            for i in range(300):
                view(Notice(f"at {i}"))

        threads = [threading.Thread(target=f, daemon=True) for f in (draw, tell)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads)


def test_the_view_draws_seldom_and_events_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert REFRESH_PER_S <= 2
    drawn: list[object] = []
    monkeypatch.setattr(LiveView, "_render", lambda self: drawn.append(self))
    view = LiveView(terminal(), 5000)  # not entered: no thread draws
    drawn.clear()
    for repeat in range(10):
        view(TrialStarted(make_spec(POINT, repeat), 1))
        view(TrialEnded(make_result(POINT, repeat)))
    assert not drawn
