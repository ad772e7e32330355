"""The hyperparameters that raypar itself understands: name, type, default and what is allowed.

A trial's config is these options, the workload's own, and nothing else: a misspelt key is found before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from raypar.errors import Mistake, suggest
from raypar.study.affinity import affinity_problem
from raypar.study.nodes import label_problem, nodes_problem
from raypar.study.space import LARGEST, Value
from raypar.study.strategies import STRATEGY_OPTIONS
from raypar.study.workload import Option, Workload, at_least, one_of

OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "lars", "lamb")
DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("fp32", "fp64", "tf32", "bf16", "fp16")
LOADERS = ("resident", "dataloader")
LR_SCALINGS = ("none", "linear", "sqrt")
LR_SCHEDULES = ("constant", "linear", "cosine")


def _positive(value: Value) -> str | None:
    fine = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    return None if fine else "must be a number greater than 0"


OPTIONS: Mapping[str, Option] = {
    "num_workers": Option(1, int, "ranks that train together", at_least(1)),
    **STRATEGY_OPTIONS,
    "batch_size": Option(64, int, "global batch: samples per optimizer step over all workers", at_least(1)),
    "per_worker_batch_size": Option(
        None, int, "samples per step and worker, instead of batch_size (weak scaling)", at_least(1), optional=True
    ),
    "epochs": Option(1, int, "passes over the training set", at_least(1)),
    "num_samples": Option(None, int, "train on this many samples only; None: all", at_least(1), optional=True),
    "lr": Option(0.1, float, "learning rate", _positive),
    "lr_scaling": one_of("none", LR_SCALINGS, "lr times batch_size / lr_base_batch_size, or its square root"),
    "lr_base_batch_size": Option(
        None, int, "the batch that lr is meant for; None: the workload's own batch_size", at_least(1), optional=True
    ),
    "lr_schedule": one_of("constant", LR_SCHEDULES, "constant, or down to 0 over the training: linear, cosine"),
    "lr_warmup_steps": Option(0, int, "steps over which lr rises from 0 (other than num_warmup_steps)", at_least(0)),
    "optimizer": one_of("sgd", OPTIMIZERS),
    "weight_decay": Option(0.0, float, "weight decay", at_least(0)),
    "clip_grad_norm": Option(
        None, float, "gradients of a larger norm are scaled down to it; None: not", _positive, optional=True
    ),
    "device": one_of("auto", DEVICES, "cpu, cuda, mps, or auto (a GPU where the cluster has one)"),
    "precision": one_of("fp32", PRECISIONS, "fp32, fp64, tf32 (NVIDIA GPUs), or mixed: bf16, fp16 with loss scaling"),
    "loader": one_of("resident", LOADERS, "resident (tensors in memory) or dataloader (torch's)"),
    "num_loader_workers": Option(
        0, int, "loader processes per worker, on its own cores, for loader=dataloader", at_least(0)
    ),
    "prefetch_factor": Option(
        None, int, "batches that a loader process makes ahead; None: torch's 2", at_least(1), optional=True
    ),
    "pin_memory": Option(
        None, bool, "loader=dataloader puts batches into page-locked memory; None: where there is a GPU", optional=True
    ),
    "cpus_per_worker": Option(1, int, "cores that each worker has to itself", at_least(1)),
    "cpu_affinity": Option(
        None,
        object,
        'cores to pin workers to: a count for each, a list ("0-3" or (0, 1)) shared out, "spread" or "compact"',
        affinity_problem,
        optional=True,
    ),
    "nodes": Option(
        "pack",
        object,
        "how workers lie on a cluster's nodes: pack (few nodes), spread (evenly over all), or over so many",
        nodes_problem,
    ),
    "node_label": Option(
        None, str, 'nodes with this label of Ray\'s alone: "type=gpu"; None: any node', label_problem, optional=True
    ),
    "num_threads": Option(None, int, "torch threads per worker; None: cpus_per_worker", at_least(1), optional=True),
    "compile": Option(False, bool, "torch.compile the model, in the warm-up"),
    "channels_last": Option(False, bool, "image tensors as NHWC in memory"),
    "drop_last": Option(False, bool, "leave out a last, smaller batch"),
    "num_warmup_steps": Option(10, int, "steps run and undone before the clock starts", at_least(0)),
    "eval_every_steps": Option(
        None, int, "evaluate and report every so many steps; None: after each epoch", at_least(1), optional=True
    ),
    "eval_batch_size": Option(1000, int, "samples at once in an evaluation", at_least(1)),
    "checkpoint_every_epochs": Option(
        None,
        int,
        "a trial that is started again goes on where it was, this many epochs back at most; None: from the beginning",
        at_least(1),
        optional=True,
    ),
    "keep_model": Option(False, bool, "keep the trained model as an artifact of its run"),
}

# What means something for a train_loop_per_worker, whose batches and optimizer raypar does not see.
LOOP_OPTIONS = ("num_workers", "device", "cpus_per_worker", "cpu_affinity", "nodes", "node_label", "num_threads")


def known_options(workload: Workload) -> dict[str, Option]:
    """Every option of a trial of this workload by name, with the workload's own defaults in place."""
    if workload.is_train_loop:
        known = {key: OPTIONS[key] for key in LOOP_OPTIONS}
    else:
        known = dict(OPTIONS)
    for key, value in workload.options.items():
        own = (
            Option(value, type(value), f"option of workload {workload.name}")
            if not isinstance(value, Option)
            else value
        )
        known[key] = own
    for key, value in workload.defaults.items():
        if key in known:
            old = known[key]
            known[key] = replace(old, default=value)
    return known


