"""Validation of workloads, of values of options, and of complete configs.

A `Study` validates itself and each of its configs when it is created. `validate` is called again with the cluster that
the study is to run on. The allowed values of options and their conflicts are in `raypar.study.options`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from raypar.errors import Mistake, RayparError, suggest
from raypar.study.metric import UNITS, Metric
from raypar.study.options import (
    absent_cores,
    conflicts,
    cores_text,
    known_options,
)
from raypar.study.space import LARGEST, Value
from raypar.study.strategy import STRATEGIES
from raypar.study.trial import Placement
from raypar.study.workload import AnyWorkload, Config, Option, Workload

KEPT = "a finite number, text, True, False, None, or tuples or dicts of these"

StrategyCheck = Callable[[Workload, Config], tuple[str, str] | None]  # what is wrong, and the fix


class Machines(Protocol):
    """Part of `raypar.run.cluster.Cluster` that validation reads."""

    @property
    def nodes(self) -> Sequence[Mapping[str, float]]: ...
    @property
    def is_own(self) -> bool: ...
    @property
    def may_grow(self) -> bool: ...
    @property
    def cores(self) -> Sequence[Any] | None: ...
    @property
    def has_mps(self) -> bool: ...
    @property
    def remedy(self) -> str: ...
    def refusals(self, placements: Sequence[Placement]) -> Mapping[Placement, str]: ...


def validate(
    config: Config,
    workload: AnyWorkload,
    cluster: Machines | None = None,
    *,
    where: str = "",
    swept: Collection[str] = (),
    must_fit: bool = True,
    check_strategy: StrategyCheck | None = None,
) -> list[Mistake]:
    """Return why a complete config can't run, although each of its values is valid on its own.

    Args:
        cluster: where it is to run; None: undecided, so only what holds everywhere is checked.
        where: prefix of the mistakes' fields, such as the point.
        swept: hyperparameters that the study varies.
        must_fit: on a cluster, its gang has to fit on the nodes.
        check_strategy: returns why the model or the machine rules out the strategy, and the fix. It needs torch, so it
            is only called on a cluster, and only for strategies that have a check.
    """
    size = None
    try:
        size = workload.train_size(config)
        wrong = None if isinstance(size, int | None) else f"returns a {type(size).__name__}, not a whole number"
    except RayparError:
        raise
    except Exception as error:  # the user's own function
        wrong = f"raises {type(error).__name__}: {error}"
    if wrong:
        return [Mistake("workload.num_train_samples", where, wrong, hint="fix that function, or leave it out")]
    prefix, wrongs = f"{where}." if where else "", conflicts(config, workload, size, swept)
    mistakes = [Mistake(f"{prefix}{key}", config[key], wrong, hint=hint) for key, wrong, hint in wrongs]
    mistakes += workload.point_mistakes(config, prefix)
    if cluster is None:
        return mistakes
    mistakes += _unavailable(config, workload, cluster)
    if check_strategy and isinstance(workload, Workload):
        key = "strategy" if config["num_workers"] > 1 and STRATEGIES[config["strategy"]].check else ""
        if not key and config["activation_checkpointing"]:
            key = "activation_checkpointing"
        if key and (refusal := check_strategy(workload, config)):
            mistakes.append(Mistake(key, config[key], f"{refusal[0]} (workload {workload.name})", hint=refusal[1]))
    if must_fit and not mistakes:
        for placement, wrong in cluster.refusals([Placement.of(config)]).items():
            lacks_gpus = placement.device == "cuda" and "GPU" in wrong
            less = "use --set device=cpu" if lacks_gpus else "drop the point, ask for less"
            hint = f"{less}, or {cluster.remedy}"
            mistakes.append(Mistake("placement", str(placement), wrong, hint=hint))
    return mistakes


def _unavailable(config: Config, workload: AnyWorkload, cluster: Machines) -> Iterator[Mistake]:
    """Yield the mistakes of values that need something the cluster's machines lack."""
    affinity, device = config["cpu_affinity"], config["device"]
    if cluster.cores == () and isinstance(affinity, (str, tuple)):
        hint = "leave it out, or give the number of cores of each worker: cpu_affinity=2"
        yield Mistake("cpu_affinity", affinity, "this system can't bind processes to cores", hint=hint)
    elif cluster.cores is not None:
        numbers = [core.number for core in cluster.cores]
        if (wrong := absent_cores(affinity, numbers)) is not None:
            hint = f"list cores of {cores_text(numbers)}, or give the number of cores of each worker: cpu_affinity=1"
            yield Mistake("cpu_affinity", affinity, wrong, hint=hint)
    num_usable_nodes = sum(node.get("CPU", 0) >= 1 for node in cluster.nodes)
    if config["nodes"] == "spread" and config["num_workers"] > 1 and num_usable_nodes < 2 and not cluster.may_grow:
        hint = f"leave it out, or {cluster.remedy}"
        yield Mistake("nodes", "spread", "there is one node, and nothing to spread over", hint=hint)
    if device == "mps" and cluster.is_own and not cluster.has_mps:
        wrong = "this machine has no Apple GPU: mps needs macOS on arm64"
        yield Mistake("device", device, wrong, hint="use --set device=cpu, or device=auto")
    if isinstance(workload, Workload) and config["precision"] == "tf32" and device != "cuda":
        wrong = f"tf32 exists on NVIDIA GPUs only, and the device is {device}"
        yield Mistake("precision", "tf32", wrong, hint="set precision=fp32 or bf16, or run it where there is a GPU")


