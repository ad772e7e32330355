"""Check of a model by backward passes of its first batch, before anything is trained.

It finds parameters without a gradient, parts of a batch that are too small for batch norm, and unusable optimizers. It
leaves weights and buffers unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from raypar.errors import Mistake
from raypar.parallel.loss import Loss
from raypar.parallel.strategy import Batch, DistContext, ForwardBackward, Gradients, parts_of
from raypar.study.strategy import STRATEGIES, num_shares, pipeline_size
from raypar.study.workload import Config, Workload
from raypar.train.checkpoint import restore
from raypar.train.data import Feed, TrainBatches
from raypar.train.optim import own_optimizer_mistakes
from raypar.units import counted

MAX_PASSES = 4  # over parts of the first batch; together they take about as long as one step
MAX_NAMED = 20  # parameters in a trial's environment
# torch's error, for its batch norm layers and for functional.batch_norm.
TOO_FEW_VALUES = "Expected more than 1 value per channel when training"


@dataclass(frozen=True)
class Checked:
    """Model that can be trained on the data, converted, with its loss and the conversion of its inputs."""

    model: nn.Module
    loss: Loss
    feed: Feed


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model, known before it is trained.

    Attributes:
        gradients: parameters without a gradient, known for several workers that share batches.
        num_norm_parts: parts of a batch that batch norm normalises separately; 0: no batch norm.
    """

    gradients: Gradients = field(default_factory=Gradients)
    num_norm_parts: int = 0

    def conditions(self, config: Config) -> dict[str, Any]:
        """Return fields of `raypar.study.conditions.RankConditions`."""
        facts: dict[str, Any] = {"batch_norm_parts": self.num_norm_parts} if self.num_norm_parts else {}
        if names := [*self.gradients.never, *self.gradients.at_times]:
            facts["without_gradient"] = tuple(names[:MAX_NAMED])
            if config["strategy"] == "ddp" and not config["static_graph"]:
                facts["finds_unused"] = True  # which costs time in each step
        return facts


def model_facts(
    workload: Workload,
    config: Config,
    checked: Checked,
    batches: TrainBatches,
    context: DistContext,
    num_workers: int,
) -> tuple[ModelFacts, list[Mistake]]:
    """Return facts of a model and mistakes in it, the same on every rank. All ranks call it.

    Args:
        checked: the complete model, as it was built.
        context: context of the ranks that check; one rank may check for all.
        num_workers: workers of the training.
    """
    model, autocast = checked.model, checked.feed.numerics.autocast
    gradients, mistakes = Gradients(), [*own_optimizer_mistakes(workload, config, model)]
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return ModelFacts(), mistakes  # its first batch initialises a lazy module
    do, batch = ForwardBackward(checked.loss, autocast, lambda value: value), next(batches.full(0))
    with _kept(model):
        model.train()
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
        mistakes += _small_part_mistakes(config, model, batch, do, batches.num_samples, num_workers)
        if num_workers > 1 and num_shares(config) > 1:
            gradients = _gradients(model, batch, do, context)
            mistakes += _gradient_mistakes(config, gradients)
    in_sync = bool(norms) and all(isinstance(m, nn.SyncBatchNorm) for m in norms)
    num_parts = parts_per_batch(config, 1 if in_sync else num_workers) if norms else 0
    return ModelFacts(gradients, num_parts), mistakes


def parts_per_batch(config: Config, num_workers: int) -> int:
    """Return the number of parts in which a batch passes through the model, over all workers."""
    if num_workers == 1:
        return int(config["accumulation_steps"])
    in_turn = config["num_microbatches"] if pipeline_size(config) > 1 else config["accumulation_steps"]
    return num_shares(config) * int(in_turn)


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Restore the state that passes of a model change: buffers, modes, gradients."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        model.zero_grad()
        with torch.no_grad():
            for buffer, before in buffers:
                restore(buffer, before)
        for module, mode in modes:
            module.training = mode


