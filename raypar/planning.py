"""What an execution of a study would do, decided before anything is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raypar.errors import Mistake, RayparError, StudyError
from raypar.run.cluster import Cluster
from raypar.study.study import Study
from raypar.study.trial import Placement, TrialResult, TrialSpec


@dataclass(frozen=True)
class Plan:
    """What an execution would do.

    Attributes:
        specs: every trial of the study, in order; empty for a search, which draws its points as it goes.
        done: results that the store has already.
        missing: the specs still to run.
    """

    study: Study
    specs: tuple[TrialSpec, ...]
    done: tuple[TrialResult, ...]
    missing: tuple[TrialSpec, ...]
    cluster: Cluster

    @property
    def num_trials(self) -> int:
        if self.study.is_search:
            return self.study.num_trials * len(self.study.points())
        return len(self.specs)

    @property
    def num_missing(self) -> int:
        return max(0, self.num_trials - len(self.done)) if self.study.is_search else len(self.missing)

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(dict.fromkeys(spec.placement for spec in self.specs))

    def estimated_s(self) -> float | None:
        """Seconds for what is missing, from the wall times of what is done; None where nothing tells."""
        known: dict[Placement, list[float]] = {}
        for result in self.done:
            if result.wall_s is not None:
                known.setdefault(result.spec.placement, []).append(result.wall_s)
        every = [s for times in known.values() for s in times]
        if not every:
            return None
        mean_s = sum(every) / len(every)
        total_s = 0.0
        for spec in self.missing:
            times = known.get(spec.placement)
            total_s += sum(times) / len(times) if times else mean_s
        return total_s if self.missing else mean_s * self.num_missing


def make_plan(
    study: Study,
    cluster: Cluster,
    done: Sequence[TrialResult],
    *,
    where: Path | str = "study",
    with_ray: bool = True,
) -> Plan:
    """Expand the study, refuse what can never run, and leave out what is done.

    Raises:
        StudyError: some placement fits nowhere on the cluster.
        RayparError: it is a search, and there is no Ray to search with.
    """
    if (study.is_search or study.scheduler is not None) and not with_ray:
        raise RayparError("a search needs Ray", hint="leave out --no-ray")
    complete = {result.spec.identity: result for result in done if result.is_complete}
    if study.is_search:
        return Plan(study, (), tuple(complete.values()), (), cluster)
    specs = study.trials(default_device=cluster.default_device)
    refused = cluster.refusals(tuple(dict.fromkeys(spec.placement for spec in specs)))
    if refused:
        hint = "drop the point, ask for less, or give the --address of a larger cluster"
        raise StudyError([Mistake("placement", str(p), why, hint=hint) for p, why in refused.items()], where=where)
    mine = {spec.identity for spec in specs}
    return Plan(
        study,
        specs,
        tuple(result for identity, result in complete.items() if identity in mine),
        tuple(spec for spec in specs if spec.identity not in complete),
        cluster,
    )


def check_data(study: Study) -> None:
    """Make sure, before anything starts, that the data is there. Raises DataError."""
    if study.is_search:
        study.workload.prepare(dict(study.config))
        return
    seen: set[str] = set()
    for spec in study.trials():
        own = {key: spec.config[key] for key in study.workload.options}
        if (key := json.dumps(own, sort_keys=True, default=str)) not in seen:
            seen.add(key)
            study.workload.prepare(spec.config)
