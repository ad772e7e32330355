"""The hyperparameters of strategies: how the work of a step is spread over workers, and what goes together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from raypar.study.space import Value
from raypar.study.workload import Config, Option, at_least, one_of

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
