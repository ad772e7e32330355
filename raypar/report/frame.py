"""A study in a notebook: `StudyFrame`, a pandas frame of its trials that has the report's figures too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


class Figures(Mapping[str, Figure]):
    """A study's figures by their keys (``speedup``, ``pareto`` …); a notebook shows them all.

    Attributes:
        left_out: those that the study has no data for, and why.
    """

    def __init__(self, figures: Sequence[Figure | OmittedFigure]) -> None:
        self._figures = {figure.key: figure for figure in figures if isinstance(figure, Figure)}
        self.left_out = {figure.title: figure.reason for figure in figures if isinstance(figure, OmittedFigure)}

    def __getitem__(self, key: str) -> Figure:
        """Raises RayparError where there is none of that key, and says which there are."""
        if key not in self._figures:
            raise RayparError(f"the study has no figure {key!r}", hint=suggest(key, list(self._figures)))
        return self._figures[key]

    def __contains__(self, key: object) -> bool:
        return key in self._figures

    def __iter__(self) -> Iterator[str]:
        return iter(self._figures)

    def __len__(self) -> int:
        return len(self._figures)

    def __repr__(self) -> str:
        return f"figures of a study: {', '.join(self._figures) or 'none'}"

    def _repr_html_(self) -> str:
        return "".join(
            f"<figure><h4>{escape(f.title)}</h4>{static_svg(f)}<figcaption>{escape(f.alternative)}</figcaption></figure>"
            for f in self._figures.values()
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
