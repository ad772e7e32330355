"""Kind of a workload's loss, from a comparison of the loss of some samples with the losses of parts of them."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, TensorDataset, default_collate

from raypar.parallel.loss import Kind, Loss, Value, part_of
from raypar.study.workload import Data, Workload
from raypar.train.data import Feed, evaluated, first_samples, mapped, moved, paired
from raypar.train.generators import generators_kept, seed_torch
from raypar.train.precision import Numerics

NOT_OF_PARTS = "would train on another loss: the loss of a batch is not the mean of its samples' losses"
HINT_RATIO = (
    "return (sum, weight) from the loss, such as (losses.sum(), weights.sum()), which add up over workers and batches; "
    "or use one worker and accumulation_steps=1"
)
IGNORED_CLASS = -100  # torch's default
NUM_SAMPLES, MAX_TELLING = 12, 32
MAX_SMALL = 64  # values of a sample
MAX_CUT_BYTES = 16 * 2**20  # of outputs and targets, whose parts are copies
MAX_READ, MAX_READ_S = 64, 0.5  # samples to choose from, if a data set is read one by one
MAX_ROWS, MAX_VALUES = 2**14, 2**20  # to choose from in a tensor in memory; the larger limit counts
# Relative difference between the loss of a batch and that of its parts. Real differences are far larger.
TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-7, torch.float32: 1e-4}
COUPLED = 1e-2  # relative difference between a sample's outputs in two batches


def loss_of(workload: Workload, data: Data, model: nn.Module, numerics: Numerics, feed: Feed) -> Loss:
    """Return the training loss of a workload's model, with its kind. The random number generators are unchanged.

    Args:
        model: converted, on the device.
    """
    loss = workload.loss
    if isinstance(loss, nn.Module):
        loss.to(numerics.device, numerics.dtype)  # its class weights
    try:
        with generators_kept(numerics.device), _without_zeros(model), warnings.catch_warnings(action="ignore"):
            return _recognised(workload, data, Probe(model, data, numerics, feed))
    except Exception:  # from the user's data, model or loss: reported elsewhere
        return Loss(loss or functional.cross_entropy)


@contextlib.contextmanager
def _without_zeros(model: nn.Module) -> Iterator[None]:
    """Fill zero parameters temporarily, because with a last layer of zeros all losses are equal."""
    zeros = [each for each in model.parameters() if each.is_floating_point() and not each.any()]
    with torch.no_grad():
        for each in zeros:
            each.normal_(std=0.1)
    try:
        yield
    finally:
        with torch.no_grad():
            for each in zeros:
                each.zero_()


def _recognised(workload: Workload, data: Data, probe: Probe) -> Loss:
    loss = workload.loss
    if loss is None and own_loss(probe.outputs, None) is not None:
        return Loss(own_loss, _kind_by_model(own_loss, probe), is_own=True)
    if _counts_some_targets_only(loss, data, probe):
        return Loss(as_ratio(loss), Kind.RATIO)
    function = loss or functional.cross_entropy
    return Loss(function, _kind_by_outputs(function, probe))


class Probe:
    """Some training samples (`inputs` before `Feed`) and the model's outputs for them in evaluation mode."""

    def __init__(self, model: nn.Module, data: Data, numerics: Numerics, feed: Feed) -> None:
        self._model, self._numerics, self._feed = model, numerics, feed
        inputs, targets = telling_samples(data)
        self.num_samples = num_rows(targets)
        if data.transform is not None and data.train is not None:
            inputs = data.transform(inputs)
        self.inputs, targets = moved((inputs, targets), numerics.device)
        self.targets = feed.targets(targets)
        self.outputs = self.run(self.inputs)

    def run(self, inputs: Any, seed: int = 0) -> Any:
        seed_torch(seed, self._numerics.device.type)
        return evaluated(self._model, self._feed(inputs), self._numerics)

    @property
    def has_rows(self) -> bool:
        """True if each tensor of the outputs has a row per sample."""
        leaves = [leaf for leaf in tree_leaves(self.outputs) if isinstance(leaf, Tensor)]
        return bool(leaves) and all(leaf.dim() and len(leaf) == self.num_samples for leaf in leaves)

    @property
    def is_random(self) -> bool:
        """True if the model draws random numbers in evaluation mode."""
        again = self.run(self.inputs, seed=1)
        return not _are_close(self.outputs, again)

    @property
    def couples_samples(self) -> bool:
        """True if a sample's outputs depend on the other samples of its batch."""
        some = torch.arange(0, self.num_samples, 3)
        expected = part_of(self.outputs, some)
        return not _are_close(expected, self.run(part_of(self.inputs, some))) and not self.is_random


def _are_close(one: Any, other: Any) -> bool:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    if any(a.shape != b.shape for a, b in tensors):
        return False
    tensors = [(a.cpu().double(), b.cpu().double()) for a, b in tensors]  # Apple's GPUs have no float64
    scales = (COUPLED * float(a.abs().mean().nan_to_num()) for a, _ in tensors)
    return all(
        torch.allclose(a, b, COUPLED, scale, equal_nan=True) for (a, b), scale in zip(tensors, scales, strict=True)
    )


