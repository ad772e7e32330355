"""Which hyperparameters can't go together, and which would do nothing beside the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from raypar.errors import Mistake, RayparError
from raypar.study.affinity import listed_cores
from raypar.study.space import Value
from raypar.study.strategies import idle, impossible, num_shares
from raypar.study.workload import Config, Workload


def check_together(
    field: str, config: Config, workload: Workload, swept: Collection[str] = frozenset()
) -> list[Mistake]:
    """What is wrong with a complete config whose values are each fine alone.

    Args:
        swept: hyperparameters that the study varies.
    """
    found: list[Mistake] = []
    cores, workers = listed_cores(config["cpu_affinity"]), config["num_workers"]
    if cores is not None and len(cores) % workers:
        found.append(
            Mistake(
                f"{field}.cpu_affinity",
                config["cpu_affinity"],
                f"{len(cores)} cores can't be shared out evenly among num_workers={workers}",
                hint=f"list a multiple of {workers} cores",
            )
        )
    if isinstance(config["nodes"], int) and config["nodes"] > workers:
        wrong, hint = f"is more than num_workers={workers}", "ask for as many nodes as workers at most"
        found.append(Mistake(f"{field}.nodes", config["nodes"], wrong, hint=hint))
    return found if workload.is_train_loop else [*found, *_check_training(field, config, workload, swept)]


def _check_training(field: str, config: Config, workload: Workload, swept: Collection[str]) -> list[Mistake]:
    found: list[Mistake] = []
    batch, shares = config["batch_size"], num_shares(config)
    try:
        num_train_samples = workload.train_size(config)
    except RayparError:
        raise
    except Exception as error:
        wrong = f"raises {type(error).__name__}: {error}"
        return [Mistake("workload.num_train_samples", field, wrong, hint="mend that function, or leave it out")]
    if num_train_samples is not None and not isinstance(num_train_samples, int):
        wrong = f"gives a {type(num_train_samples).__name__}, not a whole number"
        return [Mistake("workload.num_train_samples", num_train_samples, wrong, hint="mend that function")]
    if batch < shares:
        found.append(
            Mistake(
                f"{field}.batch_size",
                batch,
                f"is smaller than num_workers={config['num_workers']}: some workers would get no sample",
                hint=f"use batch_size of at least {shares}, or fewer workers",
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
    if config["loader"] not in workload.loaders:
        found.append(
            Mistake(
                f"{field}.loader",
                config["loader"],
                f"is not for workload {workload.name}",
                hint=f"it has: {', '.join(workload.loaders)}",
            )
        )
    for key, value, problem, hint in (*_impossible(config), *impossible(config)):
        found.append(Mistake(f"{field}.{key}", value, problem, hint=hint))
    found += [
        Mistake(f"{field}.{key}", config[key], f"has no effect {why}", hint=hint)
        for key, why, hint in (*_idle(config), *idle(config, swept))
    ]
    return found


def _impossible(config: Config) -> Iterator[tuple[str, Value, str, str]]:
    if config["checkpoint_every_epochs"] is not None:
        wrong, every = "can't be had with {}", config["checkpoint_every_epochs"]
        if config["num_workers"] > 1 and config["strategy"] == "deepspeed":
            hint = 'leave it out, or use strategy="fsdp", which shares out as much'
            yield "checkpoint_every_epochs", every, wrong.format("deepspeed: its engine keeps weights of its own"), hint
        if config["num_workers"] > 1 and config["compression"] == "powersgd":
            hint = "leave one of them out"
            yield "checkpoint_every_epochs", every, wrong.format("PowerSGD: it carries errors on in its hook"), hint
        if config["eval_every_steps"] is not None and config["loader"] == "dataloader":
            hint = 'leave one of them out, or use loader="resident"'
            yield (
                "checkpoint_every_epochs",
                every,
                wrong.format("eval_every_steps and a dataloader: it draws anew in the middle of an epoch"),
                hint,
            )
    if config["device"] == "mps":
        if config["num_workers"] > 1:
            yield "num_workers", config["num_workers"], "can't share the one MPS device", "use num_workers=1 with it"
        if config["precision"] == "fp64":
            yield "precision", "fp64", "is not to be had on MPS", 'use precision="fp32", or device="cpu"'


def _idle(config: Config) -> Iterator[tuple[str, str, str]]:
    """Options that would do nothing in this config, why, and the way out: a sweep over them would show nothing."""
    if config["loader"] != "dataloader":
        for key in ("num_loader_workers", "pin_memory"):
            if config[key]:
                yield key, f'with loader="{config["loader"]}"', f'add loader="dataloader", or leave {key} out'
    if config["prefetch_factor"] and not config["num_loader_workers"]:
        yield "prefetch_factor", "without loader processes", "add num_loader_workers of at least 1, or leave it out"
    if config["compile"] and not config["num_warmup_steps"]:
        yield (
            "num_warmup_steps",
            "but to time the compilation",
            "leave it out: the warm-up is where compile=True compiles",
        )
