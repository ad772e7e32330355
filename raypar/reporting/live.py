"""Live view of a running study.

The view shares the machine with the trials that are being timed. So an event only changes a few fields, and rich's
thread draws once a second. If the output is not a terminal, there is no thread, only a line with its time for each
trial.

A line that is too long for the terminal loses parts at its end. A label that is too long is wrapped at a space.
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
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console, ConsoleRenderable, Group
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.text import Text

from raypar import units
from raypar.analysis.progress import SPEEDUP, Interim, Leader, TrialKind, TrialTime, remaining_s, trial_kind
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
        parts.append(f"FAILED: {result.reason or result.failure.kind}")
        return parts
    if not result.is_measured:
        parts.append(f"{result.state.upper()}: {result.reason}" if result.reason else result.state.value)
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


class Display(Protocol):
    """Display of the view while trials run.

    Attributes:
        widths: width in cells of each line to draw next.
    """

    widths: Sequence[int]

    def start(self, refresh: bool = False) -> None:
        """Begin; with `refresh`, draw at once."""
        ...

    def refresh(self) -> None:
        """Draw again."""
        ...

    def stop(self) -> None:
        """End, and leave nothing behind."""
        ...


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


class _Progress:
    """Progress of a run, and when it is expected to finish."""

    def __init__(
        self,
        num_trials: int,
        done: Sequence[TrialResult],
        queued: Sequence[TrialSpec],
        is_decided: bool,
        clock: Callable[[], float],
    ) -> None:
        self.num_trials, self.num_done = num_trials, len(done)
        self.clock, self.begun_s = clock, clock()
        self.running: dict[str, _Running] = {}
        self.starting: dict[Placement, float] = {}  # gangs that are starting, since when
        self.later_s: float | None = None  # expected time of trials that may be added later; None: unknown
        self.is_decided = is_decided  # no trials will be added
        self._queued = {spec.identity: trial_kind(spec) for spec in queued}
        self._ended: list[TrialTime] = [
            (trial_kind(r.spec), r.wall_s) for r in done if r.is_complete and r.wall_s is not None
        ]
        self._num_slots = 1  # most trials seen running side by side
        self._idle_since_s: float | None = None  # since the end of a trial that ran alone
        self._waiting_since_s: float | None = self.begun_s  # time since which no trial runs; None: one runs
        self._pauses_s: list[float] = []
        self._gang_starts_s: dict[Placement, float] = {}

    def begin(self) -> None:
        self.begun_s = self._waiting_since_s = self.clock()

    def start_gang(self, placement: Placement) -> None:
        self._idle_since_s = None
        self.starting[placement] = self.clock()

    def end_start(self, placement: Placement, seconds: float) -> None:
        self.starting.pop(placement, None)
        self._gang_starts_s[placement] = seconds

    def add(self, specs: Sequence[TrialSpec], later_s: float | None) -> None:
        self.num_trials += len(specs)
        self.later_s = later_s
        self._queued |= {spec.identity: trial_kind(spec) for spec in specs}

    def start(self, spec: TrialSpec) -> None:
        now_s, self._waiting_since_s = self.clock(), None
        if self._idle_since_s is not None:
            self._pauses_s.append(now_s - self._idle_since_s)
            self._idle_since_s = None
        self._queued.pop(spec.identity, None)
        self.running[spec.identity] = _Running(spec, now_s)
        self._num_slots = max(self._num_slots, len(self.running))

    def queue_again(self, spec: TrialSpec) -> None:
        self.running.pop(spec.identity, None)
        self._queued[spec.identity] = trial_kind(spec)

    def end(self, result: TrialResult) -> None:
        now_s, late_s = self.clock(), 0.0
        started = self.running.pop(result.spec.identity, None)
        self._queued.pop(result.spec.identity, None)
        self.num_done += 1
        if result.failure is not None and result.failure.kind is FailureKind.SKIPPED:
            return
        if result.is_complete:
            seen_s = now_s - started.since_s if started else 0.0
            took_s = seen_s if result.wall_s is None else result.wall_s
            self._ended.append((trial_kind(result.spec), took_s))
            late_s = max(0.0, seen_s - took_s)  # a result is stored before its event arrives
        if not self.running:
            self._idle_since_s, self._waiting_since_s = now_s - late_s, now_s

    @property
    def num_queued(self) -> int:
        return max(0, self.num_trials - self.num_done - len(self.running))

    def remaining_s(self) -> float | None:
        """Return the seconds until the last trial ends, from ended trials; None if unknown or nothing is left."""
        if not self.running and not self.num_queued:  # until further trials are added
            return None
        now_s = self.clock()
        queued = list(self._queued.values())[: self.num_queued]
        queued += [TrialKind()] * (self.num_queued - len(queued))
        started = {*self._gang_starts_s, *self.starting}
        left_s = remaining_s(
            queued,
            [(trial_kind(trial.spec), now_s - trial.since_s) for trial in self.running.values()],
            self._ended,
            num_slots=self._num_slots,
            overheads_s=self._pauses_s[1:],  # the first pause includes the first use of the store
            gang_starts_s=list(self._gang_starts_s.values()),
            num_gang_starts=len({kind.placement for kind in queued if kind.placement} - started),
        )
        # Assume that an unknown wait lasts as long again.
        waited_s = 0.0 if self._waiting_since_s is None else now_s - self._waiting_since_s
        return None if left_s is None else left_s + (self.later_s or 0.0) + waited_s


class _Leading:
    """The leading point so far, and the metric with the unit inferred from its values so far."""

    def __init__(self, question: Question | None, done: Sequence[TrialResult]) -> None:
        self._question, self._leader = question, Leader(question, done) if question else None
        self._extremes: list[float] = []  # of the metric
        self.interim: Interim | None = None
        for result in done:
            self.see(result.final)

    @property
    def metric(self) -> Metric:
        return (self._question.judged_by if self._question else ACCURACY).read_from(self._extremes)

    @property
    def text(self) -> str:
        return interim_text(self.interim, self.metric) if self.interim else ""

    def see(self, report: Mapping[str, float]) -> None:
        value = report.get(self.metric.name)
        if value is not None and math.isfinite(value):
            seen = [*self._extremes, value]
            self._extremes = [min(seen), max(seen)]

    def add(self, result: TrialResult) -> None:
        self.see(result.final)
        if self._leader is not None:
            self._leader.add(result)
            if result.is_complete:
                self.interim = self._leader.best


class LiveView:
    """View of the events of a run; pass it to a runner as its listener.

    Args:
        console: output; a terminal gets a live view, anything else plain lines.
        num_trials: number of all trials of the study, including finished ones.
        done: results from before the run.
        queued: trials still to run, if known. A search draws them later.
        question: the study's question, which determines the leading point.
        starting: text to show until the first gang or trial starts.
        display: makes the live display from the function that renders it; None: that of a terminal, if it is one.
        clock: monotonic clock in seconds.
        now: time of day.
    """

    def __init__(
        self,
        console: Console,
        num_trials: int,
        *,
        display: Callable[[Callable[[], Group]], Display] | None = None,
        done: Sequence[TrialResult] = (),
        queued: Sequence[TrialSpec] = (),
        question: Question | None = None,
        starting: str = "",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        is_decided = question is None or question.max_repeats is None
        self._console, self._now = console, now
        self._run = _Progress(num_trials, done, queued, is_decided, clock)
        self._leading = _Leading(question, done)
        self._num_lost: Counter[TrialState] = Counter()  # trials without a usable model
        self._num_skipped = 0
        self._has_said = False
        self._errors: set[str] = set()  # already printed
        self._starting_text = starting
        self._last: deque[TrialResult] = deque(maxlen=NUM_LAST)
        self._open = ""  # points that are not settled yet, in words
        self._lock = threading.RLock()
        self._live: Display | None = display(self._render) if display else None
        if display is None and console.is_terminal and not console.is_dumb_terminal:
            self._live = _ResizableLive(
                get_renderable=self._render, console=console, refresh_per_second=REFRESH_PER_S, transient=True
            )

    def __enter__(self) -> LiveView:
        self._run.begin()
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
        # Print without our lock: rich holds its own lock while it draws the view, and the view takes ours.
        if line:
            self._say(line)

    def refresh(self) -> None:
        """Draw the view again, for a display that has no thread."""
        if self._live:
            self._live.refresh()

    def _take(self, event: runner.Event) -> str | None:
        """Update the state; return a line to print permanently, if any."""
        run = self._run
        if not isinstance(event, (runner.Notice, runner.ClusterChanged, runner.TrialsAdded)):
            self._starting_text = ""
        match event:
            case runner.GangStarting(placement):
                run.start_gang(placement)
                return None if self._live else f"starting a gang of {placement}"
            case runner.GangReady(placement, seconds):
                run.end_start(placement, seconds)
                return None if self._live else f"gang of {placement} is ready after {units.seconds(seconds)}"
            case runner.TrialStarted(spec):
                run.start(spec)
            case runner.TrialReported(spec, report):
                if spec.identity not in run.running:
                    run.start(spec)
                run.running[spec.identity].report = report
                self._leading.see(report)
            case runner.TrialRetried(spec, reason):
                run.queue_again(spec)
                return f"{spec.label}  starting again: {reason}"
            case runner.TrialEnded(result):
                return self._end(result)
            case runner.TrialsAdded(specs, reason, later_s):
                run.add(specs, later_s)
                self._open = reason
                return None if self._live else reason
            case runner.ClusterChanged(num_nodes):
                return f"the cluster has {units.counted(num_nodes, 'node')} now"
            case runner.Notice(text):
                return text
        return None

    def _end(self, result: TrialResult) -> str | None:
        run = self._run
        run.end(result)
        self._leading.add(result)
        if result.failure is not None and result.failure.kind is FailureKind.SKIPPED:
            self._num_skipped += 1
            return None  # there was a notice about the stopped point
        is_lost = not result.is_complete or result.state.traits.is_unusable
        self._last.append(result)
        self._num_lost[result.state] += is_lost
        if self._live and (not is_lost or result.reason in self._errors):
            return None
        self._errors.add(result.reason)
        shown, width = ended_parts(result, self._leading.metric), len(str(run.num_trials))
        if not self._live and result.failure is not None and result.failure.log_path:
            shown.append(f"log: {result.failure.log_path}")
        parts = [f"[{run.num_done:>{width}}/{run.num_trials}] {'  '.join(shown)}"]
        if result.is_complete and run.num_done < run.num_trials and (finish := self._finish_text()):
            parts.append(finish)
        if self._leading.text and not is_lost:
            parts.append(self._leading.text)
        return "; ".join(parts)

    def _say(self, line: str) -> None:
        self._has_said = True
        if not self._live:
            line = f"{self._now():{TIME_OF_LINE}}  {line}"
        with contextlib.suppress(OSError):  # a closed terminal must not end a trial
            self._console.print(Text(ascii_fallback(line, self._console.encoding)), soft_wrap=True)  # rich flushes

    def _finish_text(self) -> str:
        """Return ``finishes at about 14:32 (35 s left)``; empty if unknown."""
        run = self._run
        if (left_s := run.remaining_s()) is None:
            return ""
        if left_s < 1 and run.is_decided:
            return "finishes at any moment"
        now = self._now()
        finish = now + timedelta(seconds=left_s)
        clock = f"{finish:%H:%M}" if finish.date() == now.date() else f"{finish:%a %H:%M}"
        is_least = run.later_s is None and not run.is_decided
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
        run, console = self._run, self._console
        times = [f"{_whole_seconds(run.clock() - run.begun_s)} elapsed", self._finish_text()]
        head = self._summary(width)
        for text in filter(None, (", ".join(filter(None, times)), self._open, self._leading.text)):
            head += _wrapped(console, text, 2)
        running: list[Text] = []
        if self._starting_text:
            running += _wrapped(console, self._starting_text, 2)
        for placement, since_s in run.starting.items():
            running += _wrapped(console, f"starting a gang of {placement}, {_whole_seconds(run.clock() - since_s)}", 2)
        metric, shown = self._leading.metric, list(run.running.values())
        for trial in shown[:MAX_SHOWN]:
            parts = progress_parts(trial.spec, trial.report, metric)
            running += _fitted(console, "running: ", parts, trial.spec.label)
        if more := units.and_more(len(shown) - MAX_SHOWN):
            running += _wrapped(console, f"running:{more}", 2)
        last: list[Text] = []
        for result in self._last:
            label, *parts = ended_parts(result, metric)
            least = label if result.is_measured else f"{label}  {result.state.upper()}"
            last += _fitted(console, "ended:   ", [label, *parts], least)
        num_rows = console.height - 1
        num_hidden = max(0, len(head) + len(last) + len(running) - num_rows)
        return [*head, *last[num_hidden:], *running][:num_rows]

    def _summary(self, width: int) -> list[Text]:
        run = self._run
        text = f"{run.num_done}/{run.num_trials} trials, {len(run.running)} running, {run.num_queued} queued"
        text += "".join(f", {num} {state.said_of(num)}" for state, num in self._num_lost.items() if num)
        text += f", {self._num_skipped} not run" if self._num_skipped else ""
        bar_width = min(BAR_WIDTH, width - cell_len(text) - 2)
        if bar_width < MIN_BAR_WIDTH:
            return _wrapped(self._console, text, 0)
        bar = ProgressBar(max(1, run.num_trials), run.num_done, width=bar_width)
        line = Text.assemble(*((segment.text, segment.style or "") for segment in self._console.render(bar)))
        line.append(" " * (bar_width + 2 - line.cell_len) + text)
        return [line]


def _fitted(console: Console, head: str, parts: Sequence[str], least: str) -> list[Text]:
    """Return one line with as many parts as fit; if only one fits, `least` replaces it."""
    for num in range(len(parts), 0, -1):
        line = "  " + head + ("  ".join(parts[:num]) if num > 1 else least)
        if cell_len(line := ascii_fallback(line, console.encoding)) <= console.width:
            return [Text(line)]
    return _wrapped(console, head + least, 2)


def _wrapped(console: Console, text: str, indent: int) -> list[Text]:
    """Return the lines of a text; a word longer than a line is folded."""
    lines = wrap_hanging(ascii_fallback(text, console.encoding), console.width, indent)
    return [part for line in lines for part in Text(line).wrap(console, console.width)]


def _whole_seconds(value_s: float) -> str:
    rounded = round(value_s)
    return f"{rounded} s" if rounded < units.MINUTE_S else units.seconds(rounded)
