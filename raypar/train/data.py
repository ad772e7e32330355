"""Batches. The global batch of a step never depends on the number of workers.

Inputs and targets are tensors, or trees of dicts and tuples of tensors with a row for each sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate

from raypar.parallel.loss import part_of
from raypar.parallel.strategy import Batch, call
from raypar.study.workload import Config, Data, Split, first_tensor
from raypar.train.precision import Numerics, fitted


class Share(NamedTuple):
    """A rank's part of one global batch, with the `weight`, `num_samples` and `num_global` of its `Batch`."""

    indices: Tensor  # into the training set, shape (num_local,)
    weight: float
    num_samples: int
    num_global: int


def mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to a tensor, or to every tensor of a tree."""
    return function(tree) if isinstance(tree, Tensor) else tree_map_only(Tensor, function, tree)


def moved(tree: Any, device: torch.device) -> Any:
    """Return a batch on a device; leaves that can't be moved are unchanged."""
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=True)
    return tree_map(lambda each: each.to(device, non_blocking=True) if hasattr(each, "to") else each, tree)


def paired(sample: Any) -> tuple[Any, Any]:
    """Split a sample of a data set, or a batch of samples, into inputs and targets.

    Raises:
        TypeError: `sample` is neither a mapping nor a tuple of two or more.
    """
    if isinstance(sample, Mapping):
        sample = dict(sample)
        return sample, sample
    if not isinstance(sample, (tuple, list)) or len(sample) < 2:
        raise TypeError("a sample is a pair of input and target, a longer tuple with the target last, or a dict")
    *inputs, target = sample
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), target


class Feed:
    """Conversion of a batch's inputs to the model's arguments, by name or by position, in the model's dtype.

    Args:
        model: its ``forward`` decides whether a dict or tuple is one argument or several, and the type of integer
            inputs. None: the inputs are single tensors.
        inputs: some samples after the data's transform.

    Attributes:
        numerics: with the types of integer inputs that the model takes.
    """

    def __init__(self, numerics: Numerics, model: nn.Module | None = None, inputs: Any = None) -> None:
        self.numerics = numerics
        self._is_one_argument = model is not None and _takes_as_one(model, inputs)
        if model is not None:
            self.numerics = fitted(numerics, inputs, partial(self._run, model, inputs))

    def targets(self, targets: Any) -> Any:
        """Return targets with float64, numpy's default, converted to the model's dtype."""
        dtype = self.numerics.dtype
        return mapped(lambda each: each.to(dtype) if each.dtype == torch.float64 else each, targets)

    def _run(self, model: nn.Module, inputs: Any, numerics: Numerics) -> None:
        self.numerics = numerics
        evaluated(model, self(moved(inputs, numerics.device)), numerics)

    def __call__(self, inputs: Any) -> Any:
        if isinstance(inputs, Tensor):
            return self.numerics.cast(inputs)
        cast = tree_map_only(Tensor, self.numerics.cast, dict(inputs) if isinstance(inputs, Mapping) else inputs)
        if self._is_one_argument:
            return (cast,)
        return tuple(cast) if isinstance(cast, list) else cast


def evaluated(model: nn.Module, inputs: Any, numerics: Numerics) -> Any:
    """Return a model's outputs in evaluation mode, without gradients.

    Not in inference mode, because the model may cache tensors that it trains with later.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), numerics.autocast():
            return call(model, inputs)
    finally:
        for module, mode in modes:
            module.training = mode


def first_samples(data: Data, num_samples: int) -> tuple[Any, Any]:
    """Return inputs and targets of the first training samples, the inputs transformed."""
    if data.train is not None:
        inputs, targets = part_of((data.train.inputs, data.train.targets), slice(num_samples))
        return (data.transform(inputs) if data.transform else inputs), targets
    if data.train_loader is not None:
        return paired(next(iter(data.train_loader(0, 1, num_samples))))
    dataset: Any = data.train_dataset
    return paired((data.collate or default_collate)([dataset[i] for i in range(min(num_samples, len(dataset)))]))


def _takes_as_one(model: nn.Module, inputs: Any) -> bool:
    try:
        signature = inspect.signature(model.forward)
        if isinstance(inputs, Mapping):
            signature.bind(**inputs)
        elif isinstance(inputs, (tuple, list)):
            signature.bind(*inputs)
        else:
            return not isinstance(inputs, Tensor)
    except (TypeError, ValueError):  # the model has other arguments
        return True
    return False


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of an epoch's samples, shape ``(num_samples,)``; it depends only on seed and epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_samples, generator=generator)


def shares(order: Tensor, batch_size: int, rank: int, num_shares: int, *, drop_last: bool) -> Iterator[Share]:
    """Yield a rank's share of each global batch ``order[step * batch_size : (step + 1) * batch_size]``.

    The ranks' parts are contiguous and differ in size by at most one sample. A rank without a sample of a short last
    batch takes the batch's first one with weight 0, because it must join the collectives.
    """
    for batch in order.split(batch_size):  # type: ignore[no-untyped-call]
        size = len(batch)
        if drop_last and size < batch_size:
            return
        begin, end = rank * size // num_shares, (rank + 1) * size // num_shares
        if num_shares == 1:
            yield Share(batch, 1.0, size, size)
        elif begin == end:
            yield Share(batch[:1], 0.0, 0, size)
        else:
            yield Share(batch[begin:end], (end - begin) * num_shares / size, end - begin, size)


def num_steps(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of steps of an epoch."""
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


