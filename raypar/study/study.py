"""A study: one declared question about how training behaves over a space of hyperparameters."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raypar.errors import Mistake, StudyError, suggest
from raypar.study.affinity import affinity_width
from raypar.study.options import check_together, check_value, known_options, workload_mistakes
from raypar.study.space import Choice, Domain, Grid, LogUniform, RandInt, Uniform, Value, examples, problem
from raypar.study.trial import Placement, TrialSpec, point_label
from raypar.study.workload import Workload

DOMAINS = (Grid, Choice, Uniform, LogUniform, RandInt)
MAX_POINTS = 100_000


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is asked.

    Attributes:
        workload: what is trained.
        space: the swept hyperparameters. Grids are run in full; with any other domain the study is a search.
        baseline: what a point is compared with: the point that differs from it only in these values.
        num_repeats: how often every point is run, each in a block (and with a seed) of its own.
        config: fixed hyperparameters.
        name: the study file's stem unless given.
        seed: what everything random in the study is derived from.
        max_retries: how often a trial is started again after its gang or one of its processes died.
        num_trials: how many points a search draws (per grid point, if the space also has grids).
        searcher: a ``ray.tune`` search algorithm; needs metric and mode.
        scheduler: a ``ray.tune`` trial scheduler (ASHA …), needs metric and mode.
        metric: what says how good a trial is (to searcher and scheduler as well), a key of the reports; empty: the
            workload's own.
        mode: "max" or "min"; empty: the workload's own.
        max_concurrent_trials: None: timed trials one at a time, each alone; a search may pack what fits.
        description: what the study asks, for people.
        price_per_node_hour: what a machine costs an hour, in any currency; None: nothing has a cost. No part of what a
            trial is: it may change without anything being run again.

    Raises:
        StudyError: with every mistake in it.
    """

    workload: Workload
    space: Mapping[str, Domain] = field(default_factory=dict)
    baseline: Mapping[str, Value] = field(default_factory=dict)
    num_repeats: int = 3
    config: Mapping[str, Value] = field(default_factory=dict)
    name: str = ""
    seed: int = 0
    max_retries: int = 2
    num_trials: int = 20
    searcher: Any = None
    scheduler: Any = None
    metric: str = ""
    mode: str = ""
    max_concurrent_trials: int = 1
    description: str = ""
    price_per_node_hour: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.workload, Workload):
            for key in ("metric", "mode"):
                object.__setattr__(self, key, getattr(self, key) or getattr(self.workload, key))
        mistakes = list(_mistakes(self))
        if mistakes:
            raise StudyError(mistakes)

    @property
    def is_search(self) -> bool:
        """Whether points are drawn rather than listed."""
        return self.searcher is not None or any(not isinstance(d, Grid) for d in self.space.values())

    def points(self) -> tuple[dict[str, Value], ...]:
        """Every assignment of the grids, the last key varying fastest."""
        grids = {k: d.values for k, d in self.space.items() if isinstance(d, Grid)}
        return tuple(dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values()))

    def trial(
        self, point: Mapping[str, Value], repeat: int, *, order: int = 0, default_device: str = "cpu"
    ) -> TrialSpec:
        """The spec of one point and repeat; ``device="auto"`` becomes `default_device`."""
        return TrialSpec(
            study=self.name,
            workload=self.workload.name,
            point=dict(point),
            config=resolve(self.workload, {**self.config, **point}, default_device),
            repeat=repeat,
            seed=self.seed + repeat,
            order=order,
        )

    def trials(self, *, default_device: str = "cpu") -> tuple[TrialSpec, ...]:
        """Every trial in execution order, the same for the same study.

        Each repeat is a block that holds every point once. In a block the placements come in random order, and the
        trials of a placement in random order: a drift over time can't pose as an effect of a hyperparameter.
        """
        ordered: list[TrialSpec] = []
        for repeat in range(self.num_repeats):
            shuffled = random.Random(f"{self.seed}/{repeat}")
            by_placement: dict[Placement, list[TrialSpec]] = {}
            for point in self.points():
                spec = self.trial(point, repeat, default_device=default_device)
                by_placement.setdefault(spec.placement, []).append(spec)
            groups = list(by_placement.values())
            shuffled.shuffle(groups)
            for group in groups:
                shuffled.shuffle(group)
                ordered.extend(group)
        return tuple(replace(spec, order=i) for i, spec in enumerate(ordered))

    def baseline_of(self, point: Mapping[str, Value]) -> dict[str, Value]:
        """The point that `point` is compared with; itself where it is a baseline."""
        return {**point, **{k: v for k, v in self.baseline.items() if k in self.space}}


