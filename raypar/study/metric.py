"""Metrics that trials are judged by, with direction, unit, margin and display format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from raypar import units

SHARE = "share"  # 0.9321, shown as 93.2 %
PERCENT = "percent"  # 93.21, shown as 93.21 %
NUMBER = "number"
UNITS = (SHARE, PERCENT, NUMBER)

# Words in names of metrics, by their direction.
WORDS = {
    "max": r"acc|accuracy|f1|auc|auroc|bleu|rouge|iou|miou|dice|map|reward|score|psnr|ssim",
    "min": r"loss|nll|perplexity|ppl|error|err|mse|rmse|mae|wer|cer",
}
_LESS_IS_BETTER = ("loss", "error", "perplexity")  # also within a word: "testloss"
_ACCURACY = re.compile(r"acc(uracy)?([-_@ ]?(top[-_@ ]?)?\d+)?([-_ ](epoch|step))?$", re.IGNORECASE)
_PERCENT = re.compile(r"([-_ ](percent|pct)|%)$", re.IGNORECASE)
_ROUNDING = 1e-6  # by which a share may exceed 1


def direction_of(name: str) -> str:
    """Return "max" or "min" if the name of a metric shows which is better, else an empty text."""

    def has(words: str) -> bool:
        return bool(re.search(rf"(?:^|[\W_])(?:{words})(?:$|[\W_\d])", name, re.IGNORECASE))

    if has(WORDS["min"]) or any(word in name.lower() for word in _LESS_IS_BETTER):
        return "min"
    return "max" if has(WORDS["max"]) or _ACCURACY.search(name) else ""


@dataclass(frozen=True)
class Metric:
    """A metric that trials report, with everything that follows from its kind.

    Attributes:
        name: its key in the reports.
        mode: whether "max" or "min" is better; empty: inferred from its name, else "max".
        unit: "share" (0.93 is 93 %), "percent" (93 is 93 %) or "number"; empty: read from the values, see `read_from`.
    """

    name: str
    mode: str = ""
    unit: str = ""

    MARGINS: ClassVar = {SHARE: 0.005, PERCENT: 0.5}  # half a point

    def __post_init__(self) -> None:
        if not self.mode:
            object.__setattr__(self, "mode", direction_of(str(self.name)) or "max")

    @property
    def goal(self) -> str:
        """``the higher the better``."""
        return f"the {'higher' if self.mode == 'max' else 'lower'} the better"

    @property
    def text(self) -> str:
        """``accuracy, the higher the better, in per cent``."""
        unit = {SHARE: ", a share, shown in per cent", PERCENT: ", in per cent"}
        return f"{self.name}, {self.goal}{unit.get(self.unit, '')}"

    def read_from(self, values: Iterable[float]) -> Metric:
        """Return the metric with a unit inferred from the values, unless one is declared.

        A metric named as an accuracy is a share if all values are between 0 and 1, and per cent if some are above 1 and
        none above 100. A name that ends in ``_percent`` means per cent, however small the values. Everything else is a
        plain number, including a declared share with other values.

        Args:
            values: all values that trials of a study have reported. A single value may mislead: 0.8 may be a share,
                or the per cent of a model that has learned nothing yet.
        """
        if self.unit in (PERCENT, NUMBER):
            return self
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return self
        is_percent = not self.unit and bool(_PERCENT.search(self.name))
        is_share = self.unit == SHARE or bool(_ACCURACY.search(self.name.rsplit("/", 1)[-1]))
        low, high = min(finite), max(finite)
        if not (is_share or is_percent) or low < 0 or high > 100:
            return replace(self, unit=NUMBER)
        return replace(self, unit=SHARE if high <= 1 + _ROUNDING and not is_percent else PERCENT)

    @property
    def per_cent(self) -> float | None:
        """Factor that converts a value to per cent; None for a plain number."""
        return {SHARE: 100.0, PERCENT: 1.0}.get(self.unit)

    @property
    def head(self) -> str:
        """Column header: ``accuracy, %`` for values in per cent, the plain name for numbers."""
        return self.name if self.per_cent is None else f"{self.name}, %"

    def margin(self, best: float) -> float:
        """Return the difference that doesn't matter by default: half a point, or 1 % of a plain number.

        Args:
            best: the best value.
        """
        return self.MARGINS.get(self.unit, 0.01 * abs(best))

    def within(self, value: float) -> float:
        """Return the closest possible value, since interval arithmetic ignores the bounds of a share."""
        return value if self.per_cent is None else min(max(value, 0.0), 100 / self.per_cent)

    def show(self, value: float | None) -> str:
        """Return a value as text: ``93.2 %`` for a share, ``93.21 %`` for per cent, ``0.2134`` for others."""
        factor = self._factor(value)
        if value is None or factor is None:
            return units.number(value)
        return f"{factor * value:.{self._decimals}f} %"

    def show_interval(self, of: units.Interval) -> str:
        """``97.8 % [97.6, 97.9]`` for a share, ``0.2134 [0.2100, 0.2170]`` for others."""
        factor = self._factor(of.value)
        if factor is None:
            return units.number(of.value) + units.brackets(of, units.number)
        return self.show(of.value) + units.brackets(of, lambda v: f"{factor * self.within(v):.{self._decimals}f}")

    def show_difference(self, value: float) -> str:
        """Return the size of a difference as text: ``0.5 points`` for a share, ``0.0120`` for others."""
        factor = self.per_cent
        return units.number(value) if factor is None else f"{factor * value:.{self._decimals}f} points"

    def show_change(self, of: units.Interval) -> str:
        """``-2.1 points [-2.4, -1.8]`` for a share, ``+0.0120 [+0.0100, +0.0140]`` for others."""
        factor, decimals = self.per_cent, self._decimals

        def show(value: float) -> str:
            if factor is None:
                return ("+" if value >= 0 else "") + units.number(value)
            return f"{round(factor * value, decimals) + 0.0:+.{decimals}f}"  # + 0.0: no "-0.0"

        return show(of.value) + (" points" if factor is not None else "") + units.brackets(of, show)

    @property
    def smallest_shown(self) -> float:
        """Half of the last digit of `show_difference`; 0 for a plain number."""
        return 0.0 if self.per_cent is None else 0.5 * 10.0**-self._decimals / self.per_cent

    @property
    def _decimals(self) -> int:
        return 1 if self.unit == SHARE else 2

    def _factor(self, value: float | None) -> float | None:
        """Return the factor to per cent; None for a value that a share can't have, to avoid "9321.0 %"."""
        if value is None or not math.isfinite(value) or self.per_cent is None:
            return None
        return self.per_cent if -_ROUNDING <= self.per_cent * value / 100 <= 1 + _ROUNDING else None