class TrainBatches:
    """One rank's share of every global batch of a trial, epoch by epoch.

    The data has enough samples, see `raypar.train.data_check`.

    Args:
        config: the trial's complete config.
        seed: together with the epoch, determines the order of the samples.
        share: this rank's share of a batch and the number of shares, see `Strategy.share`.
        feed: conversion of the model's inputs.

    Attributes:
        num_samples: training samples of an epoch.
    """

    def __init__(self, data: Data, config: Config, seed: int, share: tuple[int, int], feed: Feed) -> None:
        self._config, self._seed, self._batch_size = config, seed, config["batch_size"]
        self._stream: _Stream
        if data.train_loader is not None:
            loader = data.train_loader(*share, self._batch_size // share[1])
            self.steps_per_epoch = len(loader)
            self.num_samples = self.steps_per_epoch * self._batch_size
            self._stream = _own_loader(loader, share, self._batch_size, feed)
            return
        samples: Any = data.train if data.train is not None else data.train_dataset
        self.num_samples = config["num_samples"] or len(samples)
        self.steps_per_epoch = num_steps(self.num_samples, self._batch_size, drop_last=config["drop_last"])
        (rank, num_shares), drop_last = share, config["drop_last"]
        split = partial(shares, batch_size=self._batch_size, rank=rank, num_shares=num_shares, drop_last=drop_last)
        if config["loader"] == "resident" and data.train is not None:
            self._stream = _resident(data.train, data.transform, self.num_samples, split, feed)
        else:
            self._stream = _dataloader(data, config, split, feed)

    def warm_up(self, *, with_short_batch: bool) -> Iterator[Batch]:
        """Yield the batches of the warm-up steps.

        Args:
            with_short_batch: add a batch of the size of an epoch's short last batch, if there is one.
        """
        order = self._order(0)
        if num_warmup_steps := self._config["num_warmup_steps"]:
            yield from self._stream(order[: num_warmup_steps * self._batch_size])
            if with_short_batch and not self._config["drop_last"] and (short := len(order) % self._batch_size):
                yield from self._stream(order[:short])

    def segments(self, steps: range) -> Iterator[Iterator[Batch]]:
        """Yield the batches of these steps in parts: an epoch, or ``eval_every_steps`` steps.

        Consume each part before the next one.
        """
        epochs = self._epochs(steps)
        if num := self._config["eval_every_steps"]:
            batches = chain.from_iterable(epochs)
            epochs = (islice(batches, num) for _ in range(-(-len(steps) // num)))
        yield from epochs

    def full(self, epoch: int) -> Iterator[Batch]:
        """Yield full batches without end, starting with `epoch`."""
        num_full = self.num_samples // self._batch_size * self._batch_size or None
        for number in count(epoch):
            yield from self._stream(self._order(number)[:num_full], epoch=number)

    def _order(self, epoch: int) -> Tensor:
        return epoch_order(self.num_samples, self._seed, epoch)

    def _epochs(self, steps: range) -> Iterator[Iterator[Batch]]:
        """Yield the batches of these steps, epoch by epoch; the first epoch is 1."""
        first, num_skipped = divmod(steps.start, self.steps_per_epoch)
        for epoch in range(first, steps.stop // self.steps_per_epoch):
            skip = num_skipped if epoch == first else 0
            yield self._stream(self._order(epoch + 1)[skip * self._batch_size :], epoch=epoch + 1, num_skipped=skip)


Splitter: TypeAlias = Callable[[Tensor], Iterator[Share]]  # of an epoch's order into this rank's shares
Transform: TypeAlias = Callable[[Any], Any]


class _Stream(Protocol):
    """Function that yields this rank's batches of an epoch, or those after `num_skipped` steps."""

    def __call__(self, order: Tensor, *, epoch: int = 0, num_skipped: int = 0) -> Iterator[Batch]: ...


def _resident(samples: Split, transform: Transform | None, num_samples: int, split: Splitter, feed: Feed) -> _Stream:
    """Gather batches from tensors that stay in (device) memory."""
    device = feed.numerics.device
    inputs = mapped(lambda each: each[:num_samples].to(device), samples.inputs)
    targets = feed.targets(mapped(lambda each: each[:num_samples].to(device), samples.targets))

    def stream(order: Tensor, **_: int) -> Iterator[Batch]:
        for indices, weight, size, num_global in split(order.to(device)):
            select = partial(torch.index_select, dim=0, index=indices)
            x, y = mapped(select, inputs), mapped(select, targets)
            yield Batch(feed(transform(x) if transform else x), y, weight, size, num_global)

    return stream


class SplitDataset(Dataset[Any]):
    """Samples of a `Split`, one by one."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> Any:
        return part_of(self._split.inputs, index), part_of(self._split.targets, index)


def _dataloader(data: Data, config: Config, split: Splitter, feed: Feed) -> _Stream:
    """Read batches from torch's DataLoader, in the same order as `_resident`."""
    device = feed.numerics.device
    dataset, transform, collate = data.train_dataset, None, data.collate
    if dataset is None:
        assert data.train is not None
        dataset, transform, collate = SplitDataset(data.train), data.transform, None
    indices: list[list[int]] = []  # of the current epoch; the loader serves all epochs
    num_loader_workers = config["num_loader_workers"]
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=indices,
        num_workers=num_loader_workers,
        persistent_workers=num_loader_workers > 0,
        prefetch_factor=config["prefetch_factor"],
        pin_memory=pins_memory(config, device),
        collate_fn=collate,
    )

    def stream(order: Tensor, **_: int) -> Iterator[Batch]:
        whole = list(split(order))
        indices[:] = [share.indices.tolist() for share in whole]
        for share, batch in zip(whole, loader, strict=True):
            x, y = moved(paired(batch), device)
            yield Batch(feed(transform(x) if transform else x), feed.targets(y), *share[1:])

    return stream


def _own_loader(loader: Any, share: tuple[int, int], batch_size: int, feed: Feed) -> _Stream:
    """Read batches from the workload's own loader, which determines their order and sizes."""
    num_shares = share[1]
    set_epoch = next((each.set_epoch for each in _samplers_of(loader) if hasattr(each, "set_epoch")), lambda _: None)

    def stream(order: Tensor, *, epoch: int = 0, num_skipped: int = 0) -> Iterator[Batch]:
        num = -(-len(order) // batch_size)
        set_epoch(epoch)
        number = 0
        for number, batch in enumerate(islice(loader, num_skipped, num_skipped + num), 1):  # noqa: B007
            x, y = moved(paired(batch), feed.numerics.device)
            size = len(first_tensor(y))
            num_global = size if num_shares == 1 else batch_size  # the other ranks' sizes are unknown
            yield Batch(feed(x), feed.targets(y), size * num_shares / num_global, size, num_global)
        if number < num:
            problem = f"data.train_loader of rank {share[0]} gave {num_skipped + number} batches, but its length is "
            raise ValueError(f"{problem}{len(loader)}: ranks with uneven numbers of batches would wait for each other")

    return stream


def _samplers_of(loader: Any) -> Iterator[Any]:
    """Yield the objects that may decide the order of a loader's samples."""
    yield loader
    for name in ("sampler", "batch_sampler"):
        if (sampler := getattr(loader, name, None)) is not None:
            yield sampler
            yield getattr(sampler, "sampler", None)


def pins_memory(config: Config, device: torch.device) -> bool:
    """Return whether a DataLoader pins its batches, which lets a GPU copy them while it computes."""
    return bool(device.type == "cuda" if config["pin_memory"] is None else config["pin_memory"])
