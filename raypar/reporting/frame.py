"""A study in a notebook: `StudyFrame`, a pandas frame of its trials with the report's points, answer and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from html import escape
from typing import Any

import pandas as pd  # type: ignore[import-untyped,unused-ignore]

from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.analysis.question import Question
from raypar.analysis.verdict import Verdict
from raypar.errors import RayparError, suggest
from raypar.reporting.console import print_report
from raypar.reporting.export import frame_of, short_names, tidy
from raypar.reporting.figures import figures_of
from raypar.reporting.notebook import Printed, open_notebook
from raypar.reporting.points import estimates_of, standing_of
from raypar.reporting.text import TerminalConsole
from raypar.reporting.vega import Figure, OmittedFigure, static_svg
from raypar.reporting.view import StudyView
from raypar.study.trial import TrialResult


class Figures(dict[str, Figure]):
    """A study's figures by their keys (``speedup``, ``pareto`` …); a notebook shows them all.

    Attributes:
        left_out: figures that the study has no data for, and why.
    """

    def __init__(self, figures: Sequence[Figure | OmittedFigure]) -> None:
        super().__init__({figure.key: figure for figure in figures if isinstance(figure, Figure)})
        self.left_out = {figure.title: figure.reason for figure in figures if isinstance(figure, OmittedFigure)}

    def __missing__(self, key: str) -> Figure:
        raise RayparError(f"the study has no figure {key!r}", hint=suggest(key, list(self)))

    def __repr__(self) -> str:
        return f"figures of a study: {', '.join(self) or 'none'}"

    def _repr_html_(self) -> str:
        return "".join(
            f"<figure><h4>{escape(f.title)}</h4>{static_svg(f)}<figcaption>{escape(f.caption)}</figcaption></figure>"
            for f in self.values()
        )


class StudyFrame(pd.DataFrame):  # type: ignore[misc,unused-ignore]
    """The trials of a study, one row each. Selections and results of computations are plain pandas frames."""

    # pandas pickles these attributes and does not turn them into columns.
    _metadata = ["_asked", "_results", "_final_test"]  # noqa: RUF012
    _asked: Question
    _results: tuple[TrialResult, ...]
    _final_test: str

    @classmethod
    def of(
        cls, question: Question, results: Sequence[TrialResult], *, all: bool = True, final_test: str = ""
    ) -> StudyFrame:
        """Return the frame of `raypar.reporting.export.short_names`, with the data for reports.

        Args:
            all: every column, not only those of `raypar.reporting.export.tidy`.
            final_test: outcome on the test set, as in `Verdict`.
        """
        plain = (short_names if all else tidy)(frame_of(question, results))
        frame = cls(plain)
        frame.attrs.update(plain.attrs)
        frame._asked, frame._results, frame._final_test = question, tuple(results), final_test
        return frame

    @property
    def _constructor(self) -> Any:
        return pd.DataFrame

    @cached_property
    def analysis(self) -> StudyAnalysis:
        """Analysis of the results: medians, intervals, speedups, verdicts."""
        analysis = analyse(self._asked, self._results)
        return replace(analysis, verdict=replace(analysis.verdict, final_test=self._final_test))

    @property
    def points(self) -> pd.DataFrame:
        """The points, one row each: swept values, finished trials ``n``, medians, and whether it is recommended.

        The ends of an interval have the suffixes ``_low`` and ``_high``. Quantities that no point has are omitted.
        """
        keys, points = self._asked.space_keys, self.analysis.points
        rows = []
        for point in points:
            row: dict[str, Any] = {**{key: point.point.get(key) for key in keys}, "n": len(point.samples)}
            for name, estimate in estimates_of(self.analysis, point).items():
                ends = (estimate.value, estimate.low, estimate.high) if estimate else (None, None, None)
                row |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))
            rows.append({**row, "recommended": standing_of(self.analysis, point) == "recommended"})
        frame = pd.DataFrame(rows)
        empty = [c for c in frame if c not in keys and frame[c].isna().all()]
        return frame.drop(columns=empty).convert_dtypes(convert_floating=False)

    @property
    def verdict(self) -> Verdict:
        """The question, the answer, the comparisons behind it, and the recommended point."""
        return self.analysis.verdict

    def report(self, *, verbose: bool = False) -> None:
        """Show the study's report as notebook output, or else on the terminal.

        Args:
            verbose: include all comparisons, scaling, effects, the parts of the time and all warnings.
        """
        view = StudyView(self.analysis)
        if (notebook := open_notebook()) is not None:
            notebook.display.display(Printed.of(lambda console: print_report(view, console, verbose=verbose)))
        else:
            print_report(view, TerminalConsole(), verbose=verbose)

    @property
    def figures(self) -> Figures:
        """The figures of the study's report."""
        return Figures(figures_of(self.analysis, self.analysis.evidence.results))
