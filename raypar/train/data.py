"""Batches: the global batch of a step never depends on the number of workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from raypar.parallel.strategy import Batch
from raypar.study.workload import Config, Data, Split, Workload
from raypar.train.precision import Numerics


class Share(NamedTuple):
    """A rank's part of one global batch: `weight` and `num_samples` as a `Batch` has them.

    A tuple, because one is made in every timed step.
    """

    indices: Tensor  # into the training set, shape (num_local,)
    weight: float
    num_samples: int


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return a permutation of the samples' indices, shape ``(num_samples,)``, that only seed and epoch decide."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_samples, generator=generator)


def shares(order: Tensor, batch_size: int, rank: int, num_shares: int, *, drop_last: bool) -> Iterator[Share]:
    """Yield a rank's share of each global batch ``order[step * batch_size : (step + 1) * batch_size]``.

    The ranks' parts are contiguous and differ in size by one sample at most. Where a last, short batch has no sample
    for a rank, that rank takes the batch's first one with weight 0: it has to join the collectives all the same.
    """
    for batch in order.split(batch_size):  # type: ignore[no-untyped-call]
        size = len(batch)
        if drop_last and size < batch_size:
            return
        begin, end = rank * size // num_shares, (rank + 1) * size // num_shares
        if num_shares == 1:
            yield Share(batch, 1.0, size)
        elif begin == end:
            yield Share(batch[:1], 0.0, 0)
        else:
            yield Share(batch[begin:end], (end - begin) * num_shares / size, end - begin)


def num_steps(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the steps of an epoch."""
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


