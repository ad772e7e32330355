"""Trainings in plain torch, one process on whole batches: what raypar's have to give, whatever cuts their batches.

Nothing of raypar's training code is used here, only what its documentation promises: the samples of epoch e, from 1 on,
come in the order of `order_of`; a global batch is a slice of it; all generators are seeded when ``data(config)`` is
called, and torch's again before ``model(config)``. Models are without dropout.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from raypar import Data, Split, Workload


def order_of(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch's samples."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def seeded(seed: int, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with every generator seeded."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return function(*args)


def rows(tree: Any, index: Any) -> Any:
    """Return some samples of a tensor, or of a tree of them."""
    return tree_map(lambda each: each[index], tree)


def size_of(tree: Any) -> int:
    """Return the number of samples of a tensor, or of a tree of them."""
    return len(tree_leaves(tree)[0])


@dataclass(frozen=True)
class Objective:
    """Loss of a whole batch.

    Attributes:
        loss: of outputs and targets, a scalar.
        weight: of a batch in the mean over an epoch's batches, of outputs and targets; None: its number of samples.
    """

    loss: Callable[[Any, Any], Tensor]
    weight: Callable[[Any, Any], float] | None = None


def once(outputs: Any, targets: Any) -> float:
    """Return the weight of a batch whose loss is a sum: every step counts alike."""
    return 1.0


@dataclass(frozen=True)
class Plain:
    """Training of a model in plain torch.

    Attributes:
        call: of model and inputs.
        samples: of data and the name of a split, its inputs and targets, of all samples.
        batches: of data, config, seed and epoch, pairs of inputs and targets, in place of slices of `samples`.
        optimizer: of model and config; None: SGD.
        dtype: of model and inputs that are floats.
    """

    objective: Objective
    call: Callable[[nn.Module, Any], Any] = lambda model, x: model(x)
    samples: Callable[[Any, str], tuple[Any, Any]] = lambda data, name: (
        getattr(data, name).inputs,
        getattr(data, name).targets,
    )
    batches: Callable[[Any, Mapping[str, Any], int, int], Iterable[tuple[Any, Any]]] | None = None
    optimizer: Callable[[nn.Module, Mapping[str, Any]], torch.optim.Optimizer] | None = None
    dtype: torch.dtype = torch.float32

    def train(self, workload: Any, config: Mapping[str, Any], seed: int = 0) -> Trained:
        """Train from scratch.

        Args:
            workload: has ``data`` and ``model``.
            config: with "epochs", "batch_size" and "lr"; also "drop_last" and "num_samples".
        """
        data = seeded(seed, workload.data, config)
        torch.manual_seed(seed)
        model = workload.model(config).to(self.dtype)
        if any(isinstance(each, nn.UninitializedParameter) for each in model.parameters()):
            with torch.no_grad():
                self._outputs(model, rows(self.samples(data, "train")[0], slice(2)))
        optimizer = (self.optimizer or _sgd)(model, config)
        reports = []
        for epoch in range(1, config["epochs"] + 1):
            model.train()
            total = weights = 0.0
            for x, y in self.batches_of(data, config, seed, epoch):
                optimizer.zero_grad()
                outputs = self._outputs(model, x)
                loss = self.objective.loss(outputs, y)
                loss.backward()
                optimizer.step()
                weight = float((self.objective.weight or (lambda _, y: size_of(y)))(outputs, y))
                total += weight * loss.item()
                weights += weight
            outputs, targets = self.evaluated(model, data)
            val_loss = float(self.objective.loss(outputs, targets))
            reports.append({"train_loss": total / weights, "val_loss": val_loss})
        return Trained(model, reports, outputs, targets)

    def evaluated(self, model: nn.Module, data: Any) -> tuple[Any, Any]:
        """Return outputs and targets of the whole validation set."""
        model.eval()
        x, targets = self.samples(data, "val")
        with torch.no_grad():
            return self._outputs(model, x), targets

    def batches_of(self, data: Any, config: Mapping[str, Any], seed: int, epoch: int) -> Iterable[tuple[Any, Any]]:
        """Yield the global batches of an epoch."""
        if self.batches is not None:
            yield from self.batches(data, config, seed, epoch)
            return
        x, y = self.samples(data, "train")
        for index in order_of(config.get("num_samples") or size_of(y), seed, epoch).split(config["batch_size"]):
            if len(index) == config["batch_size"] or not config.get("drop_last"):
                yield rows(x, index), rows(y, index)

    def _outputs(self, model: nn.Module, x: Any) -> Any:
        return self.call(model, tree_map(lambda each: each.to(self.dtype) if each.is_floating_point() else each, x))


def _sgd(model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=config["lr"])


@dataclass(frozen=True)
class Trained:
    """Trained model.

    Attributes:
        reports: ``train_loss`` and ``val_loss`` of each epoch.
        outputs, targets: of the whole validation set after the last one.
    """

    model: nn.Module
    reports: list[dict[str, float]]
    outputs: Any
    targets: Any


# ---- losses of every kind


@dataclass(frozen=True)
class Kind:
    """Workload with a loss of some kind, and the same loss of a whole batch in plain torch.

    Attributes:
        cuts: the loss of a batch follows from those of its parts.
        lr: at which it learns.
        has_one_tensor: inputs, outputs and targets are single tensors, as a pipeline needs.
    """

    workload: Workload
    plain: Plain
    cuts: bool = True
    lr: float = 0.1
    has_one_tensor: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)


NUM_TRAIN, NUM_VAL, NUM_INPUTS, NUM_CLASSES, NUM_TOKENS = 100, 50, 10, 5, 6
CLASS_WEIGHTS = torch.tensor([0.25, 1.0, 3.0, 0.5, 12.0])  # exact in any precision


def layers(num_outputs: int, *last: nn.Module) -> nn.Sequential:
    """Return a smooth network of four layers, which every strategy can cut."""
    sizes = [NUM_INPUTS, 16, 16, 16]
    hidden = [each for a, b in pairwise(sizes) for each in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(16, num_outputs), *last)


def _inputs() -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(NUM_TRAIN + NUM_VAL, NUM_INPUTS, generator=generator), generator


def _data(x: Any, y: Any) -> Data:
    train, val = slice(NUM_TRAIN), slice(NUM_TRAIN, None)
    return Data(train=Split(rows(x, train), rows(y, train)), val=Split(rows(x, val), rows(y, val)))


def classes(config: Any = None) -> Data:
    """Return samples of classes of very different sizes."""
    x, _ = _inputs()
    return _data(x, (x[:, 0] * 1.5 + x[:, 1]).sigmoid().mul(NUM_CLASSES + 1.5).sub(1.5).clamp(0).long())


def tokens(config: Any = None) -> Data:
    """Return sequences of class numbers, each padded with zeros from some place on."""
    x, generator = _inputs()
    y = torch.randint(1, NUM_CLASSES, (len(x), NUM_TOKENS), generator=generator)
    lengths = torch.randint(1, NUM_TOKENS + 1, (len(x), 1), generator=generator)
    return _data(x, y * (torch.arange(NUM_TOKENS) < lengths))


def values(config: Any = None) -> Data:
    """Return samples of a regression, shape ``(samples, 2)``."""
    x, generator = _inputs()
    return _data(x, x[:, :2].sin() + 0.3 * torch.randn(len(x), 2, generator=generator))


def shares(config: Any = None) -> Data:
    """Return a distribution over classes for each sample."""
    x, _ = _inputs()
    return _data(x, (2 * x[:, :NUM_CLASSES]).softmax(1))


def marks(config: Any = None) -> Data:
    """Return 0 or, for one in ten, 1; shape ``(samples, 1)``."""
    x, _ = _inputs()
    return _data(x, (x[:, :1] > 1.3).float())


def both(config: Any = None) -> Data:
    """Return a class number and a value for each sample."""
    x, _ = _inputs()
    return _data(x, {"kind": (x[:, 0] > 0).long() + (x[:, 1] > 1).long(), "value": x[:, 2:3].sin()})


def labelled(config: Any = None) -> Data:
    """Return samples as a model takes them that computes its loss itself."""
    x, _ = _inputs()
    y = (x[:, 0] > 0).long()
    return _data({"x": x, "labels": y}, y)


class WithLoss(nn.Module):
    """Model that returns its loss with its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean weighted by classes."""
    return F.cross_entropy(outputs, targets, weight=CLASS_WEIGHTS.to(outputs))


def weighted_pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as a sum and its weight."""
    weights = CLASS_WEIGHTS.to(outputs)[targets]
    return (F.cross_entropy(outputs, targets, reduction="none") * weights).sum(), weights.sum()


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over tokens that are no padding."""
    return F.cross_entropy(outputs, targets, reduction="none")[targets != 0].mean()


def masked_pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as a sum and the number of tokens."""
    mask = targets != 0
    return (F.cross_entropy(outputs, targets, reduction="none") * mask).sum(), mask.sum()


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a plain sum."""
    return F.mse_loss(outputs, targets, reduction="sum")


def divergence(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a sum over classes, the mean over samples."""
    return F.kl_div(outputs.log_softmax(1), targets, reduction="batchmean")


