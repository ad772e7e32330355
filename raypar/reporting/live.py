"""Live view of a running study.

The view shares the machine with the trials that are being timed. So an event only changes a few fields, and rich's
thread draws once a second. If the output is not a terminal, there is no thread, only a line with its time for each
trial.

A line that is too long for the terminal loses parts from its end. A label that is too long by itself breaks at a space.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from rich.cells import cell_len
from rich.console import Console, ConsoleRenderable, Group
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.text import Text

from raypar import units
from raypar.analysis.progress import SPEEDUP, Interim, TrialKind, TrialTime, interim_best, remaining_s, trial_kind
from raypar.analysis.question import Question
from raypar.reporting.text import ascii_fallback, wrap_hanging
from raypar.run import runner
from raypar.study.metric import Metric
from raypar.study.trial import (
    FailureKind,
    Placement,
    TrialResult,
    TrialSpec,
    TrialState,
    is_timed_whole,
    point_label,
    reason_of,
)

ACCURACY = Metric("accuracy")


def progress_parts(spec: TrialSpec, report: Mapping[str, float], metric: Metric = ACCURACY) -> list[str]:
    """Return label, epoch, loss, metric and throughput of a running trial, as far as reported."""
    parts = [spec.label]
    if (epoch := report.get("epoch")) is not None:
        epochs = spec.config.get("epochs")
        parts.append(f"epoch {epoch:g}" + (f"/{epochs}" if epochs else ""))
    loss = next((key for key in ("train_loss", "loss", "val_loss") if key in report), "")
    if loss:
        parts.append(f"loss {units.number(report[loss], 3)}")
    if metric.name != loss and (value := report.get(metric.name)) is not None:
        parts.append(f"{metric.name} {metric.read_from([value]).show(value)}")
    if (throughput := report.get("throughput_samples_per_s")) is not None:
        parts.append(units.rate(throughput))
    return parts


def ended_parts(result: TrialResult, metric: Metric = ACCURACY) -> list[str]:
    """Return label, final state and figures of a trial that has ended."""
    parts = [result.spec.label]
    if result.failure and not result.is_complete:
        parts.append(f"FAILED: {reason_of(result) or result.failure.kind}")
        return parts
    if not result.is_measured:
        parts.append(f"{result.state.upper()}: {reason_of(result)}" if reason_of(result) else result.state.value)
    if is_timed_whole(result):
        parts.append(f"trained {units.seconds(result.train_time_s)}")
    if (value := result.final.get(metric.name)) is not None:
        parts.append(f"{metric.name} {metric.read_from([value]).show(value)}")
    if result.wall_s is not None:
        parts.append(f"in all {units.seconds(result.wall_s)}")
    return parts


def interim_text(best: Interim, metric: Metric = ACCURACY) -> str:
    """Return ``leading: 1.52× at num_workers=2 (3 trials, unconfirmed)``."""
    shown = f"{best.quantity} {metric.read_from([best.value]).show(best.value)}"
    if best.quantity == SPEEDUP:
        shown = units.ratio(best.value) if best.value > 1 else "the baseline"
    trials = units.counted(best.num_trials, "trial")
    return f"leading: {shown} at {point_label(best.point)} ({trials}, unconfirmed)"


REFRESH_PER_S = 1
MAX_SHOWN = 4  # running trials that get a line each
NUM_LAST = 3  # latest ended trials that get a line each
BAR_WIDTH, MIN_BAR_WIDTH = 30, 5
TIME_OF_LINE = "%Y-%m-%d %H:%M:%S"
STARTING_RAY, STARTING_WORKERS = "starting Ray (usually 10-20 s)", "starting workers"


class _ResizableLive(Live):
    """Live display that also clears the rows added when a terminal gets narrower and wraps its lines.

    Attributes:
        widths: width in cells of each line to draw next.
    """

    widths: Sequence[int] = ()
    _drawn: Sequence[int] = ()  # width in cells of each line on the terminal

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        width = max(1, self.console.width)
        num_wrapped = sum(max(0, -(-cells // width) - 1) for cells in self._drawn)
        self._drawn = self.widths
        clear = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)) * num_wrapped
        return [Control(ControlType.CARRIAGE_RETURN, *clear), *super().process_renderables(renderables)]


@dataclass
class _Running:
    """A running trial."""

    spec: TrialSpec
    since_s: float
    report: Mapping[str, float] = field(default_factory=dict)


class LiveView:
    """View of the events of a run; pass it to a runner as its listener.

    Args:
        console: output; a terminal gets a live view, anything else plain lines.
        num_trials: number of all trials of the study, including finished ones.
        done: results from before the run.
        queued: trials still to run, if known. A search draws them later.
        question: the study's question, which determines the leading point.
        starting: text to show until the first gang or trial starts.
        clock: monotonic clock in seconds.
        now: time of day.
    """

    def __init__(
        self,
        console: Console,
        num_trials: int,
        *,
        done: Sequence[TrialResult] = (),
        queued: Sequence[TrialSpec] = (),
        question: Question | None = None,
        starting: str = "",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._console = console
        self._num_trials = num_trials
        self._num_done = len(done)
        self._num_lost: Counter[TrialState] = Counter()  # trials that failed or diverged
        self._num_skipped = 0
        self._has_said = False
        self._errors: set[str] = set()  # already printed
        self._clock, self._now = clock, now
        self._begun_s = clock()
        self._starting_text = starting
        self._last: deque[TrialResult] = deque(maxlen=NUM_LAST)
        self._running: dict[str, _Running] = {}
        self._starting: dict[Placement, float] = {}
        self._queued = {spec.identity: trial_kind(spec) for spec in queued}
        self._results = list(done)
        self._question = question
        self._interim: Interim | None = None
        self._extremes: list[float] = []  # of the metric so far
        for result in done:
            self._see(result.final)
        self._open = ""  # undecided part of a study that runs until it is settled
        self._later_s: float | None = None  # expected time of trials not decided on yet; None: unknown
        self._is_decided = question is None or question.max_repeats is None  # no trials will be added
        self._ended: list[TrialTime] = [
            (trial_kind(r.spec), r.wall_s) for r in done if r.is_complete and r.wall_s is not None
        ]
        self._num_slots = 1  # most trials seen running side by side
        self._idle_since_s: float | None = None  # since the end of a trial that ran alone
        self._waiting_since_s: float | None = self._begun_s  # since when no trial is running; None: one is
        self._pauses_s: list[float] = []
        self._gang_starts_s: dict[Placement, float] = {}
        self._lock = threading.RLock()
        self._live: _ResizableLive | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = _ResizableLive(
                get_renderable=self._render, console=console, refresh_per_second=REFRESH_PER_S, transient=True
            )

    def __enter__(self) -> LiveView:
        self._begun_s = self._waiting_since_s = self._clock()
        if self._live:
            self._live.start(refresh=True)
        elif self._starting_text:
            self._say(self._starting_text)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            if self._live:
                self._live.stop()
            if self._has_said:
                self._console.line()  # before the report

    def __call__(self, event: runner.Event) -> None:
        """Handle an event, from any thread."""
        with self._lock:
            line = self._take(event)
        # Printed outside our lock: rich holds its lock while it draws the view, which takes ours.
        if line:
            self._say(line)

    def _take(self, event: runner.Event) -> str | None:
        """Update the state; return a line to print permanently, if any."""
        if not isinstance(event, (runner.Notice, runner.ClusterChanged, runner.TrialsAdded)):
            self._starting_text = ""
        match event:
            case runner.GangStarting(placement):
                self._idle_since_s = None
                self._starting[placement] = self._clock()
                return None if self._live else f"starting a gang of {placement}"
            case runner.GangReady(placement, seconds):
                self._starting.pop(placement, None)
                self._gang_starts_s[placement] = seconds
                return None if self._live else f"gang of {placement} is ready after {units.seconds(seconds)}"
            case runner.TrialStarted(spec):
                self._start(spec)
            case runner.TrialReported(spec, report):
                if spec.identity not in self._running:
                    self._start(spec)
                self._running[spec.identity].report = report
                self._see(report)
            case runner.TrialRetried(spec, reason):
                self._running.pop(spec.identity, None)
                self._queued[spec.identity] = trial_kind(spec)
                return f"{spec.label}  starting again: {reason}"
            case runner.TrialEnded(result):
                return self._end(result)
            case runner.TrialsAdded(specs, reason, later_s):
                self._num_trials += len(specs)
                self._later_s = later_s
                self._queued |= {spec.identity: trial_kind(spec) for spec in specs}
                self._open = reason
                return None if self._live else reason
            case runner.ClusterChanged(num_nodes):
                return f"the cluster has {units.counted(num_nodes, 'node')} now"
            case runner.Notice(text):
                return text
        return None

    def _start(self, spec: TrialSpec) -> None:
        now_s, self._waiting_since_s = self._clock(), None
        if self._idle_since_s is not None:
            self._pauses_s.append(now_s - self._idle_since_s)
            self._idle_since_s = None
        self._queued.pop(spec.identity, None)
        self._running[spec.identity] = _Running(spec, now_s)
        self._num_slots = max(self._num_slots, len(self._running))

    def _end(self, result: TrialResult) -> str | None:
        now_s = self._clock()
        started = self._running.pop(result.spec.identity, None)
        self._queued.pop(result.spec.identity, None)
        self._num_done += 1
        self._results.append(result)
        self._see(result.final)
        failed, late_s = not result.is_complete, 0.0
        is_lost = failed or result.state.traits.is_unusable
        if result.failure is not None and result.failure.kind is FailureKind.SKIPPED:
            self._num_skipped += 1
            return None  # the notice of the stopped point suffices
        self._last.append(result)
        self._num_lost[result.state] += is_lost
        if not failed:
            seen_s = now_s - started.since_s if started else 0.0
            took_s = seen_s if result.wall_s is None else result.wall_s
            self._ended.append((trial_kind(result.spec), took_s))
            late_s = max(0.0, seen_s - took_s)  # the event comes after it was stored
            if self._question:
                self._interim = interim_best(self._question, self._results)
        if not self._running:
            self._idle_since_s, self._waiting_since_s = now_s - late_s, now_s
        if self._live and (not is_lost or reason_of(result) in self._errors):
            return None
        self._errors.add(reason_of(result))
        shown, width = ended_parts(result, self._metric()), len(str(self._num_trials))
        if not self._live and result.failure is not None and result.failure.log_path:
            shown.append(f"log: {result.failure.log_path}")
        parts = [f"[{self._num_done:>{width}}/{self._num_trials}] {'  '.join(shown)}"]
        if not failed and self._num_done < self._num_trials and (finish := self._finish_text()):
            parts.append(finish)
        if self._interim and not is_lost:
            parts.append(interim_text(self._interim, self._metric()))
        return "; ".join(parts)

    def _metric(self) -> Metric:
        """Return the study's metric, with the unit that its values show so far."""
        return (self._question.judged_by if self._question else ACCURACY).read_from(self._extremes)

    def _see(self, report: Mapping[str, float]) -> None:
        value = report.get(self._question.metric if self._question else ACCURACY.name)
        if value is not None and math.isfinite(value):
            seen = [*self._extremes, value]
            self._extremes = [min(seen), max(seen)]

    def _say(self, line: str) -> None:
        self._has_said = True
        if not self._live:
            line = f"{self._now():{TIME_OF_LINE}}  {line}"
        with contextlib.suppress(OSError):  # a closed terminal must not end a trial
            self._console.print(Text(ascii_fallback(line, self._console.encoding)), soft_wrap=True)  # rich flushes

    def remaining_s(self) -> float | None:
        """Return the seconds until the last trial ends, estimated from ended trials; None before the first ends."""
        with self._lock:
            now_s = self._clock()
            queued = list(self._queued.values())[: self._num_queued]
            queued += [TrialKind()] * (self._num_queued - len(queued))
            started = {*self._gang_starts_s, *self._starting}
            return remaining_s(
                queued,
                [(trial_kind(trial.spec), now_s - trial.since_s) for trial in self._running.values()],
                self._ended,
                num_slots=self._num_slots,
                overheads_s=self._pauses_s[1:],  # the first pause includes the first use of the store
                gang_starts_s=list(self._gang_starts_s.values()),
                num_gang_starts=len({kind.placement for kind in queued if kind.placement} - started),
            )

    @property
    def _num_queued(self) -> int:
        return max(0, self._num_trials - self._num_done - len(self._running))

    def _finish_text(self) -> str:
        """Return ``finishes at about 14:32 (35 s left)``; empty if unknown."""
        is_idle = not self._running and not self._num_queued  # until further trials are added
        if is_idle or (left_s := self.remaining_s()) is None:
            return ""
        left_s += self._later_s or 0.0
        if self._waiting_since_s is not None:  # unknown wait: assume as long again
            left_s += self._clock() - self._waiting_since_s
        if left_s < 1 and self._is_decided:
            return "finishes at any moment"
        now = self._now()
        finish = now + timedelta(seconds=left_s)
        clock = f"{finish:%H:%M}" if finish.date() == now.date() else f"{finish:%a %H:%M}"
        is_least = self._later_s is None and not self._is_decided
        when = f"at {clock} at the earliest" if is_least else f"at about {clock}"
        return f"finishes {when} ({_whole_seconds(left_s)} left)"

    def _render(self) -> Group:
        with self._lock:
            lines = self._lines(self._console.width)
        if self._live:
            self._live.widths = [line.cell_len for line in lines]
        return Group(*lines)

    def _lines(self, width: int) -> list[Text]:
        """Return as many lines of the view as fit on the terminal, each of at most `width` cells."""
        times = [f"{_whole_seconds(self._clock() - self._begun_s)} elapsed", self._finish_text()]
        head = [*self._summary(width), *self._wrapped(", ".join(filter(None, times)), 2)]
        if self._open:
            head += self._wrapped(self._open, 2)
        if self._interim:
            head += self._wrapped(interim_text(self._interim, self._metric()), 2)
        running: list[Text] = []
        if self._starting_text:
            running += self._wrapped(self._starting_text, 2)
        for placement, since_s in self._starting.items():
            for_s = _whole_seconds(self._clock() - since_s)
            running += self._wrapped(f"starting a gang of {placement}, {for_s}", 2)
        shown = list(self._running.values())
        for trial in shown[:MAX_SHOWN]:
            running += self._fitted(
                "running: ", progress_parts(trial.spec, trial.report, self._metric()), trial.spec.label
            )
        if more := units.and_more(len(shown) - MAX_SHOWN):
            running += self._wrapped(f"running:{more}", 2)
        last = [line for result in self._last for line in self._ended_lines(result)]
        num_rows = self._console.height - 1
        num_hidden = max(0, len(head) + len(last) + len(running) - num_rows)
        return [*head, *last[num_hidden:], *running][:num_rows]

    def _summary(self, width: int) -> list[Text]:
        text = f"{self._num_done}/{self._num_trials} trials, {len(self._running)} running, {self._num_queued} queued"
        text += "".join(f", {num} {state}" for state, num in self._num_lost.items() if num)
        text += f", {self._num_skipped} not run" if self._num_skipped else ""
        bar_width = min(BAR_WIDTH, width - cell_len(text) - 2)
        if bar_width < MIN_BAR_WIDTH:
            return self._wrapped(text, 0)
        bar = ProgressBar(max(1, self._num_trials), self._num_done, width=bar_width)
        line = Text.assemble(*((segment.text, segment.style or "") for segment in self._console.render(bar)))
        line.append(" " * (bar_width + 2 - line.cell_len) + text)
        return [line]

    def _ended_lines(self, result: TrialResult) -> list[Text]:
        label, *parts = ended_parts(result, self._metric())
        least = label if result.is_measured else f"{label}  {result.state.upper()}"
        return self._fitted("ended:   ", [label, *parts], least)

    def _fitted(self, head: str, parts: Sequence[str], least: str) -> list[Text]:
        """Return one line with as many parts as fit; if only one fits, `least` replaces it."""
        for num in range(len(parts), 0, -1):
            line = "  " + head + ("  ".join(parts[:num]) if num > 1 else least)
            if cell_len(line := ascii_fallback(line, self._console.encoding)) <= self._console.width:
                return [Text(line)]
        return self._wrapped(head + least, 2)

    def _wrapped(self, text: str, indent: int) -> list[Text]:
        """Return the lines of a text; a word longer than a line is folded."""
        lines = wrap_hanging(ascii_fallback(text, self._console.encoding), self._console.width, indent)
        return [part for line in lines for part in Text(line).wrap(self._console, self._console.width)]


def _whole_seconds(value_s: float) -> str:
    rounded = round(value_s)
    return f"{rounded} s" if rounded < units.MINUTE_S else units.seconds(rounded)
