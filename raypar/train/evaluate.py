"""Evaluation: the loss and every metric over a split, shared among the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Subset

from raypar.errors import Mistake, Shown, WorkloadError
from raypar.parallel.loss import Kind, Loss, Value, part_of
from raypar.parallel.strategy import DistContext, call
from raypar.study.workload import Config, Data, Split, Statistic, Workload
from raypar.train.data import Feed, mapped, moved, paired, pins_memory
from raypar.train.loss_kind import HINT_RATIO, NOT_OF_PARTS, kind_of_batch, loss_of
from raypar.train.precision import numerics_of
from raypar.train.saved_model import kept_model
from raypar.workloads.metrics import default_metrics, sum_and_weight

VAL_LOSS = "val_loss"


class Evaluation:
    """Loss and metrics of a model on ``Data.val``, shared among the ranks.

    Attributes:
        size: samples of the split.
        num_steps: batches that this rank evaluates.
    """

    def __init__(
        self, workload: Workload, data: Data, config: Config, context: DistContext, loss: Loss, feed: Feed
    ) -> None:
        self._loss, self._feed, self._name, self._is_verified = loss, feed, workload.name, False
        self._metrics: Mapping[str, Callable[[Any, Any], Any] | Statistic] = default_metrics(workload)
        self._numerics, self._context, self._transform = feed.numerics, context, data.transform
        batch_size = config["eval_batch_size"]
        samples = data.val if data.val is not None else data.val_dataset
        assert samples is not None, "a workload's data has val or val_dataset"
        self.size = len(samples)  # type: ignore[arg-type]
        # A loss of the whole batch needs all samples at once. Every rank evaluates them all, and one rank counts.
        rank, num_ranks = (0, 1) if loss.kind is Kind.WHOLE else (context.rank, context.world_size)
        begin, end = (part * self.size // num_ranks for part in (rank, rank + 1))
        # A rank without samples evaluates one that doesn't count, which gives the shapes.
        self._counts = end > begin and (num_ranks > 1 or context.rank == 0)
        self._mine = range(begin, max(end, begin + 1))
        self.num_steps = -(-len(self._mine) // batch_size)
        self._batches: Callable[[], Iterator[tuple[Any, Any, int]]]
        if isinstance(samples, Split):
            self._batches = lambda: self._from_memory(samples, batch_size)
        else:
            loader = DataLoader(
                Subset(samples, self._mine),
                batch_size,
                num_workers=config["num_loader_workers"],
                pin_memory=pins_memory(config, feed.numerics.device),
                collate_fn=data.collate,
            )
            self._batches = lambda: self._from_loader(loader, batch_size)

    def sample(self) -> Any:
        """Return the model's arguments for two samples, or for one if there is only one."""
        x, _, _ = next(self._batches())
        return mapped(Tensor.clone, part_of(x, slice(2)))  # a view would keep the memory of the whole batch

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``val_loss`` and every metric of a complete model; the same on every rank."""
        sums: dict[str, Tensor] = {}
        whole: list[tuple[Any, Any]] = []
        model.eval()
        with torch.no_grad():  # not in inference mode, because the model may cache tensors that it trains with later
            for x, y, size in self._batches():
                with self._numerics.autocast():
                    outputs = call(model, x)
                    if self._loss.kind is Kind.WHOLE:
                        whole.append((outputs, y))
                        parts = {}
                    else:
                        parts = {VAL_LOSS: self._sums(self._loss(outputs, y), size)}
                        self._verify(outputs, y)
                parts |= {name: _collected(metric, outputs, y, size) for name, metric in self._metrics.items()}
                sums = {name: sums[name] + part if sums else part for name, part in parts.items()}
            if whole:
                with self._numerics.autocast():
                    sums = {VAL_LOSS: self._sums(self._loss(*_joined(whole)), self.size), **sums}
        scores = {}
        for name, local in sums.items():
            total = self._context.sum(local.cpu() if self._counts else torch.zeros_like(local, device="cpu"))
            statistic = self._metrics.get(name)
            if isinstance(statistic, Statistic):
                scores[name] = statistic.finish(total)
            else:
                value, weight = total.tolist()
                is_sum = name == VAL_LOSS and self._loss.kind is Kind.SUM
                scores[name] = value if is_sum else value / weight if weight else math.nan
        return scores

    def _verify(self, outputs: Any, targets: Any) -> None:
        """Compare the loss of the first batch with those of its parts, because earlier checks saw only a few samples.

        Raises:
            WorkloadError: the loss turns out to be neither a mean nor a sum.
        """
        is_open, self._is_verified = not self._is_verified, True
        if is_open and self._loss.kind in (Kind.MEAN, Kind.SUM) and not self._loss.is_own:
            kind = kind_of_batch(self._loss.function, outputs, targets)
            if kind is Kind.WHOLE:
                shown = Shown("the first validation batch")
                raise WorkloadError.of(self._name, [Mistake("loss(outputs, targets)", shown, NOT_OF_PARTS, HINT_RATIO)])

    def _sums(self, value: Value, size: int) -> Tensor:
        """Return the sum and the weight of the losses of a batch, shape ``(2,)``."""
        noted = _in_double(self._loss.noted(value)[None])
        return torch.cat(self._loss.sums(noted, torch.tensor([size], device=noted.device)))

    def _from_memory(self, split: Split, batch_size: int) -> Iterator[tuple[Any, Any, int]]:
        device = self._numerics.device
        for at in range(self._mine.start, self._mine.stop, batch_size):
            part = slice(at, min(self._mine.stop, at + batch_size))
            x, y = moved(part_of((split.inputs, split.targets), part), device)
            x = self._transform(x) if self._transform else x
            yield self._feed(x), self._feed.targets(y), part.stop - at

    def _from_loader(self, loader: DataLoader[Any], batch_size: int) -> Iterator[tuple[Any, Any, int]]:
        for at, batch in zip(range(0, len(self._mine), batch_size), loader, strict=True):
            x, y = moved(paired(batch), self._numerics.device)
            yield self._feed(x), self._feed.targets(y), min(batch_size, len(self._mine) - at)


def _collected(metric: Callable[[Any, Any], Any] | Statistic, outputs: Any, targets: Any, size: int) -> Tensor:
    """Return a tensor to add up over batches: that of a statistic, or sum and weight of scores, shape ``(2,)``."""
    if isinstance(metric, Statistic):
        return _in_double(metric.collect(outputs, targets))
    total, weight = sum_and_weight(metric(outputs, targets), size)
    return torch.stack([_in_double(total), _in_double(torch.as_tensor(weight, device=total.device))])


def _in_double(values: Tensor) -> Tensor:
    """Return values in float64; on the CPU if the device is Apple's GPU, which has no float64."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _joined(batches: Sequence[tuple[Any, Any]]) -> Any:
    """Join the outputs and targets of all batches."""
    if len(batches) == 1:
        return batches[0]
    return tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *batches)


def evaluate_test_split(workload: Workload, config: Config, model_dir: Path) -> dict[str, float]:
    """Return ``loss`` and every metric of a kept model on ``Data.test``, computed on the CPU in this process.

    Raises:
        OSError: the weights can't be read.
        ValueError: the data has no test split.
    """
    assert workload.data is not None
    device = torch.device("cpu")
    data = workload.data(config)
    if data.test is None:
        raise ValueError(f"workload {workload.name} has has_test=True, but its data has no test split")
    numerics = numerics_of(config, device)
    model = kept_model(workload, config, numerics, model_dir)
    sample = part_of(data.test.inputs, slice(2))
    feed = Feed(numerics, model, data.transform(sample) if data.transform else sample)
    loss, data = loss_of(workload, data, model, numerics, feed), replace(data, val=data.test)
    scores = Evaluation(workload, data, config, DistContext(0, 1, device), loss, feed)(model)
    return {"loss": scores.pop("val_loss"), **scores}
