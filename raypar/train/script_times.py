"""Times of training code that raypar didn't write: of observed steps, or of what the code reports itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from raypar.measure.laps import BY_STEP, StepTimes
from raypar.observe.ranks import RankSteps
from raypar.observe.settings import not_applied
from raypar.study.script_settings import COUNTERFACTUALS, WHAT_IF
from raypar.study.space import Value
from raypar.train.job import RankOutcome


class SettingNotApplied(RuntimeError):
    """The code ran without one of its trial's settings."""


def check_applied(
    settings: Mapping[str, Value], folder: Path, rank: int, ranks: Sequence[RankSteps], why_not: str
) -> None:
    """Check that the code ran with its settings.

    Args:
        settings: see `raypar.observe.settings`.
        folder: that its processes wrote their events to.
        rank: number of the rank that ran it. On another than the first, there may be nothing to leave out, such as an
            evaluation.
        ranks: the observed ones.
        why_not: why there are none.

    Raises:
        SettingNotApplied: it did not.
    """
    missing = [name for name in not_applied(settings, folder) if name != WHAT_IF or not rank]
    if not missing:
        return
    problems = [why_not, *(problem for each in ranks for problem in each.rank.problems)]
    if missing == [WHAT_IF]:
        problems.append(COUNTERFACTUALS[str(settings[WHAT_IF])])
    why = next(filter(None, problems), "the code did not import the module that it changes")
    names = ", ".join(f"{name}={settings[name]}" for name in missing)
    raise SettingNotApplied(f"{names} had no effect: {why}")


def with_times(outcome: RankOutcome, laps: StepTimes, ranks: Sequence[RankSteps], why_not: str) -> RankOutcome:
    """Return an outcome with the times of its steps.

    Steps that the code marks with `raypar.step` take precedence over observed ones, and these over reports.

    Args:
        laps: times by what the code reports.
        ranks: the observed ones.
        why_not: why there are none.
    """
    observed = tuple(each.rank for each in ranks)
    conditions = replace(
        outcome.conditions,
        steps_from=laps.source,
        laps_cover=laps.cover,
        not_observed=why_not or None,
        peak_memory_bytes=_most([rank.peak_allocated_bytes for rank in observed], outcome.conditions.peak_memory_bytes),
        peak_reserved_bytes=_most(
            [rank.peak_reserved_bytes for rank in observed], outcome.conditions.peak_reserved_bytes
        ),
        peak_rss_bytes=_most([rank.max_rss_bytes for rank in observed], outcome.conditions.peak_rss_bytes),
    )
    outcome = replace(
        outcome,
        conditions=conditions,
        train_time_s=laps.train_time_s,
        step_times_s=laps.times_s,
        observed=observed,
    )
    if not ranks:
        return outcome
    outcome = replace(outcome, eval_time_s=max(rank.eval_s for rank in observed))
    if laps.source == BY_STEP:
        return outcome
    return replace(
        outcome,
        conditions=replace(conditions, steps_from=observed[0].counted_by, laps_cover=""),
        train_time_s=max(each.train_time_s for each in ranks),
        step_times_s=(),
        observed_step_times_s=tuple(each.step_times_s for each in ranks),
        num_samples=_sum_of_known([each.num_samples for each in ranks]),
    )


def _sum_of_known(numbers: Sequence[float]) -> int | None:
    """Return the samples of all ranks; None if those of a rank are unknown."""
    return round(sum(numbers)) if all(numbers) else None


def _most(observed: Sequence[float | None], otherwise: float | None) -> float | None:
    """Return the largest observed value."""
    return max((value for value in observed if value is not None), default=otherwise)