class TrainBatches:
    """One rank's share of every global batch of a trial, epoch by epoch.

    Args:
        config: the trial's complete config.
        seed: decides, with the epoch alone, the order of the samples.
        share: this rank's share of a batch and the number of shares, as `Strategy.share` has them.
        numerics: device, dtype and layout of the inputs.

    Attributes:
        num_samples: training samples of an epoch.
        steps_per_epoch: steps of an epoch.

    Raises:
        ValueError: there are fewer samples than the config asks for or than a batch needs.
    """

    def __init__(self, data: Data, config: Config, seed: int, share: tuple[int, int], numerics: Numerics) -> None:
        self.num_samples = num_train_samples(data, config["num_samples"])
        self._config, self._seed, self._batch_size = config, seed, config["batch_size"]
        self.steps_per_epoch = num_steps(self.num_samples, self._batch_size, drop_last=config["drop_last"])
        if not self.steps_per_epoch:
            raise ValueError(f"batch_size={self._batch_size} leaves no full batch of {self.num_samples} samples")
        (rank, num_shares), drop_last = share, config["drop_last"]
        split = partial(shares, batch_size=self._batch_size, rank=rank, num_shares=num_shares, drop_last=drop_last)
        make = _resident if config["loader"] == "resident" else _dataloader
        self._stream = make(data, config, self.num_samples, numerics, split)

    def warm_up(self, *, with_short_batch: bool) -> Iterator[Batch]:
        """Yield the batches of the warm-up steps.

        Args:
            with_short_batch: add one of the size of an epoch's last, shorter batch, if there is such.
        """
        order = self._order(0)
        if num_warmup_steps := self._config["num_warmup_steps"]:
            yield from self._stream(order[: num_warmup_steps * self._batch_size])
            if with_short_batch and not self._config["drop_last"] and (short := len(order) % self._batch_size):
                yield from self._stream(order[:short])

    def segments(self, steps: range) -> Iterator[Iterator[Batch]]:
        """Yield the batches of these steps of the training in parts with an evaluation after each.

        A part is an epoch, or ``eval_every_steps`` steps. It has to be used up before the next one is asked for.
        """
        epochs = (self._stream(order) for order in self._orders(steps))
        if num := self._config["eval_every_steps"]:
            batches = chain.from_iterable(epochs)
            epochs = (islice(batches, num) for _ in range(-(-len(steps) // num)))
        yield from epochs

    def full(self, epoch: int) -> Iterator[Batch]:
        """Yield batches without end, from `epoch` on, except for short last ones."""
        num_full = self.num_samples // self._batch_size * self._batch_size or None
        for number in count(epoch):
            yield from self._stream(self._order(number)[:num_full])

    def _order(self, epoch: int) -> Tensor:
        return epoch_order(self.num_samples, self._seed, epoch)

    def _orders(self, steps: range) -> Iterator[Tensor]:
        """Yield the order of the samples of these steps, epoch by epoch; the first epoch is 1."""
        first, num_skipped = divmod(steps.start, self.steps_per_epoch)
        for epoch in range(first, steps.stop // self.steps_per_epoch):
            order = self._order(epoch + 1)
            yield order[num_skipped * self._batch_size :] if epoch == first else order


def num_train_samples(data: Data, limit: int | None) -> int:
    """Return how many training samples are used: the first `limit`, or all.

    Raises:
        ValueError: there are fewer.
    """
    dataset = data.train if data.train is not None else data.train_dataset
    if dataset is None:
        raise ValueError("the workload's data has neither train nor train_dataset")
    num_available = len(dataset)  # type: ignore[arg-type]
    if limit is not None and limit > num_available:
        raise ValueError(f"num_samples={limit} is more than the {num_available} training samples")
    return limit or num_available


# From the order of an epoch's samples to this rank's batches, and to its shares of the global batches.
_Stream: TypeAlias = Callable[[Tensor], Iterator[Batch]]
_Split: TypeAlias = Callable[[Tensor], Iterator[Share]]


def _resident(data: Data, _: Config, num_samples: int, numerics: Numerics, split: _Split) -> _Stream:
    """Batches sliced from tensors that stay in (device) memory; no copy but the gather of the batch itself."""
    if data.train is None:
        raise ValueError('the workload\'s data is not in memory: use loader="dataloader"')
    device, cast, transform = numerics.device, numerics.cast, data.transform
    inputs, targets = data.train.inputs[:num_samples].to(device), data.train.targets[:num_samples].to(device)

    def stream(order: Tensor) -> Iterator[Batch]:
        for indices, weight, size in split(order.to(device)):
            x, y = inputs.index_select(0, indices), targets.index_select(0, indices)
            yield Batch(cast(transform(x) if transform else x), y, weight, size)

    return stream


def _dataloader(data: Data, config: Config, _: int, numerics: Numerics, split: _Split) -> _Stream:
    """Batches from torch's DataLoader, in the same order as `_resident`'s."""
    device, cast = numerics.device, numerics.cast
    dataset, transform = data.train_dataset, None
    if dataset is None:
        assert data.train is not None
        dataset, transform = TensorDataset(data.train.inputs, data.train.targets), data.transform
    indices: list[list[int]] = []  # of the current epoch, which the loader outlives
    num_loader_workers = config["num_loader_workers"]
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=indices,
        num_workers=num_loader_workers,
        persistent_workers=num_loader_workers > 0,
        prefetch_factor=config["prefetch_factor"],
        pin_memory=pins_memory(config, device),
    )

    def stream(order: Tensor) -> Iterator[Batch]:
        epoch = list(split(order))
        indices[:] = [share.indices.tolist() for share in epoch]
        for share, (x, y) in zip(epoch, loader, strict=True):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            yield Batch(cast(transform(x) if transform else x), y, share.weight, share.num_samples)

    return stream


def pins_memory(config: Config, device: torch.device) -> bool:
    """Return whether a DataLoader pins its batches, so that they are copied to a GPU while it works."""
    return bool(device.type == "cuda" if config["pin_memory"] is None else config["pin_memory"])


# A second's worth of hashing at most; of larger tensors, samples spread evenly make the digest.
MAX_HASHED_BYTES = 64 * 2**20


def fingerprint(workload: Workload, data: Data, num_used: int) -> dict[str, Any]:
    """Return name and source of the data set, and ``splits``: "train", "val" and "test", as far as there are such.

    Each split has ``num_samples``; those that are in memory also a ``digest`` of 16 hex digits, and dtype and shape
    of ``inputs`` and ``targets``. A split that is read sample by sample (a folder of images) has no digest.

    Args:
        num_used: the number of training samples in use, the first ones.
    """
    read = {"train": data.train_dataset, "val": data.val_dataset}
    splits: dict[str, Any] = {}
    for name, split in (("train", data.train), ("val", data.val), ("test", data.test)):
        if split is not None:
            splits[name] = _in_memory(split, min(num_used, len(split)) if name == "train" else len(split))
        elif (dataset := read.get(name)) is not None:
            size = num_used if name == "train" else len(dataset)  # type: ignore[arg-type]
            splits[name] = {"num_samples": size}
    of = workload.data
    return {
        "name": workload.dataset.partition(",")[0] or workload.name,
        "source": f"{getattr(of, '__module__', '')}:{getattr(of, '__qualname__', type(of).__name__)}",
        "splits": splits,
    }


def _in_memory(split: Split, num_samples: int) -> Mapping[str, Any]:
    hashed, types = hashlib.sha256(), {}
    for name, tensor in (("inputs", split.inputs[:num_samples]), ("targets", split.targets[:num_samples])):
        types[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape[1:])}
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.nbytes > MAX_HASHED_BYTES:
            tensor = tensor[:: -(-tensor.nbytes // MAX_HASHED_BYTES)]
        # As bytes, whatever the type: numpy knows no bfloat16.
        hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {"num_samples": num_samples, "digest": hashed.hexdigest()[:16], **types}
