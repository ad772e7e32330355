"""Largest batch per worker that fits into memory, at each point of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raypar.reporting.documents import Document
from raypar.reporting.text import print_line
from raypar.study.space import Value
from raypar.study.trial import point_label
from raypar.units import counted, size

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Largest:
    """Answer at one point.

    Attributes:
        batch_size: largest batch per worker that was run and fits; None: none fits.
        peak_bytes: peak memory of a worker with this batch.
        too_large: smallest batch that was run and does not fit; None: all fit.
        reason: why `too_large` does not fit; empty if unknown.
        num_trials: number of batch sizes that were run.
        is_final: the search is complete. False: it was interrupted, or a trial failed.
        is_all_data: the training set allows no larger batch.
        failure: why a trial failed; empty: none did.
    """

    point: Mapping[str, Value]
    num_workers: int
    batch_size: int | None
    peak_bytes: float | None
    too_large: int | None
    reason: str
    num_trials: int
    is_final: bool
    is_all_data: bool
    failure: str


@dataclass(frozen=True)
class FitBatchView(Document):
    """Largest batch per worker that fits into memory, at each point.

    Attributes:
        max_memory: limit of a worker's memory; empty: all memory of its GPU.
    """

    kind = "fit-batch"
    max_memory: str
    points: Sequence[Largest]


def print_fit_batch(console: Console, view: FitBatchView) -> None:
    """Print the answer at each point."""
    for answer in view.points:
        print_line(console, answer_line(answer, view.max_memory))


def answer_line(answer: Largest, limit: str) -> str:
    """Return the answer, for example ``per_worker_batch_size 384 is the largest that fits in 2GB on 1 worker: …``."""
    at = f" at {point_label(answer.point)}" if answer.point else ""
    limit = limit or "the GPU's memory"
    memory = f"{limit} on {counted(answer.num_workers, 'worker')}{at}"
    trials = f" ({counted(answer.num_trials, 'trial')})"
    if answer.failure:
        return f"No answer for {memory}: a trial failed: {answer.failure}"
    if not answer.is_final:
        fits = f"{answer.batch_size} fits" if answer.batch_size else "no tested batch fits"
        return f"Not finished for {memory}: so far {fits}{trials}"
    if answer.batch_size is None:
        reason = f": {answer.too_large} {answer.reason}" if answer.reason else ""
        return f"No batch fits in {memory}{reason}{trials}"
    text = f"per_worker_batch_size {answer.batch_size} is the largest that fits in {memory}"
    if answer.peak_bytes:
        text += f": peak {size(answer.peak_bytes)}"
    if answer.too_large is None:
        return f"{text}; the training set allows no larger one{trials}"
    return f"{text}; {answer.too_large} {answer.reason or 'does not fit'}{trials}"
