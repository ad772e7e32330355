"""Hyperparameters that raypar itself understands: name, type, default, allowed values, and a trial's complete config.

A trial's config is these options, the workload's own, and nothing else: a misspelt key is found before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from raypar.errors import Mistake, suggest
from raypar.study.placement import affinity_problem, affinity_width, label_problem, nodes_problem
from raypar.study.space import LARGEST, Value
from raypar.study.workload import Config, Option, Workload, at_least, one_of

STRATEGIES = ("ddp", "fsdp", "tensor", "pipeline", "hybrid", "local_sgd", "gather_broadcast", "deepspeed")
# Every rank takes a share of the batch; with the others, some or all ranks work on the same samples.
DATA_PARALLEL = ("ddp", "fsdp", "local_sgd", "gather_broadcast", "deepspeed")
PIPELINED = ("pipeline", "hybrid")
# Those that not every model, or not every machine, allows.
MINDS_MODEL = ("tensor", "pipeline", "hybrid", "deepspeed")
COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "interleaved")
SPLITS = ("counted", "measured")


def _split_problem(value: Value) -> str | None:
    named = isinstance(value, tuple) and value and all(isinstance(name, str) for name in value)
    return None if named or value in SPLITS else f"must be one of {', '.join(SPLITS)}, or a tuple of layer names"


def _zero(value: Value) -> str | None:
    return None if value in (0, 1, 2, 3) else "must be 0, 1, 2 or 3"


STRATEGY_OPTIONS: Mapping[str, Option] = {
    "strategy": one_of("ddp", STRATEGIES, "how the workers share a step and come to the same weights"),
    "accumulation_steps": Option(1, int, "parts of a worker's batch, one after the other, for one update", at_least(1)),
    "bucket_mb": Option(
        None,
        float,
        "gradients sent as one, in MiB; 0: each by itself; None: torch's 25 MiB",
        at_least(0),
        optional=True,
    ),
    "overlap": Option(True, bool, "send gradients while the backward pass still runs; False: after it"),
    "compression": one_of("none", COMPRESSIONS, "what gradients are turned into on their way (it loses some of them)"),
    "powersgd_rank": Option(1, int, "rank of PowerSGD's factors", at_least(1)),
    "static_graph": Option(False, bool, "let DDP rely on every step using the same weights"),
    "fsdp_reshard": Option(True, bool, "drop gathered weights after the forward pass; False: keep them for backward"),
    "zero_stage": Option(
        2, int, "what DeepSpeed shares out: nothing (0), optimizer state (1), gradients too (2), weights too (3)", _zero
    ),
    "tensor_size": Option(1, int, "workers among whom layers are split, in a hybrid", at_least(1)),
    "pipeline_size": Option(1, int, "workers that a pipeline has, in a hybrid", at_least(1)),
    "pipeline_schedule": one_of("1f1b", PIPELINE_SCHEDULES, "the order of forward and backward passes in a pipeline"),
    "num_microbatches": Option(4, int, "parts of a batch that follow one another through a pipeline", at_least(1)),
    "stages_per_worker": Option(2, int, "stages of each worker, interleaved", at_least(1)),
    "pipeline_split": Option(
        "counted",
        object,
        "cut by counted work, by measured time, or before named layers",
        _split_problem,
    ),
    "sync_every": Option(8, int, "local SGD averages the weights every so many steps", at_least(2)),
}

# Which strategies an option means something to.
_MEANT_FOR: Mapping[str, tuple[str, ...]] = {
    "bucket_mb": ("ddp", "hybrid"),
    "overlap": ("ddp",),
    "compression": ("ddp",),
    "static_graph": ("ddp",),
    "fsdp_reshard": ("fsdp",),
    "zero_stage": ("deepspeed",),
    "tensor_size": ("hybrid",),
    "pipeline_size": ("hybrid",),
    "pipeline_schedule": PIPELINED,
    "num_microbatches": PIPELINED,
    "stages_per_worker": PIPELINED,
    "pipeline_split": PIPELINED,
    "sync_every": ("local_sgd",),
}

Problem = tuple[str, Value, str, str]  # option, value, what is wrong, the way out


def num_shares(config: Config) -> int:
    """Into how many shares every batch is cut: as many as there are workers, unless some work on the same samples."""
    workers: int = config["num_workers"]
    if config["strategy"] in DATA_PARALLEL:
        return workers
    if config["strategy"] == "hybrid":
        return max(1, workers // int(config["tensor_size"] * config["pipeline_size"]))
    return 1


def pipeline_size(config: Config) -> int:
    """How many workers a pipeline of this config has; 1 where there is none."""
    if config["strategy"] == "hybrid":
        return int(config["pipeline_size"])
    return int(config["num_workers"]) if config["strategy"] == "pipeline" else 1


def tensor_size(config: Config) -> int:
    """Among how many workers each layer is split; 1 where none is."""
    if config["strategy"] == "hybrid":
        return int(config["tensor_size"])
    return int(config["num_workers"]) if config["strategy"] == "tensor" else 1


def impossible(config: Config) -> Iterator[Problem]:
    """What can't go together, whatever the model."""
    strategy, workers = config["strategy"], config["num_workers"]
    if workers == 1:
        return  # no strategy at all
    if strategy == "hybrid":
        in_replica = config["tensor_size"] * config["pipeline_size"]
        if workers % in_replica:
            wrong = f"is no multiple of tensor_size x pipeline_size = {in_replica}"
            yield "num_workers", workers, wrong, f"use a multiple of {in_replica} workers"
    if pipeline_size(config) > 1:
        yield from _impossible_in_a_pipeline(config)
    if strategy not in ("ddp", "local_sgd") and config["precision"] == "fp16":
        hint = 'use precision="bf16", which needs no scaling, or strategy="ddp"'
        yield "precision", "fp16", f"scales its loss by rank: {strategy} would mix the scales", hint
    if strategy in ("tensor", "pipeline", "hybrid", "deepspeed") and config["compile"]:
        yield "compile", True, f"is not for strategy={strategy}", 'leave it out, or use strategy="ddp" or "fsdp"'
    if strategy in ("fsdp", "tensor", "hybrid") and config["optimizer"] in ("lars", "lamb"):
        hint = 'use strategy="ddp", or another optimizer'
        yield "optimizer", config["optimizer"], f"needs whole layers' norms, which {strategy} splits up", hint
    if strategy == "deepspeed":
        if config["optimizer"] in ("lars", "lamb") and config["zero_stage"]:
            hint = 'use zero_stage=0, strategy="ddp", or another optimizer'
            yield "optimizer", config["optimizer"], "needs whole layers' norms, which ZeRO cuts into flat parts", hint
        if config["precision"] == "fp64":
            yield "precision", "fp64", "is not DeepSpeed's: it keeps float32", 'use precision="fp32"'
    if config["static_graph"] and config["accumulation_steps"] > 1:
        hint = "leave one of them out"
        yield "static_graph", True, "can't be had with accumulation_steps over 1", hint


