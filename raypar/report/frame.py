"""A study in a notebook: `StudyFrame`, a pandas frame of its trials that has the report's figures too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from html import escape
from typing import Any

import pandas as pd  # type: ignore[import-untyped,unused-ignore]

from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.analysis.question import Question
from raypar.errors import RayparError, suggest
from raypar.report.export import frame_of
from raypar.report.figures import figures_of
from raypar.report.vega import Figure, OmittedFigure, static_svg
from raypar.study.trial import TrialResult


class Figures(dict[str, Figure]):
    """A study's figures by their keys (``speedup``, ``pareto`` …); a notebook shows them all.

    Attributes:
        left_out: those that the study has no data for, and why.
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
    """The trials of a study, one row each. What is selected or computed from it is a plain pandas frame."""

    _metadata = ["_asked", "_results"]  # noqa: RUF012  (pandas pickles these attributes, and makes no columns of them)
    _asked: Question
    _results: tuple[TrialResult, ...]

    @classmethod
    def of(cls, question: Question, results: Sequence[TrialResult]) -> StudyFrame:
        """The frame of `raypar.report.export.frame_of`, with what figures are made of."""
        plain = frame_of(question, results)
        frame = cls(plain)
        frame.attrs.update(plain.attrs)
        frame._asked, frame._results = question, tuple(results)
        return frame

    @property
    def _constructor(self) -> Any:
        return pd.DataFrame

    @cached_property
    def analysis(self) -> StudyAnalysis:
        """Analysis of the results: medians, intervals, speedups, verdicts."""
        return analyse(self._asked, self._results)

    @property
    def figures(self) -> Figures:
        """The figures of the study's report."""
        return Figures(figures_of(self.analysis, self._results))
