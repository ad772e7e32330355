"""The hyperparameters that raypar itself understands: name, type, default and what is allowed.

A trial's config is these options, the workload's own, and nothing else: a misspelt key is found before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from raypar.errors import Mistake, suggest
from raypar.study.space import Value
from raypar.study.workload import Config, Workload

OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "adadelta")
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("fp32", "fp64")
LOADERS = ("resident", "dataloader")


@dataclass(frozen=True)
class Option:
    """One hyperparameter: its default, the type that the default's type or ``kind`` names, and a check."""

    default: Value
    kind: type
    doc: str
    check: Callable[[Value], str | None] = lambda _: None
    optional: bool = False  # None is allowed, and means what `doc` says


def _at_least(low: float) -> Callable[[Value], str | None]:
    return lambda v: (
        None if isinstance(v, (int, float)) and math.isfinite(v) and v >= low else f"must be at least {low}"
    )


def _positive(value: Value) -> str | None:
    fine = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    return None if fine else "must be a number greater than 0"


def _one_of(known: tuple[str, ...]) -> Callable[[Value], str | None]:
    return lambda v: None if v in known else f"unknown, {suggest(str(v), known)}"


OPTIONS: Mapping[str, Option] = {
    "num_workers": Option(1, int, "ranks that train together", _at_least(1)),
    "batch_size": Option(64, int, "global batch: samples per optimizer step over all workers", _at_least(1)),
    "per_worker_batch_size": Option(
        None, int, "samples per step and worker, instead of batch_size (weak scaling)", _at_least(1), optional=True
    ),
    "epochs": Option(1, int, "passes over the training set", _at_least(1)),
    "num_samples": Option(None, int, "train on this many samples only; None: all", _at_least(1), optional=True),
    "lr": Option(0.1, float, "learning rate", _positive),
    "optimizer": Option("sgd", str, ", ".join(OPTIMIZERS), _one_of(OPTIMIZERS)),
    "weight_decay": Option(0.0, float, "weight decay", _at_least(0)),
    "device": Option("auto", str, "cpu, cuda, or auto (a GPU where the cluster has one)", _one_of(DEVICES)),
    "precision": Option("fp32", str, ", ".join(PRECISIONS), _one_of(PRECISIONS)),
    "loader": Option("resident", str, "resident (tensors in memory) or dataloader (torch's)", _one_of(LOADERS)),
    "num_loader_workers": Option(0, int, "loader processes per worker, for loader=dataloader", _at_least(0)),
    "cpus_per_worker": Option(1, int, "cores that each worker has to itself", _at_least(1)),
    "num_threads": Option(None, int, "torch threads per worker; None: cpus_per_worker", _at_least(1), optional=True),
    "drop_last": Option(False, bool, "leave out a last, smaller batch"),
    "num_warmup_steps": Option(10, int, "steps run and undone before the clock starts", _at_least(0)),
}

# What means something for a train_loop_per_worker, whose batches and optimizer raypar does not see.
LOOP_OPTIONS = ("num_workers", "device", "cpus_per_worker", "num_threads")


def known_options(workload: Workload) -> dict[str, Option]:
    """Every option of a trial of this workload by name, with the workload's own defaults in place."""
    if workload.is_train_loop:
        known = {key: OPTIONS[key] for key in LOOP_OPTIONS}
    else:
        known = dict(OPTIONS)
    for key, value in workload.options.items():
        known[key] = Option(value, type(value), f"option of workload {workload.name}")
    for key, value in workload.defaults.items():
        if key in known:
            old = known[key]
            known[key] = Option(value, old.kind, old.doc, old.check, old.optional)
    return known


def check_value(field: str, key: str, value: Value, option: Option) -> Mistake | None:
    """What is wrong with one value of one option, or None."""
    usual = "" if option.default is None else f", by default {option.default}"
    hint = f"{option.doc}; {option.kind.__name__}{usual}"
    if value is None:
        return None if option.optional else Mistake(field, value, f"`{key}` needs a value", hint=hint)
    wanted = (int, float) if option.kind is float else (option.kind,)
    # bool is an int in Python, but `epochs=True` is a slip.
    if not isinstance(value, wanted) or (isinstance(value, bool) and option.kind is not bool):
        wrong = f"`{key}` is of type {option.kind.__name__}, not {type(value).__name__}"
        return Mistake(field, value, wrong, hint=hint)
    problem = option.check(value)
    return Mistake(field, value, f"`{key}` {problem}", hint=hint) if problem else None


def workload_mistakes(workload: Workload) -> list[Mistake]:
    """What is wrong with a workload, whatever a study makes of it."""
    found: list[Mistake] = []
    if workload.is_train_loop:
        return found
    for part in ("model", "data"):
        if not callable(getattr(workload, part)):
            hint = f"give the Workload {part}=, a function of the trial's config"
            found.append(Mistake(f"workload.{part}", getattr(workload, part), "is no function", hint=hint))
    for key, value in workload.options.items():
        if not isinstance(value, (str, int, float, bool, tuple)):
            hint = "a default is a str, int, float, bool or tuple, and its type is the option's"
            found.append(Mistake(f"workload.options[{key!r}]", value, "is no default for an option", hint=hint))
    known = known_options(replace(workload, defaults={}))
    for key, value in workload.defaults.items():
        where = f"workload.defaults[{key!r}]"
        if key not in known:
            hint = f"{suggest(key, list(known))}; the workload's own hyperparameters go into options={{...}}"
            found.append(Mistake(where, value, f"`{key}`: unknown", hint=hint))
        elif wrong := check_value(where, key, value, known[key]):
            found.append(wrong)
    return found


def check_together(field: str, config: Config, num_train_samples: int | None) -> list[Mistake]:
    """What is wrong with a complete config whose values are each fine alone; not for a train loop's config."""
    found: list[Mistake] = []
    workers, batch = config["num_workers"], config["batch_size"]
    if batch < workers:
        found.append(
            Mistake(
                f"{field}.batch_size",
                batch,
                f"is smaller than num_workers={workers}: some workers would get no sample",
                hint=f"use batch_size of at least {workers}, or fewer workers",
            )
        )
    wanted, size = config["num_samples"], num_train_samples
    if size is not None and wanted is not None and wanted > size:
        found.append(
            Mistake(f"{field}.num_samples", wanted, f"is more than the {size} training samples", hint="ask for fewer")
        )
    elif (available := wanted or size) is not None and batch > available:
        found.append(
            Mistake(
                f"{field}.batch_size",
                batch,
                f"is larger than the training set of {available} samples",
                hint="use a smaller batch_size" + (" or a larger num_samples" if wanted else ""),
            )
        )
    if config["num_loader_workers"] and config["loader"] != "dataloader":
        found.append(
            Mistake(
                f"{field}.num_loader_workers",
                config["num_loader_workers"],
                f'has no effect with loader="{config["loader"]}"',
                hint='add loader="dataloader", or leave num_loader_workers out',
            )
        )
    return found
