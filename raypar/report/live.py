"""What a person sees while a study runs.

The view shares the machine with the trials that are being timed. So an event only changes a few fields; drawing is
left to rich's own thread, once a second. Where the output is no terminal, there is no thread: a line for each trial.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raypar import units
from raypar.report.plain import encodable
from raypar.run.events import (
    Event,
    GangReady,
    GangStarting,
    Notice,
    TrialEnded,
    TrialReported,
    TrialRetried,
    TrialStarted,
)
from raypar.study.trial import Placement, TrialResult, TrialSpec, TrialState

REFRESH_PER_S = 1
MAX_SHOWN = 4  # running trials with a line of their own
BAR_WIDTH = 30


@dataclass
class _Running:
    """A trial under way."""

    spec: TrialSpec
    since_s: float
    report: Mapping[str, float] = field(default_factory=dict)


class LiveView:
    """Shows the events of a run; give it to a runner as its listener.

    Args:
        console: where to; a terminal gets a view that is drawn over, anything else plain lines.
        num_trials: all trials of the study, those done before included.
        num_done_before: trials whose results were there already.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        num_trials: int,
        *,
        num_done_before: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._num_trials = num_trials
        self._num_done = num_done_before
        self._num_failed = 0
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._starting: dict[Placement, float] = {}
        self._wall_times_s: list[float] = []
        self._lock = threading.RLock()
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=console,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
            )

    def __enter__(self) -> LiveView:
        if self._num_done:
            self._say(f"{units.counted(self._num_done, 'trial')} of {self._num_trials} done before")
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take an event, from any thread."""
        with self._lock:
            line = self._take(event)
        # Printed outside: rich draws the view under its own lock, and the view takes ours.
        if line:
            self._say(line)

    def _take(self, event: Event) -> str | None:
        """Change what is known; what to print for good, if anything."""
        match event:
            case GangStarting(placement):
                self._starting[placement] = self._clock()
                return None if self._live else f"starting a gang of {placement}"
            case GangReady(placement, seconds):
                self._starting.pop(placement, None)
                return None if self._live else f"gang of {placement} is ready after {units.seconds(seconds)}"
            case TrialStarted(spec):
                self._running[spec.identity] = _Running(spec, self._clock())
            case TrialReported(spec, report):
                known = self._running.setdefault(spec.identity, _Running(spec, self._clock()))
                known.report = report
            case TrialRetried(spec, reason):
                self._running.pop(spec.identity, None)
                return f"{spec.label}  starting again: {reason}"
            case TrialEnded(result):
                return self._end(result)
            case Notice(text):
                return text
        return None

    def _end(self, result: TrialResult) -> str | None:
        self._running.pop(result.spec.identity, None)
        self._num_done += 1
        failed = result.state is TrialState.FAILED
        self._num_failed += failed
        if result.wall_s is not None and not failed:
            self._wall_times_s.append(result.wall_s)
        if self._live and not failed:
            return None
        width = len(str(self._num_trials))
        return f"[{self._num_done:>{width}}/{self._num_trials}] {_ended(result)}"

    def _say(self, line: str) -> None:
        self._console.print(Text(encodable(line, self._console.encoding)), soft_wrap=True)  # rich flushes

    def remaining_s(self) -> float | None:
        """Seconds until the last trial ends, going by the median of those ended; None before the first."""
        with self._lock:
            if not self._wall_times_s:
                return None
            typical = statistics.median(self._wall_times_s)
            now = self._clock()
            started = sum(max(0.0, typical - (now - t.since_s)) for t in self._running.values())
            return (started + self._num_queued * typical) / max(1, len(self._running))

    @property
    def _num_queued(self) -> int:
        return max(0, self._num_trials - self._num_done - len(self._running))

    def _render(self) -> RenderableType:
        with self._lock:
            lines: list[RenderableType] = [self._summary()]
            now = self._clock()
            for placement, since_s in self._starting.items():
                lines.append(self._line(f"  starting a gang of {placement}, {units.seconds(round(now - since_s))}"))
            shown = list(self._running.values())
            lines.extend(self._line(f"  {_progress(trial)}") for trial in shown[:MAX_SHOWN])
            if len(shown) > MAX_SHOWN:
                lines.append(self._line(f"  and {len(shown) - MAX_SHOWN} more"))
        return Group(*lines)

    def _summary(self) -> RenderableType:
        text = f"{self._num_done}/{self._num_trials} trials, {len(self._running)} running, {self._num_queued} queued"
        if self._num_failed:
            text += f", {self._num_failed} failed"
        if (remaining := self.remaining_s()) is not None:
            text += f", {units.seconds(round(remaining))} left"
        row = Table.grid(padding=(0, 2))
        bar_width = max(5, min(BAR_WIDTH, self._console.width - len(text) - 3))
        row.add_row(ProgressBar(max(1, self._num_trials), self._num_done, width=bar_width), self._line(text))
        return row

    def _line(self, text: str) -> Text:
        """One line of the view, cut where the terminal ends: a view that wraps would jump."""
        return Text(encodable(text, self._console.encoding), no_wrap=True, overflow="ellipsis")


def _progress(trial: _Running) -> str:
    """Label, epoch, loss, accuracy and throughput of a running trial, as far as it told."""
    parts = [trial.spec.label]
    report = trial.report
    if not report:
        return parts[0]
    if (epoch := report.get("epoch")) is not None:
        epochs = trial.spec.config.get("epochs")
        parts.append(f"epoch {epoch:g}" + (f"/{epochs}" if epochs else ""))
    loss = next((report[key] for key in ("train_loss", "loss", "val_loss") if key in report), None)
    if loss is not None:
        parts.append(f"loss {units.number(loss, 3)}")
    if (accuracy := report.get("accuracy")) is not None:
        parts.append(f"accuracy {units.score('accuracy', accuracy)}")
    if (throughput := report.get("throughput_samples_per_s")) is not None:
        parts.append(units.rate(throughput))
    return "  ".join(parts)


def _ended(result: TrialResult) -> str:
    """One line about a trial that has ended."""
    parts = [result.spec.label]
    if result.failure:
        parts.append(f"FAILED: {(result.failure.message.strip() or result.failure.kind).splitlines()[0]}")
        if result.failure.log_path:
            parts.append(f"log: {result.failure.log_path}")
        return "  ".join(parts)
    if result.state is not TrialState.FINISHED:
        parts.append(result.state.value)
    if result.train_time_s is not None:
        parts.append(f"trained {units.seconds(result.train_time_s)}")
    if result.wall_s is not None:
        parts.append(f"in all {units.seconds(result.wall_s)}")
    if (accuracy := result.final.get("accuracy")) is not None:
        parts.append(f"accuracy {units.score('accuracy', accuracy)}")
    return "  ".join(parts)
