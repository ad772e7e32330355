"""Hyperparameters that raypar itself understands, one entry of `OPTIONS` each, and a trial's complete config.

An entry holds the default, the type, the meaning and the allowed values of an option. `conflicts` finds invalid
combinations. Options of strategies and their conflicts are defined in the strategies' modules. A trial's config
consists of these options and the workload's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from raypar.plugins import Lazy
from raypar.study.script_settings import SCRIPT_SETTINGS
from raypar.study.space import Value
from raypar.study.strategy import IN_EVERY_CONFIG, STRATEGIES, Conflict, num_shares, strategy_options
from raypar.study.workload import (
    LOADERS,
    AnyWorkload,
    Config,
    Option,
    Workload,
    at_least,
    one_of,
    whole_number,
)
from raypar.units import SIZES_BYTES, parsed

OWN_OPTIMIZER = "own"  # value of the option if the workload has an optimizer
OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop", "adadelta", "lars", "lamb")
DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("fp32", "fp64", "tf32", "bf16", "fp16")
LR_SCALINGS = ("none", "linear", "sqrt")
LR_SCHEDULES = ("constant", "linear", "cosine")
MAX_CORES = 1_000_000
UNPINNED = "off"  # value of cpu_affinity
AFFINITIES = 'a count (2), a list of cores ("0-3" or (0, 1)), "spread", "compact" or "off"'


@dataclass(frozen=True)
class Auto:
    """Values that a config takes from the machines if the study leaves them open.

    Attributes:
        device: the meaning of ``device="auto"``.
        cores_per_gpu: ``cpus_per_worker`` of a worker with a GPU.
    """

    device: str = "cpu"
    cores_per_gpu: int = 1


ON_CPU = Auto()


def listed_cores(affinity: Value) -> tuple[int, ...] | None:
    """Return the cores of an explicit list (``"0-3,8"``, ``(0, 1)``); None for other values of ``cpu_affinity``.

    Raises ValueError for an invalid list.
    """
    if isinstance(affinity, tuple):
        if not all(isinstance(core, int) and not isinstance(core, bool) and core >= 0 for core in affinity):
            raise ValueError("a list of cores holds whole numbers from 0")
        cores = affinity
    elif isinstance(affinity, str) and affinity not in ("spread", "compact", UNPINNED):
        cores = tuple(core for part in affinity.split(",") for core in _core_range(part.strip()))
    else:
        return None
    if not cores:
        raise ValueError("the list of cores is empty")
    if len(set(cores)) < len(cores):
        raise ValueError("a core is listed twice")
    return cores


def _core_range(part: str) -> range:
    first, _, last = part.partition("-")
    if not all(number.isascii() and number.isdecimal() for number in (first, last or first)) or part.endswith("-"):
        raise ValueError(f"write {AFFINITIES}")
    if max(len(first), len(last)) > len(str(MAX_CORES)) - 1:
        raise ValueError(f"no machine has {MAX_CORES:,} cores")
    cores = range(int(first), int(last or first) + 1)
    if not cores:
        raise ValueError(f"{part} runs backwards")
    return cores


def cores_text(cores: Iterable[int]) -> str:
    """Return core numbers as ``0-3,8``."""
    groups = itertools.groupby(enumerate(sorted(cores)), key=lambda entry: entry[1] - entry[0])
    runs = [[number for _, number in run] for _, run in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def absent_cores(affinity: Value, cores: Collection[int]) -> str | None:
    """Return which cores of a ``cpu_affinity`` are missing from a machine's cores; None if it has them all."""
    absent = sorted(set(listed_cores(affinity) or ()) - set(cores))
    return f"there is no core {cores_text(absent)}: the machine's are {cores_text(cores)}" if absent else None


