"""The point that the validation set chooses, and what the test set says of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.points import PointAnalysis
from raypar.analysis.stats import median_estimate
from raypar.study.space import Value
from raypar.study.trial import gain, point_label

FINAL_TEST_FILE = "test.json"


@dataclass(frozen=True)
class FinalTest:
    """What the models of the chosen point do on samples that nothing was chosen by.

    Attributes:
        point: the chosen one.
        metric: what it was chosen by, on the validation set.
        scores: of each of its models on the test set.
        look: the how manieth look at the test set this was: a study that goes on after it looks again.
    """

    point: Mapping[str, Value]
    metric: str
    scores: tuple[Mapping[str, float], ...]
    look: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> FinalTest:
        """Raises KeyError or TypeError where it is none."""
        return cls(dict(raw["point"]), raw["metric"], tuple(raw["scores"]), raw["look"])

    def sentence(self) -> str:
        """For the report."""
        key = self.metric.removeprefix("val_")
        values = [score[key] for score in self.scores if key in score]
        if not values:
            return ""
        estimate = median_estimate(values, log_scale=False)
        shown = units.score_interval(key, estimate.value, estimate.low, estimate.high)
        seen = "seen once" if self.look == 1 else f"looked at {self.look} times, each worth less"
        return (
            f"Test set, {seen}, by the {units.counted(len(values), 'model')} of the point that is best on the "
            f"validation set ({point_label(self.point)}): {key} {shown}."
        )


def stored_final_test(text: str | None) -> FinalTest | None:
    """What `FinalTest.to_json` gave; None where there is none."""
    try:
        return FinalTest.from_dict(json.loads(text)) if text else None
    except (ValueError, KeyError, TypeError):
        return None


def with_final_test(analysis: StudyAnalysis, final: FinalTest | None) -> StudyAnalysis:
    """The analysis with the sentence of a final test, if there was one."""
    sentence = final.sentence() if final else ""
    return replace(analysis, verdicts=(*analysis.verdicts, sentence)) if sentence else analysis


def chosen_point(analysis: StudyAnalysis) -> PointAnalysis | None:
    """The point with the best median of the study's metric; of equals, the first. None where no point has it."""
    scored = [(p, p.metric) for p in analysis.points if p.metric is not None]
    return max(scored, key=lambda entry: gain(analysis.mode, entry[1].value))[0] if scored else None
