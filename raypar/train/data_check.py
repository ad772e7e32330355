"""Check of a workload's data and model before training: all mistakes at once, each with its fix.

Training would accept these mistakes silently (128 inputs and 50 targets are 50 samples), or fail without naming their
cause. Exceptions of a model or loss are left to the training, whose error has a traceback.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from raypar import units
from raypar.errors import Mistake, RayparError, Shown, WorkloadError, cut
from raypar.parallel.loss import Kind, Loss, part_of
from raypar.parallel.strategy import DistContext, ForwardBackward
from raypar.study.strategy import STRATEGIES, num_shares, pipeline_size
from raypar.study.workload import Config, Data, Split, Statistic, Workload
from raypar.train.checkpoint import generators_kept
from raypar.train.data import Feed, TrainBatches, digest, evaluated, first_samples, moved, paired
from raypar.train.loss_kind import HINT_RATIO, IGNORED_CLASS, NOT_OF_PARTS, loss_of, num_rows, takes_classes
from raypar.train.model_check import model_facts
from raypar.train.precision import Numerics, numerics_of
from raypar.train.worker import seed_generators
from raypar.units import listed
from raypar.workloads.metrics import default_metrics, pairs_samples, sum_and_weight

T = TypeVar("T")

RETURN_DATA = "return raypar.Data(train=Split(inputs, targets), val=Split(inputs, targets))"
SPLITS_DIFFER = (
    "data(config) gives other samples each time it is called, so training samples of one rank or trial are validation "
    "samples of another"
)
SAME_DATA = (
    "seed the generator that draws or splits them: numpy.random.default_rng(0), torch.Generator().manual_seed(0)"
)
HINT_MEAN = "return the batch's mean, or a pair (sum, weight)"
FIX = "fix that function"
HINT_FORWARD = "make the model's forward take the inputs of data(config), or the reverse"
HINT_LOSS = "fix that function, or give targets of the shape and type that it takes"
HINT_ONE_SHAPE = "give both one shape: outputs.squeeze(1) in the model, or targets.unsqueeze(1) in the data"
PAIRS_ALL = "pairs each output with every target"
NUM_COMPARED = 16  # targets, to try the metrics on
BROADCAST = "incorrect results due to broadcasting"  # in torch's warning
NUM_SAMPLES = 3  # run through model, loss and metrics
MAX_CHECKED_BYTES = 64 * 2**20  # larger inputs are sampled evenly
# Smaller limits for comparing the ranks' samples, which happens before each training.
MAX_COMPARED_BYTES, NUM_COMPARED_SAMPLES, MAX_ROWS = 4 * 2**20, 8, 2**20
MAX_WHOLE_BYTES = 2**30
LIMIT_S = 4.0  # for all points of a study, before it starts
MAX_LOADED_TWICE_S = 1.0
MAX_READ_AGAIN = 1.5  # passes over the data set by all ranks' own loaders in an epoch
MAX_ERROR_CHARS = 300
NO_GROUP = "process group"  # in torch's errors without a process group
PACKAGE, STANDARD_LIBRARY = Path(__file__).parents[1], sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Checked:
    """Model that can be trained on the data, converted, with its loss and the conversion of its inputs."""

    model: Any
    loss: Loss
    feed: Feed


@dataclass
class WorkloadCheck:
    """Check of one workload under one config, and the mistakes found so far.

    Attributes:
        data: return value of the workload's ``data``.
        mistakes: mistakes that make training impossible.
        raised: errors of the workload's own functions. In a rank, the training raises them again, with their traceback.
    """

    workload: Workload
    config: Config
    numerics: Numerics
    data: Any = None
    mistakes: list[Mistake] = field(default_factory=list)
    raised: list[Mistake] = field(default_factory=list)

    def attempt(self, where: str, function: Callable[[], T], shown: str = "", hint: str = FIX) -> T | None:
        """Call a function of the workload; if it raises, note the error and return None.

        Args:
            shown: description of its arguments.
        """
        try:
            return function()
        except (Exception, SystemExit) as error:  # the user's own code
            self.raised.append(Mistake(where, Shown(shown or "no value"), f"raises {_error_text(error)}", hint))
            return None


def check_workload(
    workload: Workload, data: Any, config: Config, build: Callable[[], Any], numerics: Numerics, context: DistContext
) -> Checked:
    """Build the model and check that it can be trained on the data. All ranks call it.

    Leaves the random number generators as `build` leaves them.

    Args:
        data: return value of the workload's ``data``.

    Raises:
        WorkloadError: with every mistake in data and model, or if the ranks have different data.
    """
    check = WorkloadCheck(workload, config, numerics, data)
    with generators_kept(numerics.device):
        check.mistakes += _data_mistakes(check)
    try:
        model = build()
    except Exception:
        if check.mistakes:  # which may be the cause
            raise WorkloadError.of(workload.name, check.mistakes) from None
        raise
    checked = _check_model(check, model)
    if checked is None:
        raise WorkloadError.of(workload.name, check.mistakes + check.raised)
    with generators_kept(numerics.device):
        if wrong := _different_data(data, config, context):
            raise WorkloadError.of(workload.name, [wrong])
    return checked


def mistakes_of_points(workload: Workload, points: Sequence[tuple[str, Config]], seed: int) -> list[Mistake]:
    """Return every mistake in the data and model of some points, including errors of their functions.

    Runs in a separate process, without a process group, on the CPU. Points after `LIMIT_S` are left to their ranks.

    Args:
        points: label and complete config of each.
        seed: seed of the generators, the same as in the ranks.
    """
    until_s = time.monotonic() + LIMIT_S
    mistakes: dict[str, tuple[Mistake, list[str]]] = {}
    num_checked = 0
    for label, config in points:
        for mistake in _mistakes_of_point(workload, config, seed, compares=not num_checked):
            mistakes.setdefault(str(mistake), (mistake, []))[1].append(label)
        num_checked += 1
        if time.monotonic() > until_s:
            break
    of_all = {*points[0][1], "data(config)"}  # fields that need no points
    return [
        mistake
        if len(labels) == num_checked or mistake.field in of_all
        else replace(mistake, field=f"{mistake.field} at {listed(labels, 2, word='and')}")
        for mistake, labels in mistakes.values()
    ]


def _mistakes_of_point(workload: Workload, config: Config, seed: int, *, compares: bool) -> list[Mistake]:
    assert workload.model is not None and workload.data is not None
    load, build = workload.data, workload.model
    check = WorkloadCheck(workload, config, numerics_of(config, torch.device("cpu")))
    start_s = time.monotonic()
    check.data = check.attempt("data(config)", lambda: seeded(seed, load, config))
    if not check.raised:
        check.mistakes += _data_mistakes(check)
        if compares and not check.mistakes and time.monotonic() - start_s < MAX_LOADED_TWICE_S:
            once, again = identity_of(check.data, config), identity_of(seeded(seed, load, config), config)
            if once != again:
                shown = Shown("different samples in two calls")
                check.mistakes.append(Mistake("data(config)", shown, SPLITS_DIFFER, SAME_DATA))
    model = check.attempt("model(config)", lambda: seeded(seed, build, config))
    if not check.raised:
        checked = _check_model(check, model)
        if checked is not None and not check.raised:
            check.mistakes += _first_batch_mistakes(check, seed, checked)
    else:
        if model is not None:
            check.mistakes += _model_mistakes(model)
        if isinstance(check.data, Data) and not check.mistakes:
            _check_without_outputs(check, None)
    if config["device"] != "cpu":  # the functions may need the device
        check.raised.clear()
    # They may also need the process group, which only the ranks of a trial have.
    return check.mistakes + [each for each in check.raised if NO_GROUP not in each.problem.lower()]


def _first_batch_mistakes(check: WorkloadCheck, seed: int, checked: Checked) -> list[Mistake]:
    config, numerics = check.config, check.numerics
    batches = TrainBatches(check.data, config, seed, (0, num_shares(config)), numerics, checked.feed)
    do = ForwardBackward(checked.loss, numerics.autocast, lambda loss: loss)
    alone = DistContext(0, 1, numerics.device)
    batch, num_workers = next(batches.full(0)), config["num_workers"]
    return model_facts(check.workload, config, checked.model, batch, do, batches.num_samples, alone, num_workers)[1]


def seeded(seed: int, function: Callable[..., T], *args: Any) -> T:
    """Call a function with all generators seeded as in a rank that loads its data."""
    seed_generators(seed)
    return function(*args)


def _check_model(check: WorkloadCheck, model: Any) -> Checked | None:
    """Run a few samples through model, loss and metrics; return None, and note the mistakes, if there are any."""
    check.mistakes += _model_mistakes(model)
    if check.mistakes:
        return None
    data, numerics = check.data, check.numerics
    model = numerics.convert(model)
    with generators_kept(numerics.device):
        x, _ = first_samples(data, NUM_SAMPLES)
        feed = Feed(numerics, model, x)
        if any(map(is_lazy, model.parameters())):  # its first batch initialises a lazy module
            _outputs(model, feed(moved(x, numerics.device)), numerics)
        loss = loss_of(check.workload, data, model, numerics, feed)
        _check_batch(check, model, feed, loss)
    if data.train_loader is not None and num_shares(check.config) > 1 and loss.kind is Kind.MEAN:
        loss = loss.counting(num_rows)  # the loader decides the sizes of the ranks' batches
    return None if check.mistakes else Checked(model, loss, feed)


# ---- data


def _data_mistakes(check: WorkloadCheck) -> Iterator[Mistake]:
    data, config = check.data, check.config
    if not isinstance(data, Data):
        yield Mistake("data(config)", _kind(data), "is not a raypar.Data", RETURN_DATA)
        return
    for name, split, dataset in (
        ("train", data.train, data.train_dataset),
        ("val", data.val, data.val_dataset),
        ("test", data.test, None),
    ):
        if split is not None:
            yield from _split_mistakes(f"data.{name}", split)
        if dataset is not None:
            yield from _dataset_mistakes(f"data.{name}_dataset", dataset)
        if name == "train" and data.train_loader is not None:
            yield from _loader_mistakes(data, config)
        elif split is None and dataset is None and (name != "test" or check.workload.has_test):
            hint = f"give Data {name}=Split(inputs, targets)" + (f", or {name}_dataset" if name != "test" else "")
            yield Mistake(f"data.{name}", None, "there are no samples", hint)
    train, dataset = data.train, data.train_dataset
    if isinstance(train, Split) and dataset is not None and hasattr(dataset, "__len__") and len(dataset) != len(train):
        hint = "both hold the same samples in the same order"
        yield Mistake("data.train_dataset", Shown(f"{len(dataset)} samples"), f"data.train has {len(train)}", hint)
    yield from _size_mistakes(data, config)


def _pipeline_mistakes(inputs: Any, targets: Any, config: Config) -> Iterator[Mistake]:
    if pipeline_size(config) > 1 and not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
        hint = 'use strategy="ddp" or "fsdp", or give one tensor of inputs and one of targets'
        yield Mistake("strategy", config["strategy"], "passes one tensor from stage to stage", hint)


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
        yield Mistake(
            "data.train_loader", None, "is given together with train or train_dataset", "leave one of them out"
        )
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
            yield Mistake("data.train_loader(rank, num_ranks, batch_size)", None, f"raises {_error_text(error)}", hint)
            return
        if not size:
            yield Mistake("data.train_loader", Shown("0 batches"), "is empty", "give it at least one batch")


def _split_mistakes(where: str, split: Any) -> Iterator[Mistake]:
    if not isinstance(split, Split):
        hint = f"give {where.removeprefix('data.')}=Split(inputs, targets)"
        yield Mistake(where, _kind(split), "is not a raypar.Split", hint)
        return
    tensors = {f"{where}.{part}{name}": leaf for part in ("inputs", "targets") for name, leaf in _leaves(split, part)}
    wrong = {part: each for part, each in tensors.items() if not isinstance(each, Tensor) or each.dim() == 0}
    for part, each in wrong.items():
        hint = f"give {part.rpartition('.')[2]} as one tensor, a row for each sample: torch.as_tensor(…)"
        yield Mistake(part, _kind(each), "is not a tensor of samples", hint)
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
        yield Mistake(where, _kind(dataset), "is not a map-style dataset", hint)
        return
    if not len(dataset):
        yield Mistake(where, Shown("0 samples"), "is empty", "give it at least one sample")
        return
    try:
        sample = dataset[0]
    except Exception as error:  # the user's own code
        yield Mistake(f"{where}[0]", None, f"raises {_error_text(error)}", "fix its __getitem__")
        return
    try:
        paired(sample)
    except TypeError:
        hint = "return input, target; several inputs and the target last; or a dict"
        yield Mistake(f"{where}[0]", _kind(sample), "is not a pair of input and target", hint)
        return
    layouts = [str(leaf.layout) for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    if set(layouts) - {str(torch.strided)}:
        shown, problem = Shown(f"tensors of layout {', '.join(layouts)}"), "can't be put into batches"
        yield Mistake(f"{where}[0]", shown, problem, "return input.to_dense(), target")


# ---- the same data everywhere


def identity_of(data: Data, config: Config) -> str:
    """Return a digest of some of the samples, in their order, to compare data sets."""
    parts: list[object] = []
    for split, dataset in ((data.train, data.train_dataset), (data.val, data.val_dataset)):
        if split is not None:
            limit = config["num_samples"] if split is data.train and config["num_samples"] else len(split)
            parts.append(digest(split, limit, MAX_COMPARED_BYTES))
        elif dataset is not None:
            parts += [len(dataset), *_digests_of_samples(dataset)]  # type: ignore[arg-type]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _digests_of_samples(dataset: Any) -> list[str]:
    """Return digests of some samples, without parts that change between reads, for example by augmentation."""
    indices = torch.linspace(0, len(dataset) - 1, min(NUM_COMPARED_SAMPLES, len(dataset))).long().tolist()
    reads = [(_tensors(dataset[index]), _tensors(dataset[index])) for index in indices]
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
    number = _number_of(_digest_of_batch(next(iter(loader))))
    most, minus_least = context.max([number, -number])
    dataset: Any = getattr(loader, "dataset", None)
    size = len(dataset) if hasattr(dataset, "__len__") else 0
    num_read = len(loader) * config["batch_size"]
    if most == -minus_least or (size and num_read > MAX_READ_AGAIN * max(size, config["batch_size"])):
        hint = "give it a DistributedSampler(dataset, num_ranks, rank)"
        return Mistake(where, Shown(f"{len(loader)} batches a rank"), "all ranks read the same samples", hint)
    return None


def _digest_of_batch(batch: Any) -> str:
    tensors = _tensors(batch)
    shown = [(tuple(each.shape), each.double().sum().item()) for each in tensors]
    return hashlib.sha256(repr(shown).encode()).hexdigest()


def _number_of(text: str) -> int:
    """Return the beginning of a digest as a number that float64 represents exactly."""
    return int(text[:12], 16)


def _different_data(data: Data, config: Config, context: DistContext) -> Mistake | None:
    """Return a mistake if the ranks have different samples, or different numbers of batches."""
    if context.world_size == 1:
        return None
    if data.train_loader is not None and (wrong := _different_loaders(data.train_loader, config, context)):
        return wrong
    number = _number_of(identity_of(data, config))
    most, minus_least = context.max([number, -number])
    if most == -minus_least:
        return None
    return Mistake("data(config)", Shown("different samples on different ranks"), SPLITS_DIFFER, SAME_DATA)


def _kind(value: Any) -> Shown | None:
    """Describe a value of a wrong type by its type and size; the value itself may be large."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        parts = ", ".join(type(each).__name__ for each in value[:4])
        return Shown(f"{type(value).__name__} of {len(value)} ({parts}{', …' if len(value) > 4 else ''})")
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return Shown(f"{type(value).__name__}{shape}")


