"""Evaluation: the loss and every metric over a split, shared among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from raypar.parallel.strategy import DistContext
from raypar.study.workload import Config, Data, Split, Statistic, Workload
from raypar.train.data import pins_memory
from raypar.train.precision import Numerics, numerics_of
from raypar.train.saved_model import WEIGHTS_FILE
from raypar.workloads.metrics import default_metrics, sum_and_weight


class Evaluation:
    """Loss and metrics of a model on ``Data.val``, shared among the ranks.

    Attributes:
        size: samples of the split.
        num_steps: batches that this rank evaluates.
    """

    def __init__(
        self, workload: Workload, data: Data, config: Config, numerics: Numerics, context: DistContext
    ) -> None:
        self._loss_of: Callable[..., Tensor] = workload.loss or nn.functional.cross_entropy
        self._metrics = default_metrics(workload)
        self._numerics, self._context, self._transform = numerics, context, data.transform
        batch_size = config["eval_batch_size"]
        samples = data.val if data.val is not None else data.val_dataset
        assert samples is not None, "a workload's data has val or val_dataset"
        self.size = len(samples)  # type: ignore[arg-type]
        begin, end = (part * self.size // context.world_size for part in (context.rank, context.rank + 1))
        # A rank without samples evaluates one that doesn't count: it needs the shapes.
        self._counts = end > begin
        self._mine = range(begin, max(end, begin + 1))
        self.num_steps = -(-len(self._mine) // batch_size)
        self._batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
        if isinstance(samples, Split):
            self._batches = lambda: self._from_memory(samples, batch_size)
        else:
            loader = DataLoader(
                Subset(samples, self._mine),
                batch_size,
                num_workers=config["num_loader_workers"],
                pin_memory=pins_memory(config, numerics.device),
            )
            self._batches = lambda: self._from_loader(loader)

    def sample(self) -> Tensor:
        """Return two samples as a model takes them (one, if there is only one)."""
        x, _ = next(self._batches())
        return x[:2]

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``val_loss`` and every metric of a complete model; the same on every rank."""
        sums: dict[str, Tensor] = {}
        model.eval()
        with torch.inference_mode():
            for x, y in self._batches():
                with self._numerics.autocast():
                    outputs = model(x)
                    parts = {"val_loss": self._loss_of(outputs, y).double() * len(y)}
                for name, metric in self._metrics.items():
                    if isinstance(metric, Statistic):
                        parts[name] = metric.collect(outputs, y).double()
                    else:
                        pair = sum_and_weight(metric(outputs, y), len(y))
                        parts[name] = torch.stack([torch.as_tensor(part, device=y.device).double() for part in pair])
                sums = {name: sums[name] + part if sums else part for name, part in parts.items()}
        scores = {}
        for name, local in sums.items():
            total = self._context.sum(local.cpu() if self._counts else torch.zeros_like(local, device="cpu"))
            of = self._metrics.get(name)
            if isinstance(of, Statistic):
                scores[name] = of.finish(total)
            else:
                scores[name] = float(total) / self.size if of is None else float(total[0] / total[1])
        return scores

    def _from_memory(self, split: Split, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        device = self._numerics.device
        for at in range(self._mine.start, self._mine.stop, batch_size):
            part = slice(at, min(self._mine.stop, at + batch_size))
            x = split.inputs[part].to(device)
            yield self._numerics.cast(self._transform(x) if self._transform else x), split.targets[part].to(device)

    def _from_loader(self, loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        device = self._numerics.device
        for x, y in loader:
            yield self._numerics.cast(x.to(device, non_blocking=True)), y.to(device, non_blocking=True)


def evaluate_test_split(workload: Workload, config: Config, model_dir: Path) -> dict[str, float]:
    """Return ``loss`` and every metric of a kept model on ``Data.test``, computed in this process on the CPU.

    Raises:
        OSError: the weights can't be read.
        ValueError: the data has no test split.
    """
    assert workload.model is not None and workload.data is not None
    device = torch.device("cpu")
    data = workload.data(config)
    if data.test is None:
        raise ValueError(f"workload {workload.name} has has_test=True, but its data has no test split")
    numerics = numerics_of(config, device)
    model = numerics.convert(workload.model(config))
    model.load_state_dict(torch.load(model_dir / WEIGHTS_FILE, weights_only=True))
    evaluation = Evaluation(workload, replace(data, val=data.test), config, numerics, DistContext(0, 1, device))
    scores = evaluation(model)
    return {"loss": scores.pop("val_loss"), **scores}
