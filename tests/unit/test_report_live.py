"""The view of a running study: consoles and threads. Its texts are in ``tests/golden/cases/live.txt``."""

import io
import re
import threading
from dataclasses import replace
from datetime import datetime

import pytest
from results import make_result, make_spec
from rich.cells import cell_len
from rich.console import Console

from raypar.analysis.question import Question
from raypar.reporting.live import REFRESH_PER_S, LiveView
from raypar.run.runner import GangStarting, Notice, TrialEnded, TrialReported, TrialsAdded, TrialStarted
from raypar.study.trial import Placement, TrialState

POINT = {"batch_size": 64, "num_workers": 2}


def terminal():
    return Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)


def test_a_pipe_is_flushed_after_every_line_and_gets_substitutes_for_unicode():
    class Flushed(io.TextIOWrapper):
        num_flushed = 0

        def flush(self):
            super().flush()
            self.num_flushed += 1

    file = Flushed(buffer := io.BytesIO(), encoding="ascii")
    LiveView(Console(file=file, width=80), 1)(GangStarting(Placement(2, 1, "cpu")))
    text = buffer.getvalue()
    assert re.fullmatch(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  starting a gang of 2 workers x 1 core\n", text)
    assert file.num_flushed == 1


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_a_failure_stays_on_the_terminal_and_a_success_on_a_dumb_one(monkeypatch, kind):
    monkeypatch.setenv("TERM", kind)
    console = terminal()
    with LiveView(console, 3) as view:
        view(TrialEnded(make_result(POINT, 0)))
        view(TrialEnded(make_result(POINT, 1, state=TrialState.FAILED, failure="boom")))
    text = console.file.getvalue()
    assert "[2/3] batch_size=64 num_workers=2 #2  FAILED: boom" in text and ("[1/3]" in text) == (kind == "dumb")


def test_a_closed_terminal_does_not_stop_the_study():
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal)
        with LiveView(console, 3) as view:
            console.file = Closed()
            view(Notice("nobody reads it"))
            view(TrialEnded(make_result(POINT, 0)))
        assert view._run.num_done == 1