# ---- model, loss and metrics


def _model_mistakes(model: Any) -> Iterator[Mistake]:
    if isinstance(model, type):
        name = model.__name__
        yield Mistake("model(config)", Shown(f"class {name}"), "is not an instance", f"make one: return {name}(…)")
    elif not isinstance(model, nn.Module):
        yield Mistake("model(config)", _kind(model), "is not a torch.nn.Module", "return the model")
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        hint = "give it at least one parameter with requires_grad=True"
        yield Mistake("model(config)", _kind(model), "has nothing to train", hint)


def _check_batch(check: WorkloadCheck, model: nn.Module, feed: Feed, loss: Loss) -> None:
    """Run a few samples through model, loss and metrics, and note the mistakes."""
    data, numerics = check.data, check.numerics
    x, y = moved(first_samples(data, NUM_SAMPLES), numerics.device)
    y = feed.targets(y)
    check.mistakes += _pipeline_mistakes(x, y, check.config)
    shapes = f"inputs of {_shape_text(x)}"
    outputs = check.attempt("model(inputs)", lambda: evaluated(model, feed(x), numerics), shapes, HINT_FORWARD)
    check.mistakes += _nan_mistakes(data, model, numerics, feed, loss)
    if outputs is None:
        if check.raised:
            _check_without_outputs(check, model)
        return
    if _note_classes(check, outputs):
        if not y.is_floating_point() and y.shape[1:] == outputs.shape[2:]:  # try the metrics with valid classes
            _check_metrics(check, outputs, y.long().clamp(0, outputs.shape[1] - 1))
        return
    _check_loss(check, outputs, y, loss)
    _check_metrics(check, outputs, y)


