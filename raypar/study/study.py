"""Studies: declared questions about how training behaves over a space of hyperparameters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raypar.errors import StudyError
from raypar.study.metric import Metric
from raypar.study.options import ON_CPU, Auto, resolve
from raypar.study.space import Domain, Grid, Value, plain
from raypar.study.trial import REVISION, Placement, TrialSpec, point_label
from raypar.study.validation import MIN_BLOCKS, validate_study
from raypar.study.workload import Workload
from raypar.units import DURATIONS_S, SHARES, counted, parsed


@dataclass(frozen=True, kw_only=True)
class Study:
    """Declared question: a workload, a space of hyperparameters, and what to compare.

    Attributes:
        workload: model, data, loss and metrics.
        space: swept hyperparameters. Grids are run in full; with any other domain the study is a search.
        baseline: values to compare at: a point's speedup is over the point that differs from it in these alone.
        num_repeats: trials of every point, each in a block (and with a seed) of its own; with `until` at least so many.
        until: "settled": after each block, points that are still open are run again, with what they are compared with;
            empty: every point is run `num_repeats` times.
        margin: with `until`, the difference of speedups that does not matter: 0.05, or "5%".
        max_repeats: with `until`, the most trials of a point.
        budget: with `until`, seconds (or "10m", "2h") after which no block is to end; None: no limit.
        config: fixed hyperparameters.
        name: the study's name in the store; empty: the file's stem.
        seed: source of everything random in the study.
        max_retries: times that a trial is started again after its gang or one of its processes died.
        num_trials: points that a search draws (per grid point, if the space also has grids).
        searcher: a ``ray.tune`` search algorithm; needs metric and mode.
        scheduler: a ``ray.tune`` trial scheduler (ASHA …); needs metric and mode.
        metric: key of the reports that trials are judged by, also by searcher and scheduler, or a `Metric`; empty: the
            workload's.
        mode: "max" or "min"; empty: the metric's, as the workload or its name has it.
        max_concurrent_trials: None: every trial has its machines to itself, so that there is one at a time on a
            machine, and several on a cluster of several. A number: so many at a time, on machines that they may share,
            each on cores of its own; 1: one at a time, wherever it runs.
        description: the question, for people; empty: the file's docstring.
        price_per_node_hour: cost of a machine for an hour, in any currency; None: nothing has a cost. It may change
            without anything being run again.

    Raises:
        StudyError: with every mistake in it.
    """

    workload: Workload
    space: Mapping[str, Domain] = field(default_factory=dict)
    baseline: Mapping[str, Value] = field(default_factory=dict)
    num_repeats: int = 3
    until: str = ""
    margin: float | str = 0.05
    max_repeats: int = 30
    budget: float | str | None = None
    config: Mapping[str, Value] = field(default_factory=dict)
    name: str = ""
    seed: int = 0
    max_retries: int = 2
    num_trials: int = 20
    searcher: Any = None
    scheduler: Any = None
    metric: str | Metric = ""
    mode: str = ""
    max_concurrent_trials: int | None = None
    description: str = ""
    price_per_node_hour: float | None = None

    def __post_init__(self) -> None:
        for key in ("space", "config", "baseline"):
            if isinstance(chosen := getattr(self, key), Mapping):
                object.__setattr__(self, key, {name: plain(value) for name, value in chosen.items()})
        for key, scales in (("margin", SHARES), ("budget", DURATIONS_S)):
            if isinstance(text := getattr(self, key), str) and (value := parsed(text, scales)) is not None:
                object.__setattr__(self, key, value)
        if mistakes := validate_study(self):
            raise StudyError(mistakes)

    @property
    def is_search(self) -> bool:
        """True if points are drawn rather than listed."""
        return self.searcher is not None or any(not isinstance(d, Grid) for d in self.space.values())

    @property
    def judged_by(self) -> Metric:
        """Metric that trials are judged by: the study's, else the workload's."""
        return self.workload.metric_of(self.metric, self.mode)

    @property
    def num_first_repeats(self) -> int:
        """Repeats of every point before anything is decided."""
        return max(MIN_BLOCKS, self.num_repeats) if self.until else self.num_repeats

    @property
    def repeats_text(self) -> str:
        """``3 repeats``, ``3 to 30 repeats, until settled``."""
        if not self.until:
            return counted(self.num_repeats, "repeat")
        return f"{self.num_first_repeats} to {self.max_repeats} repeats, until {self.until}"

    @property
    def budget_s(self) -> float | None:
        """Seconds of the budget, if there is one."""
        return None if self.budget is None else float(self.budget)

    def points(self) -> tuple[dict[str, Value], ...]:
        """Return every assignment of the grids, the last key varying fastest."""
        grids = {k: d.values for k, d in self.space.items() if isinstance(d, Grid)}
        return tuple(dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values()))

    def trial(self, point: Mapping[str, Value], repeat: int, *, order: int = 0, auto: Auto = ON_CPU) -> TrialSpec:
        """Return the spec of one point and repeat; `auto` has the values that the study leaves to the machines."""
        return TrialSpec(
            study=self.name,
            workload=self.workload.name,
            point=dict(point),
            config=resolve(self.workload, {**self.config, **point}, auto),
            repeat=repeat,
            seed=self.seed + repeat,
            order=order,
        )

    def trials(self, *, auto: Auto = ON_CPU) -> tuple[TrialSpec, ...]:
        """Return every trial in execution order, the same for the same study; the first ones, where more may follow."""
        points, repeats = self.points(), range(self.num_first_repeats)
        return tuple(spec for r in repeats for spec in self.block(r, points, auto=auto))

    def block(
        self, repeat: int, points: Sequence[Mapping[str, Value]], *, auto: Auto = ON_CPU
    ) -> tuple[TrialSpec, ...]:
        """Return a trial of each point, in execution order, the same for the same study and points.

        The placements come in random order, and the trials of a placement in random order: a drift over time can't
        pose as an effect of a hyperparameter. Trials that differ in the revision of the code alone follow each other.
        """
        shuffled = random.Random(f"{self.seed}/{repeat}")
        by_placement: dict[Placement, dict[str, list[TrialSpec]]] = {}
        for point in points:
            spec = self.trial(point, repeat, auto=auto)
            rest = point_label({key: value for key, value in point.items() if key != REVISION})
            group = by_placement.setdefault(replace(spec.placement, revision=""), {})
            group.setdefault(rest, []).append(spec)
        groups = [list(group.values()) for group in by_placement.values()]
        shuffled.shuffle(groups)
        for pairs in groups:
            shuffled.shuffle(pairs)
            for pair in pairs:
                shuffled.shuffle(pair)
        ordered = itertools.chain.from_iterable(itertools.chain(*groups))
        first = repeat * len(self.points())
        return tuple(replace(spec, order=first + i) for i, spec in enumerate(ordered))

    def baseline_of(self, point: Mapping[str, Value]) -> dict[str, Value]:
        """Return the point that `point` is compared with; itself where it is a baseline."""
        return {**point, **{k: v for k, v in self.baseline.items() if k in self.space}}
