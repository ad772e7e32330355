"""Breakdown of a step's time on each rank, from the spans that the ranks recorded.

A step consists of work (data, forward, backward, optimizer, other) and waiting. Waiting counts as

- exposed communication, during a collective that all ranks have joined
- waiting for stragglers, during a collective that the last rank has not joined yet
- the pipeline's bubble, if only messages between stages are under way. It includes the messages, because the time at
  which a sender was ready is not recorded.

The parts add up to the step's time. Communication during work is hidden and reported beside the parts. It begins when
the last rank joins. It does not include messages between stages, whose end is only seen when a rank waits for them.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from raypar.measure.spans import DATA, STEP, WAIT, Interval, RecordedSteps, Span, merged, without
from raypar.study.profile import (
    BACKWARD,
    BUBBLE,
    COMMUNICATION,
    DATA_WAIT,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PARTS,
    STRAGGLERS,
    Breakdown,
    Profile,
    mean_of,
)
from raypar.study.strategy import names_collectives, sync_period
from raypar.study.workload import Config

_PART_OF = {DATA: DATA_WAIT, FORWARD: FORWARD, BACKWARD: BACKWARD, OPTIMIZER: OPTIMIZER}
# Other marks of raypar: copies before and after a communication.
_OTHER_MARKS = ("combine", "spread")
_NOT_COMMUNICATION = (STEP, WAIT, *_PART_OF, *_OTHER_MARKS)


def profile_of(recorded: Sequence[RecordedSteps], config: Config) -> Profile | None:
    """Return a trial's profile from the recorded steps of its ranks, in order; None without a step.

    The middle half of the steps by time counts, which leaves out steps that other work on the machine disturbed.
    """
    matches = names_collectives(config)
    steps = break_down([rank.spans for rank in recorded], matches=matches)
    if not steps or not steps[0]:
        return None
    period, num_steps = sync_period(config), min(map(len, steps))
    # With a period, steps differ, because the weights are averaged at its end: whole periods count.
    whole_periods = list(range(num_steps % period if num_steps > period else 0, num_steps))
    counted = whole_periods if period > 1 else _middle_half(steps)
    typical = statistics.mean if period > 1 else statistics.median
    plain = [max(times) for times in zip(*(rank.step_times_s for rank in recorded), strict=False)]
    profiled = [max(times) for times in zip(*(rank.profiled_step_times_s for rank in recorded), strict=False)]
    step_s = typical(plain)
    flop, peak = recorded[0].flop_per_sample, sum(rank.peak_flops for rank in recorded)
    return Profile(
        ranks=tuple(mean_of([of_rank[i] for i in counted]) for of_rank in steps),
        num_steps=len(counted),
        step_s=step_s,
        overhead=typical(profiled) / step_s - 1,
        shares_clock=all(rank.shares_clock for rank in recorded),
        matches_collectives=matches,
        utilisation=flop * config["batch_size"] / step_s / peak if flop and peak else None,
        flop_per_sample=flop,
        peak_flops=peak,
    )


def break_down(ranks: Sequence[Sequence[Span]], *, matches: bool = True) -> list[list[Breakdown]]:
    """Return the breakdown of each step, ``[rank][step]``.

    Args:
        ranks: each rank's spans, on one clock; see `raypar.measure.spans.spans_of`.
        matches: the k-th collective of a name is the same one on all ranks. If not, or if the ranks have different
            numbers of a name, waiting for stragglers counts as communication.
    """
    arrivals = _arrivals([[span for span in rank if _is_collective(span)] for rank in ranks], matches)
    return [list(_steps(rank, collectives)) for rank, collectives in zip(ranks, arrivals, strict=True)]


@dataclass(frozen=True)
class _Collective:
    """One rank's part of a collective; it is complete when the last rank has joined."""

    start_s: float
    complete_s: float
    end_s: float
    last_rank: int


def _arrivals(collectives: Sequence[Sequence[Span]], matches: bool) -> list[list[_Collective]]:
    by_name = [_by_name(sorted(of_rank, key=lambda span: span[1])) for of_rank in collectives]
    arrivals: list[list[_Collective]] = []
    for rank, named in enumerate(by_name):
        mine = []
        for name, spans in named.items():
            peers = [other[name] for other in by_name]
            matched = matches and all(len(peer) == len(spans) for peer in peers)
            for k, (_, start, end) in enumerate(spans):
                starts = [peer[k][1] for peer in peers] if matched else [start]
                # Clocks of several machines agree only roughly, so this limits the time to the end.
                complete = min(max(starts), end)
                mine.append(_Collective(start, complete, end, starts.index(max(starts)) if matched else rank))
        arrivals.append(sorted(mine, key=lambda c: c.start_s))
    return arrivals


def _by_name(spans: Iterable[Span]) -> Mapping[str, list[Span]]:
    named: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        named[span[0]].append(span)
    return named


def _steps(spans: Sequence[Span], collectives: Sequence[_Collective]) -> Iterator[Breakdown]:
    by_name = _by_name(spans)
    waits = merged((start, end) for _, start, end in by_name[WAIT])
    messages = merged((start, end) for name, start, end in spans if _is_message(name))
    for _, start, end in by_name[STEP]:
        step = (start, end)
        waiting = _clipped(waits, step)
        parts = dict.fromkeys(PARTS, 0.0)
        for name, part in _PART_OF.items():
            marked = merged(_clipped([(a, b) for _, a, b in by_name[name]], step))
            parts[part] = _length(without(marked, waiting))
        here = [c for c in collectives if c.start_s < end and c.end_s > start]
        moving = merged((c.complete_s, c.end_s) for c in here if c.complete_s < c.end_s)
        waits_for: dict[int, float] = {}
        left = without(waiting, moving)
        parts[COMMUNICATION] = _length(waiting) - _length(left)
        for c in sorted(here, key=lambda c: c.complete_s):
            lacking = _clipped(left, (c.start_s, c.complete_s))
            if lacking:
                waits_for[c.last_rank] = waits_for.get(c.last_rank, 0.0) + _length(lacking)
                left = without(left, lacking)
        parts[STRAGGLERS] = sum(waits_for.values())
        rest = without(left, messages)
        parts[BUBBLE] = _length(left) - _length(rest)
        parts[COMMUNICATION] += _length(rest)  # in calls that start something
        # Rounding may make it negative.
        parts[OTHER] = max(0.0, end - start - sum(parts.values()))
        hidden = without(_clipped(moving, step), waiting)
        yield Breakdown(end - start, parts, _length(hidden), waits_for)


def _is_message(name: str) -> bool:
    return name not in _NOT_COMMUNICATION and ("send" in name.lower() or "recv" in name.lower())


def _is_collective(span: Span) -> bool:
    return span[0] not in _NOT_COMMUNICATION and not _is_message(span[0])


def _clipped(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    """Return the parts of intervals, sorted by start, inside a window."""
    start, end = window
    first = bisect_right(intervals, start, key=lambda i: i[1])
    last = bisect_left(intervals, end, key=lambda i: i[0])
    return [(max(a, start), min(b, end)) for a, b in intervals[first:last]]


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _middle_half(steps: Sequence[Sequence[Breakdown]]) -> list[int]:
    """Return the steps whose time on the slowest rank is neither in the lowest nor in the highest quarter."""
    slowest = [max(times) for times in zip(*([b.step_s for b in of_rank] for of_rank in steps), strict=False)]
    order = sorted(range(len(slowest)), key=slowest.__getitem__)
    out = len(order) // 4
    return sorted(order[out : len(order) - out])
