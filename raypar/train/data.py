"""Batches: the global batch of a step never depends on the number of workers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from raypar.parallel.strategy import Batch
from raypar.study.workload import Config, Data, Split, Workload


class Share(NamedTuple):
    """A rank's part of one global batch; a tuple, because one is made in every timed step.

    Attributes:
        indices: shape ``(num_local,)``, into the training set.
        weight, num_samples: as a `Batch` has them.
    """

    indices: Tensor
    weight: float
    num_samples: int


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the samples: a permutation that only seed and epoch decide."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_samples, generator=generator)


def num_steps(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def shares(order: Tensor, batch_size: int, rank: int, num_shares: int, *, drop_last: bool) -> Iterator[Share]:
    """A rank's share of each global batch ``order[step * batch_size : (step + 1) * batch_size]``.

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


BatchStream = Callable[[Tensor], Iterator[Batch]]  # from an epoch's order to the rank's batches


def num_train_samples(data: Data) -> int:
    """How many training samples there are."""
    if data.train is not None:
        return len(data.train)
    if data.train_dataset is None:
        raise ValueError("the workload's data has neither train nor train_dataset")
    return len(data.train_dataset)  # type: ignore[arg-type]


def resident(
    data: Data,
    num_samples: int,
    cast: Callable[[Any], Any],
    device: torch.device,
    split_order: Callable[[Tensor], Iterator[Share]],
) -> BatchStream:
    """Batches sliced from the first `num_samples` samples, tensors that stay in (device) memory; no copy but the
    gather of the batch itself."""
    if data.train is None:
        raise ValueError('the workload\'s data is not in memory: use loader="dataloader"')
    inputs, targets = data.train.inputs[:num_samples].to(device), data.train.targets[:num_samples].to(device)
    transform = data.transform

    def stream(order: Tensor) -> Iterator[Batch]:
        for indices, weight, size in split_order(order.to(device)):
            x = inputs.index_select(0, indices)
            y = targets.index_select(0, indices)
            yield Batch(cast(transform(x) if transform else x), y, weight, size)

    return stream


class _InMemory(Dataset[Any]):
    """A Split served sample by sample, as torch's DataLoader wants it."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


class _Shares(Sampler[list[int]]):
    """Hands a rank's shares of the current epoch to a DataLoader, which may outlive the epoch."""

    def __init__(self) -> None:
        self.current: Sequence[Share] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return (share.indices.tolist() for share in self.current)

    def __len__(self) -> int:
        return len(self.current)


def dataloader(
    data: Data,
    cast: Callable[[Any], Any],
    device: torch.device,
    split_order: Callable[[Tensor], Iterator[Share]],
    config: Config,
) -> BatchStream:
    """Batches from torch's DataLoader as the config wants it, in the same order as `resident`."""
    own, num_loader_workers, pin_memory = data.train_dataset, config["num_loader_workers"], config["pin_memory"]
    if own is not None:
        dataset = own
    else:
        assert data.train is not None
        dataset = _InMemory(data.train.inputs, data.train.targets)
    transform = data.transform if own is None else None
    sampler = _Shares()
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_loader_workers,
        persistent_workers=num_loader_workers > 0,
        prefetch_factor=config["prefetch_factor"],
        pin_memory=device.type == "cuda" if pin_memory is None else pin_memory,
    )

    def stream(order: Tensor) -> Iterator[Batch]:
        sampler.current = tuple(split_order(order))
        for share, (x, y) in zip(sampler.current, loader, strict=True):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            yield Batch(cast(transform(x) if transform else x), y, share.weight, share.num_samples)

    return stream


def orders(order_of: Callable[[int], Tensor], steps: range, steps_per_epoch: int, batch_size: int) -> Iterator[Tensor]:
    """The order of the samples of these steps of the training, epoch by epoch (the first is 1)."""
    first, num_skipped = divmod(steps.start, steps_per_epoch)
    for epoch in range(first, steps.stop // steps_per_epoch):
        order = order_of(epoch + 1)
        yield order[num_skipped * batch_size :] if epoch == first else order


def segments(
    epochs: Iterator[Iterator[Batch]], total_steps: int, eval_every_steps: int | None
) -> Iterator[Iterator[Batch]]:
    """The training in parts with an evaluation after each: the epochs, or so many steps at a time.

    A part has to be used up before the next one is asked for.
    """
    if eval_every_steps is None:
        yield from epochs
        return
    every = (batch for epoch in epochs for batch in epoch)
    for _ in range(-(-total_steps // eval_every_steps)):
        yield islice(every, eval_every_steps)


def full_batches(
    order_of: Callable[[int], Tensor], epoch: int, stream: BatchStream, batch_size: int
) -> Iterator[Batch]:
    """Those of this epoch and all that follow, but for short last ones."""
    while True:
        order = order_of(epoch)
        epoch += 1
        yield from stream(order[: len(order) // batch_size * batch_size or len(order)])


# A second's worth of hashing at most; of larger tensors, samples spread evenly make the digest.
MAX_HASHED_BYTES = 64 * 2**20


def fingerprint(workload: Workload, data: Data, num_train_samples: int) -> dict[str, Any]:
    """Name and source of the data set, and ``splits``: "train", "val" and "test", as far as there are such.

    Each split has ``num_samples``; those that are in memory also a ``digest`` of 16 hex digits, and dtype and shape
    of ``inputs`` and ``targets``. What is read sample by sample (a folder of images) has no digest.

    Args:
        num_train_samples: so many of the training samples were used, the first ones.
    """
    read = {"train": data.train_dataset, "val": data.val_dataset}
    splits: dict[str, Any] = {}
    for name, split in (("train", data.train), ("val", data.val), ("test", data.test)):
        if split is not None:
            used = min(num_train_samples, len(split)) if name == "train" else len(split)
            splits[name] = _in_memory(split, used)
        elif (dataset := read.get(name)) is not None:
            size = num_train_samples if name == "train" else len(dataset)  # type: ignore[arg-type]
            splits[name] = {"num_samples": size}
    of = workload.data
    return {
        "name": workload.dataset.partition(",")[0] or workload.name,
        "source": f"{getattr(of, '__module__', '')}:{getattr(of, '__qualname__', type(of).__name__)}",
        "splits": splits,
    }


def _in_memory(split: Split, num_samples: int) -> Mapping[str, Any]:
    hashed = hashlib.sha256()
    for tensor in (split.inputs, split.targets):
        _hash(hashed, tensor[:num_samples])
    return {
        "num_samples": num_samples,
        "digest": hashed.hexdigest()[:16],
        **{name: _type(tensor) for name, tensor in (("inputs", split.inputs), ("targets", split.targets))},
    }


def _hash(hashed: Any, tensor: Tensor) -> None:
    hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if (size := tensor.numel() * tensor.element_size()) > MAX_HASHED_BYTES:
        tensor = tensor[:: -(-size // MAX_HASHED_BYTES)]
    # As bytes, whatever the type: numpy knows no bfloat16.
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    hashed.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")


def _type(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape[1:])}