def check_value(field: str, key: str, value: Value, option: Option) -> Mistake | None:
    """What is wrong with one value of one option, or None."""
    usual = "" if option.default is None else f", by default {option.default}"
    kind = "" if option.kind is object else f"; {option.kind.__name__}"
    hint = f"{option.doc}{kind}{usual}"
    if value is None:
        return None if option.optional else Mistake(field, value, f"`{key}` needs a value", hint=hint)
    wanted = (int, float) if option.kind is float else (option.kind,)
    # bool is an int in Python, but `epochs=True` is a slip.
    if not isinstance(value, wanted) or (isinstance(value, bool) and option.kind not in (bool, object)):
        wrong = f"`{key}` is of type {option.kind.__name__}, not {type(value).__name__}"
        return Mistake(field, value, wrong, hint=hint)
    if isinstance(value, int) and abs(value) > LARGEST:
        return Mistake(field, value, f"`{key}` is beyond 2^53", hint=hint)
    try:
        problem = option.check(value)
    except Exception as error:  # the workload's own check
        problem = f"can't be checked: {type(error).__name__}: {error}"
    if problem is None and isinstance(value, float) and not math.isfinite(value):
        problem = "must be a finite number"
    return Mistake(field, value, f"`{key}` {problem}", hint=hint) if problem else None


def is_default(value: object) -> bool:
    """Whether an option's type can be told by this default, or it is an `Option`."""
    return isinstance(value, (str, int, float, bool, tuple, Option))


def workload_mistakes(workload: Workload) -> list[Mistake]:
    """What is wrong with a workload, whatever a study makes of it."""
    found: list[Mistake] = []
    if not isinstance(workload.name, str) or not workload.name:
        found.append(Mistake("workload.name", workload.name, "is no name", hint='say name="mine"'))
    if workload.mode not in ("max", "min"):
        hint = 'say mode="max" for an accuracy'
        found.append(Mistake("workload.mode", workload.mode, 'must be "max" or "min"', hint=hint))
    if workload.is_train_loop:
        if not callable(workload.train_loop):
            hint = "give Workload.from_train_loop a function of the config"
            found.append(Mistake("workload.train_loop", workload.train_loop, "is no function", hint=hint))
        return found
    for part in ("model", "data"):
        if not callable(getattr(workload, part)):
            hint = f"give the Workload {part}=, a function of the trial's config"
            found.append(Mistake(f"workload.{part}", getattr(workload, part), "is no function", hint=hint))
    for part in ("loss", "prepare", "save", "generate", "layers", "tensor_plan"):
        if (value := getattr(workload, part)) is not None and not callable(value):
            hint = "give a function, or leave it out"
            found.append(Mistake(f"workload.{part}", value, "is no function", hint=hint))
    size = workload.num_train_samples
    if size is not None and not callable(size) and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        hint = "give a number, or a function of the config that tells it, or leave it out"
        found.append(Mistake("workload.num_train_samples", size, "is no whole number of at least 1", hint=hint))
    if not isinstance(workload.loaders, (tuple, list)) or not workload.loaders or set(workload.loaders) - {*LOADERS}:
        hint = f"give a tuple of them: loaders={LOADERS}"
        found.append(Mistake("workload.loaders", workload.loaders, f"are not some of {', '.join(LOADERS)}", hint=hint))
    for part in ("options", "defaults", "metrics"):
        value = getattr(workload, part)
        if not isinstance(value, Mapping) and not (part == "metrics" and value is None):
            found.append(Mistake(f"workload.{part}", value, "must be a dict", hint=f'say {part}={{"name": …}}'))
    if not isinstance(workload.options, Mapping) or not isinstance(workload.defaults, Mapping):
        return found
    for key, value in workload.options.items():
        if not is_default(value):
            hint = "a default is a str, int, float, bool or tuple (its type is the option's), or a raypar.Option"
            found.append(Mistake(f"workload.options[{key!r}]", value, "is no default for an option", hint=hint))
    known = known_options(replace(workload, defaults={}))
    for key, value in workload.defaults.items():
        where = f"workload.defaults[{key!r}]"
        if key not in known:
            hint = f"{suggest(str(key), list(known))}; the workload's own hyperparameters go into options={{...}}"
            found.append(Mistake(where, value, f"`{key}`: unknown", hint=hint))
        elif is_default(workload.options.get(key, 0)) and (wrong := check_value(where, key, value, known[key])):
            found.append(wrong)
    return found
