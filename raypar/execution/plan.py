"""What an execution of a study would do, decided before anything is started."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypar.analysis.question import current_results, question_of
from raypar.errors import Mistake, RayparError, StudyError, cut, is_for_training
from raypar.run.cluster import Cluster
from raypar.run.placement import CoreLeases, absent_cores, cores_text
from raypar.study.options import MINDS_MODEL, STRATEGY_OPTIONS, resolve
from raypar.study.space import Grid, examples
from raypar.study.study import Study
from raypar.study.trial import Placement, TrialResult, TrialSpec
from raypar.study.workload import Config, Workload


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

    @property
    def trial_cores(self) -> frozenset[int]:
        """The cores of this machine that trials are to be on, each alone; empty where that isn't known beforehand."""
        found: set[int] = set()
        for placement, affinity in {(spec.placement, spec.config["cpu_affinity"]) for spec in self.specs}:
            leases, ranks = CoreLeases(), dict.fromkeys(range(placement.num_workers), "here")
            leases.add_host("here", self.cluster.cores or ())
            for cores in (leases.lease(ranks, placement.cpus_per_worker, affinity) or {}).values():
                found.update(cores)
        return frozenset(found)

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
        StudyError: some trial could never run on the cluster.
        RayparError: it is a search, and there is no Ray to search with.
    """
    if (study.is_search or study.scheduler is not None) and not with_ray:
        raise RayparError("a search needs Ray", hint="leave out --no-ray")
    complete = {result.spec.identity: result for result in done if result.is_complete}
    specs = _drawable(study, cluster) if study.is_search else study.trials(default_device=cluster.default_device)
    if mistakes := _impossible(study, specs, cluster):
        raise StudyError(mistakes, where=where)
    if study.is_search:
        return Plan(study, (), current_results(question_of(study), tuple(complete.values())).results, (), cluster)
    mine = {spec.identity for spec in specs}
    return Plan(
        study,
        specs,
        tuple(result for identity, result in complete.items() if identity in mine),
        tuple(spec for spec in specs if spec.identity not in complete),
        cluster,
    )


def _drawable(study: Study, cluster: Cluster) -> tuple[TrialSpec, ...]:
    """Trials that show every listed value of a search's space, without all their combinations."""
    drawn = {key: examples(domain) for key, domain in study.space.items() if not isinstance(domain, Grid)}
    first = {key: values[0] for key, values in drawn.items()}
    others = [{**first, key: value} for key, values in drawn.items() for value in values[1:]]
    return tuple(
        study.trial({**draw, **point}, 0, default_device=cluster.default_device)
        for point in study.points()
        for draw in (first, *others)
    )


def _impossible(study: Study, specs: Sequence[TrialSpec], cluster: Cluster) -> list[Mistake]:
    """What keeps trials from ever running on the cluster, each thing once."""
    found: dict[str, Mistake] = {}
    placements: dict[Placement, None] = {}
    for spec in specs:
        mistakes = [*_absent(spec, cluster), *(() if study.workload.is_train_loop else _unsuited(spec))]
        found |= {str(mistake): mistake for mistake in mistakes}
        if not mistakes and not study.is_search:  # a search finds out draw by draw what is too large
            placements[spec.placement] = None
    found |= {str(mistake): mistake for mistake in _unsplittable(study, specs)}
    for placement, why in cluster.refusals(tuple(placements)).items():
        hint = "drop the point, ask for less, or give the --address of a larger cluster"
        if placement.device == "cuda" and "GPU" in why:
            hint = "say --set device=cpu, or give the --address of a cluster with GPUs enough"
        found[str(placement)] = Mistake("placement", str(placement), why, hint=hint)
    return list(found.values())


def _absent(spec: TrialSpec, cluster: Cluster) -> Iterator[Mistake]:
    """What the trial names that the cluster's machine doesn't have."""
    affinity, device = spec.config["cpu_affinity"], spec.config["device"]
    numbers = [core.number for core in cluster.cores or ()]
    if cluster.cores == () and isinstance(affinity, (str, tuple)):
        hint = "leave it out, or say how many cores for each worker: cpu_affinity=2"
        yield Mistake("cpu_affinity", affinity, "this system can't bind processes to cores", hint=hint)
    elif cluster.cores is not None and (why := absent_cores(affinity, numbers)) is not None:
        hint = f"list cores of {cores_text(numbers)}, or say how many for each worker: cpu_affinity=1"
        yield Mistake("cpu_affinity", affinity, why, hint=hint)
    can_hold = sum(node.get("CPU", 0) >= 1 for node in cluster.nodes)
    if spec.config["nodes"] == "spread" and spec.placement.num_workers > 1 and can_hold < 2 and not cluster.may_grow:
        hint = "leave it out, or give the --address of a cluster of several nodes"
        yield Mistake("nodes", "spread", "there is one node, and nothing to spread over", hint=hint)
    if device == "mps" and cluster.is_own and not cluster.has_mps:
        wrong = "this machine has no Apple GPU: mps needs macOS on arm64"
        yield Mistake("device", device, wrong, hint="say --set device=cpu, or device=auto")


def _unsuited(spec: TrialSpec) -> Iterator[Mistake]:
    """What the trial's device can't do."""
    if spec.config["precision"] == "tf32" and spec.placement.device != "cuda":
        wrong = f"tf32 exists on NVIDIA GPUs only, and the device is {spec.placement.device}"
        yield Mistake("precision", "tf32", wrong, hint="say precision=fp32 or bf16, or run it where there is a GPU")


def _unsplittable(study: Study, specs: Sequence[TrialSpec]) -> Iterator[Mistake]:
    """Strategies that the workload's model doesn't allow. Most can't fail for it, and the others need torch to tell."""
    seen: set[str] = set()
    for spec in specs:
        config = spec.config
        if study.workload.is_train_loop or config["strategy"] not in MINDS_MODEL or config["num_workers"] == 1:
            continue
        own = {key: config[key] for key in (*study.workload.options, *STRATEGY_OPTIONS, "num_workers")}
        if (key := json.dumps(own, sort_keys=True, default=str)) in seen:
            continue
        seen.add(key)
        from raypar.parallel.strategy import check_compatible

        if (problem := check_compatible(study.workload, config)) is not None:
            yield Mistake(
                "strategy", config["strategy"], f"{problem[0]} (workload {study.workload.name})", hint=problem[1]
            )


def check_data(study: Study) -> None:
    """Make sure, before anything starts, that the data is there. Raises DataError, or a RayparError that tells what
    else the workload's ``prepare`` raised."""
    if study.is_search:
        _prepare(study.workload, resolve(study.workload, study.config))
        return
    seen: set[str] = set()
    for spec in study.trials():
        own = {key: spec.config.get(key) for key in (*study.workload.options, "loader")}
        if (key := json.dumps(own, sort_keys=True, default=str)) not in seen:
            seen.add(key)
            _prepare(study.workload, spec.config)


def _prepare(workload: Workload, config: Config) -> None:
    try:
        workload.prepare(config)
    except RayparError:
        raise
    except Exception as error:  # the user's own code
        if is_for_training(error):
            raise
        message = f"workload {workload.name}: prepare raises {cut(traceback.format_exception_only(error)[-1].strip())}"
        raise RayparError(message, hint="mend that function, or leave it out") from error
