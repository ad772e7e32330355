"""Searches without a running Ray: searcher and scheduler of Ray Tune, asked trial by trial in this process.

It calls both as Ray Tune does (``ray.tune.execution.tune_controller``). Schedulers that need Tune's controller are
refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.search.variant_generator import generate_variants

from raypar.errors import Mistake, Shown
from raypar.run.runner import Event, TrialEnded, TrialReported, TrialStarted
from raypar.run.search import TuneReports, for_run, point_of, search_mistakes, tune_space
from raypar.study.options import Auto
from raypar.study.study import Study
from raypar.study.trial import TrialSpec

WITHOUT_TUNE = (AsyncHyperBandScheduler, FIFOScheduler, MedianStoppingRule)


def local_mistakes(study: Study) -> list[Mistake]:
    """Return what keeps a study's searcher and scheduler from running without Ray."""
    kinds_of: dict[str, tuple[type, ...]] = {"searcher": (Searcher,), "scheduler": WITHOUT_TUNE}
    others = [role for role, kinds in kinds_of.items() if not isinstance(getattr(study, role), (*kinds, type(None)))]
    return search_mistakes(study) or [
        Mistake(role, Shown(f"{type(getattr(study, role)).__name__}(…)"), "needs Ray", hint="leave out --no-ray")
        for role in others
    ]


@dataclass(frozen=True)
class LocalTrial:
    """Trial as schedulers see it."""

    trial_id: str
    status: str = "RUNNING"


@dataclass
class _Observed:
    """Running trial of a search: what searcher and scheduler have seen of it."""

    trial: LocalTrial
    reports: TuneReports
    num_seen: int = 0
    num_in_attempt: int = 0  # reports of the current attempt, which repeats those before it


class LocalSearch:
    """Draws the trials of a search one by one, and decides after each report whether a trial stops.

    Args:
        specs: what the search has done already, or the trials of a study that lists them.
        stop: stops a trial at its report.
    """

    def __init__(
        self, study: Study, specs: Sequence[TrialSpec], auto: Auto, stop: Callable[[TrialSpec], object]
    ) -> None:
        self._study, self._specs, self._auto, self._stop = study, tuple(specs), auto, stop
        self._searcher, scheduler = for_run(study)
        self._scheduler = scheduler or FIFOScheduler()
        self._running: dict[str, _Observed] = {}  # by identity

    @property
    def max_concurrent(self) -> int:
        """Number of trials that may run at a time, as far as the study and its searcher limit it."""
        of_study = self._study.max_concurrent_trials or 1
        return min(of_study, getattr(self._searcher, "max_concurrent", None) or of_study)

    def specs(self) -> Iterator[TrialSpec]:
        """Yield the trials to run. At most `max_concurrent` of them may not have ended."""
        for number, spec in enumerate(self._drawn() if self._study.is_search else self._specs):
            trial = LocalTrial(str(number))
            self._running[spec.identity] = _Observed(trial, TuneReports.of(self._study))
            self._scheduler.on_trial_add(None, trial)
            yield spec

    def _drawn(self) -> Iterator[TrialSpec]:
        study, drawn = self._study, Counter(tuple(spec.point.items()) for spec in self._specs)
        num_missing = study.num_trials * len(study.points()) - len(self._specs)
        for number, config in zip(range(num_missing), self._configs(), strict=False):
            point = point_of(study, config)
            repeat = drawn[tuple(point.items())]
            drawn[tuple(point.items())] += 1
            yield study.trial(point, repeat, order=number, auto=self._auto)

    def _configs(self) -> Iterator[Mapping[str, Any]]:
        """Yield points as the searcher suggests them, or drawn at random, and every grid point once per draw."""
        space = tune_space(self._study)
        if self._searcher is None:
            # A continued search must draw other points than before.
            random = np.random.RandomState(self._study.seed + len(self._specs))
            while True:
                yield from (spec["config"] for _, spec in generate_variants({"config": space}, random_state=random))
        self._searcher.set_search_properties(None, None, space)
        number = 0
        while isinstance(suggested := self._searcher.suggest(str(number)), Mapping):
            yield {**suggested}
            number += 1

    def note(self, event: Event) -> None:
        """Pass an event of the running trial on to searcher and scheduler."""
        if isinstance(event, TrialStarted):
            self._running[event.spec.identity].num_in_attempt = 0
        elif isinstance(event, TrialReported):
            running = self._running[event.spec.identity]
            running.num_in_attempt += 1
            if running.num_in_attempt > running.num_seen:
                running.num_seen += 1
                self._decide(running, event)
        elif isinstance(event, TrialEnded):
            self._end(self._running.pop(event.result.spec.identity), event.result.state.traits.is_usable)

    def _decide(self, running: _Observed, event: TrialReported) -> None:
        if (result := running.reports.take(event.report)) is None:
            return
        decision = TrialScheduler.STOP
        if not result["done"]:
            decision = self._scheduler.on_trial_result(None, running.trial, result)
        if decision == TrialScheduler.STOP:
            self._stop(event.spec)
        elif self._searcher is not None:
            self._searcher.on_trial_result(running.trial.trial_id, result)

    def _end(self, running: _Observed, is_usable: bool) -> None:
        last = dict(running.reports.last) if is_usable and running.reports.last else None
        if last is not None:
            self._scheduler.on_trial_complete(None, running.trial, last)
        else:
            self._scheduler.on_trial_error(None, running.trial)
        if self._searcher is not None:
            self._searcher.on_trial_complete(running.trial.trial_id, result=last, error=last is None)
