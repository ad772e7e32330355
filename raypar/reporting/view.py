"""A study's report: everything that it says, for the terminal, the page, Markdown, MLflow, notebooks and JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.recommend import Recommendation
from raypar.analysis.search import search_lines
from raypar.reporting.documents import Document
from raypar.reporting.fit import ScalingView, scaling_lines
from raypar.reporting.points import brief_legend, legend
from raypar.reporting.profile import PointProfile
from raypar.reporting.recommend import objective, recommended_lines
from raypar.reporting.sentences import IndentedLine, comparison_columns, effect_lines, goodput_lines, machine_lines
from raypar.reporting.text import Column

MAX_CAVEATS = 4
_CAPITALISED = re.compile(r"^[A-Z](?=[a-z]*\b)")  # first letter of "Times" or "A", but not of "GPUs" or "F1"


@dataclass(frozen=True)
class StudyView(Document):
    """Report on a study: its analysis, and all sentences about it."""

    kind = "report"
    shown = (
        "study=analysis.question.study_name scope=analysis.scope header question=analysis.verdict.question "
        "answer=analysis.verdict.answer recommended objective importance status=analysis.verdict.status "
        "doubt=analysis.verdict.doubt final_test=analysis.verdict.final_test workload=analysis.question.workload "
        "swept=analysis.question.space_keys baseline=analysis.question.baseline metric=analysis.question.metric "
        "mode=analysis.question.mode metric_unit=analysis.question.unit time_metric=analysis.time_metric "
        "energy_source=analysis.energy_source price_per_node_hour=analysis.question.price_per_node_hour "
        "num_trials=analysis.num_trials num_by_state=analysis.num_by_state wall_s=analysis.wall_s "
        "comparisons=analysis.verdict.comparisons recommendation importances=analysis.importances outlook "
        "points=analysis.points legend caveats=analysis.warnings statements=analysis.statements scaling "
        "effects=analysis.effects target=analysis.target batches=analysis.batches machines=analysis.machines "
        "breakdowns"
    )
    analysis: StudyAnalysis

    @property
    def name(self) -> str:
        """Name of the study."""
        return self.analysis.question.study_name or "study"

    @cached_property
    def header(self) -> str:
        """Summary of the run: ``quickstart: 4 points, 12 trials, settled, 46 s``."""
        analysis = self.analysis
        unmeasured = {state: num for state, num in analysis.num_by_state.items() if not state.traits.is_measured}
        parts = [
            units.counted(len(analysis.points), "point"),
            units.counted(analysis.num_trials, "trial"),
            *(f"{num} {state.said_of(num)}" for state, num in unmeasured.items() if num),
            analysis.verdict.status,
            units.seconds(analysis.wall_s) if analysis.wall_s is not None else "",
            analysis.scope,
        ]
        return f"{self.name}: {', '.join(filter(None, parts))}"

    @property
    def headline(self) -> str:
        """Question and its answer."""
        return f"{self.analysis.verdict.question} {self.analysis.verdict.answer}".strip()

    @cached_property
    def comparisons(self) -> list[Column]:
        """Columns with points, speedup and outcome of each comparison; empty for a single one (see the answer)."""
        return comparison_columns(self.analysis.verdict)

    @cached_property
    def recommended(self) -> Sequence[str]:
        """Recommended or leading point in sentences; the answer of a search names it."""
        return list(recommended_lines(self.analysis.verdict))

    @property
    def recommendation(self) -> Recommendation | None:
        """Recommendation of the fastest point; None for a search."""
        return None if self.analysis.question.is_search else self.analysis.verdict.recommendation

    @cached_property
    def objective(self) -> str:
        """Objective of the recommendation, in words; empty for a search."""
        return objective(self.recommendation) if self.recommendation else ""

    @cached_property
    def importance(self) -> str:
        """Importance of each hyperparameter of a search, in a sentence; empty for other studies."""
        importances, metric = self.analysis.importances, self.analysis.question.metric
        if importances is None:
            return ""
        trials = units.counted(importances.num_points, "trial")
        if not importances.shares:
            return f"Importance for {metric}: not shown by {trials}."
        shares = ", ".join(f"{key} {units.percent(share)}" for key, share in importances.shares.items())
        return f"Importance for {metric} (random forest, {trials}): {shares}."

    @cached_property
    def outlook(self) -> Sequence[str]:
        """Sentences on the certainty of a search's answer and on what to try next; empty for other studies."""
        analysis = self.analysis
        if not analysis.question.is_search:
            return []
        return [*search_lines(analysis.question, analysis.points, analysis.importances)]

    @cached_property
    def summary(self) -> Sequence[str]:
        """Sentences after the answer: the recommended point, the final test, and what a search shows."""
        lines = (*self.recommended, self.analysis.verdict.final_test, self.importance, *self.outlook)
        return [*filter(None, lines)]

    @cached_property
    def caveats(self) -> str:
        """Caveats in short, except those in the answer or the table; empty if there are none."""
        named = {"few_repeats", "not_separated", *(["other_load"] if self.analysis.verdict.doubt else [])}
        texts = [finding.subject for finding in self.analysis.warnings if finding.check not in named]
        if not texts:
            return ""
        texts = [texts[0], *(_CAPITALISED.sub(lambda first: first[0].lower(), text) for text in texts[1:])]
        more = units.counted(len(texts), "caveat")
        return f"! {more}: {units.listed(texts, MAX_CAVEATS, separator='; ')}."

    @cached_property
    def brief_legend(self) -> str:
        """Line on the times and intervals of the table of points; empty without a finished trial."""
        return brief_legend(self.analysis)

    @cached_property
    def legend(self) -> str:
        """Meaning of the columns of the table of points, and the basis of the intervals; empty without points."""
        return legend(self.analysis) if self.analysis.points else ""

    @cached_property
    def sections(self) -> Mapping[str, Sequence[IndentedLine]]:
        """Further sections, by heading: lines on scaling, effects, batch sizes and machines."""
        sections = {
            "Scaling": scaling_lines(self.name, self.analysis.worker_groups),
            "Effects of the hyperparameters": effect_lines(self.analysis),
            "Batch sizes: throughput and progress": goodput_lines(self.analysis),
            "Machines": machine_lines(self.analysis.machines),
        }
        return {heading: lines for heading, lines in sections.items() if lines}

    @cached_property
    def scaling(self) -> Sequence[ScalingView]:
        """Scaling of points that differ only in ``num_workers``."""
        return [ScalingView.of(group, group.analysis) for group in self.analysis.worker_groups]

    @property
    def breakdowns(self) -> Sequence[PointProfile]:
        """Parts of a step's time, of the profiled points."""
        return [PointProfile(*each) for each in self.analysis.profiles]