def _impossible_in_a_pipeline(config: Config) -> Iterator[Problem]:
    num, size, schedule = config["num_microbatches"], pipeline_size(config), config["pipeline_schedule"]
    if config["accumulation_steps"] > 1:
        hint = "use num_microbatches, which does it"
        yield "accumulation_steps", config["accumulation_steps"], "is what a pipeline does anyway", hint
    if schedule == "1f1b" and num < size:
        hint = f"use at least {size}"
        yield "num_microbatches", num, f"is fewer than the {size} stages that 1f1b keeps busy", hint
    if schedule == "interleaved" and num % max(1, num // size):
        hint = f"use a multiple of {size}"
        yield "num_microbatches", num, f"can't be dealt out in rounds of {size}, which interleaved needs", hint
    batch, shares = config["batch_size"], num_shares(config)
    if batch % (shares * num):
        each = f"{shares} replicas x {num} micro-batches" if shares > 1 else f"{num} micro-batches"
        hint = f"use a multiple of {shares * num}"
        yield "batch_size", batch, f"can't be cut into {each} of equal size", hint


def idle(config: Config, swept: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Options that would do nothing under this strategy, why, and the way out.

    Args:
        swept: hyperparameters that the study varies. Where it varies the strategy, a fixed option is meant for those
            strategies that know it.
    """
    strategy = config["strategy"]
    for key, meant_for in _MEANT_FOR.items():
        is_default = config[key] == STRATEGY_OPTIONS[key].default
        if strategy in meant_for or is_default or ("strategy" in swept and key not in swept):
            continue
        yield key, f'with strategy="{strategy}"', f"it is for {', '.join(meant_for)}: leave it out, or choose one"
    if strategy in PIPELINED and config["pipeline_schedule"] != "interleaved" and "stages_per_worker" in swept:
        yield "stages_per_worker", "without interleaved stages", 'use pipeline_schedule="interleaved"'
    if config["compression"] != "powersgd" and "powersgd_rank" in swept and "compression" not in swept:
        yield "powersgd_rank", "without PowerSGD", 'use compression="powersgd"'


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