def num_rows(tree: Any) -> int:
    """Return the number of samples of a tensor or a tree of tensors."""
    return next(len(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


# ---- known losses


def own_loss(outputs: Any, _targets: Any) -> Any:
    """Return the loss that a model has computed itself; None if its outputs have none."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return None if isinstance(outputs, Tensor) else getattr(outputs, "loss", None)


def takes_classes(loss: Any) -> bool:
    """Return whether a loss is torch's cross-entropy or negative log-likelihood, which take class numbers."""
    functions = (None, functional.cross_entropy, functional.nll_loss)
    return any(loss is each for each in functions) or isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))


def as_ratio(loss: Any) -> Callable[[Tensor, Tensor], Value]:
    """Convert one of torch's class losses, a mean, to a function that returns its sum and its weight.

    torch divides the sum of the losses by the sum of the weights of the targets' classes, without ignored targets
    (https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html).
    """
    ignored, weights = getattr(loss, "ignore_index", IGNORED_CLASS), getattr(loss, "weight", None)
    if isinstance(loss, nn.Module):
        summed: Any = copy.copy(loss)
        summed.reduction = "sum"
    else:
        summed = partial(loss or functional.cross_entropy, reduction="sum")

    def pair(outputs: Tensor, targets: Tensor) -> Value:
        counted = targets[targets != ignored]
        return summed(outputs, targets), len(counted) if weights is None else weights[counted].sum()

    return pair


def _counts_some_targets_only(loss: Any, data: Data, probe: Probe) -> bool:
    """Return whether a loss is one of torch's means over targets that are weighted or may be ignored."""
    targets = probe.targets
    is_known = takes_classes(loss) and isinstance(probe.outputs, Tensor) and isinstance(targets, Tensor)
    if not is_known or targets.is_floating_point() or getattr(loss, "reduction", "mean") != "mean":
        return False
    if getattr(loss, "weight", None) is not None:
        return True
    ignored = getattr(loss, "ignore_index", IGNORED_CLASS)
    splits = [split.targets for split in (data.train, data.val, data.test) if split is not None]
    is_read_one_by_one = data.train is None or data.val is None
    return any(bool((each == ignored).any()) for each in (targets, *splits)) or (
        is_read_one_by_one and targets.dim() > 1
    )


# ---- other losses


def _kind_by_outputs(loss: Callable[..., Any], probe: Probe) -> Kind:
    """Return the kind of a loss from the model's outputs, in float64 if the loss takes it."""
    if not probe.has_rows:
        return _kind_by_model(loss, probe)
    if probe.num_samples > 2 and probe.couples_samples:
        return Kind.WHOLE
    pair = probe.outputs, probe.targets
    for convert in (_in_double, lambda given: given):
        # Constants of the loss may be of another type, and Apple's GPUs have no float64.
        with contextlib.suppress(Exception):
            return find_kind(partial(_loss_of_part, loss, convert(pair)), probe.num_samples)
    return Kind.MEAN


def _in_double(tree: Any) -> Any:
    return mapped(lambda each: each.double() if each.is_floating_point() else each, tree)


