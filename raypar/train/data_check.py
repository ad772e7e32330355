"""Check of a workload's data and model, before a trial trains with them: all mistakes at once, each with its fix.

These mistakes are trained on in silence (128 inputs and 50 targets are 50 samples), or fail in a way that does not name
their cause. What a model or loss raises by itself is left to the training, whose error has a traceback.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate

from raypar.errors import Mistake, RayparError, WorkloadError
from raypar.study.workload import Data, Split, Statistic, Workload
from raypar.train.checkpoint import generator_states, set_generator_states
from raypar.train.precision import Numerics
from raypar.workloads.metrics import default_metrics, pairs_samples, sum_and_weight

RETURN_DATA = "return raypar.Data(train=Split(inputs, targets), val=Split(inputs, targets))"
CLASS_LOSSES = (None, functional.cross_entropy, functional.nll_loss)
IGNORED_CLASS = -100  # torch's default
HINT_ONE_SHAPE = "give both one shape: outputs.squeeze(1) in the model, or targets.unsqueeze(1) in the data"
NUM_COMPARED = 16  # targets that metrics are tried on
BROADCAST = "incorrect results due to broadcasting"  # of torch's warning
# Of larger inputs, samples spread evenly are looked at.
MAX_LOOKED_AT_BYTES = 64 * 2**20


class _Shown(str):
    """Text that stands for a value in a message."""

    def __repr__(self) -> str:
        return str(self)


def check_workload(workload: Workload, data: Any, build: Callable[[], Any], numerics: Numerics) -> Any:
    """Return the model that `build` makes, converted, where it can be trained on the data.

    Leaves the random number generators as `build` leaves them.

    Args:
        data: what the workload's ``data`` returned.

    Raises:
        WorkloadError: with every mistake in data and model.
    """
    with _generators_kept(numerics.device):
        mistakes = [*_data_mistakes(workload, data)]
    try:
        model = build()
    except Exception:
        if mistakes:  # of which that may come
            raise WorkloadError.of(workload.name, mistakes) from None
        raise
    mistakes += _model_mistakes(model)
    if not mistakes:
        model = numerics.convert(model)
        with _generators_kept(numerics.device):
            mistakes += _batch_mistakes(workload, data, model, numerics)
    if mistakes:
        raise WorkloadError.of(workload.name, mistakes)
    return model


@contextlib.contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    states = generator_states(device)
    try:
        yield
    finally:
        set_generator_states(states, device)


# ---- data


def _data_mistakes(workload: Workload, data: Any) -> Iterator[Mistake]:
    if not isinstance(data, Data):
        yield Mistake("data(config)", _kind(data), "is no raypar.Data", RETURN_DATA)
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
        if split is None and dataset is None and (name != "test" or workload.has_test):
            hint = f"give Data {name}=Split(inputs, targets)" + (f", or {name}_dataset" if name != "test" else "")
            yield Mistake(f"data.{name}", None, "there are no samples", hint)
    train, dataset = data.train, data.train_dataset
    if isinstance(train, Split) and dataset is not None and hasattr(dataset, "__len__") and len(dataset) != len(train):
        hint = "both hold the same samples in the same order"
        yield Mistake("data.train_dataset", _Shown(f"{len(dataset)} samples"), f"data.train has {len(train)}", hint)


def _split_mistakes(where: str, split: Any) -> Iterator[Mistake]:
    if not isinstance(split, Split):
        yield Mistake(
            where, _kind(split), "is no raypar.Split", f"give {where.removeprefix('data.')}=Split(inputs, targets)"
        )
        return
    tensors = {f"{where}.inputs": split.inputs, f"{where}.targets": split.targets}
    wrong = {part: each for part, each in tensors.items() if not isinstance(each, Tensor) or each.dim() == 0}
    for part, each in wrong.items():
        hint = f"give {part.rpartition('.')[2]} as one tensor, a row for each sample: torch.as_tensor(…)"
        yield Mistake(part, _kind(each), "is no tensor of samples", hint)
    if wrong:
        return
    counts = [len(each) for each in tensors.values()]
    if counts[0] != counts[1]:
        shown = _Shown("{} inputs and {} targets".format(*counts))
        yield Mistake(where, shown, "the numbers differ", "give each input its target, in the same order")
    elif not counts[0]:
        yield Mistake(where, _Shown("0 samples"), "is empty", "give it one sample at least")
    for part, each in tensors.items():
        if part.endswith("targets") and each.is_floating_point() and (num := int(each.isnan().sum())):
            yield Mistake(part, _Shown(f"{num} NaN"), "makes the loss NaN", "drop or fill these samples")


def _dataset_mistakes(where: str, dataset: Any) -> Iterator[Mistake]:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        hint = "give it __len__ and __getitem__: a torch.utils.data.Dataset, not an IterableDataset"
        yield Mistake(where, _kind(dataset), "is no map-style dataset", hint)
    elif not len(dataset):
        yield Mistake(where, _Shown("0 samples"), "is empty", "give it one sample at least")
    elif not isinstance(sample := dataset[0], (tuple, list)) or len(sample) != 2:
        yield Mistake(f"{where}[0]", _kind(sample), "is no pair of input and target", "return input, target")


def _kind(value: Any) -> _Shown | None:
    """Return what stands for a value of a wrong type: never the value itself, which may be large."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        parts = ", ".join(type(each).__name__ for each in value[:4])
        return _Shown(f"{type(value).__name__} of {len(value)} ({parts}{', …' if len(value) > 4 else ''})")
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return _Shown(f"{type(value).__name__}{shape}")