def _gradients(model: nn.Module, batch: Batch, do: ForwardBackward, context: DistContext) -> Gradients:
    """Run passes over parts of a batch on all ranks; return the parameters that get no gradient."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with_grad, sparse = torch.zeros(len(named), dtype=torch.float64), torch.zeros(len(named), dtype=torch.float64)
    num = 0
    # At least two samples each, for batch norm.
    for part, _ in parts_of(batch, max(1, min(MAX_PASSES, batch.num_samples // 2))):
        model.zero_grad()
        try:
            do.run(model, part)
        except Exception:  # the training raises it as well, with its traceback
            break
        with_grad += torch.tensor([p.grad is not None for _, p in named], dtype=torch.float64)
        sparse += torch.tensor([p.grad is not None and p.grad.is_sparse for _, p in named], dtype=torch.float64)
        num += 1
    *counts, total = context.sum(torch.cat([with_grad, sparse, torch.tensor([num], dtype=torch.float64)])).tolist()
    names = [name for name, _ in named]
    of_all = list(zip(names, counts[: len(names)], strict=True))
    return Gradients(
        never=tuple(name for name, count in of_all if total and not count),
        at_times=tuple(name for name, count in of_all if 0 < count < total),
        are_sparse=tuple(name for name, count in zip(names, counts[len(names) :], strict=True) if count),
    )


def _gradient_mistakes(config: Config, gradients: Gradients) -> Iterator[Mistake]:
    strategy, static = config["strategy"], config["static_graph"]
    traits = STRATEGIES[strategy]
    at_times = f"{', '.join(gradients.at_times[:3])} get a gradient in some passes only"
    if gradients.at_times and traits.needs_same_parameters:
        yield Mistake("strategy", strategy, f"needs the same parameters on all ranks: {at_times}", 'use strategy="ddp"')
    if gradients.at_times and strategy == "ddp" and static:
        yield Mistake("static_graph", static, f"needs the same parameters in all steps: {at_times}", "leave it out")
    elif gradients.are_missing and strategy == "ddp" and config["find_unused_parameters"] is False and not static:
        names = ", ".join([*gradients.never, *gradients.at_times][:3])
        hint = "leave it out, or freeze what is not trained: requires_grad_(False)"
        yield Mistake("find_unused_parameters", False, f"some parameters get no gradient in a pass: {names}", hint)
    if gradients.are_sparse and not traits.takes_sparse_gradients:
        problem = f"does not take sparse gradients, which {', '.join(gradients.are_sparse[:3])} get"
        yield Mistake("strategy", strategy, problem, 'use sparse=False in the model\'s layers, or strategy="ddp"')


def _small_part_mistakes(
    config: Config, model: nn.Module, batch: Batch, do: ForwardBackward, num_samples: int, num_workers: int
) -> Iterator[Mistake]:
    """Yield a mistake if a part of a batch is a single sample that batch norm can't normalise."""
    batch_size, num_parts = config["batch_size"], parts_per_batch(config, num_workers)
    last = 0 if config["drop_last"] else num_samples % batch_size
    if batch_size >= 2 * num_parts and (not last or last >= 2 * num_parts):
        return
    if _takes(model, next(parts_of(batch, max(1, batch.num_samples)))[0], do):
        return  # images have many values per channel
    shared = f"in {num_parts} parts ({counted(num_workers, 'worker')}), " if num_parts > 1 else ""
    if batch_size < 2 * num_parts:
        problem = (
            f"a batch goes through the model {shared or 'as it is, '}and batch norm can't normalise a single sample"
        )
        hint = f"use a batch_size of at least {2 * num_parts}"
        hint += ", fewer workers or fewer accumulation_steps" if num_parts > 1 else ""
        yield Mistake("batch_size", batch_size, problem, hint)
        return
    has = f"has {counted(last, 'sample')}"
    if shared:
        has += f" and goes through the model {shared.removesuffix(', ')}"
    problem = f"the last batch of an epoch {has}, and batch norm can't normalise a single sample"
    yield Mistake("batch_size", batch_size, problem, f"set drop_last=True, or num_samples={num_samples - last}")


def _takes(model: nn.Module, sample: Batch, do: ForwardBackward) -> bool:
    """Return whether batch norm takes a single sample."""
    try:
        do.run(model, sample)
    except ValueError as error:
        return TOO_FEW_VALUES not in str(error)
    except Exception:  # the training raises it as well, with its traceback
        return True
    return True
