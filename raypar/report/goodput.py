"""What a batch size does, in sentences: samples per second, progress per sample, and both together."""

from __future__ import annotations

from collections.abc import Iterator

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.goodput import BatchGroup
from raypar.analysis.stats import Estimate
from raypar.study.trial import point_label

MAX_GROUPS = 2
Line = tuple[int, str]  # indentation and text


def batch_lines(group: BatchGroup) -> Iterator[str]:
    """What the batch size does to throughput, to progress per sample, and to their product."""
    at = f" at {point_label(group.rest)}" if group.rest else ""
    yield f"Against {group.key}={group.base}{at}: samples/s × progress per sample = speed towards the target."
    for batch in group.batches:
        if batch.batch_size != group.base:
            parts = f"{_shown(batch.throughput)} × {_shown(batch.progress)} = {_shown(batch.goodput)}"
            yield f"- {group.key}={batch.batch_size}: {parts}{_said(batch.goodput)}"


def goodput_lines(analysis: StudyAnalysis) -> list[Line]:
    """The section of a report; empty where no two batch sizes reached a target in all their trials."""
    if analysis.target is None or not analysis.batches:
        return []
    target = analysis.target
    reached = f"{target.metric} {units.score(target.metric, target.value)}"
    lines = [(0, f"What the batch size does on the way to {reached}, the best that every trial reached:")]
    for group in analysis.batches[:MAX_GROUPS]:
        first, *others = batch_lines(group)
        lines += [(2, first), *((4, line) for line in others)]
    if (more := len(analysis.batches) - MAX_GROUPS) > 0:
        lines.append((2, f"`raypar recommend {analysis.study_name} --target …` shows {more} more."))
    return lines


def _shown(ratio: Estimate) -> str:
    return units.ratio_interval(ratio.value, ratio.low, ratio.high)


def _said(goodput: Estimate) -> str:
    if goodput.low is None:
        return ", by one trial each"
    return "" if goodput.excludes(1.0) else ", which can't be told from 1×"