def kind_of_batch(loss: Callable[..., Any], outputs: Any, targets: Any) -> Kind:
    """Return the kind of a loss from a batch of outputs and targets, or from its first `MAX_CUT_BYTES`.

    `MEAN` if the batch can't be cut, and for torch's class losses.
    """
    size = num_rows(targets)
    leaves = [leaf for leaf in tree_leaves((outputs, targets)) if isinstance(leaf, Tensor)]
    if takes_classes(loss) or any(not leaf.dim() or len(leaf) != size for leaf in leaves):
        return Kind.MEAN
    num = min(size, max(NUM_SAMPLES, MAX_CUT_BYTES * size // max(1, sum(leaf.nbytes for leaf in leaves))))
    return find_kind(partial(_loss_of_part, loss, part_of((outputs, targets), slice(num))), num)


def _loss_of_part(loss: Callable[..., Any], pair: tuple[Any, Any], part: Tensor | slice) -> Any:
    return loss(*part_of(pair, part))


def _kind_by_model(loss: Callable[..., Any], probe: Probe) -> Kind:
    """Return the kind of a loss by running the model on the parts, for outputs without a row per sample."""
    kind = find_kind(
        lambda part: loss(probe.run(part_of(probe.inputs, part)), part_of(probe.targets, part)), probe.num_samples
    )
    return Kind.MEAN if kind is Kind.WHOLE and probe.is_random else kind


def find_kind(loss: Callable[[Any], Any], num_samples: int) -> Kind:
    """Return the kind of a loss by comparing it with the losses of parts of its batch.

    `WHOLE` also if the loss of a part is not finite or can't be computed.

    Args:
        loss: returns a number or a pair for some of the samples, given as a tensor of indices or ``slice(None)``.
    """
    value = loss(slice(None))
    if isinstance(value, tuple):
        return Kind.RATIO
    if num_samples < 2 or not bool(torch.isfinite(value)):
        return Kind.MEAN  # there is nothing to compare
    whole, tolerance = float(value), TOLERANCES.get(value.dtype, 1e-2)
    is_mean = is_sum = True
    for parts in partitions(num_samples):
        try:
            losses = [float(loss(part)) for part in parts]
        except Exception:  # the loss may take no other number of samples
            return Kind.WHOLE
        shares = [len(part) / num_samples for part in parts]
        scale = tolerance * max(abs(whole), *(abs(each) for each in losses), 1e-6)
        mean, total = sum(share * each for share, each in zip(shares, losses, strict=True)), sum(losses)
        is_mean, is_sum = is_mean and abs(whole - mean) <= scale, is_sum and abs(whole - total) <= scale
    return Kind.MEAN if is_mean else Kind.SUM if is_sum else Kind.WHOLE


def partitions(num_samples: int) -> Iterator[Sequence[Tensor]]:
    """Yield some partitions of the samples into two and three parts, even and uneven."""
    generator = torch.Generator().manual_seed(num_samples)
    third = num_samples // 3
    for sizes in ([num_samples // 2], [max(1, num_samples // 4)], [1], [third, third]):
        order = torch.randperm(num_samples, generator=generator)
        kept = [size for size in sizes if size]
        yield order.split([*kept, num_samples - sum(kept)])  # type: ignore[no-untyped-call]


# ---- samples


def telling_samples(data: Data) -> tuple[Any, Any]:
    """Return inputs, not transformed, and targets of samples that a loss may weight differently."""
    if data.train is not None:
        rows = telling_rows((data.train.targets, _small_leaves(data.train.inputs)))
        return part_of(data.train.inputs, rows), part_of(data.train.targets, rows)
    if data.train_loader is not None:
        return first_samples(data, NUM_SAMPLES)
    dataset: Any = data.train_dataset
    size, until_s = len(dataset), time.monotonic() + MAX_READ_S
    collate = data.collate or default_collate
    if (targets := known_targets(dataset)) is not None:
        return paired(collate([dataset[row] for row in telling_rows(targets).tolist()]))
    samples = []
    for index in torch.linspace(0, size - 1, min(MAX_READ, size)).long().tolist():
        samples.append(dataset[index])
        if time.monotonic() > until_s and len(samples) >= NUM_SAMPLES:
            break
    inputs, targets = paired(collate(samples))
    rows = telling_rows((targets, _small_leaves(inputs)))
    return paired(collate([samples[row] for row in rows.tolist()]))


def _small_leaves(inputs: Any) -> list[Tensor]:
    """Return possible labels or weights among several inputs, which a model with its own loss may use."""
    leaves = [] if isinstance(inputs, Tensor) else tree_leaves(inputs)
    return [each for each in leaves if isinstance(each, Tensor) and each.dim() and each[0].numel() <= MAX_SMALL]


def known_targets(dataset: Any) -> Tensor | None:
    """Return the targets of a data set that keeps them in memory, as in torch and torchvision; None if unknown."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1]
    if isinstance(dataset, Subset):
        whole = known_targets(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(list(dataset.indices), dtype=torch.int64)]
    for name in ("targets", "labels"):
        with contextlib.suppress(Exception):  # a data set may have anything under this name
            targets = torch.as_tensor(getattr(dataset, name))
            if targets.dim() and len(targets) == len(dataset):
                return targets
    return None


def telling_rows(tree: Any) -> Tensor:
    """Return the indices of at most `MAX_TELLING` samples that differ the most; the others are spread evenly.

    For integers: the samples with the fewest and the most occurrences of the smallest, largest, most frequent and
    rarest value (padding, ignored positions, rare classes). For floats: those with the fewest and the most zeros and
    NaN, and with the smallest and largest value (weights).

    Args:
        tree: targets or similar, a tensor or a tree of tensors.
    """
    size, chosen = num_rows(tree), list[list[int]]()
    for leaf in (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim() and leaf.numel()):
        looked_at = leaf[: max(MAX_ROWS, MAX_VALUES // leaf[0].numel())]
        rows = looked_at.reshape(len(looked_at), -1)
        if rows.is_complex():
            rows = torch.view_as_real(rows).flatten(1)
        if rows.is_floating_point():
            present = rows.nan_to_num()
            scores = [rows.isnan().sum(1), present.amax(1), present.amin(1), (rows == 0).sum(1)]
        else:
            values, times = torch.unique(rows, return_counts=True)
            kinds = {int(values[at]) for at in (0, -1, int(times.argmax()), int(times.argmin()))}
            scores = [(rows == value).sum(1) for value in sorted(kinds)]
        chosen.append([int(row) for score in scores for row in (score.argmax(), score.argmin())])
    in_turns = [row for of_leaves in zip_longest(*chosen) for row in of_leaves if row is not None]
    telling = list(dict.fromkeys(in_turns))[:MAX_TELLING]
    spread = torch.linspace(0, size - 1, min(NUM_SAMPLES, size)).long().tolist()
    return torch.tensor(list(dict.fromkeys([*telling, *spread]))[: max(NUM_SAMPLES, len(telling))])