def test_events_may_come_from_many_threads_while_the_view_is_drawn():
    with LiveView(terminal(), 400) as view:

        def run(first):
            for repeat in range(first, first + 50):
                view(TrialStarted(make_spec(POINT, repeat), 1))
                view(Notice(f"at {repeat}"))
                view(TrialEnded(make_result(POINT, repeat)))

        def draw():
            for _ in range(300):  # an endless loop could keep the lock from the other threads
                view._live.refresh()

        threads = [threading.Thread(target=run, args=(50 * i,), daemon=True) for i in range(8)]
        threads.append(threading.Thread(target=draw, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads)
        assert (view._run.num_done, view._run.running) == (400, {})


def test_the_view_is_drawn_rarely_and_never_by_events(monkeypatch):
    assert REFRESH_PER_S <= 2
    drawn = []
    monkeypatch.setattr(LiveView, "_render", lambda self: drawn.append(self))
    view = LiveView(terminal(), 5000)  # not entered: no thread draws
    drawn.clear()
    for repeat in range(10):
        view(TrialStarted(make_spec(POINT, repeat), 1))
        view(TrialEnded(make_result(POINT, repeat)))
    assert not drawn


LONG = {"batch_size": 768, "num_workers": 2, "learning_rate": 0.001, "optimizer": "adamw", "hidden": "512-512-512"}
NUMBERS = {"epoch": 2, "train_loss": 0.2134, "accuracy": 0.971, "throughput_samples_per_s": 114_321.0}


def busy_view(console, point=LONG):
    """Return a view with all kinds of lines. It is not entered, so that no thread draws."""
    view = LiveView(console, 1234, starting="starting Ray", clock=lambda: 0.0)
    reason = "2 points open: batch_size=768 1.04× [0.98, 1.10]; about 5 min more"
    added = TrialsAdded([make_spec(point, 9)], reason, 60.0)
    results = [make_result(point, repeat, wall_s=300.0 * repeat) for repeat in range(5)]
    failed = make_result(point, 5, state=TrialState.FAILED, failure="ValueError: no such thing\nat 1")
    reported = [TrialReported(make_spec(point, repeat), NUMBERS) for repeat in (6, 7)]
    for event in (added, GangStarting(Placement(16, 4, "cuda")), *map(TrialEnded, [*results, failed]), *reported):
        view(event)
    return view


def drawn(view):
    with view._console.capture() as capture:
        view._console.print(view._render())
    return capture.get()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("point", [POINT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("width", [20, 33, 40, 60, 79, 80, 81, 100, 200])
def test_no_line_of_the_view_is_wider_than_the_terminal_and_no_label_is_cut(width, point, encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    view = busy_view(Console(file=file, width=width, height=200, force_terminal=True, color_system=None), point)
    text = drawn(view)
    assert max(map(cell_len, text.splitlines())) <= width and "…" not in text
    words = " ".join(text.split())
    assert "1 failed" in words and "elapsed" in words and "left" in words and "2 points open" in words
    if width >= 40:
        for repeat in (4, 5, 6, 7, 8):
            label = make_spec(point, repeat - 1).label
            assert label in words
    if width >= 80 and point is POINT:
        assert "epoch 2" in words and "trained 4.00 s" in words


@pytest.mark.parametrize("height", [3, 6, 9, 24])
def test_a_low_terminal_shows_what_matters_most(height):
    console = Console(file=io.StringIO(), width=80, height=height, force_terminal=True, color_system=None)
    lines = drawn(busy_view(console)).splitlines()
    assert len(lines) <= height - 1 and "6/1235 trials" in lines[0] and "elapsed" in lines[1]


class Screen(io.StringIO):
    """Terminal that wraps its text again when its width changes. The cursor is at the end of the text."""

    def __init__(self, width):
        super().__init__()
        self.width, self.rows, self.column = width, [["", False]], 0  # text, and whether the next row continues it
        self.at = 0

    def write(self, text):
        for token in re.findall(r"\x1b\[\??[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if token == "\n":
                self.at += 1
                self.rows[self.at :] = self.rows[self.at :] or [["", False]]
                self.column = 0
            elif token == "\r":
                self.column = 0
            elif token == "\x1b[2K":
                self.rows[self.at] = ["", False]
            elif token == "\x1b[1A":
                self.at -= 1
                assert self.at >= 0
            elif not token.startswith("\x1b"):
                for character in token:
                    if self.column == self.width:
                        self.rows[self.at][1] = True
                        self.at, self.column = self.at + 1, 0
                        self.rows[self.at :] = self.rows[self.at :] or [["", False]]
                    row = self.rows[self.at]
                    row[0] = row[0][: self.column] + character
                    self.column += 1
        return len(text)

    def resize(self, width):
        assert not any(text for text, _ in self.rows[self.at + 1 :])
        lines = [""]
        for text, goes_on in self.rows[: self.at + 1]:
            lines[-1] += text
            lines += [] if goes_on else [""]
        lines.pop()
        self.width = width
        self.rows = []
        for line in lines:
            parts = [line[i : i + width] for i in range(0, len(line), width)] or [""]
            self.rows += [[part, i < len(parts) - 1] for i, part in enumerate(parts)]
        self.at = len(self.rows) - 1
        self.column = len(self.rows[-1][0])

    @property
    def text(self):
        return "".join(text + ("" if goes_on else "\n") for text, goes_on in self.rows[: self.at + 1])


@pytest.mark.parametrize("widths", [[80, 40], [80, 100, 30], [60, 59, 25, 80], [40, 80, 40, 24, 90]])
def test_a_resized_terminal_keeps_the_notices_and_nothing_of_the_view(widths):
    screen = Screen(widths[0])
    console = Console(file=screen, width=widths[0], height=50, force_terminal=True, color_system=None)
    view = busy_view(console)
    screen.__init__(widths[0])  # without the lines that are already printed
    notices = []
    view._live.auto_refresh = False
    with view:
        for number, width in enumerate(widths):
            screen.resize(width)
            console.width = width
            for _ in range(2):
                view._live.refresh()
                assert screen.text.count("elapsed") == 1 and "1 failed" in " ".join(screen.text.split())
            notices.append(f"notice {number}")
            view(Notice(notices[-1]))
            assert screen.text.count("elapsed") == 1
    assert screen.text.rstrip("\n").split("\n") == notices


def test_one_error_is_printed_once_on_a_terminal_and_with_each_trial_in_a_log():
    for is_terminal, num_printed in ((True, 2), (False, 3)):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
        view = LiveView(console, 9)
        for repeat, failure in enumerate(("boom", "boom", "another")):
            view(TrialEnded(make_result(POINT, repeat, state=TrialState.FAILED, failure=failure)))
        assert console.file.getvalue().count("FAILED") == num_printed
        assert "3 failed" in drawn(view)


@pytest.mark.parametrize(("num", "words"), [(1, "1 does not fit"), (2, "2 do not fit")])
def test_trials_that_do_not_fit_are_counted_in_plain_english(num, words):
    view = LiveView(terminal(), 3)
    for repeat in range(num):
        view(TrialEnded(make_result(POINT, repeat, state=TrialState.DOES_NOT_FIT)))
    assert f"queued, {words}\n" in drawn(view)


def test_the_remaining_time_changes_while_no_trial_ends():
    now_s = [0.0]
    done = [make_result({"num_workers": 1}, 0, wall_s=10.0)]
    specs = [make_spec({"num_workers": 1}, repeat) for repeat in (1, 2)]
    view = LiveView(terminal(), 3, done=done, queued=specs, clock=lambda: now_s[0], now=lambda: datetime(2026, 3, 2))

    def left_s():
        return float(view._finish_text().rpartition("(")[2].partition(" s left")[0])

    def after(seconds):
        now_s[0] += seconds
        return left_s()

    # Ray starts, or another study uses the cores, for an unknown time.
    assert [left_s(), after(5), after(20)] == [20, 25, 45]
    view(TrialStarted(specs[0], 1))
    assert [left_s(), after(5), after(5)] == [20, 15, 10]
    assert [after(5), after(5), after(15)] == [15, 20, 35]  # it takes longer than the others did
    view(TrialEnded(replace(done[0], spec=specs[0])))
    assert [left_s(), after(5)] == [10, 15]


def test_the_expected_end_includes_trials_that_may_be_added():
    question = Question("s", {"num_workers": 1}, ("num_workers",), max_repeats=30)
    view = LiveView(terminal(), 2, question=question, clock=lambda: 0.0, now=lambda: datetime(2026, 3, 2, 23, 59))
    assert view._finish_text() == ""
    view(TrialEnded(make_result({"num_workers": 1}, 0, wall_s=30.0)))
    view(TrialStarted(make_spec({"num_workers": 2}), 1))
    assert view._finish_text() == "finishes at 23:59 at the earliest (30 s left)"
    view(TrialsAdded([make_spec({"num_workers": 1}, 1)], "1 point open", 120.0))
    assert view._finish_text() == "finishes at about Tue 00:02 (3 min 0 s left)"


def test_a_metric_is_shown_in_the_unit_that_its_values_have_so_far():
    asked = Question("s", {}, ("num_workers",), metric="acc", num_repeats=1, is_search=True)
    specs = [make_spec({"num_workers": n}) for n in (1, 2)]
    ended = replace(make_result({"num_workers": 1}), reports=({"acc": 93.21},))
    with LiveView(console := terminal(), 2, question=asked) as view:
        view(TrialReported(specs[0], {"acc": 0.8}))
        view(TrialReported(specs[0], {"acc": 50.0}))
        view(TrialEnded(ended))
        view(TrialReported(specs[1], {"acc": 0.8}))
    text = console.file.getvalue()
    assert "acc 93.21 %" in text and "acc 0.80 %" in text
    assert not re.search(r"\b(9321|5000)", text)
    lines = io.StringIO()
    view = LiveView(Console(file=lines, width=200), 2, done=[ended], question=asked)
    view(TrialEnded(replace(make_result({"num_workers": 2}), reports=({"acc": 0.8},))))
    assert "acc 0.80 %" in lines.getvalue()