def validate_value(field: str, key: str, value: Value, option: Option) -> Mistake | None:
    """Return what is wrong with one value of one option, or None."""
    default = "" if option.default is None else f", by default {option.default}"
    kind = "" if option.kind is object else f"; {option.kind.__name__}"
    hint = f"{option.doc}{kind}{default}"
    if value is None:
        return None if option.optional else Mistake(field, value, f"`{key}` needs a value", hint=hint)
    types = (int, float) if option.kind is float else (option.kind,)
    # bool is an int in Python, but `epochs=True` is a slip.
    if not isinstance(value, types) or (isinstance(value, bool) and option.kind not in (bool, object)):
        wrong = f"`{key}` is of type {option.kind.__name__}, not {type(value).__name__}"
        return Mistake(field, value, wrong, hint=hint)
    if isinstance(value, int) and abs(value) > LARGEST:
        return Mistake(field, value, f"`{key}` is beyond 2^53", hint=hint)
    try:
        wrong_value = option.check(value)
    except Exception as error:  # the workload's own check
        wrong_value = f"can't be checked: {type(error).__name__}: {error}"
    if wrong_value is None and isinstance(value, float) and not math.isfinite(value):
        wrong_value = "must be a finite number"
    if wrong_value is None and not can_be_kept(value):
        wrong_value = f"can't be kept with the results: {KEPT}"
    return Mistake(field, value, f"`{key}` {wrong_value}", hint=hint) if wrong_value else None


def unknown_option(field: str, value: object, key: str, options: Collection[str], hint: str = "") -> Mistake:
    """Return the mistake of a key that is not an option, with the closest one."""
    return Mistake(field, value, f"unknown option '{key}'", hint=suggest(key, list(options)) + hint)


def is_default(value: object) -> bool:
    """Return whether an option's type follows from this default, or it is an `Option`."""
    return isinstance(value, (str, int, float, bool, tuple, Option))


def metric_mistakes(where: str, metric: Metric) -> Iterator[Mistake]:
    """Yield the mistakes of a metric, whatever its fields hold."""
    if not isinstance(metric.name, str) or not metric.name:
        yield Mistake(where, metric.name, "must be the name of a metric", hint='set metric="val_loss"')
    if metric.mode not in ("max", "min"):
        part = where.removesuffix("metric") + "mode"
        yield Mistake(part, metric.mode, 'must be "max" or "min"', 'set mode="max" for an accuracy')
    if metric.unit not in ("", *UNITS):
        hint = 'such as Metric("f1", "max", "share"), whose values are 0 to 1'
        yield Mistake(where, metric.unit, f"its unit must be one of {', '.join(UNITS)}", hint=hint)


def workload_mistakes(workload: AnyWorkload) -> Iterator[Mistake]:
    """Yield the mistakes of a workload, whatever its fields hold."""
    if not isinstance(workload.name, str) or not workload.name:
        yield Mistake("workload.name", workload.name, "must be a name", hint='set name="mine"')
    yield from metric_mistakes("workload.metric", workload.metric_of())
    yield from workload.mistakes()
    for part in ("options", "defaults"):
        value = getattr(workload, part)
        if not isinstance(value, Mapping):
            yield Mistake(f"workload.{part}", value, "must be a dict", hint=f'set {part}={{"name": …}}')
    if not isinstance(workload.options, Mapping) or not isinstance(workload.defaults, Mapping):
        return
    for key, value in workload.options.items():
        if not is_default(value):
            hint = "a default is a str, int, float, bool or tuple (its type is the option's), or a raypar.Option"
            yield Mistake(f"workload.options[{key!r}]", value, "can't be the default of an option", hint=hint)
    options = known_options(replace(workload, defaults={}))
    for key, value in workload.defaults.items():
        where = f"workload.defaults[{key!r}]"
        if key not in options:
            hint = "; the workload's own hyperparameters go into options={...}"
            yield unknown_option(where, value, str(key), options, hint)
        elif is_default(workload.options.get(key, 0)) and (wrong := validate_value(where, key, value, options[key])):
            yield wrong


def can_be_kept(value: object) -> bool:
    """Return whether a value comes back from JSON, which has no NaN and no infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
