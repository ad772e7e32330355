"""Why a step takes as long as it does, in a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from raypar import units
from raypar.analysis import observed_checks
from raypar.analysis.comparison import Comparison
from raypar.analysis.finding import Finding
from raypar.analysis.why import PointWhy, ScalingWhy, scaling_of, why_of
from raypar.reporting.documents import Document
from raypar.reporting.profile import HEADS, NAMES
from raypar.reporting.text import Column, print_line, print_paragraph, print_table
from raypar.study.profile import PARTS
from raypar.study.script_settings import CHANGE, NO_CHECKPOINTS, NO_COMMUNICATION, NO_EVALUATION, NO_LOADING
from raypar.study.trial import point_label

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.analysis.analyse import StudyAnalysis

WORTH_A_WORD = 0.01  # smallest share of a step that is named
WORTH_GROWING = 0.1  # smallest share of the largest change that is named
MAX_GROWN = 3
NEARLY_PERFECT = 0.05  # largest excess over a step with perfect scaling
COST_NOTHING = {
    NO_LOADING: "loading cost nothing",
    NO_COMMUNICATION: "communication cost nothing",
    NO_EVALUATION: "evaluation cost nothing",
    NO_CHECKPOINTS: "checkpoints cost nothing",
}


@dataclass(frozen=True)
class WhyView(Document):
    """Why the steps of a study take as long as they do.

    Attributes:
        study: its name.
        points: the answer at each point whose steps were observed.
        scaling: each point with more workers than another one that is otherwise the same.
        not_observed: reasons why steps of other points were not observed.
        doubt: reason why its times can't be trusted; empty if they can.
        mistakes: what the observed code does that costs time, or changes what it trains.
        sentences: the answer.
    """

    kind = "why"
    shown = "study points scaling not_observed doubt mistakes sentences"
    study: str
    points: Sequence[PointWhy]
    scaling: Sequence[ScalingWhy]
    not_observed: Sequence[str]
    doubt: str
    mistakes: Sequence[Finding]

    @classmethod
    def of(cls, analysis: StudyAnalysis, *, only_unchanged: bool = False) -> WhyView:
        """Return the view of an analysis.

        Args:
            only_unchanged: leave out points with changed settings of the script.
        """
        evidence = analysis.evidence
        reasons = [reason for r in evidence.finished for reason in r.conditions.of_ranks("not_observed")]
        points = [each for each in why_of(evidence) if not (only_unchanged and CHANGE in each.point)]
        scaling = scaling_of(evidence, points)
        unobserved = tuple(dict.fromkeys(reasons))
        about_code = {check.name for check in observed_checks.CHECKS}
        mistakes = tuple(finding for finding in analysis.warnings if finding.check in about_code)
        return cls(evidence.question.study_name, points, scaling, unobserved, evidence.doubt, mistakes)

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The answer, point by point."""
        if not self.points:
            return ("No trial shows the parts of its steps. `raypar study FILE --profile` measures those of a model.",)
        return (*(line for answer in self.points for line in self._about(answer)), *map(_growth, self.scaling))

    def _about(self, answer: PointWhy) -> Iterator[str]:
        at = f" at {point_label(answer.point)}" if len(self.points) > 1 else ""
        yield f"Each step{at} takes {units.seconds_interval(answer.step_s)}: {_shares(answer)}."
        for what, share in {"Evaluations": answer.eval_share, "Checkpoints": answer.save_share}.items():
            if share >= WORTH_A_WORD:
                yield f"{what} between the steps take {units.percent(share)} of the whole time."
        for each in answer.what_ifs:
            yield f"If {COST_NOTHING[each.left_out]}: {outcome_of(each.comparison)}."


def print_why(console: Console, view: WhyView) -> None:
    """Print the answer, a table of the parts, and what to do."""
    for reason in view.not_observed:
        print_paragraph(console, not_observed(reason))
    if view.doubt:
        print_paragraph(console, f"These times can't be trusted: {view.doubt}.")
    for sentence in view.sentences:
        print_paragraph(console, sentence)
    if view.points:
        print_line(console, "")
        print_table(console, _columns(view.points))
    if view.mistakes:
        print_line(console, "")
    for mistake in view.mistakes:
        print_paragraph(console, mistake.detail)
        print_paragraph(console, f"→ {mistake.advice}", 2)
    if any(answer.ranks for answer in view.points):  # observed, and not profiled
        print_line(console, "")
        print_paragraph(console, "More: `raypar improve SCRIPT` tries settings that shorten these parts.")


