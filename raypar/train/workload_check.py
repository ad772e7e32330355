"""Check of a workload's data, model, loss and metrics before training: all mistakes at once, each with its fix.

Exceptions of a model or loss are left to the training, whose error has a traceback.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from raypar import units
from raypar.errors import Mistake, RayparError, Shown, WorkloadError, message_of
from raypar.parallel.loss import Kind, Loss, part_of
from raypar.parallel.strategy import DistContext
from raypar.study.strategy import STRATEGIES, num_shares, pipeline_size
from raypar.study.workload import Config, Data, Statistic, Workload
from raypar.train.data import Feed, TrainBatches, evaluated, first_samples, moved
from raypar.train.data_check import data_mistakes, described, error_text, splits_of
from raypar.train.data_identity import NO_DIGESTS, different_data, identity_of, some_indices, splits_differ
from raypar.train.generators import generators_kept, seed_generators
from raypar.train.loss_kind import HINT_RATIO, IGNORED_CLASS, NOT_OF_PARTS, loss_of, num_rows, takes_classes
from raypar.train.model_check import Checked, model_facts
from raypar.train.precision import Numerics, numerics_of
from raypar.units import listed
from raypar.workloads.metrics import default_metrics, pairs_samples, sum_and_weight

T = TypeVar("T")

HINT_MEAN = "return the batch's mean, or a pair (sum, weight)"
FIX = "fix that function"
HINT_ONE_SHAPE = "give both one shape: outputs.squeeze(1) in the model, or targets.unsqueeze(1) in the data"
PAIRS_ALL = "pairs each output with every target"
BROADCAST = "incorrect results due to broadcasting"  # in torch's warning
NO_GROUP = "process group"  # in torch's errors without a process group
NUM_SAMPLES = 3  # run through model, loss and metrics
NUM_COMPARED = 16  # targets, to try the metrics on
MAX_CHECKED_BYTES = 64 * 2**20  # larger inputs are sampled evenly
LIMIT_S = 4.0  # for all points of a study, before it starts
MAX_LOADED_TWICE_S = 1.0


@dataclass
class WorkloadCheck:
    """Check of one workload under one config, and the mistakes found so far.

    Attributes:
        data: return value of the workload's ``data``.
        mistakes: mistakes that make training impossible.
        raised: errors of the workload's own functions. In a rank, the training raises them again, with their traceback.
        needs_group: some of these functions need a process group, which only the ranks of a trial have.
    """

    workload: Workload
    config: Config
    numerics: Numerics
    data: Any = None
    mistakes: list[Mistake] = field(default_factory=list)
    raised: list[Mistake] = field(default_factory=list)
    needs_group: bool = False

    def attempt(self, where: str, function: Callable[[], T], shown: str = "", hint: str = FIX) -> T | None:
        """Call a function of the workload; if it raises, note the error and return None.

        Args:
            shown: description of its arguments.
        """
        try:
            return function()
        except (Exception, SystemExit) as error:  # the user's own code
            self.note(error, where, shown, hint)
            return None

    def note(self, error: BaseException, where: str, shown: str, hint: str = FIX) -> None:
        """Note an error of the workload's own functions."""
        self.needs_group |= NO_GROUP in message_of(error).lower()
        self.raised.append(Mistake(where, Shown(shown or "no value"), f"raises {error_text(error)}", hint))

    def check_data(self) -> None:
        """Note the mistakes in the data."""
        self.mistakes += data_mistakes(self.data, self.config, has_test=self.workload.has_test)

    def check_model(self, model: Any) -> Checked | None:
        """Run a few samples through model, loss and metrics; return None, and note the mistakes, if there are any."""
        self.mistakes += _model_mistakes(model)
        if self.mistakes:
            return None
        data, numerics = self.data, self.numerics
        model = numerics.convert(model)
        with generators_kept(numerics.device):
            x, _ = first_samples(data, NUM_SAMPLES)
            feed = Feed(numerics, model, x)
            if any(map(is_lazy, model.parameters())):  # its first batch initialises a lazy module
                with contextlib.suppress(Exception):  # reported below
                    evaluated(model, feed(moved(x, numerics.device)), numerics)
            loss = loss_of(self.workload, data, model, numerics, feed)
            _check_batch(self, model, feed, loss)
        if data.train_loader is not None and num_shares(self.config) > 1 and loss.kind is Kind.MEAN:
            loss = loss.counting(num_rows)  # the loader decides the sizes of the ranks' batches
        return None if self.mistakes else Checked(model, loss, feed)


