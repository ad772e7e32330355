"""Identity of a data set: its description in results, and checks that all ranks have the same samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from raypar.errors import Mistake, Shown
from raypar.parallel.strategy import DistContext
from raypar.study.strategy import num_shares
from raypar.study.trial import DataRecord, SplitRecord, TensorRecord
from raypar.study.workload import Config, Data, Split, Workload, first_tensor

# At most a second of hashing. The digest of a larger tensor is over evenly spread samples.
MAX_HASHED_BYTES = 64 * 2**20
# Smaller limits for comparing the ranks' samples, which happens before each training.
MAX_COMPARED_BYTES, NUM_COMPARED_SAMPLES, MAX_ROWS = 4 * 2**20, 8, 2**20
NO_DIGESTS: Mapping[tuple[str, int], str] = MappingProxyType({})
MAX_READ_AGAIN = 1.5  # passes over the data set by all ranks' own loaders in an epoch


def fingerprint(
    workload: Workload, data: Data, num_used: int, digests: Mapping[tuple[str, int], str] = NO_DIGESTS
) -> DataRecord:
    """Return name and source of the data set, and its existing ``splits``: "train", "val" and "test".

    Each split has ``num_samples``. A split in memory also has a ``digest`` of 16 hex digits, and dtype and shape of
    ``inputs`` and ``targets``. A split that is read sample by sample (a folder of images) has no digest.

    Args:
        num_used: number of training samples in use, counted from the first.
        digests: known ones, by split and number of samples.
    """
    splits: dict[str, SplitRecord] = {}
    for name, split, dataset in (
        ("train", data.train, data.train_dataset if data.train_dataset is not None else data.train_loader),
        ("val", data.val, data.val_dataset),
        ("test", data.test, None),
    ):
        if split is not None:
            num_samples = min(num_used, len(split)) if name == "train" else len(split)
            splits[name] = _in_memory(split, num_samples, digests.get((name, num_samples), ""))
        elif dataset is not None:
            splits[name] = {"num_samples": num_used if name == "train" else len(dataset)}  # type: ignore[arg-type]
    of = workload.data
    return {
        "name": workload.dataset.partition(",")[0] or workload.name,
        "source": f"{getattr(of, '__module__', '')}:{getattr(of, '__qualname__', type(of).__name__)}",
        "splits": splits,
    }


def _in_memory(split: Split, num_samples: int, known_digest: str) -> SplitRecord:
    def type_of(tree: Any) -> TensorRecord:
        first = first_tensor(tree)
        return {"dtype": str(first.dtype).removeprefix("torch."), "shape": list(first.shape[1:])}

    return {
        "num_samples": num_samples,
        "digest": known_digest or digest(split, num_samples, MAX_HASHED_BYTES),
        "inputs": type_of(split.inputs),
        "targets": type_of(split.targets),
    }


def digest(split: Split, num_samples: int, most_bytes: int) -> str:
    """Return a digest, 16 hex digits, of the first samples; tensors above `most_bytes` are sampled evenly."""
    hashed = hashlib.sha256()
    for tensor in tree_leaves((split.inputs, split.targets)):
        tensor = tensor[:num_samples]
        hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        if tensor.nbytes > most_bytes:
            tensor = tensor[:: -(-tensor.nbytes // most_bytes)]
        # As bytes, whatever the type: numpy knows no bfloat16.
        hashed.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]


def identity_of(data: Data, config: Config, digests: Mapping[tuple[str, int], str] = NO_DIGESTS) -> str:
    """Return a digest of some of the samples, in their order, to compare data sets.

    Args:
        digests: known ones, by split and number of samples; those of all data sets to compare.
    """
    parts: list[object] = []
    for name, split, dataset in (("train", data.train, data.train_dataset), ("val", data.val, data.val_dataset)):
        if split is not None:
            limit = config["num_samples"] if split is data.train and config["num_samples"] else len(split)
            parts.append(digests.get((name, limit)) or digest(split, limit, MAX_COMPARED_BYTES))
        elif dataset is not None:
            parts += [len(dataset), *_digests_of_samples(dataset)]  # type: ignore[arg-type]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def some_indices(dataset: Any) -> list[int]:
    """Return evenly spread indices of at most `NUM_COMPARED_SAMPLES` samples."""
    indices: list[int] = torch.linspace(0, len(dataset) - 1, min(NUM_COMPARED_SAMPLES, len(dataset))).long().tolist()
    return indices


def _digests_of_samples(dataset: Any) -> list[str]:
    """Return digests of some samples, without parts that change between reads, for example by augmentation."""
    reads = [(_tensors(dataset[index]), _tensors(dataset[index])) for index in some_indices(dataset)]
    num_parts = min(len(parts) for read in reads for parts in read)
    stays = [all(torch.equal(once[i], again[i]) for once, again in reads) for i in range(num_parts)]
    kept = [[part for part, is_kept in zip(once, stays, strict=False) if is_kept] for once, _ in reads]
    return [digest(Split(parts, ()), MAX_ROWS, MAX_COMPARED_BYTES) for parts in kept]


def _tensors(sample: Any) -> list[Tensor]:
    """Return the tensors and numbers of a sample, each with a dimension."""
    leaves = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, (Tensor, np.ndarray, np.generic, int, float))]
    return [torch.as_tensor(leaf).reshape(-1) for leaf in leaves]


def _different_loaders(make: Callable[[int, int, int], Any], config: Config, context: DistContext) -> Mistake | None:
    """Return a mistake if the ranks' loaders have different lengths, or the same samples."""
    shares, where = num_shares(config), "data.train_loader"
    loader = make(context.rank if shares == context.world_size else 0, shares, config["batch_size"] // shares)
    most, minus_least = context.max([len(loader), -len(loader)])
    if most != -minus_least:
        shown, hint = Shown(f"{-minus_least:.0f} to {most:.0f} batches"), "use a DistributedSampler, or drop_last=True"
        return Mistake(where, shown, "the ranks have different numbers of batches, and would wait for each other", hint)
    if shares < context.world_size:
        return None
    sums = [(tuple(each.shape), each.double().sum().item()) for each in _tensors(next(iter(loader)))]
    number = _number_of(hashlib.sha256(repr(sums).encode()).hexdigest())
    most, minus_least = context.max([number, -number])
    dataset: Any = getattr(loader, "dataset", None)
    size = len(dataset) if hasattr(dataset, "__len__") else 0
    num_read = len(loader) * config["batch_size"]
    if most == -minus_least or (size and num_read > MAX_READ_AGAIN * max(size, config["batch_size"])):
        hint = "give it a DistributedSampler(dataset, num_ranks, rank)"
        return Mistake(where, Shown(f"{len(loader)} batches a rank"), "all ranks read the same samples", hint)
    return None


def _number_of(digest_text: str) -> int:
    """Return the beginning of a digest as a number that float64 represents exactly."""
    return int(digest_text[:12], 16)


def different_data(
    data: Data, config: Config, context: DistContext, digests: Mapping[tuple[str, int], str] = NO_DIGESTS
) -> Mistake | None:
    """Return a mistake if the ranks have different samples, or different numbers of batches.

    Args:
        digests: see `identity_of`.
    """
    if context.world_size == 1:
        return None
    if data.train_loader is not None and (wrong := _different_loaders(data.train_loader, config, context)):
        return wrong
    number = _number_of(identity_of(data, config, digests))
    most, minus_least = context.max([number, -number])
    if most == -minus_least:
        return None
    return splits_differ("different samples on different ranks")


def splits_differ(shown: str) -> Mistake:
    """Return the mistake of a ``data`` function that returns different samples each time."""
    problem = (
        "data(config) returns different samples each time it is called, so training samples of one rank or trial are "
        "validation samples of another"
    )
    hint = "seed the generator that draws or splits them: numpy.random.default_rng(0), torch.Generator().manual_seed(0)"
    return Mistake("data(config)", Shown(shown), problem, hint)