# ---- model, loss and metrics


def _model_mistakes(model: Any) -> Iterator[Mistake]:
    if isinstance(model, type):
        name = model.__name__
        yield Mistake("model(config)", _Shown(f"class {name}"), "is no instance", f"make one: return {name}(…)")
    elif not isinstance(model, nn.Module):
        yield Mistake("model(config)", _kind(model), "is no torch.nn.Module", "return the model")


def _batch_mistakes(workload: Workload, data: Data, model: nn.Module, numerics: Numerics) -> Iterator[Mistake]:
    """Yield what two samples show, run through model, loss and metrics."""
    if any(map(is_lazy, model.parameters())):
        return  # a lazy module is made by its first batch
    x, y = _some_samples(data)
    outputs = _outputs(model, x, numerics)
    if data.train is not None and (num := _num_nan(data.train.inputs)) and _is_nan_in_outputs(data, model, numerics):
        shown = _Shown(f"{num} samples with NaN")
        yield Mistake("data.train.inputs", shown, "make the model's outputs NaN", "drop these samples, or fill them")
    if outputs is None:
        return
    loss = workload.loss
    if isinstance(outputs, Tensor) and outputs.dim() > 1 and _takes_classes(loss):
        splits = {"train": data.train, "val": data.val, "test": data.test}
        ignored = getattr(loss, "ignore_index", IGNORED_CLASS)
        mistakes = [
            mistake
            for name, split in splits.items()
            if split is not None
            and (mistake := _class_mistake(f"data.{name}.targets", split.targets, outputs, ignored))
        ]
        yield from mistakes
        if mistakes:
            return
    yield from _loss_mistakes(loss or functional.cross_entropy, outputs, y.to(numerics.device))
    targets = y if data.train is None else data.train.targets[:NUM_COMPARED]
    given = (each.to(numerics.device) for each in (y, targets))
    yield from _metric_mistakes(default_metrics(workload), outputs, *given)


def _some_samples(data: Data) -> tuple[Tensor, Tensor]:
    if data.train is not None:
        x = data.train.inputs[:2]
        return (data.transform(x) if data.transform else x), data.train.targets[:2]
    dataset: Any = data.train_dataset
    x, y = default_collate([dataset[i] for i in range(min(2, len(dataset)))])
    return x, y


