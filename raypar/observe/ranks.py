"""Observation of each rank on a machine, from the files that its processes wrote."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.observe.events import HAS_TORCH, LOADED, STOPPED, Event, EventKind, read_events
from raypar.observe.steps import Observed, observed
from raypar.study.observation import ObservedDdp, ObservedLoader, ObservedRank
from raypar.study.profile import PARTS, Breakdown

MAX_WARMUP_STEPS = 10  # at most a quarter of all steps
MAX_LOSSES = 500  # the first half of them without gaps, the others evenly spaced
MAX_ITERATIONS = 3  # whose digests are kept
NOT_LOADED = "the observer was not loaded: the command does not run Python, or runs it with -I or -S"
NO_TORCH = "no process imported torch"
NO_STEPS = "no process trained: there was no optimizer step and no backward pass"
ONE_STEP = "there was only one training step, whose start is unknown"


@dataclass(frozen=True)
class RankSteps:
    """Observation of one rank, and the time of each step after its warm-up in seconds."""

    rank: ObservedRank
    step_times_s: tuple[float, ...]

    @property
    def train_time_s(self) -> float:
        """Time of all steps; those that were not timed count as average ones."""
        return self.rank.breakdown.step_s * self.rank.num_steps

    @property
    def num_samples(self) -> float:
        """Samples of all steps."""
        return self.rank.samples_per_step * self.rank.num_steps


def read_ranks(folder: Path) -> tuple[tuple[RankSteps, ...], str]:
    """Return the ranks that trained, in order; or none, and the reason.

    Args:
        folder: to which the processes wrote their events.
    """
    if not (folder / HAS_TORCH).exists():
        return (), NO_TORCH if (folder / LOADED).exists() else NOT_LOADED
    if (folder / STOPPED).exists():  # the number of steps is unknown
        return (), f"the observer stopped: {(folder / STOPPED).read_text(encoding='utf-8', errors='replace')}"
    try:
        return _read(folder)
    except Exception as error:  # an incomplete recording must not cost the trial
        return (), f"the recording can't be read: {type(error).__name__}: {error}"


def _read(folder: Path) -> tuple[tuple[RankSteps, ...], str]:
    by_rank: dict[int, list[RankSteps]] = defaultdict(list)
    has_steps = False
    for path in folder.glob("*.events"):
        events, facts = read_events(path)
        seen = observed(events, facts)
        has_steps = has_steps or seen is not None
        if seen is not None and seen.steps:
            ranks = rank_of(seen, events, facts)
            by_rank[ranks.rank.rank].append(ranks)
    if not by_rank:
        return (), ONE_STEP if has_steps else NO_STEPS
    twice = [rank for rank, each in by_rank.items() if len(each) > 1]
    if twice:
        return (), f"{len(by_rank[twice[0]])} processes trained as rank {twice[0]}, and which of them counts is unknown"
    return tuple(each[0] for _, each in sorted(by_rank.items())), ""


def rank_of(seen: Observed, events: Sequence[Event], facts: Mapping[str, Any]) -> RankSteps:
    """Return the observation of a rank that made at least two steps."""
    num_warmup = min(MAX_WARMUP_STEPS, len(seen.steps) // 4)
    begun_s, ended_s = facts.get("profiled", (math.inf, -math.inf))
    settled = seen.steps[num_warmup:]
    num_profiled = sum(begun_s <= step.start_s and step.end_s <= ended_s for step in seen.steps)
    # The profiler slows down its steps, and those in which it starts and ends.
    steps = [step for step in settled if step.end_s <= begun_s or step.start_s >= ended_s] or settled
    num = len(steps)
    parts = {part: sum(step.parts[part] for step in steps) / num for part in PARTS}
    passes = sum(step.num_passes for step in steps) / num
    samples, tokens = _per_step(seen, events)
    first_s = seen.steps[0].start_s
    losses = [seen.first_loss, *(step.loss for step in seen.steps)]
    optimizers = facts.get("optimizers", ())
    rank = ObservedRank(
        rank=facts.get("rank", 0),
        num_ranks=facts.get("world_size", 1),
        counted_by=seen.counted_by,
        num_steps=len(seen.steps) + 1 + seen.num_unrecorded,
        num_skipped=seen.num_skipped,
        num_warmup_steps=num_warmup + 1,
        breakdown=Breakdown(sum(step.step_s for step in steps) / num, parts, seen.hidden_s * passes),
        passes_per_step=passes,
        samples_per_step=samples,
        tokens_per_step=tokens,
        eval_s=sum(end - max(start, first_s) for start, end in seen.evaluations if end > first_s),
        save_s=sum(end - max(start, first_s) for start, end in seen.saves if end > first_s),
        losses=tuple(_thinned([(i, loss) for i, loss in enumerate(losses, 1) if loss is not None])),
        optimizers=tuple(each["class"] for each in optimizers),
        learning_rates=tuple(float(each["lr"][0]) for each in optimizers if each["lr"] and each["lr"][0] is not None),
        num_parameters=tuple(each["num_parameters"] for each in optimizers),
        parameters=seen.parameters,
        sends=facts.get("sends", False),
        loaders=tuple(_loaders(events, facts, seen.trained_on)),
        ddp=tuple(map(_ddp, facts.get("ddp", ()))),
        num_threads=facts.get("num_threads", 0),
        num_cores=facts.get("num_cores", 0),
        num_batch_norms=facts.get("num_batch_norms", 0),
        # Evaluations after some of the steps must not count.
        num_item_calls=statistics.median(step.num_reads for step in steps),
        num_blocking_copies=statistics.median(step.num_blocking_copies for step in steps),
        operations=tuple((name, seconds / max(1, num_profiled)) for name, seconds in facts.get("operations", ())),
        device_name=facts.get("device", ""),
        max_rss_bytes=facts.get("max_rss_bytes"),
        peak_allocated_bytes=facts.get("peak_allocated_bytes"),
        peak_reserved_bytes=facts.get("peak_reserved_bytes"),
        problems=tuple(facts.get("problems", ())),
    )
    return RankSteps(rank, tuple(step.step_s for step in steps))


def _per_step(seen: Observed, events: Sequence[Event]) -> tuple[float, float]:
    """Return the samples and the tokens of a training step; 0 if the samples of some batches are unknown.

    Loaders that fetch ahead deliver a batch during an earlier step. So if the last loader ended, all batches count;
    else those between the first and the last step, which leave out as many at the end as they fetched ahead.
    """
    end_s, num = seen.steps[-1].end_s, len(seen.steps) + 1
    batches = [e for e in events if e[0] == EventKind.BATCH and e[3] in seen.trained_on and e[2] <= end_s]
    has_ended = any(e[0] == EventKind.END and batches and e[3] == batches[-1][3] for e in events)
    if not has_ended:
        batches, num = [e for e in batches if e[2] > seen.steps[0].start_s], len(seen.steps)
    if not all(e[4] for e in batches):
        return 0.0, 0.0
    return sum(e[4] for e in batches) / num, sum(e[5] for e in batches) / num


def _thinned(losses: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    half = MAX_LOSSES // 2
    yield from losses[:half]
    rest = losses[half:]
    stride = -(-len(rest) // half) or 1
    # Multiples of the stride, so that ranks keep the same steps.
    yield from (loss for loss in rest if loss[0] % stride == 0)


def _loaders(
    events: Sequence[Event], facts: Mapping[str, Any], trained_on: frozenset[float]
) -> Iterator[ObservedLoader]:
    """Yield the loaders in the order of their first iterations."""
    waits: dict[float, list[float]] = defaultdict(list)
    for e in events:
        if e[0] == EventKind.BATCH:
            waits[e[3]].append(e[2] - e[1])
    iterators: dict[int, list[Event]] = defaultdict(list)
    for e in sorted((e for e in events if e[0] == EventKind.ITERATOR), key=lambda e: e[1]):
        iterators[int(e[4])].append(e)
    for number, of_loader in iterators.items():
        facts_of_loader = facts["loaders"][number]
        is_trained_on = any(e[3] in trained_on for e in of_loader)
        if is_trained_on:  # it may be evaluated on as well
            of_loader = [e for e in of_loader if e[3] in trained_on]
        firsts = [e[2] - e[1] + waits[e[3]][0] for e in of_loader if waits[e[3]]]
        others = [wait for e in of_loader for wait in waits[e[3]][1:]]
        digests = facts.get("digests", {})
        yield ObservedLoader(
            **facts_of_loader,
            is_trained_on=is_trained_on,
            num_iterations=len(of_loader),
            first_batch_s=statistics.median(firsts) if firsts else None,
            batch_s=statistics.median(others) if others else None,
            digests=tuple(tuple(digests.get(str(int(e[3])), ())) for e in of_loader[:MAX_ITERATIONS]),
        )


def _ddp(logged: Mapping[str, Any]) -> ObservedDdp:
    return ObservedDdp(
        bucket_bytes=logged.get("bucket_cap_bytes", 0),
        find_unused_parameters=bool(logged.get("find_unused_parameters")),
        has_unused_parameters=bool(logged.get("unused_parameter_size")),
        gradient_as_bucket_view=bool(logged.get("gradient_as_bucket_view")),
        static_graph=bool(logged.get("static_graph")),
        parameter_bytes=logged.get("total_parameter_size_bytes", 0),
    )