def _note_classes(check: WorkloadCheck, outputs: Any) -> bool:
    """Note targets that are not classes of the outputs; return whether there were any."""
    if not (isinstance(outputs, Tensor) and outputs.dim() > 1 and takes_classes(check.workload.loss)):
        return False
    splits = {"train": check.data.train, "val": check.data.val, "test": check.data.test}
    ignored = getattr(check.workload.loss, "ignore_index", IGNORED_CLASS)
    mistakes = [
        mistake
        for name, split in splits.items()
        if split is not None
        and isinstance(split.targets, Tensor)
        and (mistake := _class_mistake(f"data.{name}.targets", split.targets, outputs, ignored))
    ]
    check.mistakes += mistakes
    return bool(mistakes)


def _check_without_outputs(check: WorkloadCheck, model: nn.Module | None) -> None:
    """Note mistakes in targets and metrics with random outputs of the last layer's width, as the model gives none."""
    y = first_samples(check.data, NUM_SAMPLES)[1]
    if not isinstance(y, Tensor) or not takes_classes(check.workload.loss):
        return
    widths = [each.out_features for each in model.modules() if isinstance(each, nn.Linear)] if model else []
    width = widths[-1] if widths else 2 if y.is_floating_point() else int(y.max()) + 1
    outputs = torch.randn(len(y), max(1, width))
    if not (widths and _note_classes(check, outputs)) and y.dim() == 1 and not y.is_floating_point():
        _check_metrics(check, outputs, y)


