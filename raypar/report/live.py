"""Live view of a running study.

The view shares the machine with the trials that are being timed. So an event only changes a few fields; drawing is
left to rich's own thread, once a second. Where the output is no terminal, there is no thread: a line for each trial.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raypar import units
from raypar.analysis.progress import SPEEDUP, Interim, TrialKind, TrialTime, interim_best, remaining_s, trial_kind
from raypar.analysis.question import Question
from raypar.report.text import ascii_fallback
from raypar.run import runner
from raypar.study.trial import Placement, TrialResult, TrialSpec, TrialState, point_label


def progress_text(spec: TrialSpec, report: Mapping[str, float]) -> str:
    """Label, epoch, loss, accuracy and throughput of a running trial, as far as reported."""
    parts = [spec.label]
    if (epoch := report.get("epoch")) is not None:
        epochs = spec.config.get("epochs")
        parts.append(f"epoch {epoch:g}" + (f"/{epochs}" if epochs else ""))
    loss = next((report[key] for key in ("train_loss", "loss", "val_loss") if key in report), None)
    if loss is not None:
        parts.append(f"loss {units.number(loss, 3)}")
    if (accuracy := report.get("accuracy")) is not None:
        parts.append(f"accuracy {units.score('accuracy', accuracy)}")
    if (throughput := report.get("throughput_samples_per_s")) is not None:
        parts.append(units.rate(throughput))
    return "  ".join(parts)


def ended_text(result: TrialResult) -> str:
    """One line about a trial that has ended."""
    parts = [result.spec.label]
    if result.failure:
        parts.append(f"FAILED: {result.reason or result.failure.kind}")
        if result.failure.log_path:
            parts.append(f"log: {result.failure.log_path}")
        return "  ".join(parts)
    if not result.is_measured:
        parts.append(f"{result.state.upper()}: {result.reason}" if result.reason else result.state.value)
    if result.train_time_s is not None:
        parts.append(f"trained {units.seconds(result.train_time_s)}")
    if result.wall_s is not None:
        parts.append(f"in all {units.seconds(result.wall_s)}")
    if (accuracy := result.final.get("accuracy")) is not None:
        parts.append(f"accuracy {units.score('accuracy', accuracy)}")
    return "  ".join(parts)


def interim_text(best: Interim) -> str:
    """``leading: 1.52× at num_workers=2 (3 trials, unconfirmed)``."""
    is_speedup = best.quantity == SPEEDUP
    shown = units.ratio(best.value) if is_speedup else f"{best.quantity} {units.score(best.quantity, best.value)}"
    trials = units.counted(best.num_trials, "trial")
    return f"leading: {shown} at {point_label(best.point)} ({trials}, unconfirmed)"


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
        done: results that were there already.
        queued: the trials to come, where they are known: a search draws its own.
        question: what the study asks, to say which point is the best so far.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        num_trials: int,
        *,
        done: Sequence[TrialResult] = (),
        queued: Sequence[TrialSpec] = (),
        question: Question | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._num_trials = num_trials
        self._num_done = len(done)
        self._num_lost: Counter[TrialState] = Counter()  # trials that failed or diverged
        self._clock = clock
        self._running: dict[str, _Running] = {}
        self._starting: dict[Placement, float] = {}
        self._queued = {spec.identity: trial_kind(spec) for spec in queued}
        self._results = list(done)
        self._question = question
        self._interim: Interim | None = None
        self._open = ""  # what a study that runs until it is settled has open
        self._ended: list[TrialTime] = [
            (trial_kind(r.spec), r.wall_s) for r in done if r.is_complete and r.wall_s is not None
        ]
        self._num_slots = 1  # trials that were seen running side by side
        self._idle_since_s: float | None = None  # since a trial ended that ran alone
        self._pauses_s: list[float] = []
        self._gang_starts_s: dict[Placement, float] = {}
        self._lock = threading.RLock()
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._render, console=console, refresh_per_second=REFRESH_PER_S, transient=True
            )

    def __enter__(self) -> LiveView:
        if self._num_done:
            self._say(f"{units.counted(self._num_done, 'trial')} of {self._num_trials} done before")
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()

    def __call__(self, event: runner.Event) -> None:
        """Take an event, from any thread."""
        with self._lock:
            line = self._take(event)
        # Printed outside: rich draws the view under its own lock, and the view takes ours.
        if line:
            self._say(line)

    def _take(self, event: runner.Event) -> str | None:
        """Change what is known; what to print for good, if anything."""
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
            case runner.TrialRetried(spec, reason):
                self._running.pop(spec.identity, None)
                self._queued[spec.identity] = trial_kind(spec)
                return f"{spec.label}  starting again: {reason}"
            case runner.TrialEnded(result):
                return self._end(result)
            case runner.TrialsAdded(specs, reason):
                self._num_trials += len(specs)
                self._queued |= {spec.identity: trial_kind(spec) for spec in specs}
                self._open = reason
                return None if self._live else reason
            case runner.ClusterChanged(num_nodes):
                return f"the cluster has {units.counted(num_nodes, 'node')} now"
            case runner.Notice(text):
                return text
        return None

    def _start(self, spec: TrialSpec) -> None:
        now_s = self._clock()
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
        failed, late_s = not result.is_complete, 0.0
        is_lost = failed or result.is_unusable
        self._num_lost[result.state] += is_lost
        if not failed:
            seen_s = now_s - started.since_s if started else 0.0
            took_s = seen_s if result.wall_s is None else result.wall_s
            self._ended.append((trial_kind(result.spec), took_s))
            late_s = max(0.0, seen_s - took_s)  # reported after it was stored
            if self._question:
                self._interim = interim_best(self._question, self._results)
        if not self._running:
            self._idle_since_s = now_s - late_s
        if self._live and not is_lost:
            return None
        width = len(str(self._num_trials))
        parts = [f"[{self._num_done:>{width}}/{self._num_trials}] {ended_text(result)}"]
        if not failed and self._num_done < self._num_trials and (left_s := self.remaining_s()) is not None:
            parts.append(f"{units.seconds(round(left_s))} left")
        if self._interim and not is_lost:
            parts.append(interim_text(self._interim))
        return "; ".join(parts)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that was closed: no reason to lose a trial
            self._console.print(Text(ascii_fallback(line, self._console.encoding)), soft_wrap=True)  # rich flushes

    def remaining_s(self) -> float | None:
        """Seconds until the last trial ends, going by those that have ended; None before the first."""
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
                overheads_s=self._pauses_s[1:],  # the first one holds the first use of the store
                gang_starts_s=list(self._gang_starts_s.values()),
                num_gang_starts=len({kind.placement for kind in queued if kind.placement} - started),
            )

    @property
    def _num_queued(self) -> int:
        return max(0, self._num_trials - self._num_done - len(self._running))

    def _render(self) -> RenderableType:
        with self._lock:
            lines: list[RenderableType] = [self._summary()]
            if self._interim:
                lines.append(self._line(f"  {interim_text(self._interim)}"))
            if self._open:
                lines.append(self._line(f"  {self._open}"))
            now = self._clock()
            for placement, since_s in self._starting.items():
                lines.append(self._line(f"  starting a gang of {placement}, {units.seconds(round(now - since_s))}"))
            shown = list(self._running.values())
            lines.extend(self._line(f"  {progress_text(trial.spec, trial.report)}") for trial in shown[:MAX_SHOWN])
            if more := units.and_more(len(shown) - MAX_SHOWN):
                lines.append(self._line(f" {more}"))
        return Group(*lines)

    def _summary(self) -> RenderableType:
        text = f"{self._num_done}/{self._num_trials} trials, {len(self._running)} running, {self._num_queued} queued"
        text += "".join(f", {num} {state}" for state, num in self._num_lost.items() if num)
        if (remaining := self.remaining_s()) is not None:
            text += f", {units.seconds(round(remaining))} left"
        row = Table.grid(padding=(0, 2))
        bar_width = max(5, min(BAR_WIDTH, self._console.width - len(text) - 3))
        row.add_row(ProgressBar(max(1, self._num_trials), self._num_done, width=bar_width), self._line(text))
        return row

    def _line(self, text: str) -> Text:
        """One line of the view, cut where the terminal ends: a view that wraps would jump."""
        return Text(ascii_fallback(text, self._console.encoding), no_wrap=True, overflow="ellipsis")
