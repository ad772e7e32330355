"""Check of a workload's data before training: all mistakes at once, each with its fix.

Training would accept these mistakes silently (128 inputs and 50 targets are 50 samples), or fail without naming their
cause.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from raypar.errors import Mistake, Shown, cut
from raypar.study.strategy import num_shares
from raypar.study.workload import Config, Data, Split
from raypar.train.data import paired

RETURN_DATA = "return raypar.Data(train=Split(inputs, targets), val=Split(inputs, targets))"
MAX_ERROR_CHARS = 300
PACKAGE, STANDARD_LIBRARY = Path(__file__).parents[1], sysconfig.get_path("stdlib")


def splits_of(data: Data) -> tuple[tuple[str, Any, Any], ...]:
    """Return name, split in memory and data set of the training, validation and test samples."""
    train, val = ("train", data.train, data.train_dataset), ("val", data.val, data.val_dataset)
    return train, val, ("test", data.test, None)


def data_mistakes(data: Any, config: Config, *, has_test: bool) -> Iterator[Mistake]:
    """Yield the mistakes in the return value of a workload's ``data``.

    Args:
        has_test: the workload says that it has a test split.
    """
    if not isinstance(data, Data):
        yield Mistake("data(config)", described(data), "is not a raypar.Data", RETURN_DATA)
        return
    for name, split, dataset in splits_of(data):
        if split is not None:
            yield from _split_mistakes(f"data.{name}", split)
        if dataset is not None:
            yield from _dataset_mistakes(f"data.{name}_dataset", dataset)
        if name == "train" and data.train_loader is not None:
            yield from _loader_mistakes(data, config)
        elif split is None and dataset is None and (name != "test" or has_test):
            hint = f"give Data {name}=Split(inputs, targets)" + (f", or {name}_dataset" if name != "test" else "")
            yield Mistake(f"data.{name}", None, "there are no samples", hint)
    train, dataset = data.train, data.train_dataset
    if isinstance(train, Split) and dataset is not None and hasattr(dataset, "__len__") and len(dataset) != len(train):
        hint = "both hold the same samples in the same order"
        yield Mistake("data.train_dataset", Shown(f"{len(dataset)} samples"), f"data.train has {len(train)}", hint)
    yield from _size_mistakes(data, config)


def _size_mistakes(data: Data, config: Config) -> Iterator[Mistake]:
    """Yield the options that the number of training samples does not allow."""
    samples: Any = data.train if data.train is not None else data.train_dataset
    try:
        available = len(samples)
    except Exception:  # reported elsewhere
        return
    limit, batch_size = config["num_samples"], config["batch_size"]
    if limit is not None and limit > available > 0:
        yield Mistake("num_samples", limit, f"is more than the {available} training samples", "ask for fewer")
    elif available and config["drop_last"] and batch_size > (limit or available):
        hint = "use a smaller batch_size, or leave out drop_last"
        yield Mistake("batch_size", batch_size, f"drop_last leaves no batch of {limit or available} samples", hint)


def _loader_mistakes(data: Data, config: Config) -> Iterator[Mistake]:
    assert data.train_loader is not None
    shares, batch_size = num_shares(config), config["batch_size"]
    if data.train is not None or data.train_dataset is not None:
        problem = "is given together with train or train_dataset"
        yield Mistake("data.train_loader", None, problem, "leave one of them out")
    elif batch_size % shares:
        problem = f"is not a multiple of the {shares} ranks, whose loaders all get the same batch size"
        yield Mistake("batch_size", batch_size, problem, f"use a multiple of {shares}")
    elif config["num_samples"] is not None:
        yield Mistake("num_samples", config["num_samples"], "has no effect with data.train_loader", "leave it out")
    else:
        try:
            size = len(data.train_loader(0, shares, batch_size // shares))
        except Exception as error:  # the user's own code
            hint = "return a DataLoader of a map-style data set, or an iterable with __len__"
            yield Mistake("data.train_loader(rank, num_ranks, batch_size)", None, f"raises {error_text(error)}", hint)
            return
        if not size:
            yield Mistake("data.train_loader", Shown("0 batches"), "is empty", "give it at least one batch")


def _split_mistakes(where: str, split: Any) -> Iterator[Mistake]:
    if not isinstance(split, Split):
        hint = f"give {where.removeprefix('data.')}=Split(inputs, targets)"
        yield Mistake(where, described(split), "is not a raypar.Split", hint)
        return
    tensors = {f"{where}.{part}{name}": leaf for part in ("inputs", "targets") for name, leaf in _leaves(split, part)}
    wrong = {part: each for part, each in tensors.items() if not isinstance(each, Tensor) or each.dim() == 0}
    for part, each in wrong.items():
        hint = f"give {part.rpartition('.')[2]} as one tensor, a row for each sample: torch.as_tensor(…)"
        yield Mistake(part, described(each), "is not a tensor of samples", hint)
    unlike = {part: each for part, each in tensors.items() if part not in wrong and each.layout is not torch.strided}
    for part, each in unlike.items():
        hint = "give dense tensors: inputs.to_dense(); or, where they are too large, a dataset whose samples are dense"
        yield Mistake(part, Shown(f"tensor of layout {each.layout}"), "can't be cut into samples", hint)
    if wrong or unlike:
        return
    counts = {part: len(each) for part, each in tensors.items()}
    if len(set(counts.values())) > 1:
        shown = " and ".join(f"{count} {part.removeprefix(f'{where}.')}" for part, count in counts.items())
        yield Mistake(where, Shown(shown), "the numbers differ", "give each input its target, in the same order")
    elif not next(iter(counts.values()), 0):
        yield Mistake(where, Shown("0 samples"), "is empty", "give it at least one sample")


def _leaves(split: Split, part: str) -> list[tuple[str, Any]]:
    """Return the leaves of inputs or targets, each with the path to it."""
    tree = getattr(split, part)
    if not isinstance(tree, (Mapping, tuple)):
        return [("", tree)]
    leaves, _ = tree_flatten_with_path(tree)
    return [(keystr(path), leaf) for path, leaf in leaves] or [("", tree)]


def _dataset_mistakes(where: str, dataset: Any) -> Iterator[Mistake]:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        hint = "give it __len__ and __getitem__: a torch.utils.data.Dataset, not an IterableDataset"
        yield Mistake(where, described(dataset), "is not a map-style dataset", hint)
        return
    if not len(dataset):
        yield Mistake(where, Shown("0 samples"), "is empty", "give it at least one sample")
        return
    try:
        sample = dataset[0]
    except Exception as error:  # the user's own code
        yield Mistake(f"{where}[0]", None, f"raises {error_text(error)}", "fix its __getitem__")
        return
    try:
        paired(sample)
    except TypeError:
        hint = "return input, target; several inputs and the target last; or a dict"
        yield Mistake(f"{where}[0]", described(sample), "is not a pair of input and target", hint)
        return
    layouts = [str(leaf.layout) for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    if set(layouts) - {str(torch.strided)}:
        shown, problem = Shown(f"tensors of layout {', '.join(layouts)}"), "can't be put into batches"
        yield Mistake(f"{where}[0]", shown, problem, "return input.to_dense(), target")


def described(value: Any) -> Shown | None:
    """Describe a value of a wrong type by its type and size; the value itself may be large."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        parts = ", ".join(type(each).__name__ for each in value[:4])
        return Shown(f"{type(value).__name__} of {len(value)} ({parts}{', …' if len(value) > 4 else ''})")
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return Shown(f"{type(value).__name__}{shape}")


def error_text(error: BaseException) -> str:
    """Return an error's type and first line, and the innermost line of its traceback outside installed packages."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(": ")
    return f"{cut(text, MAX_ERROR_CHARS)}{at}"


def _is_installed(file: str) -> bool:
    return "site-packages" in file or file.startswith(("<frozen", str(PACKAGE), STANDARD_LIBRARY))