def check_workload(
    workload: Workload,
    data: Any,
    config: Config,
    build: Callable[[], Any],
    numerics: Numerics,
    context: DistContext,
    digests: Mapping[tuple[str, int], str] = NO_DIGESTS,
) -> Checked:
    """Build the model and check that it can be trained on the data. All ranks call it.

    Leaves the random number generators as `build` leaves them.

    Args:
        data: return value of the workload's ``data``.
        digests: those of its splits that all ranks know, by split and number of samples.

    Raises:
        WorkloadError: with every mistake in data and model, or if the ranks have different data.
    """
    check = WorkloadCheck(workload, config, numerics, data)
    with generators_kept(numerics.device):
        check.check_data()
    try:
        model = build()
    except Exception:
        if check.mistakes:  # which may be the cause
            raise WorkloadError.of(workload.name, check.mistakes) from None
        raise
    checked = check.check_model(model)
    if checked is None:
        raise WorkloadError.of(workload.name, check.mistakes + check.raised)
    with generators_kept(numerics.device):
        if wrong := different_data(data, config, context, digests):
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
        check.check_data()
        if compares and not check.mistakes and time.monotonic() - start_s < MAX_LOADED_TWICE_S:
            once, again = identity_of(check.data, config), identity_of(seeded(seed, load, config), config)
            if once != again:
                check.mistakes.append(splits_differ("different samples in two calls"))
    model = check.attempt("model(config)", lambda: seeded(seed, build, config))
    if not check.raised:
        checked = check.check_model(model)
        if checked is not None and not check.raised:
            check.mistakes += _first_batch_mistakes(check, seed, checked)
    elif model is not None:
        check.mistakes += _model_mistakes(model)
    is_left_to_ranks = check.needs_group or config["device"] != "cpu"  # the functions may need the device
    return check.mistakes if is_left_to_ranks else check.mistakes + check.raised


def _first_batch_mistakes(check: WorkloadCheck, seed: int, checked: Checked) -> list[Mistake]:
    config, alone = check.config, DistContext(0, 1, check.numerics.device)
    batches = TrainBatches(check.data, config, seed, (0, num_shares(config)), checked.feed)
    return model_facts(check.workload, config, checked, batches, alone, config["num_workers"])[1]


def seeded(seed: int, function: Callable[..., T], *args: Any) -> T:
    """Call a function with all generators seeded as in a rank that loads its data."""
    seed_generators(seed)
    return function(*args)


def _model_mistakes(model: Any) -> Iterator[Mistake]:
    if isinstance(model, type):
        name = model.__name__
        yield Mistake("model(config)", Shown(f"class {name}"), "is not an instance", f"make one: return {name}(…)")
    elif not isinstance(model, nn.Module):
        yield Mistake("model(config)", described(model), "is not a torch.nn.Module", "return the model")
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        hint = "give it at least one parameter with requires_grad=True"
        yield Mistake("model(config)", described(model), "has nothing to train", hint)


def _check_batch(check: WorkloadCheck, model: nn.Module, feed: Feed, loss: Loss) -> None:
    """Run a few samples through model, loss and metrics, and note the mistakes."""
    numerics = check.numerics
    x, y = moved(first_samples(check.data, NUM_SAMPLES), numerics.device)
    y = feed.targets(y)
    if pipeline_size(check.config) > 1 and not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        hint = 'use strategy="ddp" or "fsdp", or give one tensor of inputs and one of targets'
        problem = "passes one tensor from stage to stage"
        check.mistakes.append(Mistake("strategy", check.config["strategy"], problem, hint))
    hint = "make the model's forward take the inputs of data(config), or the reverse"
    shapes = f"inputs of {_shape_text(x)}"
    outputs = check.attempt("model(inputs)", lambda: evaluated(model, feed(x), numerics), shapes, hint)
    check.mistakes += _nan_mistakes(check, model, feed, loss)
    is_real = outputs is not None
    if outputs is None:
        outputs = _random_outputs(model, y)
        if not check.raised or outputs is None or not takes_classes(check.workload.loss):
            return
    if wrong := list(_class_mistakes(check, outputs)):
        check.mistakes += wrong
        if y.is_floating_point() or y.shape[1:] != outputs.shape[2:]:
            return
        y = y.long().clamp(0, outputs.shape[1] - 1)  # try the metrics with valid classes
    elif is_real:
        _check_loss(check, outputs, y, loss)
    _check_metrics(check, outputs, y)


def _random_outputs(model: nn.Module, targets: Any) -> Tensor | None:
    """Return outputs of the last layer's width for a model that raises; None if the width is unknown."""
    widths = [each.out_features for each in model.modules() if isinstance(each, nn.Linear)]
    is_row = isinstance(targets, Tensor) and targets.dim() == 1
    return torch.randn(len(targets), widths[-1], device=targets.device) if widths and is_row else None