def affinity_width(affinity: Value, num_workers: int) -> int | None:
    """Return the number of cores that ``cpu_affinity`` gives each worker; None if ``cpus_per_worker`` sets it."""
    if isinstance(affinity, int):
        return affinity
    cores = listed_cores(affinity)
    return None if cores is None else max(1, len(cores) // num_workers)


def node_label_of(label: str) -> tuple[str, str]:
    """Return key and value of a ``node_label``; both are empty if it is not valid."""
    key, equals, value = (part.strip() for part in label.partition("="))
    return (key, value) if equals and key and value and "=" not in value else ("", "")


def _affinity_problem(affinity: Value) -> str | None:
    if not isinstance(affinity, (int, str, tuple)) or isinstance(affinity, bool):
        return f"must be {AFFINITIES}, not a {type(affinity).__name__}"
    if isinstance(affinity, int):
        return None if affinity >= 1 else 'must be at least 1 core; core 0 alone is written "0-0" or (0,)'
    try:
        listed_cores(affinity)
    except ValueError as error:
        return str(error)
    return None


def _nodes_problem(nodes: Value) -> str | None:
    is_count = isinstance(nodes, int) and not isinstance(nodes, bool) and nodes >= 1
    return None if nodes in ("pack", "spread") or is_count else 'must be "pack", "spread", or a number of at least 1'


def _memory_problem(value: Value) -> str | None:
    is_size = isinstance(value, str) and (parsed(value, SIZES_BYTES) or 0) > 0
    return None if is_size else 'must be a size with its unit: "20GB", "512MiB"'


def memory_limit_bytes(config: Config) -> float | None:
    """Return ``max_memory`` of a complete config in bytes; None: no limit, as in configs older than the option."""
    limit = config.get("max_memory")
    return None if limit is None else parsed(str(limit), SIZES_BYTES)


def _positive(value: Value) -> str | None:
    is_positive = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    return None if is_positive else "must be a number greater than 0"


# Options of raypar's training that don't depend on the strategy.
GENERAL: Mapping[str, Option] = {
    "batch_size": whole_number(64, "global batch: samples per optimizer step over all workers"),
    "per_worker_batch_size": whole_number(None, "samples per step and worker, instead of batch_size (weak scaling)"),
    "epochs": whole_number(1, "passes over the training set"),
    "num_samples": whole_number(None, "train on this many samples only; None: all"),
    "lr": Option(0.1, float, "learning rate", _positive),
    "lr_scaling": one_of("none", LR_SCALINGS, "scale lr by batch_size / lr_base_batch_size, or by its square root"),
    "lr_base_batch_size": whole_number(
        None,
        "the batch that lr is meant for; None: the workload's own batch_size",
        has_effect=lambda config: config["lr_scaling"] != "none",
    ),
    "lr_schedule": one_of("constant", LR_SCHEDULES, "constant, or down to 0 over the training: linear, cosine"),
    "lr_warmup_steps": whole_number(0, "steps over which lr rises from 0 (unrelated to num_warmup_steps)", at_least=0),
    "optimizer": one_of("sgd", OPTIMIZERS),
    "weight_decay": Option(0.0, float, "weight decay", at_least(0)),
    "clip_grad_norm": Option(None, float, "maximum norm of the gradients; None: no limit", _positive, optional=True),
    "device": one_of("auto", DEVICES, "cpu, cuda, mps, or auto (cuda where every trial fits on the GPUs, else cpu)"),
    "precision": one_of("fp32", PRECISIONS, "fp32, fp64, tf32 (NVIDIA GPUs), or mixed: bf16, fp16 with loss scaling"),
    "loader": one_of("resident", LOADERS, "resident (tensors in memory) or dataloader (torch's)"),
    "num_loader_workers": whole_number(
        0, "loader processes per worker, on its own cores, for loader=dataloader", at_least=0
    ),
    "prefetch_factor": whole_number(None, "batches that a loader process makes ahead; None: torch's 2"),
    "pin_memory": Option(
        None, bool, "loader=dataloader puts batches into page-locked memory; None: if there is a GPU", optional=True
    ),
    "cpus_per_worker": whole_number(1, "cores reserved for each worker; unless set, all that a node has per GPU"),
    "cpu_affinity": Option(
        None,
        object,
        'cores to pin workers to: a count per worker, a list to divide ("0-3" or (0, 1)), "spread" or "compact"; '
        '"off": workers reserve as many cores, and run on any',
        _affinity_problem,
        optional=True,
    ),
    "nodes": Option(
        "pack",
        object,
        "placement of workers on a cluster's nodes: pack (few), spread (evenly over all), or a number of nodes",
        _nodes_problem,
    ),
    "node_label": Option(
        None,
        str,
        'only nodes with this Ray label: "type=gpu"; None: any node',
        lambda label: None if any(node_label_of(str(label))) else 'must be a label and its value: "type=gpu"',
        optional=True,
    ),
    "num_threads": whole_number(
        None,
        "torch threads per worker; None: cpus_per_worker",
        has_effect=lambda config: config["num_threads"] != config["cpus_per_worker"],
    ),
    "compile": Option(False, bool, "torch.compile the model, in the warm-up"),
    "activation_checkpointing": Option(
        False, bool, "keep only the inputs of the model's blocks, and compute their activations again for backward"
    ),
    "channels_last": Option(False, bool, "image tensors as NHWC in memory"),
    "drop_last": Option(False, bool, "drop a smaller last batch"),
    "num_warmup_steps": whole_number(10, "steps run and undone before the clock starts", at_least=0),
    "eval_every_steps": whole_number(None, "number of steps between evaluations; None: one epoch"),
    "eval_batch_size": whole_number(1000, "samples per batch in an evaluation"),
    "checkpoint_every_epochs": whole_number(
        None,
        "a restarted trial continues from a checkpoint that is at most this many epochs old; None: from the beginning",
    ),
    "keep_model": Option(False, bool, "keep the trained model as an artifact of its run"),
    "keep_checkpoints": Option(
        False,
        bool,
        "with keep_model: keep the model of every report, too, not only of the best one",
        has_effect=lambda config: config["keep_model"],
    ),
    "max_memory": Option(
        None,
        str,
        'maximum memory of the training on a worker, "20GB"; a trial that needs more does not fit; None: no limit',
        _memory_problem,
        optional=True,
    ),
    "stop_on_nan": Option(True, bool, "end a trial at its first report of a loss that is not finite; False: continue"),
}


def _options() -> dict[str, Option]:
    """Return all options: those of strategies follow the strategy."""
    return {
        "num_workers": whole_number(1, "ranks that train together"),
        "strategy": one_of("ddp", STRATEGIES, "how the workers share a step and reach the same weights"),
        "accumulation_steps": whole_number(1, "gradient accumulation: parts of a worker's batch for one update"),
        **strategy_options(),
        **GENERAL,
    }


# Created at first use: strategies declare theirs in modules that import this package.
OPTIONS: Mapping[str, Option] = Lazy(_options)


def known_options(workload: AnyWorkload) -> dict[str, Option]:
    """Return every option of a trial of this workload by name, with the workload's own defaults."""
    applicable = workload.raypar_options
    options = {key: option for key, option in OPTIONS.items() if applicable is None or key in applicable}
    if not isinstance(workload, Workload):
        options |= SCRIPT_SETTINGS
    for key, value in workload.hyperparameters.items():
        if not isinstance(value, Option):
            value = Option(value, type(value), f"option of workload {workload.name}")
        options[key] = value
    if has_own_optimizer(workload):
        options["optimizer"] = replace(options["optimizer"], default=OWN_OPTIMIZER)
    for key, value in workload.defaults.items():
        if key in options:
            options[key] = replace(options[key], default=value)
    return options


def has_own_optimizer(workload: AnyWorkload) -> bool:
    """Return whether the workload's optimizer replaces raypar's option."""
    return isinstance(workload, Workload) and workload.optimizer is not None and "optimizer" not in workload.options


def leaves_cores_open(workload: AnyWorkload, chosen: Mapping[str, Value]) -> bool:
    """Return whether neither a study's settings nor the workload's defaults give ``cpus_per_worker``."""
    return "cpus_per_worker" not in {**workload.defaults, **chosen}


def resolve(workload: AnyWorkload, chosen: Mapping[str, Value], auto: Auto = ON_CPU) -> dict[str, Value]:
    """Return a complete config: chosen values, then defaults, with derived values filled in.

    Args:
        chosen: values of a study's config and point; ``per_worker_batch_size`` determines ``batch_size``.
        auto: values of options that are left to the machines.
    """
    options = known_options(workload)
    config: dict[str, Any] = {key: option.default for key, option in options.items()}
    if not isinstance(workload, Workload):
        for key in SCRIPT_SETTINGS.keys() - workload.hyperparameters.keys():
            del config[key]  # an identity has those that are chosen
    config.update(chosen)
    for key, option in options.items():
        is_of_others = option.strategies and not {config.get("strategy"), *IN_EVERY_CONFIG} & {*option.strategies}
        if is_of_others and key not in chosen:
            del config[key]
    if isinstance(workload, Workload):
        if config["per_worker_batch_size"] is not None:
            config["batch_size"] = config["per_worker_batch_size"] * config["num_workers"]
        if config["lr_base_batch_size"] is None:
            config["lr_base_batch_size"] = options["batch_size"].default
    if config["device"] == "auto":
        config["device"] = auto.device
    if (width := affinity_width(config["cpu_affinity"], config["num_workers"])) is not None:
        config["cpus_per_worker"] = width
    elif config["device"] == "cuda" and leaves_cores_open(workload, chosen):
        config["cpus_per_worker"] = auto.cores_per_gpu
    if config["num_threads"] is None:
        config["num_threads"] = config["cpus_per_worker"]
    # So that `lr=1` and `lr=1.0` are one trial.
    floats = {key for key, option in options.items() if option.kind is float}
    return {key: float(v) if key in floats and v is not None else v for key, v in config.items()}


def has_effect(key: str, config: Config) -> bool:
    """Return False for an option of another strategy, or of a feature that this complete config doesn't use."""
    option = OPTIONS[key]
    is_of_strategy = not option.strategies or config.get("strategy") in option.strategies
    return is_of_strategy and option.has_effect(config)


def conflicts(
    config: Config, workload: AnyWorkload, num_train_samples: int | None, swept: Collection[str]
) -> Iterator[Conflict]:
    """Yield the option, the problem and the fix of each combination of values that can't run, or has no effect."""
    workers, num_cores = config["num_workers"], len(listed_cores(config["cpu_affinity"]) or ())
    if num_cores % workers:
        problem = f"{num_cores} cores can't be shared out evenly among num_workers={workers}"
        yield "cpu_affinity", problem, f"list a multiple of {workers} cores"
    if isinstance(config["nodes"], int) and config["nodes"] > workers:
        yield "nodes", f"is more than num_workers={workers}", "ask for at most as many nodes as workers"
    if isinstance(workload, Workload):
        yield from _batch_conflicts(config, num_train_samples)
        yield from _data_conflicts(config, workload)
        yield from _training_conflicts(config, workload)
        yield from STRATEGIES[config["strategy"]].conflicts(config, swept)
        if workers > 1:
            yield from _strategy_conflicts(config)
    # If the study varies the strategy, a fixed option is meant for those strategies that have it.
    for key, option in known_options(workload).items():
        is_for_it = not option.strategies or config["strategy"] in option.strategies
        if is_for_it or config.get(key, option.default) == option.default:
            continue
        if "strategy" not in swept or key in swept:
            hint = f"leave it out, or use a strategy that has it: {', '.join(option.strategies)}"
            yield key, f'has no effect with strategy="{config["strategy"]}"', hint


def _batch_conflicts(config: Config, num_train_samples: int | None) -> Iterator[Conflict]:
    batch_size, num_samples, shares = config["batch_size"], config["num_samples"], num_shares(config)
    if batch_size < shares:
        problem = f"is smaller than num_workers={config['num_workers']}: some workers would get no sample"
        yield "batch_size", problem, f"use batch_size of at least {shares}, or fewer workers"
    num_available = num_samples or num_train_samples
    if num_available and batch_size > num_available:
        problem = f"is larger than the training set of {num_available} samples"
        yield "batch_size", problem, "use a smaller batch_size, or a larger num_samples where that is set"
    if num_samples and num_train_samples and num_samples > num_train_samples:
        yield "num_samples", f"is more than the {num_train_samples} training samples", "ask for fewer"


def _data_conflicts(config: Config, workload: Workload) -> Iterator[Conflict]:
    loader = config["loader"]
    if loader not in workload.loaders:
        yield "loader", f"is not for workload {workload.name}", f"it has: {', '.join(workload.loaders)}"
    for key in ("num_loader_workers", "pin_memory"):
        if loader != "dataloader" and config[key]:
            yield key, f'has no effect with loader="{loader}"', f'add loader="dataloader", or leave {key} out'
    if config["prefetch_factor"] and not config["num_loader_workers"]:
        hint = "add num_loader_workers of at least 1, or leave it out"
        yield "prefetch_factor", "has no effect without loader processes", hint


def _training_conflicts(config: Config, workload: Workload) -> Iterator[Conflict]:
    if config["device"] == "mps" and config["precision"] == "fp64":
        yield "precision", "is unavailable on MPS", 'use precision="fp32", or device="cpu"'
    if config["compile"] and not config["num_warmup_steps"]:
        hint = "leave it out: compile=True compiles in the warm-up"
        yield "num_warmup_steps", "would time the compilation", hint
    if config["compile"] and config["activation_checkpointing"]:
        hint = "leave one of them out: compiled code chooses what to compute again"
        yield "activation_checkpointing", "does not go with compile", hint
    if config["max_memory"] and config["device"] != "cuda" and not config["num_warmup_steps"]:
        hint = "leave it out: memory is measured in the warm-up"
        yield "num_warmup_steps", "does not go with max_memory", hint
    if config["checkpoint_every_epochs"] and config["eval_every_steps"] and config["loader"] == "dataloader":
        problem = "does not go with eval_every_steps and a dataloader, which shuffles again in the middle of an epoch"
        yield "checkpoint_every_epochs", problem, 'leave one of them out, or use loader="resident"'
    if has_own_optimizer(workload) and config["optimizer"] != OWN_OPTIMIZER:
        hint = 'leave it out, or add it to the workload\'s options={"optimizer": …} and read config["optimizer"] there'
        yield "optimizer", "has no effect: the workload has its own optimizer=", hint


def _strategy_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield the conflicts that follow from the strategy's traits, for several workers."""
    strategy, traits = config["strategy"], STRATEGIES[config["strategy"]]
    if config["device"] == "mps":
        yield "num_workers", "can't share the one MPS device", "use num_workers=1 with it"
    if config["optimizer"] in ("lars", "lamb") and not traits.has_layer_norms:
        hint = 'use strategy="ddp", or another optimizer'
        yield "optimizer", f"needs the norms of whole layers, which {strategy} splits", hint
    if config["precision"] == "fp16" and not traits.scales_loss:
        hint = 'use precision="bf16", which needs no scaling, or strategy="ddp"'
        yield "precision", f"scales its loss by rank: {strategy} would mix the scales", hint
    if config["activation_checkpointing"] and not traits.recomputes:
        yield "activation_checkpointing", f"is not for strategy={strategy}", 'leave it out, or use strategy="fsdp"'
    if config["compile"] and traits.check is not None:
        yield "compile", f"is not for strategy={strategy}", 'leave it out, or use strategy="ddp" or "fsdp"'
