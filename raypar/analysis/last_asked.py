"""Which trials belong to what a study asked last.

A study's name may hold trials of other settings: another number of epochs, another learning rate, other seeds, asked
for in an earlier execution. They answer another question, and stand in no median of this one. Other values of what is
swept are no other settings: those points stand beside the ones of the last execution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypar import units
from raypar.analysis.question import Question, point_key
from raypar.study.space import Value
from raypar.study.trial import TrialResult

MAX_NAMED = 3  # settings, and values of one
SEED = "seed"
WORKLOAD = "workload"


@dataclass(frozen=True)
class LastAsked:
    """The trials of a study, parted.

    Attributes:
        results: those of what was asked last, in the order given; with its swept hyperparameters as their points.
        aside: the others.
        settings: in what these differ: what was asked last, and every other value.
    """

    results: tuple[TrialResult, ...]
    aside: tuple[TrialResult, ...]
    settings: Mapping[str, tuple[Value, tuple[Value, ...]]]

    def sentence(self) -> str:
        """What was set aside; empty where nothing was."""
        return aside_told(len(self.aside), self.settings)


def last_asked(question: Question, results: Sequence[TrialResult]) -> LastAsked:
    """The trials of this question and the others. All are of it where the store does not say what it fixes.

    Args:
        question: as the last execution asked it.
        results: of all executions.
    """
    kept, aside = [], []
    settings: dict[str, tuple[Value, dict[Value, None]]] = {}
    for result in results:
        others = _other_settings(question, result)
        if not others:
            kept.append(_as_asked(question, result))
            continue
        aside.append(result)
        for key, (wanted, own) in others.items():
            settings.setdefault(key, (wanted, {}))[1][own] = None
    told = {key: (wanted, tuple(values)) for key, (wanted, values) in settings.items()}
    return LastAsked(tuple(kept), tuple(aside), told)


def aside_told(num_trials: int, settings: Mapping[str, tuple[Value, tuple[Value, ...]]]) -> str:
    """A sentence on so many trials of other settings; empty for none."""
    if not num_trials:
        return ""
    parts = [
        f"{key}={_listed(map(units.value_of, others))} instead of {units.value_of(wanted)}"
        for key, (wanted, others) in settings.items()
    ]
    return f"{units.counted(num_trials, 'trial')} of other settings set aside: {_listed(parts)}."


def _other_settings(question: Question, result: TrialResult) -> dict[str, tuple[Value, Value]]:
    """What the question fixes and the trial has another value of, as (the question's, the trial's)."""
    spec = result.spec
    config: Mapping[str, Any] = spec.config
    found: dict[str, tuple[Value, Value]] = {}
    if question.workload and spec.workload != question.workload:
        found[WORKLOAD] = (question.workload, spec.workload)
    if question.seed is not None and spec.seed - spec.repeat != question.seed:
        found[SEED] = (question.seed, spec.seed - spec.repeat)
    for key, wanted in question.config.items():
        if key not in config:
            continue  # an older version did not know it
        if key == "num_threads" and wanted is None:
            wanted = config.get("cpus_per_worker")
        own = config[key]
        if type(own) is type(wanted) and own == wanted:
            continue  # the usual case, told quickly
        if point_key({key: wanted}) != point_key({key: own}):
            found[key] = (wanted, tuple(own) if isinstance(own, list) else own)
    return found


def _as_asked(question: Question, result: TrialResult) -> TrialResult:
    """An earlier execution may have swept more, or less: what it fixed is a value of the point all the same."""
    spec = result.spec
    keys = question.space_keys
    if not question.config or tuple(spec.point) == keys or any(key not in spec.config for key in keys):
        return result
    return replace(result, spec=replace(spec, point={key: spec.config[key] for key in keys}))


def _listed(parts: Iterable[str]) -> str:
    return units.listed(parts, MAX_NAMED, word="and")
