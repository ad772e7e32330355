"""Steps and their phases, from the events that a process recorded (`raypar.observe.events`)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, TypeAlias

from raypar.measure.spans import merged, without
from raypar.observe.communication import BEFORE
from raypar.observe.events import UNRECORDED, Event, EventKind, count_name
from raypar.study.observation import BY_BACKWARD, BY_OPTIMIZER
from raypar.study.profile import BACKWARD, COMMUNICATION, COPY, DATA_WAIT, FORWARD, OPTIMIZER, OTHER, PARTS

Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class ObservedStep:
    """One training step: from the end of the previous step to its own end.

    Attributes:
        start_s, end_s: on the machine's monotonic clock.
        apart_s: evaluation and checkpoints in between, which are not part of the step.
        parts: seconds by name (`raypar.study.profile.PARTS`); they add up to `step_s`.
        loss: sum over its backward passes; None: unknown.
        num_passes: backward passes.
        num_reads, num_blocking_copies: values read from a GPU, and copies to it that wait.
    """

    start_s: float
    end_s: float
    apart_s: float
    parts: Mapping[str, float]
    samples: int
    tokens: int
    loss: float | None
    num_passes: int = 1
    num_reads: int = 0
    num_blocking_copies: int = 0

    @property
    def step_s(self) -> float:
        """Duration in seconds, without evaluation and checkpoints."""
        return self.end_s - self.start_s - self.apart_s


@dataclass(frozen=True)
class Observed:
    """Observation of one process.

    Attributes:
        steps: all steps but the first, whose start is unknown.
        counted_by: `BY_OPTIMIZER` or `BY_BACKWARD`.
        num_skipped: steps whose gradients overflowed.
        num_unrecorded: steps after the recording became too long.
        evaluations, saves: intervals on the monotonic clock, which don't overlap.
        trained_on: iterators whose batches are trained on.
        first_loss: loss of the first step.
        parameters: number of a step, from 1, and a digest of some parameters after it.
        hidden_s: seconds per backward pass in which DDP communicates while gradients are computed.
    """

    steps: tuple[ObservedStep, ...]
    counted_by: str
    num_skipped: int
    num_unrecorded: int
    evaluations: tuple[Interval, ...]
    saves: tuple[Interval, ...]
    trained_on: frozenset[float]
    first_loss: float | None = None
    parameters: tuple[tuple[int, float], ...] = ()
    hidden_s: float = 0.0


def observed(events: Sequence[Event], facts: Mapping[str, Any]) -> Observed | None:
    """Return the observation of a process; None if it did not train.

    Args:
        events: sorted by end.
    """
    on_host = _by_kind(events)
    moments = {e[1]: e[2] for e in on_host[EventKind.DEVICE]}
    of = _by_kind(_on_device(events, moments)) if moments else on_host
    optimizers = _step_optimizers(on_host)
    unrecorded = facts.get(UNRECORDED, {})
    if optimizers:
        ending = [e for e in of[EventKind.STEP] if e[3] in optimizers]
        num_skipped = sum(not e[4] for e in ending)
        num_unrecorded = sum(unrecorded.get(count_name(EventKind.STEP, key), 0) for key in optimizers)
    else:
        ending, num_skipped = of[EventKind.BACKWARD], 0
        num_unrecorded = unrecorded.get(count_name(EventKind.BACKWARD, 0), 0)
    if not ending:
        return None
    ends = [e[2] for e in ending]
    trains = _training_iterators(on_host)
    evaluations = _evaluations(on_host, trains)
    saves = merged((e[1], e[2]) for e in of[EventKind.SAVE])
    num_passes = len(on_host[EventKind.BACKWARD]) + unrecorded.get(count_name(EventKind.BACKWARD, 0), 0)
    exposed_s, hidden_s = _ddp_communication(facts, num_passes)
    times = _times_by_part(of, moments, trains, merged([*evaluations, *saves]), ends)
    loss_of = _losses(of)
    batches = [e for e in of[EventKind.BATCH] if e[3] in trains]
    steps = []
    for (start, end), parts in zip(pairwise(ends), times, strict=True):
        passes, of_step = _within(of[EventKind.BACKWARD], start, end), _within(batches, start, end)
        counts = _within(of[EventKind.COUNTS], start, end)
        apart_s = parts.pop(_APART)
        # DDP communicates within the backward pass.
        moved_s = min(exposed_s * len(passes), parts[BACKWARD])
        parts[BACKWARD] -= moved_s
        parts[COMMUNICATION] += moved_s
        step = ObservedStep(
            start,
            end,
            apart_s,
            parts,
            samples=int(sum(e[4] for e in of_step)),
            tokens=int(sum(e[5] for e in of_step)),
            loss=loss_of(passes),
            num_passes=len(passes),
            num_reads=int(sum(e[4] for e in counts)),
            num_blocking_copies=int(sum(e[5] for e in counts)),
        )
        steps.append(step)
    return Observed(
        tuple(steps),
        BY_OPTIMIZER if optimizers else BY_BACKWARD,
        num_skipped,
        num_unrecorded,
        tuple(without(evaluations, saves)),
        tuple(saves),
        trains,
        loss_of(_within(of[EventKind.BACKWARD], -math.inf, ends[0])),
        tuple(_parameters(on_host, optimizers)),
        hidden_s,
    )


def _by_kind(events: Iterable[Event]) -> dict[EventKind, list[Event]]:
    of: dict[EventKind, list[Event]] = {kind: [] for kind in EventKind}
    for event in events:
        of[EventKind(int(event[0]))].append(event)
    of[EventKind.STEP] = _outermost(of[EventKind.STEP])
    return of


def _outermost(steps: Sequence[Event]) -> list[Event]:
    """Return the steps that are not part of a step of the same optimizer, which calls its base class."""
    outermost: list[Event] = []
    starts: dict[float, float] = {}
    for e in reversed(steps):
        if e[1] < starts.get(e[3], math.inf):
            starts[e[3]] = e[1]
            outermost.append(e)
    return outermost[::-1]


_ON_DEVICE = (
    EventKind.FORWARD,
    EventKind.BACKWARD,
    EventKind.STEP,
    EventKind.CLOSURE,
    EventKind.LOSS,
    EventKind.COUNTS,
    EventKind.WAIT,
    EventKind.COPY,
)


def _on_device(events: Sequence[Event], moments: Mapping[float, float]) -> Sequence[Event]:
    """Return the events with a GPU's times for its work, and the others as they are.

    The host launches work ahead of time. A wait for a batch meanwhile delays nothing, so waiting for data is only the
    time in which the GPU has no work. Work that the GPU has not reached is left out.

    Args:
        moments: a GPU's time by the host's.
    """
    last_s = max(moments)
    moved = [
        (e[0], moments.get(e[1], e[1]), moments.get(e[2], e[2]), *e[3:]) if e[0] in _ON_DEVICE else e
        for e in events
        if e[0] not in _ON_DEVICE or e[1 if e[0] == EventKind.FORWARD else 2] <= last_s
    ]
    return sorted(moved, key=lambda e: e[2])


def _step_optimizers(of: Mapping[EventKind, Sequence[Event]]) -> frozenset[float]:
    """Return the optimizers whose steps end the training steps; none: backward passes end them.

    Of several optimizers that take turns, as in a GAN, the one with the most steps ends a step; of equals, the last in
    a turn. Optimizers that follow each other, as in the folds of a cross-validation, all do. An optimizer that steps
    during the backward pass, one for each parameter, ends none.
    """
    passes = [(e[1], e[2]) for e in of[EventKind.BACKWARD]]
    steps_of: dict[float, list[float]] = {}  # by optimizer, in the order of their first steps
    for e in of[EventKind.STEP]:
        if not _inside(e[2], passes):
            steps_of.setdefault(e[3], []).append(e[2])
    ending: set[float] = set()
    together: list[float] = []
    last_s = -math.inf
    for key, ends in [*steps_of.items(), (math.nan, [math.inf])]:
        if together and ends[0] > last_s:
            # Of equals, `max` returns the first.
            ending.add(max(reversed(together), key=lambda optimizer: len(steps_of[optimizer])))
            together = []
        together.append(key)
        last_s = max(last_s, ends[-1])
    return frozenset(ending)


def _inside(moment: float, intervals: Sequence[Interval]) -> bool:
    i = bisect_right(intervals, moment, key=lambda interval: interval[0]) - 1
    return i >= 0 and moment < intervals[i][1]


def _parameters(of: Mapping[EventKind, Sequence[Event]], optimizers: frozenset[float]) -> Iterator[tuple[int, float]]:
    """Yield the number of a step and the digest of its parameters."""
    ends = [e[2] for e in of[EventKind.STEP] if e[3] in optimizers]
    for e in of[EventKind.PARAMETERS]:
        if e[3] in optimizers:
            yield bisect_right(ends, e[2]), e[4]


def _training_iterators(of: Mapping[EventKind, Sequence[Event]]) -> frozenset[float]:
    """Return the iterators that are trained on.

    A batch is trained on if a backward pass or a step follows before the next batch. It is evaluated if only forward
    passes without gradients follow. Batches that are fetched together have the same use, unless an evaluation begins
    before them: then only the iterator of the last batch is known to be trained on.
    """
    kinds = (EventKind.BATCH, EventKind.END, EventKind.EVAL, EventKind.FORWARD, EventKind.BACKWARD, EventKind.STEP)
    trained, evaluated, unused = Counter[float](), Counter[float](), Counter[float]()
    batches: list[tuple[float, bool]] = []  # iterators; a call of `Module.eval` precedes
    is_evaluating = has_trained = has_evaluated = has_gradients = False

    def decide() -> None:
        for key, follows_eval in batches:
            if has_trained and (not follows_eval or key == batches[-1][0]):
                trained[key] += 1
            elif has_evaluated and not has_trained and not has_gradients:
                evaluated[key] += 1
            elif not has_gradients:
                unused[key] += 1

    for e in sorted(chain.from_iterable(of[kind] for kind in kinds), key=lambda e: e[2]):
        is_used = has_trained or has_evaluated or has_gradients
        if e[0] == EventKind.BATCH:
            if is_used:
                decide()
                batches = []
                has_trained = has_evaluated = has_gradients = False
            batches.append((e[3], is_evaluating))
        elif e[0] == EventKind.END and not is_used:
            # A loader that fetches ahead ends before its last batch is used.
            kept = [] if is_evaluating else batches[-1:]
            unused.update(key for key, _ in batches[: len(batches) - len(kept)])
            batches = kept
        elif e[0] == EventKind.END and (has_trained or has_evaluated or is_evaluating):
            decide()
            batches = []
        elif e[0] == EventKind.EVAL:
            is_evaluating = True
        elif e[0] == EventKind.FORWARD:
            has_gradients |= bool(e[4])
            has_evaluated |= not e[4]
        elif e[0] in (EventKind.BACKWARD, EventKind.STEP):
            has_trained, is_evaluating = True, False
    decide()
    return frozenset(key for key, num in trained.items() if num >= max(evaluated[key], unused[key]))


def _evaluations(of: Mapping[EventKind, Sequence[Event]], trains: frozenset[float]) -> list[Interval]:
    """Return the intervals of evaluation: from a sign of it to the next sign of training.

    Signs of evaluation are a call of `Module.eval`, and batches of an iterator that is not trained on.
    """
    kinds = (
        *(EventKind.EVAL, EventKind.ITERATOR, EventKind.BATCH, EventKind.END),
        *(EventKind.FORWARD, EventKind.BACKWARD, EventKind.STEP),
    )
    intervals: list[Interval] = []
    begun: float | None = None
    last = 0.0
    is_loading = False  # batches that are not trained on
    for kind, start, end, key, value, _ in sorted(chain.from_iterable(of[k] for k in kinds), key=lambda e: e[1]):
        is_training: bool | None = kind in (EventKind.BACKWARD, EventKind.STEP)
        if kind in (EventKind.ITERATOR, EventKind.BATCH, EventKind.END):
            is_training = key in trains
            is_loading = not is_training and kind != EventKind.END
        elif is_training:
            is_loading = False
        elif kind == EventKind.FORWARD:
            # Within a step, models such as a teacher run without gradients. Evaluations may forget to turn them off.
            is_training = True if value and not is_loading else None
        if is_training and begun is not None:
            intervals.append((begun, start))
            begun = None
        elif is_training is False and begun is None:
            begun = start
        last = end
    if begun is not None:
        intervals.append((begun, last))
    return merged(intervals)


def _losses(of: Mapping[EventKind, Sequence[Event]]) -> Callable[[Sequence[Event]], float | None]:
    """Return a function that sums the losses of backward passes; None if one of them is unknown."""
    copied = {e[1]: e[4] for e in of[EventKind.LOSS]}

    def total(passes: Sequence[Event]) -> float | None:
        losses = [copied.get(e[1], e[4]) for e in passes]
        return sum(losses) if losses and all(map(math.isfinite, losses)) else None

    return total


def _forward(
    of: Mapping[EventKind, Sequence[Event]], moments: Mapping[float, float], apart: Sequence[Interval]
) -> Iterator[Interval]:
    """Yield from the first call of a module since the previous backward pass to the backward pass.

    Without such a call, the forward pass begins with the latest end of a batch, step or backward pass, or with its
    closure.
    """
    calls = [e[1] for e in of[EventKind.FORWARD] if e[4] and not _inside(e[1], apart)]
    before = [moments.get(e[2], e[2]) for e in of[EventKind.BATCH]]
    before += [e[2] for kind in (EventKind.STEP, EventKind.BACKWARD) for e in of[kind]]
    before += [e[1] for e in of[EventKind.CLOSURE]]
    before.sort()
    previous = -math.inf
    for e in of[EventKind.BACKWARD]:
        i = bisect_left(calls, previous)
        if i < len(calls) and calls[i] < e[1]:
            yield calls[i], e[1]
        elif k := bisect_right(before, e[1]):
            yield before[k - 1], e[1]
        previous = e[2]


_APART, _CLOSURE = "apart", "closure"


def _times_by_part(
    of: Mapping[EventKind, Sequence[Event]],
    moments: Mapping[float, float],
    trains: frozenset[float],
    apart: Sequence[Interval],
    ends: Sequence[float],
) -> list[dict[str, float]]:
    """Return the seconds of each part, and of `_APART`, between each two ends of steps.

    Where intervals of several parts overlap, the time belongs to the first part in the order below.
    """
    data = [e for kind in (EventKind.BATCH, EventKind.ITERATOR, EventKind.END) for e in of[kind] if e[3] in trains]
    layers: list[tuple[str, Iterable[Interval]]] = [
        (_APART, apart),
        (COMMUNICATION, ((e[1], e[2]) for e in of[EventKind.WAIT])),
        (COPY, ((e[1], e[2]) for e in of[EventKind.COPY])),
        (BACKWARD, ((e[1], e[2]) for e in of[EventKind.BACKWARD])),
        (OPTIMIZER, ((e[1], e[2]) for e in of[EventKind.STEP])),
        (FORWARD, _forward(of, moments, apart)),
        (_CLOSURE, ((e[1], e[2]) for e in of[EventKind.CLOSURE])),
    ]
    # The host waits while it does nothing else. With a GPU, it waits while the GPU has nothing to do.
    layers.insert(len(layers) if moments else 3, (DATA_WAIT, ((e[1], e[2]) for e in data)))
    names = [name for name, _ in layers]
    closure = names.index(_CLOSURE)
    changes = [(end, -1, 0) for end in ends]
    for i, (_, intervals) in enumerate(layers):
        for start, end in intervals:
            if start < end:
                changes += [(start, i, 1), (end, i, -1)]
    changes.sort()
    times = [dict.fromkeys((*PARTS, _APART), 0.0) for _ in ends[1:]]
    num_open = [0] * len(layers)
    step, since = -1, -math.inf
    for moment, i, change in changes:
        if moment > since and 0 <= step < len(times):
            part = OTHER
            for name, num in zip(names, num_open, strict=True):
                if num and name != _CLOSURE and not (name == OPTIMIZER and num_open[closure]):
                    part = name
                    break
            times[step][part] += moment - since
        since = moment
        if i < 0:
            step += 1
        else:
            num_open[i] += change
    return times


def _ddp_communication(facts: Mapping[str, Any], num_passes: int) -> tuple[float, float]:
    """Return the seconds per backward pass in which DDP communicates: while nothing is computed, and hidden.

    Only passes that synchronise gradients communicate, and each of several models has its own passes.
    """
    exposed_s = hidden_s = 0.0
    for each in facts.get("ddp", ()):
        comm_s, overlap_s = (
            _mean_s(each, name) for name in ("backward_comm_time", "backward_compute_comm_overlap_time")
        )
        share = min(1.0, (each.get("iteration", 0) + 1) / max(1, num_passes))
        exposed_s += max(0.0, comm_s - overlap_s) * share
        hidden_s += overlap_s * share
    return exposed_s, hidden_s


def _mean_s(logged: Mapping[str, Any], name: str) -> float:
    """Return a mean of DDP's logging data, without its first iterations."""
    name = f"avg_{name}"
    mean, num = logged.get(name, 0), logged.get("iteration", 0)
    before = logged.get(BEFORE, {})
    num_before = before.get("iteration", num)
    if num > num_before:
        mean = (mean * num - before.get(name, 0) * num_before) / (num - num_before)
    return float(max(0.0, mean)) / 1e9


def _within(events: Sequence[Event], start: float, end: float) -> Sequence[Event]:
    """Return the events, sorted by end, that end in an interval."""
    return events[bisect_right(events, start, key=lambda e: e[2]) : bisect_right(events, end, key=lambda e: e[2])]
