"""Strategies: how the workers of a trial share a step, as declared by one module each.

The modules are in `raypar.parallel` or in installed packages. This lower layer finds them by their entry points.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias

from raypar.errors import RayparError
from raypar.plugins import registered
from raypar.study.space import Value
from raypar.study.workload import Config, Option, Workload

Conflict: TypeAlias = tuple[str, str, str]  # option, problem, fix


class Exchange(StrEnum):
    """Way in which workers exchange gradients or parts of the model, as far as it changes how they scale."""

    ALL_REDUCE = "all-reduce"
    HOST = "through one process or the CPUs"
    SHARDED = "sharded"
    MODEL = "parts of the model"


@dataclass(frozen=True)
class WorkLayout:
    """Division of a step's work among the workers of a trial.

    Attributes:
        num_shares: shares that every batch is cut into; workers beyond them work on the same samples.
        pipeline_size: workers in a pipeline; 1 without one.
        tensor_size: workers that each layer is split among; 1 if none is.
    """

    num_shares: int = 1
    pipeline_size: int = 1
    tensor_size: int = 1


def one_share_each(config: Config) -> WorkLayout:
    """Return the layout of data parallelism: every worker takes a share of each batch."""
    return WorkLayout(num_shares=config["num_workers"])


@dataclass(frozen=True, kw_only=True)
class StrategyTraits:
    """Declaration of a strategy: what it is, its options, and what it goes with.

    Attributes:
        build: makes a rank's `raypar.parallel.base.Strategy` from a `raypar.parallel.strategy.Task`.
        splits: description of what the workers split, for the documentation.
        built_on: library or function that it is built on, for the documentation.
        options: its own options; strategies that share an option have the same object.
        layout: returns how the workers of a complete config share a step.
        layouts: yields the ways to divide a step among a number of workers: values of its own options. They differ in
            speed and memory, not in what is computed. None: it is not one of the layouts to choose from.
        conflicts: yields values that can't run under it or have no effect, from a complete config (for any number of
            workers) and the swept hyperparameters. General conflicts follow from the traits below.
        check: returns why a workload's model or this machine rules it out, and the fix, or None. May import torch.
            None: it works with every model and machine.
        scales_loss: combines with the loss scaling of ``precision="fp16"``.
        has_layer_norms: a rank has the norms of complete layers, which LARS and LAMB need.
        takes_loss_pairs: combines with a loss that is a pair (sum, weight).
        takes_sparse_gradients: combines with sparse gradients.
        needs_same_parameters: all ranks must use the same parameters in a step, because it gathers weights.
        names_collectives: all ranks take part in each collective, so a profile's spans can be matched.
        recomputes: combines with activation checkpointing.
        sync_every: option with the number of steps between synchronisations; empty: every step has one.
        exchange: way in which workers exchange gradients or parts of the model.
    """

    build: Callable[[Any], Any]
    splits: str
    built_on: str
    options: Mapping[str, Option] = field(default_factory=dict)
    layout: Callable[[Config], WorkLayout] = one_share_each
    layouts: Callable[[int], Iterator[Mapping[str, Value]]] | None = None
    conflicts: Callable[[Config, Collection[str]], Iterator[Conflict]] = lambda *_: iter(())
    check: Callable[[Workload, Config], tuple[str, str] | None] | None = None
    scales_loss: bool = False
    has_layer_norms: bool = True
    takes_loss_pairs: bool = True
    takes_sparse_gradients: bool = False
    needs_same_parameters: bool = False
    names_collectives: bool = True
    recomputes: bool = True
    sync_every: str = ""
    exchange: Exchange = Exchange.ALL_REDUCE


# Their options are in every trial's config, and so in its identity. Options of later strategies are only in the configs
# of their own trials, so that a new strategy doesn't change the identity of other trials.
IN_EVERY_CONFIG = ("ddp", "fsdp", "tensor", "pipeline", "hybrid", "local_sgd", "gather_broadcast", "deepspeed")
# raypar's own, in the order in which they are listed.
OWN = {name: f"raypar.parallel.{name}:STRATEGY" for name in IN_EVERY_CONFIG}
STRATEGIES = registered("raypar.strategies", StrategyTraits, OWN)


def strategy_options() -> dict[str, Option]:
    """Return the options of all strategies, each with the names of its strategies.

    Raises:
        RayparError: two strategies have different options of one name.
    """
    options: dict[str, Option] = {}
    for name, traits in STRATEGIES.items():
        for key, option in traits.options.items():
            others = options[key].strategies if key in options else ()
            option = replace(option, strategies=(*others, name))
            if key in options and replace(options[key], strategies=option.strategies) != option:
                message = f"strategy {name}: option {key} differs from that of {', '.join(others)}"
                raise RayparError(message, hint="rename it in the package that adds the strategy")
            options[key] = option
    return options


def layout_of(config: Config) -> WorkLayout:
    """Return how the workers of a complete config share a step."""
    return STRATEGIES[config["strategy"]].layout(config)


def num_shares(config: Config) -> int:
    """Return the number of shares of every batch: one per worker, unless some take the same samples."""
    return layout_of(config).num_shares


def pipeline_size(config: Config) -> int:
    """Return the number of workers in a pipeline; 1 without one."""
    return layout_of(config).pipeline_size


def tensor_size(config: Config) -> int:
    """Return the number of workers that each layer is split among; 1 if none is."""
    return layout_of(config).tensor_size


def sync_period(config: Config) -> int:
    """Return the number of steps between synchronisations, also for a stored config with an unknown strategy."""
    traits = STRATEGIES.get(config.get("strategy", ""))
    return int(config[traits.sync_every]) if traits and traits.sync_every else 1


def names_collectives(config: Config) -> bool:
    """Return this trait of a stored config's strategy; True if the strategy is unknown."""
    traits = STRATEGIES.get(config.get("strategy", ""))
    return traits is None or traits.names_collectives


def exchange_of(config: Config) -> Exchange:
    """Return how the workers of a stored config exchange gradients; on CPUs, they do it through the host."""
    traits = STRATEGIES.get(config.get("strategy", ""))
    by_strategy = traits.exchange if traits else Exchange.ALL_REDUCE
    return Exchange.HOST if config.get("device") == "cpu" and by_strategy is Exchange.ALL_REDUCE else by_strategy
