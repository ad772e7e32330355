"""What tests of figures look at: figures by key, the rows that they draw, the parts of a spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from html_studies import question

from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.analysis.question import Question
from raypar.report.figures import figures_of
from raypar.report.vega import Figure
from raypar.study.trial import TrialResult


def made(trials: list[TrialResult], asked: Question | None = None) -> tuple[StudyAnalysis, dict[str, Figure]]:
    analysis = analyse(asked or question(), trials)
    return analysis, {f.key: f for f in figures_of(analysis, trials) if isinstance(f, Figure)}


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Every object of a spec, the rows of its data left out."""
    if isinstance(node, dict):
        yield node
        for key, value in node.items():
            if key != "values":
                yield from walk(value)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value)


def rows_of(figure: Figure) -> list[dict[str, Any]]:
    return list(figure.spec["data"]["values"])


def own_rows(figure: Figure, layer: int) -> list[dict[str, Any]]:
    return list(figure.spec["layer"][layer]["data"]["values"])