def resolve(workload: Workload, chosen: Mapping[str, Value], default_device: str = "cpu") -> dict[str, Value]:
    """A complete config: what was chosen over the defaults; ``per_worker_batch_size`` settles ``batch_size``."""
    known = known_options(workload)
    config: dict[str, Any] = {key: option.default for key, option in known.items()}
    config.update(chosen)
    if not workload.is_train_loop:
        if config["per_worker_batch_size"] is not None:
            config["batch_size"] = config["per_worker_batch_size"] * config["num_workers"]
        if config["lr_base_batch_size"] is None:
            config["lr_base_batch_size"] = known["batch_size"].default
    if (width := affinity_width(config["cpu_affinity"], config["num_workers"])) is not None:
        config["cpus_per_worker"] = width
    if config["device"] == "auto":
        config["device"] = default_device
    if config["num_threads"] is None:
        config["num_threads"] = config["cpus_per_worker"]
    # So that `lr=1` and `lr=1.0` are one trial.
    floats = {key for key, option in known.items() if option.kind is float}
    return {key: float(v) if key in floats and v is not None else v for key, v in config.items()}


def _mistakes(study: Study) -> list[Mistake]:
    found: list[Mistake] = []
    if study.name and not re.fullmatch(r"[\w][\w .-]*", study.name):
        found.append(
            Mistake("name", study.name, "may hold letters, digits, space, '_', '-' and '.'", hint="choose another name")
        )
    for key, low in (("num_repeats", 1), ("max_retries", 0), ("num_trials", 1), ("max_concurrent_trials", 1)):
        value = getattr(study, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            found.append(Mistake(key, value, f"must be a whole number of at least {low}", hint=f"say {key}={low}"))
    price = study.price_per_node_hour
    if price is not None and not (_is_number(price) and math.isfinite(price) and price > 0):
        hint = "say price_per_node_hour=2.5, or leave it out"
        found.append(Mistake("price_per_node_hour", price, "must be a number greater than 0", hint=hint))
    if study.mode not in ("max", "min"):
        found.append(Mistake("mode", study.mode, 'must be "max" or "min"', hint='say mode="max" for an accuracy'))
    if not isinstance(study.seed, int) or isinstance(study.seed, bool) or not 0 <= study.seed < 2**32:
        found.append(Mistake("seed", study.seed, "must be a whole number from 0 to 4294967295", hint="say seed=0"))
    mappings = ("space", "config", "baseline")
    for key in mappings:
        if not isinstance(getattr(study, key), Mapping):
            hint = f'say {key}={{"batch_size": …}}'
            found.append(Mistake(key, getattr(study, key), "must be a dict of hyperparameters", hint=hint))
    if not isinstance(study.workload, Workload):
        hint = "take one from raypar.workloads, or make a raypar.Workload"
        return [
            *found,
            Mistake("workload", study.workload, f"is a {type(study.workload).__name__}, not a Workload", hint=hint),
        ]
    unusable = workload_mistakes(study.workload)
    if unusable or not all(isinstance(getattr(study, key), Mapping) for key in mappings):
        return [*found, *unusable]
    return [*found, *_space_mistakes(study), *_baseline_mistakes(study)]


def _space_mistakes(study: Study) -> list[Mistake]:
    found: list[Mistake] = []
    known = known_options(study.workload)
    free = study.workload.is_train_loop  # its config is its own affair

    def check_key(where: str, key: str, value: object) -> bool:
        if key in known:
            return True
        if not free:
            wrong = f"`{key}`: unknown to workload {study.workload.name}"
            found.append(Mistake(f"{where}[{key!r}]", value, wrong, hint=suggest(key, list(known))))
        return False

    for key, value in study.config.items():
        if check_key("config", key, value) and (m := check_value(f"config[{key!r}]", key, value, known[key])):
            found.append(m)
        if key in study.space:
            found.append(
                Mistake(f"config[{key!r}]", value, "is also swept in `space`", hint="say it in one of the two")
            )
    for key, domain in study.space.items():
        if not isinstance(domain, DOMAINS):
            hint = (
                f"write grid({domain!r})"
                if not isinstance(domain, (list, tuple))
                else "write grid(" + ", ".join(map(repr, domain)) + ")"
            )
            found.append(Mistake(f"space[{key!r}]", domain, "is not a grid, choice or range", hint=hint))
            continue
        if wrong := problem(domain):
            hint = "a grid needs values that differ, a range two numbers with low < high"
            found.append(Mistake(f"space[{key!r}]", domain, wrong, hint=hint))
        elif study.searcher is not None and isinstance(domain, Grid):
            hint = f"write choice({', '.join(map(repr, domain.values))})"
            found.append(Mistake(f"space[{key!r}]", domain, "is a grid, but a searcher draws every value", hint=hint))
        elif check_key("space", key, domain):
            for value in examples(domain):
                if m := check_value(f"space[{key!r}]", key, value, known[key]):
                    found.append(m)
    chosen = {**study.config, **study.space}
    if "batch_size" in chosen and "per_worker_batch_size" in chosen and not free:
        found.append(
            Mistake(
                "per_worker_batch_size",
                chosen["per_worker_batch_size"],
                "is given beside batch_size",
                hint="batch_size fixes the global batch (strong scaling), per_worker_batch_size a worker's (weak): "
                "leave one out",
            )
        )
    if not found and "cpus_per_worker" in chosen and "cpu_affinity" in chosen:
        taken = [v for v in _values(chosen["cpu_affinity"]) if affinity_width(v, 1) is not None]
        if taken:
            wrong = f"is given beside cpu_affinity={taken[0]!r}, which says how many cores as well"
            hint = 'leave cpus_per_worker out, or say cpu_affinity="spread" or "compact"'
            found.append(Mistake("cpus_per_worker", chosen["cpus_per_worker"], wrong, hint=hint))
    if found:
        return found
    num_points = 1
    for domain in study.space.values():
        num_points *= len(domain.values) if isinstance(domain, Grid) else 1
    if num_points > MAX_POINTS:
        return [
            Mistake(
                "space",
                f"{num_points:,} points",
                f"is more than {MAX_POINTS:,}",
                hint="narrow the grids, or search with choice/uniform and num_trials",
            )
        ]
    seen: set[str] = set()
    for point in study.points():
        sampled = {k: examples(d)[0] for k, d in study.space.items() if not isinstance(d, Grid)}
        config = resolve(study.workload, {**study.config, **sampled, **point})
        for m in check_together(point_label(point), config, study.workload, study.space):
            if str(m) not in seen:
                seen.add(str(m))
                found.append(m)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _values(chosen: object) -> tuple[Value, ...]:
    return examples(chosen) if isinstance(chosen, DOMAINS) else (chosen,)  # type: ignore[return-value]


def _baseline_mistakes(study: Study) -> list[Mistake]:
    found: list[Mistake] = []
    for key, value in study.baseline.items():
        where = f"baseline[{key!r}]"
        domain = study.space.get(key)
        if domain is None:
            found.append(
                Mistake(
                    where,
                    value,
                    f"`{key}` is not swept, so no point differs in it",
                    hint=suggest(key, list(study.space)) if study.space else "add it to `space`",
                )
            )
        elif isinstance(domain, (Grid, Choice)) and value not in domain.values:
            found.append(
                Mistake(
                    where,
                    value,
                    "matches no point",
                    hint=f"take one of {', '.join(map(repr, domain.values))}, or add it to the space",
                )
            )
        elif not isinstance(domain, (Grid, Choice)):
            found.append(
                Mistake(
                    where,
                    value,
                    "no point of a drawn range is sure to match it",
                    hint="a baseline needs grid(...) or choice(...)",
                )
            )
    return found