def _nan_mistakes(check: WorkloadCheck, model: nn.Module, feed: Feed, loss: Loss) -> Iterator[Mistake]:
    """Yield NaN in inputs and targets that reaches outputs or loss; a transform, model or loss may handle it."""
    transform, numerics = check.data.transform or (lambda inputs: inputs), check.numerics
    for name, split, _ in splits_of(check.data):
        samples = _sampled((split.inputs, split.targets)) if split is not None else ((), ())
        effects = {"inputs": "make the model's outputs NaN", "targets": "make the loss NaN"}
        for (part, effect), tree in zip(effects.items(), samples, strict=True):
            rows = _rows_with_nan(tree)
            if not len(rows):
                continue
            x, y = moved(part_of(samples, rows[:2]), numerics.device)
            with contextlib.suppress(Exception), torch.no_grad():  # reported elsewhere
                outputs = evaluated(model, feed(transform(x)), numerics)
                value = outputs if part == "inputs" else loss(outputs, feed.targets(y))
                if bool((value[0] if isinstance(value, tuple) else value).isnan().any()):
                    shown = Shown(f"{units.counted(len(rows), 'sample')} with NaN")
                    yield Mistake(f"data.{name}.{part}", shown, effect, "drop these samples, or fill them")


def _rows_with_nan(tree: Any) -> Tensor:
    """Return the indices of the samples that have a NaN, shape ``(num,)``."""
    leaves = [leaf for leaf in tree_leaves(tree) if leaf.is_floating_point()]
    masks = [leaf.isnan().reshape(len(leaf), -1).any(1) for leaf in leaves]
    return torch.stack(masks).any(0).nonzero().flatten() if masks else torch.zeros(0, dtype=torch.int64)