def _outputs(model: nn.Module, inputs: Any, numerics: Numerics) -> Any:
    """Return the model's outputs; None if it raises."""
    with contextlib.suppress(Exception):
        return evaluated(model, inputs, numerics)
    return None


def _rows_with_nan(tree: Any) -> Tensor:
    """Return a mask of the samples of `_sampled` that have a NaN, shape ``(samples,)``."""
    leaves = [leaf for leaf in tree_leaves(_sampled(tree)) if leaf.is_floating_point()]
    masks = [leaf.isnan().reshape(len(leaf), -1).any(1) for leaf in leaves]
    return torch.stack(masks).any(0) if masks else torch.zeros(0, dtype=torch.bool)


def _sampled(tree: Any) -> Any:
    """Return all samples, or evenly spread ones if all would take too much time."""
    num_bytes = sum(leaf.nbytes for leaf in tree_leaves(tree))
    stride = max(1, -(-num_bytes // MAX_CHECKED_BYTES))
    return tree if stride == 1 else part_of(tree, slice(None, None, stride))


def _nan_mistakes(data: Data, model: nn.Module, numerics: Numerics, feed: Feed, loss: Loss) -> Iterator[Mistake]:
    """Yield NaN in inputs and targets that reaches outputs or loss; a transform, model or loss may handle it."""
    for name, split in (("train", data.train), ("val", data.val), ("test", data.test)):
        if split is None:
            continue
        for part in ("inputs", "targets"):
            rows = _rows_with_nan(getattr(split, part)).nonzero().flatten()
            if not len(rows):
                continue
            x, y = moved(part_of(_sampled((split.inputs, split.targets)), rows[:2]), numerics.device)
            y = feed.targets(y)
            outputs = _outputs(model, feed(data.transform(x) if data.transform else x), numerics)
            shown = Shown(f"{units.counted(len(rows), 'sample')} with NaN")
            if part == "inputs" and isinstance(outputs, Tensor) and bool(outputs.isnan().any()):
                hint = "drop these samples, or fill them"
                yield Mistake(f"data.{name}.inputs", shown, "make the model's outputs NaN", hint)
            elif part == "targets" and outputs is not None:
                with contextlib.suppress(Exception), torch.no_grad():
                    value = loss(outputs, y)
                    total = value[0] if isinstance(value, tuple) else value
                    if bool(total.isnan().any()):
                        yield Mistake(f"data.{name}.targets", shown, "make the loss NaN", "drop or fill these samples")


def _class_mistake(where: str, targets: Tensor, outputs: Tensor, ignored: int) -> Mistake | None:
    """Return a mistake if cross-entropy can't take the targets for outputs of shape (batch, classes, …)."""
    num_classes = outputs.shape[1]
    if targets.is_floating_point():
        if targets.shape[1:] == outputs.shape[1:]:
            return None  # a probability for each class
        hint = "give class numbers: targets.long(); or, for a regression, a loss=: torch.nn.functional.mse_loss"
        return Mistake(where, Shown(str(targets.dtype)), "are no classes, which cross-entropy needs", hint)
    if targets.dtype not in (torch.int64, torch.uint8):
        return Mistake(where, Shown(str(targets.dtype)), "cross-entropy needs int64", "give targets.long()")
    if targets.shape[1:] != outputs.shape[2:]:
        expected = f"(num_samples{''.join(f', {size}' for size in outputs.shape[2:])})"
        shown = Shown(f"shape {tuple(targets.shape)}")
        problem = (
            f"cross-entropy needs {expected} for outputs of shape (batch, {', '.join(map(str, outputs.shape[1:]))})"
        )
        return Mistake(where, shown, problem, "give one class number for each sample: for example targets.squeeze(1)")
    classes = targets[targets != ignored]
    if not len(classes):
        return None
    low, high = int(classes.min()), int(classes.max())
    if low >= 0 and high < num_classes:
        return None
    problem = f"the model's {num_classes} outputs are for the classes 0 to {num_classes - 1}"
    hint = f"number the classes from 0{f', or give the model {high + 1} outputs' if high >= num_classes else ''}"
    return Mistake(where, Shown(f"{low} to {high}"), problem, hint)


def _check_loss(check: WorkloadCheck, outputs: Any, y: Any, loss: Loss) -> None:
    """Note mistakes that prevent computing the loss, or make it depend on the number of workers."""
    workload = check.workload
    where, shapes = "loss(outputs, targets)", f"outputs of {_shape_text(outputs)}, targets of {_shape_text(y)}"
    if isinstance(workload.loss, nn.Module) and any(p.requires_grad for p in workload.loss.parameters()):
        hint = "make them part of the model, whose outputs the loss gets"
        check.mistakes.append(Mistake("loss", _kind(workload.loss), "has parameters that nothing trains", hint))
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        value = check.attempt(where, lambda: loss(outputs, y), shapes, HINT_LOSS)
    if value is None:
        return
    total, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if isinstance(outputs, Tensor) and any(BROADCAST in str(each.message) for each in caught):
        check.mistakes.append(Mistake(where, Shown(shapes), PAIRS_ALL, HINT_ONE_SHAPE))
    elif not isinstance(total, Tensor) or (isinstance(value, tuple) and weight is None):
        check.mistakes.append(Mistake(where, _kind(value), "is not a tensor or a pair (sum, weight)", HINT_MEAN))
    elif total.dim() or (isinstance(weight, Tensor) and weight.dim()):
        shown = Shown(f"shape {tuple(total.shape)}")
        check.mistakes.append(Mistake(where, shown, "is not a single number", HINT_MEAN))
    else:
        check.mistakes += _kind_mistakes(check.data, check.config, outputs, y, loss)


def _kind_mistakes(data: Data, config: Config, outputs: Any, y: Any, loss: Loss) -> Iterator[Mistake]:
    where, shares = "loss(outputs, targets)", num_shares(config)
    if loss.kind is Kind.RATIO:
        strategy = config["strategy"]
        if config["num_workers"] > 1 and not STRATEGIES[strategy].takes_loss_pairs:
            yield Mistake("strategy", strategy, "does not take a loss that is a pair", 'use strategy="fsdp" or "ddp"')
        elif not _adds_up(loss, outputs, y):
            hint = "return the sum over the samples, not their mean, and the weight by which it is divided"
            yield Mistake(where, Shown("a pair"), "is not the sum and the weight: those of parts do not add up", hint)
        return
    if loss.kind is not Kind.WHOLE:
        return
    cuts = {"num_workers": (config["num_workers"], shares), "accumulation_steps": (config["accumulation_steps"],) * 2}
    if pipeline_size(config) > 1:
        cuts["num_microbatches"] = (config["num_microbatches"],) * 2
    for key, (value, num) in cuts.items():
        if num > 1:
            yield Mistake(key, value, NOT_OF_PARTS, HINT_RATIO)
    samples: Any = data.val if data.val is not None else data.val_dataset
    size, num_batches = len(samples), -(-len(samples) // config["eval_batch_size"])
    if num_batches > 1 and (loss.is_own or not _has_rows(outputs, num_rows(y)) or _vary_in_shape(data)):
        hint = f"set eval_batch_size={size}, or give the workload a loss= that returns (sum, weight)"
        problem = "is smaller than the validation set, and the loss of its batches is not that of the whole"
        yield Mistake("eval_batch_size", config["eval_batch_size"], problem, hint)
    num_bytes = sum(leaf.nbytes for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)) // num_rows(y) * size
    if num_batches > 1 and num_bytes > MAX_WHOLE_BYTES:
        problem = f"needs the outputs of all {size} validation samples at once, {units.size(num_bytes)}"
        yield Mistake(where, Shown(loss.kind.value), problem, HINT_RATIO)


def _vary_in_shape(data: Data) -> bool:
    """Return whether validation batches can't be joined because `Data.collate` pads each to its longest sample."""
    if data.collate is None or data.val is not None:
        return False
    dataset: Any = data.val_dataset
    alone = [
        data.collate([dataset[index]])
        for index in torch.linspace(0, len(dataset) - 1, min(NUM_COMPARED_SAMPLES, len(dataset))).long().tolist()
    ]
    shapes = ([leaf.shape[1:] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] for batch in alone)
    first = next(shapes)
    return any(each != first for each in shapes)


def _has_rows(tree: Any, size: int) -> bool:
    return all(leaf.dim() and len(leaf) == size for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _adds_up(loss: Loss, outputs: Any, y: Any) -> bool:
    """Return whether the sums and weights of single samples add up to those of all; True if that is unknown."""
    size = num_rows(y)
    if size < 2 or not _has_rows((outputs, y), size):
        return True
    try:
        with torch.no_grad():
            whole = [float(part) for part in loss(outputs, y)]
            rows = [part_of((outputs, y), slice(at, at + 1)) for at in range(size)]
            totals = [sum(float(part) for part in parts) for parts in zip(*(loss(*row) for row in rows), strict=True)]
    except Exception:  # it can't take single samples
        return True
    if not all(map(math.isfinite, [*whole, *totals])):
        return True
    return all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) for a, b in zip(whole, totals, strict=True))


def _check_metrics(check: WorkloadCheck, outputs: Any, y: Any) -> None:
    train = check.data.train
    size, targets = num_rows(y), y if train is None else part_of(train.targets, slice(NUM_COMPARED))
    shapes = Shown(f"outputs of {_shape_text(outputs)}, targets of {_shape_text(y)}")
    for name, metric in default_metrics(check.workload).items():
        where, function = f"metrics[{name!r}]", metric.collect if isinstance(metric, Statistic) else metric
        try:
            with torch.no_grad():
                scores = function(outputs, y)
            if isinstance(metric, Statistic):
                continue
            sum_and_weight(scores, size)
        except RayparError as error:  # from one of raypar's metrics
            check.mistakes.append(Mistake(where, shapes, error.message, error.hint))
        except Exception as error:  # the user's own code
            check.raised.append(Mistake(where, shapes, f"raises {_error_text(error)}", FIX))
        else:
            are_tensors = isinstance(outputs, Tensor) and isinstance(y, Tensor)
            if are_tensors and pairs_samples(metric, outputs, moved(targets, y.device)):
                check.mistakes.append(Mistake(where, shapes, PAIRS_ALL, HINT_ONE_SHAPE))


def _error_text(error: BaseException) -> str:
    """Return an error's type and first line, and the innermost line of its traceback outside installed packages."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{cut(last_line_of(error), MAX_ERROR_CHARS)}{at}"


def _is_installed(file: str) -> bool:
    return "site-packages" in file or file.startswith(("<frozen", str(PACKAGE), STANDARD_LIBRARY))


def last_line_of(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0].rstrip(": ")


def _shape_text(tree: Any) -> str:
    """Return the shapes of a tensor or a tree of tensors."""
    if isinstance(tree, Tensor):
        return f"shape {tuple(tree.shape)}"
    leaves, _ = tree_flatten_with_path(tree)
    shapes = [f"{keystr(path)} {tuple(leaf.shape)}" for path, leaf in leaves if isinstance(leaf, Tensor)]
    return f"shapes {listed(shapes, 4)}" if shapes else f"type {type(tree).__name__}"