def _outputs(model: nn.Module, x: Tensor, numerics: Numerics) -> Any:
    """Return the model's outputs; None where it raises.

    Not in inference mode: what the model caches, it is to be trained with.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), numerics.autocast():
            return model(numerics.cast(x.to(numerics.device)))
    except Exception:
        return None
    finally:
        model.train(was_training)


def _num_nan(inputs: Tensor) -> int:
    """Return the number of samples with a NaN, of those that are looked at."""
    if not inputs.is_floating_point():
        return 0
    inputs = inputs[:: max(1, -(-inputs.nbytes // MAX_LOOKED_AT_BYTES))]
    return int(_has_nan(inputs).sum())


def _has_nan(inputs: Tensor) -> Tensor:
    return inputs.isnan().reshape(len(inputs), -1).any(1)


def _is_nan_in_outputs(data: Data, model: nn.Module, numerics: Numerics) -> bool:
    """Return whether a sample with NaN gives outputs with NaN: a transform or model may know what to do with it."""
    assert data.train is not None
    inputs = data.train.inputs[:: max(1, -(-data.train.inputs.nbytes // MAX_LOOKED_AT_BYTES))]
    x = inputs[_has_nan(inputs)][:2]
    outputs = _outputs(model, data.transform(x) if data.transform else x, numerics)
    return isinstance(outputs, Tensor) and bool(outputs.isnan().any())


def _takes_classes(loss: Any) -> bool:
    return loss in CLASS_LOSSES or isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))


def _class_mistake(where: str, targets: Tensor, outputs: Tensor, ignored: int) -> Mistake | None:
    """Return why cross-entropy does not take targets for outputs of shape (batch, classes, …)."""
    num_classes = outputs.shape[1]
    if targets.is_floating_point():
        if targets.shape[1:] == outputs.shape[1:]:
            return None  # a probability for each class
        hint = "give class numbers: targets.long(); or, for a regression, a loss=: torch.nn.functional.mse_loss"
        return Mistake(where, _Shown(str(targets.dtype)), "are no classes, which cross-entropy needs", hint)
    if targets.dtype not in (torch.int64, torch.uint8):
        return Mistake(where, _Shown(str(targets.dtype)), "cross-entropy needs int64", "give targets.long()")
    if targets.shape[1:] != outputs.shape[2:]:
        expected = f"(num_samples{''.join(f', {size}' for size in outputs.shape[2:])})"
        shown = _Shown(f"shape {tuple(targets.shape)}")
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
    return Mistake(where, _Shown(f"{low} to {high}"), problem, hint)


def _loss_mistakes(loss: Callable[..., Any], outputs: Any, y: Tensor) -> Iterator[Mistake]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.no_grad():
                value = loss(outputs, y)
        except Exception:
            return
    if isinstance(outputs, Tensor) and any(BROADCAST in str(each.message) for each in caught):
        shown = _Shown(f"outputs of shape {tuple(outputs.shape)}, targets of shape {tuple(y.shape)}")
        yield Mistake("loss(outputs, targets)", shown, "pairs each output with every target", HINT_ONE_SHAPE)
    elif isinstance(value, Tensor) and value.dim():
        shown = _Shown(f"shape {tuple(value.shape)}")
        yield Mistake("loss(outputs, targets)", shown, "is no single number", "return the batch's mean")


def _metric_mistakes(metrics: Mapping[str, Any], outputs: Any, y: Tensor, targets: Tensor) -> Iterator[Mistake]:
    for name, metric in metrics.items():
        try:
            with torch.no_grad():
                scores = metric.collect(outputs, y) if isinstance(metric, Statistic) else metric(outputs, y)
        except RayparError as error:  # of one of raypar's own
            shown = _Shown(getattr(metric, "__name__", type(metric).__name__))
            yield Mistake(f"metrics[{name!r}]", shown, error.message, error.hint)
            continue
        except Exception:
            continue
        if not isinstance(metric, Statistic):
            try:
                sum_and_weight(scores, len(y))
            except RayparError as error:
                problem = f"is no score for each of {len(y)} samples"
                yield Mistake(f"metrics[{name!r}]", _kind(scores), problem, error.hint)
                continue
            if isinstance(outputs, Tensor) and pairs_samples(metric, outputs, targets):
                shown = _Shown(f"outputs of shape {tuple(outputs.shape)}, targets of shape {tuple(y.shape)}")
                yield Mistake(f"metrics[{name!r}]", shown, "pairs each output with every target", HINT_ONE_SHAPE)