def focal_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of a focal loss."""
    each = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="none")
    return (each * (1 - (-each).exp()) ** 2).sum()


def focal_pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return a focal loss per positive sample, as a sum and their number and a constant."""
    return focal_sum(outputs, targets), targets.sum() + 0.0625 * len(targets)


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the quotient."""
    return focal_sum(outputs, targets) / (targets.sum() + 0.0625 * len(targets))


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss that compares each sample with all others of the batch."""
    scores = F.normalize(outputs, dim=1) @ F.normalize(targets.to(outputs), dim=1).T / 0.2
    return F.cross_entropy(scores, torch.arange(len(scores)))


def root(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the root of the mean square."""
    return F.mse_loss(outputs, targets).sqrt()


def several(outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of two losses."""
    return F.cross_entropy(outputs[:, :3], targets["kind"]) + 0.5 * F.mse_loss(outputs[:, 3:], targets["value"])


def _kind(
    loss: Any,
    data: Callable[..., Data],
    num_outputs: int = 2,
    *last: nn.Module,
    plain: Objective | None = None,
    **more: Any,
) -> Kind:
    workload = Workload(
        name="kind",
        model=lambda config: layers(num_outputs, *last),
        data=data,
        loss=loss,
        metrics={},
        metric="val_loss",
        mode="min",
    )
    return Kind(workload, Plain(plain or Objective(loss)), **more)


_unfold = nn.Unflatten(1, (NUM_CLASSES, NUM_TOKENS))
_ALL_TOKENS = NUM_CLASSES * NUM_TOKENS
_weights = Objective(weighted, lambda _, y: CLASS_WEIGHTS[y].sum())
_num_tokens = Objective(masked, lambda _, y: (y != 0).sum())
KINDS: Mapping[str, Kind] = {
    "mean": _kind(F.cross_entropy, classes, NUM_CLASSES),
    "class weights, torch's": _kind(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), classes, NUM_CLASSES, plain=_weights),
    "class weights, a pair": _kind(weighted_pair, classes, NUM_CLASSES, plain=_weights),
    "class weights, a function": _kind(weighted, classes, NUM_CLASSES, cuts=False),
    "class weights, smoothed": _kind(
        nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1),
        classes,
        NUM_CLASSES,
        plain=Objective(
            lambda o, y: F.cross_entropy(o, y, weight=CLASS_WEIGHTS.to(o), label_smoothing=0.1), _weights.weight
        ),
    ),
    "padding, torch's": _kind(nn.CrossEntropyLoss(ignore_index=0), tokens, _ALL_TOKENS, _unfold, plain=_num_tokens),
    "padding, a pair": _kind(masked_pair, tokens, _ALL_TOKENS, _unfold, plain=_num_tokens),
    "padding, a function": _kind(masked, tokens, _ALL_TOKENS, _unfold, cuts=False),
    "sum": _kind(squares, values, plain=Objective(squares, once), lr=0.003),
    "mean of sums": _kind(divergence, shares, NUM_CLASSES),
    "focal, a pair": _kind(focal_pair, marks, 1, plain=Objective(focal, lambda _, y: y.sum() + 0.0625 * len(y))),
    "contrastive": _kind(contrastive, values, cuts=False),
    "root of a mean": _kind(root, values, cuts=False),
    "several tasks": _kind(several, both, 4, has_one_tensor=False),
    "the model's own": Kind(
        Workload(
            name="kind",
            model=lambda config: WithLoss(),
            data=labelled,
            metrics={},
            metric="val_loss",
            mode="min",
        ),
        Plain(Objective(lambda outputs, _: outputs["loss"]), lambda model, x: model(**x)),
        has_one_tensor=False,
    ),
}


def largest_difference(reports: Iterable[Mapping[str, float]], right: Iterable[Mapping[str, float]]) -> float:
    """Return the largest relative difference between reports in the numbers that the right ones have."""
    return max(
        difference(report[key], expected[key])
        for report, expected in zip(reports, right, strict=True)
        for key in expected
    )


def difference(one: float, other: float) -> float:
    """Return the relative difference of two numbers; infinite where one of them is not finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if one == other or (math.isnan(one) and math.isnan(other)) else math.inf
    return abs(one - other) / max(abs(other), 1e-3)
