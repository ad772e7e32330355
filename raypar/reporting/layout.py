"""Layouts of a training step: which one is fastest, in a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from raypar import units
from raypar.analysis.comparison import Comparison, Outcome
from raypar.predict.layout import StepLayout
from raypar.reporting.documents import Document
from raypar.reporting.text import Column, print_line, print_paragraph, print_table
from raypar.study.memory_fit import MemoryFit
from raypar.study.space import Value

if TYPE_CHECKING:
    from rich.console import Console

MAX_SHOWN = 20


@dataclass(frozen=True)
class RankedLayout:
    """A layout, and what was measured of it.

    Attributes:
        measured_s: median seconds of a step; None: it has not run, so its time is a prediction.
        comparison: of its time with that of plain data parallelism, as a speedup; None: not compared.
    """

    shown = (
        "settings measured_s predicted_s=layout.predicted_s memory_bytes=layout.memory_bytes fit=layout.fit "
        "num_trials speedup=comparison.estimate outcome=comparison.outcome problem=layout.problem"
    )
    layout: StepLayout
    measured_s: float | None = None
    comparison: Comparison | None = None
    num_trials: int = 0

    @property
    def settings(self) -> Mapping[str, Value]:
        return self.layout.shown

    @property
    def words(self) -> str:
        """``--set`` of a command line."""
        return " ".join(f"--set {key}={value}" for key, value in self.layout.shown.items())


@dataclass(frozen=True)
class LayoutView(Document):
    """Layouts of a study's training step, the best first.

    Attributes:
        gpu_bytes: memory of a GPU; None: not given.
        layouts: those that may fit: the repeated ones, then those that ran once, then predictions.
        num_excluded: legal layouts that do not fit.
        notes: sentences on what is predicted, and why nothing ran.
    """

    kind = "layout"
    shown = "study num_workers gpu_bytes answer notes num_legal num_excluded layouts"
    study: str
    num_workers: int
    layouts: Sequence[RankedLayout]
    num_excluded: int = 0
    gpu_bytes: float | None = None
    notes: Sequence[str] = ()

    @property
    def num_legal(self) -> int:
        return len(self.layouts) + self.num_excluded

    @cached_property
    def answer(self) -> str:
        """The layout to use."""
        if not self.layouts:
            size = "" if self.gpu_bytes is None else f" into {units.size(self.gpu_bytes)}"
            return f"No layout on {self.num_workers} workers fits{size}." if self.num_legal else "No layout is legal."
        best = self.layouts[0]
        words = best.layout.words.replace(" ", ", ")
        if best.measured_s is None:
            if best.layout.predicted_s is None:
                return "No step time can be predicted."
            return f"Try {words}: predicted {units.seconds(best.layout.predicted_s)} a step. Nothing has run."
        chosen, time = self.chosen, units.seconds(best.measured_s)
        if best.comparison is None or best.comparison.estimate is None:
            return f"Use {words}: {time} a step."
        ratio = f"{units.ratio_interval(best.comparison.estimate)} as fast as ddp"
        if chosen is best:
            return f"Use {words}: {time} a step, {ratio}."
        plain = f"No layout is shown to be faster than strategy=ddp, {units.seconds(chosen.measured_s)} a step."
        return f"{plain} The fastest, {words}, takes {time}, {ratio} ({best.comparison.outcome})."

    @property
    def chosen(self) -> RankedLayout:
        """The fastest layout if it is shown to be faster than plain data parallelism, and that otherwise."""
        best = self.layouts[0]
        if best.comparison is None or best.comparison.outcome is Outcome.FASTER:
            return best
        return next((each for each in self.layouts if each.layout.is_baseline and each.measured_s is not None), best)


def print_layouts(console: Console, view: LayoutView) -> None:
    """Print the answer, a table of the layouts, and how to run the best one."""
    print_paragraph(console, view.answer)
    shown = view.layouts[:MAX_SHOWN]
    if shown:
        console.print()
        columns = [
            Column("layout", [each.layout.words for each in shown], is_prose=True),
            Column("measured", [_seconds(each.measured_s) for each in shown], is_number=True),
            Column("predicted", [_seconds(each.layout.predicted_s) for each in shown], is_number=True),
            Column("trials", [str(each.num_trials or units.MISSING) for each in shown], is_number=True),
        ]
        if view.gpu_bytes is not None:
            columns.append(Column("memory", [_memory(each.layout) for each in shown]))
        print_table(console, columns)
        if (num := len(view.layouts) - len(shown)) > 0:
            print_line(console, f"and {num} more with longer predicted steps: --json lists them")
    console.print()
    for note in view.notes:
        print_paragraph(console, note)
    if shown:
        print_paragraph(console, f"To use it: --set num_workers={view.num_workers} {view.chosen.layout.words}")


def _seconds(value: float | None) -> str:
    return units.MISSING if value is None else units.seconds(value)


def _memory(layout: StepLayout) -> str:
    if layout.memory_bytes is None:
        return "unknown"
    fit = layout.fit or MemoryFit.UNCERTAIN
    return f"{units.size(layout.memory_bytes[1])}, {fit}"