def _sampled(tree: Any) -> Any:
    """Return all samples, or evenly spread ones if all would take too much time."""
    num_bytes = sum(leaf.nbytes for leaf in tree_leaves(tree))
    stride = max(1, -(-num_bytes // MAX_CHECKED_BYTES))
    return tree if stride == 1 else part_of(tree, slice(None, None, stride))


def _class_mistakes(check: WorkloadCheck, outputs: Any) -> Iterator[Mistake]:
    """Yield the targets that cross-entropy can't take for outputs of shape ``(batch, classes, …)``."""
    if not (isinstance(outputs, Tensor) and outputs.dim() > 1 and takes_classes(check.workload.loss)):
        return
    ignored = getattr(check.workload.loss, "ignore_index", IGNORED_CLASS)
    for name, split, _ in splits_of(check.data):
        targets = split.targets if split is not None else None
        if isinstance(targets, Tensor) and (wrong := _class_mistake(targets, outputs, ignored)):
            yield Mistake(f"data.{name}.targets", *wrong)


def _class_mistake(targets: Tensor, outputs: Tensor, ignored: int) -> tuple[Shown, str, str] | None:
    """Return the value of targets that are not classes of the outputs, the problem and the fix."""
    num_classes = outputs.shape[1]
    if targets.is_floating_point():
        if targets.shape[1:] == outputs.shape[1:]:
            return None  # a probability for each class
        hint = "give class numbers: targets.long(); or, for a regression, a loss=: torch.nn.functional.mse_loss"
        return Shown(str(targets.dtype)), "are not class numbers, which cross-entropy needs", hint
    if targets.dtype not in (torch.int64, torch.uint8):
        return Shown(str(targets.dtype)), "cross-entropy needs int64", "give targets.long()"
    if targets.shape[1:] != outputs.shape[2:]:
        expected = f"(num_samples{''.join(f', {size}' for size in outputs.shape[2:])})"
        of_outputs = f"(batch, {', '.join(map(str, outputs.shape[1:]))})"
        problem = f"cross-entropy needs {expected} for outputs of shape {of_outputs}"
        hint = "give one class number for each sample: for example targets.squeeze(1)"
        return Shown(f"shape {tuple(targets.shape)}"), problem, hint
    classes = targets[targets != ignored]
    if not len(classes):
        return None
    low, high = int(classes.min()), int(classes.max())
    if low >= 0 and high < num_classes:
        return None
    problem = f"the model's {num_classes} outputs are for the classes 0 to {num_classes - 1}"
    hint = f"number the classes from 0{f', or give the model {high + 1} outputs' if high >= num_classes else ''}"
    return Shown(f"{low} to {high}"), problem, hint


def _check_loss(check: WorkloadCheck, outputs: Any, y: Any, loss: Loss) -> None:
    """Note mistakes that prevent computing the loss, or make it depend on the number of workers."""
    workload = check.workload
    where, shapes = "loss(outputs, targets)", f"outputs of {_shape_text(outputs)}, targets of {_shape_text(y)}"
    if isinstance(workload.loss, nn.Module) and any(p.requires_grad for p in workload.loss.parameters()):
        hint = "make them part of the model, whose outputs the loss gets"
        check.mistakes.append(Mistake("loss", described(workload.loss), "has parameters that nothing trains", hint))
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        hint = "fix that function, or give targets of the shape and type that it takes"
        value = check.attempt(where, lambda: loss(outputs, y), shapes, hint)
    if value is None:
        return
    total, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if isinstance(outputs, Tensor) and any(BROADCAST in str(each.message) for each in caught):
        check.mistakes.append(Mistake(where, Shown(shapes), PAIRS_ALL, HINT_ONE_SHAPE))
    elif not isinstance(total, Tensor) or (isinstance(value, tuple) and weight is None):
        check.mistakes.append(Mistake(where, described(value), "is not a tensor or a pair (sum, weight)", HINT_MEAN))
    elif total.dim() or (isinstance(weight, Tensor) and weight.dim()):
        shown = Shown(f"shape {tuple(total.shape)}")
        check.mistakes.append(Mistake(where, shown, "is not a single number", HINT_MEAN))
    elif loss.kind is Kind.RATIO:
        check.mistakes += _ratio_mistakes(check.config, outputs, y, loss)
    elif loss.kind is Kind.WHOLE:
        check.mistakes += _whole_mistakes(check.data, check.config, outputs, y, loss)


def _ratio_mistakes(config: Config, outputs: Any, y: Any, loss: Loss) -> Iterator[Mistake]:
    """Yield mistakes of a loss that is a pair (sum, weight)."""
    strategy = config["strategy"]
    if config["num_workers"] > 1 and not STRATEGIES[strategy].takes_loss_pairs:
        yield Mistake("strategy", strategy, "does not take a loss that is a pair", 'use strategy="fsdp" or "ddp"')
    elif not _adds_up(loss, outputs, y):
        problem = "is not a sum and its weight: the pairs of parts do not add up"
        hint = "return the sum over the samples, not their mean, and the weight by which it is divided"
        yield Mistake("loss(outputs, targets)", Shown("a pair"), problem, hint)


def _whole_mistakes(data: Data, config: Config, outputs: Any, y: Any, loss: Loss) -> Iterator[Mistake]:
    """Yield the options that cut the batch of a loss that is a function of the whole batch."""
    cuts = {"num_workers": num_shares(config), "accumulation_steps": config["accumulation_steps"]}
    if pipeline_size(config) > 1:
        cuts["num_microbatches"] = config["num_microbatches"]
    for key, num in cuts.items():
        if num > 1:
            yield Mistake(key, config[key], NOT_OF_PARTS, HINT_RATIO)
    samples: Any = data.val if data.val is not None else data.val_dataset
    can_join = not loss.is_own and _has_rows(outputs, num_rows(y)) and not _vary_in_shape(data)
    if len(samples) > config["eval_batch_size"] and not can_join:
        hint = f"set eval_batch_size={len(samples)}, or give the workload a loss= that returns (sum, weight)"
        problem = "is smaller than the validation set, whose loss can't be computed from batches"
        yield Mistake("eval_batch_size", config["eval_batch_size"], problem, hint)


def _vary_in_shape(data: Data) -> bool:
    """Return whether validation batches can't be joined because `Data.collate` pads each to its longest sample."""
    if data.collate is None or data.val is not None:
        return False
    dataset: Any = data.val_dataset
    batches = [data.collate([dataset[index]]) for index in some_indices(dataset)]
    shapes = [[leaf.shape[1:] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] for batch in batches]
    return any(each != shapes[0] for each in shapes)


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
            check.note(error, where, shapes)
        else:
            are_tensors = isinstance(outputs, Tensor) and isinstance(y, Tensor)
            if are_tensors and pairs_samples(metric, outputs, moved(targets, y.device)):
                check.mistakes.append(Mistake(where, shapes, PAIRS_ALL, HINT_ONE_SHAPE))


def _shape_text(tree: Any) -> str:
    """Return the shapes of a tensor or a tree of tensors."""
    if isinstance(tree, Tensor):
        return f"shape {tuple(tree.shape)}"
    leaves, _ = tree_flatten_with_path(tree)
    shapes = [f"{keystr(path)} {tuple(leaf.shape)}" for path, leaf in leaves if isinstance(leaf, Tensor)]
    return f"shapes {listed(shapes, 4)}" if shapes else f"type {type(tree).__name__}"
