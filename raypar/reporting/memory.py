"""Predicted peak memory of a worker at each point of a study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

from raypar import units
from raypar.predict.memory import PeakMemory, PointMemory
from raypar.reporting.documents import Document
from raypar.reporting.text import Column, print_paragraph, print_table
from raypar.study.memory_fit import MemoryFit
from raypar.study.trial import point_label

MIN_SHARE = 0.01  # of a part that the table names
MAX_LABELS = 4  # points that a sentence names

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class MemoryView(Document):
    """Predicted peak memory of a worker at each point of a study.

    Attributes:
        gpu_bytes: memory of a GPU; None: not given.
    """

    kind = "memory"
    shown = "study gpu_bytes answer note points"
    study: str
    points: Sequence[PointMemory]
    gpu_bytes: float | None = None

    @cached_property
    def answer(self) -> str:
        """Largest need of a point, and the number of points that fit."""
        predicted = [each for each in self.points if each.parts is not None]
        if not predicted:
            return "No point's memory can be predicted."
        largest = max(predicted, key=lambda each: each.most_bytes or 0.0)
        at = f", at {point_label(largest.point)}" if largest.point and len(predicted) > 1 else ""
        text = f"A worker of study {self.study} needs {_range(largest)}{at}."
        if self.gpu_bytes is None:
            return text
        fitting = sum(each.fit is MemoryFit.YES for each in predicted)
        if len(predicted) == 1:
            return f"{text} It {predicted[0].fit} into {units.size(self.gpu_bytes)}."
        which = (
            "Both"
            if fitting == len(predicted) == 2
            else f"All {fitting}"
            if fitting == len(predicted)
            else f"{fitting} of {len(predicted)}"
        )
        return f"{text} {which} points certainly fit into {units.size(self.gpu_bytes)}."

    @property
    def note(self) -> str:
        """Meaning of the figures."""
        if self.gpu_bytes is None:
            return (
                "Predicted from the shapes of two steps, which allocate nothing. As measured trials count it: memory "
                "that torch allocates, without the data set and libraries."
            )
        return (
            "Predicted from the shapes of two steps, which allocate nothing. The ranges add assumed gaps in the "
            "allocator's blocks, and 0.3 to 1.5 GB for CUDA's context and libraries; no GPU was measured."
        )


def print_memory(console: Console, view: MemoryView) -> None:
    """Print the answer, a table of the points, and why some have no prediction."""
    print_paragraph(console, view.answer)
    predicted = [(each, each.parts) for each in view.points if each.parts is not None]
    if predicted:
        console.print()
        columns = [
            Column("point", [point_label(each.point) or "all" for each, _ in predicted]),
            Column("peak", [_range(each) for each, _ in predicted], is_number=True),
            Column("of it", [_parts(parts, view.gpu_bytes) for _, parts in predicted], is_prose=True),
        ]
        if view.gpu_bytes is not None:
            columns.insert(2, Column(f"in {units.size(view.gpu_bytes)}", [str(each.fit) for each, _ in predicted]))
        print_table(console, columns)
    console.print()
    for text in _problems(view.points):
        print_paragraph(console, text)
    print_paragraph(console, view.note)


def fit_lines(points: Sequence[PointMemory], gpu_bytes: float) -> Iterator[str]:
    """Yield a line on each point that may not fit into a GPU, and on those without a prediction."""
    for each in points:
        if each.parts is not None and each.fit is not MemoryFit.YES:
            at = f"{point_label(each.point)} " if each.point else ""
            yield f"{each.fit}: {at}needs {_range(each)} of {units.size(gpu_bytes)}: {_parts(each.parts, gpu_bytes)}"
    if fitting := sum(each.fit is MemoryFit.YES for each in points):
        yield f"points that certainly fit into {units.size(gpu_bytes)}: {fitting} of {len(points)}"
    yield from _problems(points)


def _problems(points: Sequence[PointMemory]) -> Iterator[str]:
    """Yield each reason why there are no predictions, with its points."""
    labels: dict[str, list[str]] = {}
    for each in points:
        if each.problem:
            labels.setdefault(each.problem, []).append(point_label(each.point))
    for problem, at in labels.items():
        yield f"No prediction of memory at {units.listed(at, MAX_LABELS, word='and')}: {problem}."


def _parts(parts: PeakMemory, gpu_bytes: float | None) -> str:
    """Return the parts of at least `MIN_SHARE`, the largest first, without those that are not on a GPU."""
    others = ("uncertain",) if gpu_bytes is None else ("uncertain", "host_copy")
    names = [field.name for field in fields(parts) if field.name not in others]
    sizes = sorted(((getattr(parts, name), name) for name in names), reverse=True)
    shown = [(num_bytes, name) for num_bytes, name in sizes if num_bytes >= MIN_SHARE * parts.total]
    return ", ".join(f"{name.replace('_', ' ')} {units.size(num_bytes)}" for num_bytes, name in shown)


def _range(each: PointMemory) -> str:
    least, most = units.size(each.least_bytes or 0), units.size(each.most_bytes or 0)
    return least if least == most else f"{least} to {most}"