def not_observed(reason: str) -> str:
    """Return a sentence on a script whose steps were not observed."""
    return f"Not observed: {reason}."


def outcome_of(comparison: Comparison) -> str:
    """Return ``1.70× as fast (95 % CI 1.62-1.79)``, with its outcome unless that is clear."""
    estimate = comparison.estimate
    if estimate is None:
        return "unknown"
    interval = ""
    if units.is_noise(estimate):
        interval = f" {units.TOO_NOISY}"
    elif estimate.low is not None and estimate.high is not None:
        interval = f" (95 % CI {estimate.low:.2f}-{estimate.high:.2f})"
    open_ = "" if comparison.is_settled else f", {comparison.outcome}"
    return f"{units.ratio(estimate.value)} as fast{interval}{open_}"


def _shares(answer: PointWhy) -> str:
    named = [part for part in answer.by_size if part.share.value >= WORTH_A_WORD]
    return ", ".join(f"{units.percent(part.share.value)} {NAMES[part.name]}" for part in named)


def _growth(scaling: ScalingWhy) -> str:
    """Return how a step changes with the number of workers, which parts change, and which of them limit scaling."""
    base, answer = scaling.base, scaling.answer
    rest = {key: value for key, value in answer.point.items() if key != "num_workers"}
    at = f" at {point_label(rest)}" if rest else ""
    workers = units.counted(answer.num_workers, "worker")
    samples = ""
    if base.samples_per_step and answer.samples_per_step:
        few, many = f"{base.samples_per_step:.4g}", f"{answer.samples_per_step:.4g}"
        samples = f"has {many} samples instead of {few} and " if few != many else ""
    text = (
        f"With {workers} instead of {base.num_workers}{at}, training is {outcome_of(scaling.comparison)}. "
        f"A step {samples}takes {units.seconds(answer.step_s.value)} instead of {units.seconds(base.step_s.value)}: "
        f"{_changes(scaling.growth_s)}."
    )
    if scaling.ideal_step_s is None:
        return text
    ideal = units.seconds(scaling.ideal_step_s)
    if answer.step_s.value <= scaling.ideal_step_s * (1 + NEARLY_PERFECT):
        return f"{text} Scaling is nearly perfect: an ideal step would take {ideal}."
    lost = ", ".join(f"{NAMES[name]} ({units.seconds(scaling.excess_s[name])})" for name in _largest(scaling.excess_s))
    return f"{text} Scaling is limited by {lost}: an ideal step would take {ideal}."


def _largest(parts_s: Mapping[str, float]) -> list[str]:
    """Return the few parts with the largest values, apart from small ones."""
    largest = sorted(parts_s, key=lambda name: -parts_s[name])[:MAX_GROWN]
    return [name for name in largest if parts_s[name] > 0 and parts_s[name] >= WORTH_GROWING * parts_s[largest[0]]]


def _changes(parts_s: Mapping[str, float]) -> str:
    """Return the parts that change most: ``exposed communication +3.0 ms, forward pass -1.0 ms``."""
    shown = _largest({name: abs(seconds) for name, seconds in parts_s.items()})
    return ", ".join(f"{NAMES[name]} {_signed(parts_s[name])}" for name in shown)


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{units.seconds(abs(seconds))}"


def _columns(points: Sequence[PointWhy]) -> list[Column]:
    shown = [name for name in PARTS if any(p.share_of(name) >= WORTH_A_WORD for p in points)]
    cells = {
        **({"point": [point_label(p.point) for p in points]} if len(points) > 1 else {}),
        "step": [units.seconds(p.step_s.value) for p in points],
        **{HEADS[name]: [units.percent(p.share_of(name)) for p in points] for name in shown},
    }
    return [Column(head, each, head != "point") for head, each in cells.items()]
