"""What a trial was trained and judged on, told apart from other data: number of samples, types, and a digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raypar.study.workload import Data, Split, Workload

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
