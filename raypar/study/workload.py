"""Workloads: a model, data, a loss and metrics, as plain functions of a trial's config.

Nothing here imports torch: a study file stays quick to load, and the functions import what they need when they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypedDict, Unpack

from raypar.errors import Mistake, suggest
from raypar.study.command import Command
from raypar.study.metric import PERCENT, SHARE, Metric, direction_of
from raypar.study.space import Value, plain

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

Config: TypeAlias = Mapping[str, Any]

# Losses of scores of classes, (batch, classes, …), and class numbers, (batch, …).
CLASS_LOSSES = (
    *(f"torch.nn.functional.{name}" for name in ("cross_entropy", "nll_loss")),
    *(f"torch.nn.modules.loss.{name}" for name in ("CrossEntropyLoss", "NLLLoss")),
)
DEFAULT_CHOOSER = "raypar"  # of a metric that is named nowhere
LOADERS = ("resident", "dataloader")
# Options of raypar that determine where training code runs and what ends it. Train loops and commands have only these.
PLACEMENT_OPTIONS = (
    *("num_workers", "device", "cpus_per_worker", "cpu_affinity", "nodes", "node_label", "num_threads"),
    "stop_on_nan",
)


@dataclass(frozen=True)
class Split:
    """One part of a data set, held in memory.

    Attributes:
        inputs: shape ``(num_samples, ...)``, any dtype; whole numbers are cast batch by batch to the model's type.
            Several inputs are a dict or a tuple of such tensors. The model gets a dict's entries by name and a tuple's
            by position, or the dict or tuple itself if its ``forward`` takes one argument.
        targets: shape ``(num_samples, ...)``; a dict or a tuple of tensors if the loss takes one.
    """

    inputs: Any
    targets: Any

    def __len__(self) -> int:
        return len(first_tensor(self.targets))


def first_tensor(tree: Any) -> Any:
    """Return the first tensor of a tree of dicts, tuples and lists."""
    while isinstance(tree, (Mapping, tuple, list)) and tree:
        tree = next(iter(tree.values())) if isinstance(tree, Mapping) else tree[0]
    return tree


@dataclass(frozen=True)
class Data:
    """Samples as a workload's ``data`` function returns them.

    A sample of a data set is a pair of input and target, a longer tuple of inputs with the target last, or a dict,
    which is both input and target. Each may be a dict or a tuple of tensors, as in a `Split`.

    Attributes:
        train: the training samples; None if there are too many for memory (then `train_dataset`).
        val: the samples for ``val_loss`` and the metrics; None: `val_dataset`.
        transform: applied to a batch of inputs in the worker, for example from uint8 to normalised float32.
        train_dataset: a map-style dataset of the same training samples in the same order, ready for the model, for
            ``loader="dataloader"``. Without it, that loader serves ``train`` sample by sample and applies `transform`
            to its batches. Without `train`, a DataLoader reads it for any value of `loader`.
        val_dataset: the same for `val`; used only if that is None.
        test: samples that no trial sees. Only models that were chosen on `val` see them, once, at a study's end.
        collate: makes a batch from a list of samples of `train_dataset` or `val_dataset`, as a DataLoader's
            ``collate_fn``; None: torch's own.
        train_loader: ``train_loader(rank, num_ranks, batch_size)`` returns a rank's DataLoader, instead of `train` and
            `train_dataset`. `batch_size` is the rank's part of the global batch. Its length is the same on every rank.
            If its sampler has ``set_epoch``, it is called before each epoch.
    """

    train: Split | None = None
    val: Split | None = None
    transform: Callable[[Any], Any] | None = None
    train_dataset: Dataset[Any] | None = None
    val_dataset: Dataset[Any] | None = None
    test: Split | None = None
    collate: Callable[[list[Any]], Any] | None = None
    train_loader: Callable[[int, int, int], Any] | None = None


@dataclass(frozen=True)
class Statistic:
    """Metric that is not a mean of per-sample scores, such as a macro-F1.

    Attributes:
        collect: ``collect(outputs, targets) -> tensor`` of one shape for every batch; summed over batches and ranks.
        finish: turns that sum into the metric.
    """

    collect: Callable[[Any, Any], Tensor]
    finish: Callable[[Tensor], float]


@dataclass(frozen=True)
class Option:
    """One hyperparameter.

    Attributes:
        default: its value unless a study sets another.
        kind: the type of its values (an int is valid for a float); `object`: `check` decides.
        doc: its meaning, for people.
        check: returns what is wrong with a value (``"must be at least 1"``), or None.
        optional: None is allowed; `doc` explains it.
        has_effect: returns whether a complete config uses it; other trials are logged without it.
        strategies: the values of `strategy` under which it has an effect; empty: all.
    """

    default: Value
    kind: type
    doc: str
    check: Callable[[Value], str | None] = lambda _: None
    optional: bool = False
    has_effect: Callable[[Config], bool] = lambda _: True
    strategies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "default", plain(self.default))
        if isinstance(self.kind, type):  # of a `str` or `int` enumeration, whose members come as texts and numbers
            object.__setattr__(
                self, "kind", next((k for k in (bool, int, float, str) if issubclass(self.kind, k)), self.kind)
            )


def at_least(low: float) -> Callable[[Value], str | None]:
    """Return a check for numbers with a lower bound."""
    return lambda v: (
        None if isinstance(v, (int, float)) and math.isfinite(v) and v >= low else f"must be at least {low}"
    )


def one_of(default: str, names: Iterable[str], doc: str = "", **rules: Any) -> Option:
    """Return a hyperparameter that is one of some names; `rules`: other fields of `Option`."""
    names = tuple(names)

    def check(value: Value) -> str | None:
        return None if value in names else f"unknown, {suggest(str(value), names)}"

    return Option(default, str, doc or ", ".join(names), check, **rules)


def whole_number(default: int | None, doc: str, *, at_least: int = 1, **rules: Any) -> Option:
    """Return a hyperparameter that is a whole number with a lower bound; None as default makes it optional."""

    def check(value: Value) -> str | None:
        return None if isinstance(value, int) and value >= at_least else f"must be at least {at_least}"

    return Option(default, int, doc, check, optional=default is None, **rules)


def _no_preparation(config: Config) -> None:
    """Do nothing: an embedded data set needs no preparation."""


class CommonFields(TypedDict, total=False):
    """Fields that a train loop and a command share with a `Workload`, which describes them."""

    options: Mapping[str, Value | Option]
    defaults: Mapping[str, Value]
    metric: str | Metric
    mode: str
    metric_chosen_by: str
    prepare: Callable[[Config], object]
    description: str
    dataset: str


def _with_chooser(fields: CommonFields) -> CommonFields:
    """Return the fields; if they name no metric, raypar chose the default one."""
    if fields.get("metric"):
        return fields
    others = fields.copy()
    others.pop("metric", None)
    others["metric_chosen_by"] = others.get("metric_chosen_by") or DEFAULT_CHOOSER
    return others


@dataclass(frozen=True, kw_only=True)
class AnyWorkload:
    """Base of the kinds of workload, with what all of them have; `Workload` describes the fields.

    The kinds are `Workload` (model, data and loss, trained by raypar's own loop), `TrainLoopWorkload` and
    `CommandWorkload`, whose training code raypar can't instrument.

    Attributes:
        kind: the kind, in words.
        raypar_options: raypar's own options that apply to it; None: all.
        takes_any_key: a study may set hyperparameters that nothing declares.
    """

    kind: ClassVar[str]
    raypar_options: ClassVar[tuple[str, ...] | None] = PLACEMENT_OPTIONS
    takes_any_key: ClassVar[bool] = False

    name: str
    metric: str | Metric = ""
    mode: str = ""
    metric_chosen_by: str = ""
    options: Mapping[str, Value | Option] = field(default_factory=dict)
    defaults: Mapping[str, Value] = field(default_factory=dict)
    prepare: Callable[[Config], object] = _no_preparation
    preload: tuple[str, ...] = ()
    description: str = ""
    dataset: str = ""
    has_test: bool = False

    def __post_init__(self) -> None:
        for key in ("options", "defaults"):
            if isinstance(values := getattr(self, key), Mapping):
                object.__setattr__(self, key, {name: plain(value) for name, value in values.items()})

    @property
    def hyperparameters(self) -> Mapping[str, Value | Option]:
        """Its own hyperparameters, each with its default or an `Option`."""
        return self.options

    @property
    def files(self) -> tuple[str, ...]:
        """Paths, relative to the study's folder, of the Python files that it runs."""
        return ()

    @property
    def script(self) -> str:
        """Path, relative to the study's folder, of the script that it certainly runs; empty: unknown, or none."""
        return ""

    def train_size(self, config: Config) -> int | None:
        """Return the number of training samples under a config; None if unknown beforehand."""
        return None

    def mistakes(self) -> Iterator[Mistake]:
        """Yield the mistakes of the fields that only its kind has."""
        yield from _function_mistakes(self, "prepare")

    def point_mistakes(self, config: Config, where: str = "") -> Iterator[Mistake]:
        """Yield what prevents it from running with a complete config; `where` is a prefix of the mistakes' fields."""
        yield from ()

    def metric_of(self, name: str | Metric = "", mode: str = "") -> Metric:
        """Return the metric that a study is judged by.

        Args:
            name: key of the reports, or a metric; empty: the workload's own.
            mode: "max" or "min"; empty: the metric's own.
        """
        if isinstance(name, Metric):
            return replace(name, mode=mode or name.mode)
        declared = self.metric if isinstance(self.metric, Metric) else None
        default_name = declared.name if declared else self.metric or self._default_metric()
        if name in ("", default_name):
            name, mode = str(default_name), mode or self.mode
            if declared:
                return replace(declared, mode=mode or declared.mode)
        return self._reported_metric(name, mode)

    def _default_metric(self) -> str:
        """Return the name of the metric to judge by if none is named."""
        return str(type(self).metric)

    def _reported_metric(self, name: str, mode: str) -> Metric:
        """Return the metric of a key of the reports."""
        return Metric(name, mode)


@dataclass(frozen=True, kw_only=True)
class Workload(AnyWorkload):
    """Model, data, loss and metrics; holds no training code.

    Attributes:
        name: its name in plans, reports and the store.
        model: builds the network. Called once per trial and rank, after seeding.
        data: loads the data. Called once per trial and rank at most; may read `raypar.workloads.datasets.data_dir()`.
        share_data: ranks of a machine may share what `data` returned for the same settings, copy-on-write. False: every
            rank calls it, for a function that does more than return data, such as change an object that `model` reads.
        num_train_samples: size of the training set, or a function of the config that returns it without loading
            the data, so that a plan can be checked; None: unknown.
        optimizer: ``optimizer(model, config) -> torch.optim.Optimizer``, instead of raypar's options `optimizer` and
            `weight_decay`, for example with parameter groups. The model has the rank's parameters under their names;
            under a strategy that splits them, these are parts (DTensors). `lr_schedule` multiplies each group's lr;
            ``config["lr"]`` is scaled by `lr_scaling`.
        loss: ``loss(outputs, targets) -> scalar``, the batch's mean over its samples; or ``-> (sum, weight)`` for the
            loss ``sum / weight``, such as the sum over all tokens and their number. raypar adds both up over workers,
            accumulation and evaluation batches. None: the loss that the model returns (``outputs.loss``,
            ``outputs["loss"]``), else cross-entropy.
        metrics: name to a `Statistic` or to ``metric(outputs, targets)``, which returns a score for each sample, shape
            ``(batch,)``, or the sum of the scores and their number (of positions, say); averaged over ``Data.val``.
            None: accuracy if the loss is torch's cross-entropy, else nothing.
        metric: key of the reports that its studies are judged by unless they name another, or a `Metric` with its
            direction and unit; empty: "accuracy" if that is one of the metrics, else "val_loss".
        mode: whether "max" or "min" of it is better; empty: inferred from its name.
        metric_chosen_by: who chose the metric if the user did not; recommendations name it.
        options: the workload's own hyperparameters, each with a default, which determines the type, or an `Option`.
        defaults: its defaults for raypar's own options (``{"lr": 0.1}``).
        loaders: allowed values of `loader`: a set that is too large for memory has no "resident".
        prepare: makes sure that the data is there, on the driver, before anything starts; raises DataError.
        preload: modules that the functions import, imported ahead so that no trial pays for it.
        description: one line for people.
        dataset: the data set's name and size, for people.
        has_test: `data` returns a test split.
        save: writes a trained model into an empty folder, for ``keep_model``; None: its weights as ``weights.pt``.
        generate: ``generate(folder, prompt, max_new_tokens) -> text`` with a model that `save` wrote.
        layers: the model's own layers, in the order of the forward pass, for strategies that cut the model.
            ``nn.Sequential(*layers)`` computes the same, and no layer changes its input in place. May raise
            RayparError if this model can't be cut. None: the model itself if it is an ``nn.Sequential``.
        tensor_plan: names of the model's ``nn.Linear`` layers to how each is split among workers: "column" (by output
            features) or "row" (by input features, after a column one). None: pairs of ``nn.Linear`` in an
            ``nn.Sequential`` with only elementwise layers between them.
    """

    kind = "model"
    raypar_options = None

    model: Callable[[Config], nn.Module] | None = None
    data: Callable[[Config], Data] | None = None
    share_data: bool = True
    num_train_samples: int | Callable[[Config], int | None] | None = None
    optimizer: Callable[[nn.Module, Config], Optimizer] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any] | Statistic] | None = None
    loaders: tuple[str, ...] = LOADERS
    save: Callable[[nn.Module, Config, Path], None] | None = None
    generate: Callable[[Path, str, int], str] | None = None
    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    tensor_plan: Callable[[nn.Module], Mapping[str, str]] | None = None

    @classmethod
    def from_train_loop(
        cls,
        train_loop_per_worker: Callable[[dict[str, Any]], Any],
        *,
        name: str = "",
        preload: tuple[str, ...] = ("torchvision", "ray.train.torch"),
        **fields: Unpack[CommonFields],
    ) -> TrainLoopWorkload:
        """Take a Ray Train ``train_loop_per_worker(config)`` as it is.

        It is called with the trial's config, reports through ``ray.train.report`` and may use ``ray.train.torch``.
        It gets every key of the study's config and space that neither raypar nor `options` knows, unchecked.
        Each step is timed: those that the loop marks with ``raypar.step()``, or those that raypar observes. If there
        are none, the time between two reports counts, if these have an ``epoch`` or a ``step``, and else the whole
        trial.

        Args:
            train_loop_per_worker: the loop, an importable function.
            name: its name in plans, reports and the store; empty: the function's name.
            preload: modules that it imports, imported ahead so that no trial pays for it.
            **fields: `options`, `defaults`, `metric` (by default "accuracy"), `mode`, `metric_chosen_by`, `prepare`,
                `description` and `dataset`, as for a `Workload`.

        Returns:
            The workload. Its metrics are those that the loop reports.
        """
        name = name or str(getattr(train_loop_per_worker, "__name__", "train_loop"))
        return TrainLoopWorkload(name=name, train_loop=train_loop_per_worker, preload=preload, **_with_chooser(fields))

    @classmethod
    def from_command(
        cls,
        command: str | Sequence[str],
        *,
        metrics: Mapping[str, str] | None = None,
        tensorboard: str = "",
        folder: str = "",
        shell: bool = False,
        fresh_process: bool = False,
        name: str = "",
        **fields: Unpack[CommonFields],
    ) -> CommandWorkload:
        """Take a command line, such as ``"torchrun --nproc-per-node={num_workers} train.py --lr {lr}"``.

        It runs once on each machine of a trial, on the cores of all its workers there.
        Its steps are timed as raypar observes them, if it trains with torch.
        Reports are its output's JSON lines (``{"step": 10, "loss": 0.5}``), calls of ``raypar.report`` in the script,
        and what `metrics` finds. An exit code other than 0 is a failure.

        Args:
            command: the command line, or its words, with any hyperparameter in braces, and ``{num_nodes}``,
                ``{node_rank}``, ``{workers_per_node}``, ``{master_addr}``, ``{master_port}``, ``{seed}``, ``{repeat}``
                and ``{output_dir}``. Values are filled in after it is split into words: they need no quotes.
            metrics: name to a regular expression, whose first group is the value: ``{"loss": r"loss: ([0-9.]+)"}``.
            tensorboard: folder of event files, whose scalars are reported at the end: ``"{output_dir}/runs"``.
            folder: where it runs, relative to the study file's folder; ``"{output_dir}"``: a new one for each trial.
            shell: hand the text to ``/bin/sh``; values are quoted.
            fresh_process: start new interpreters in every trial. Otherwise, a script that ``python`` or ``torchrun``
                runs, and that imports torch, is run by forks of a process that has imported what it imports.
            name: its name in plans, reports and the store; empty: the script's file name.
            **fields: `options` (those in braces need no entry), `defaults`, `metric` (by default "loss"), `mode`,
                `metric_chosen_by`, `prepare`, `description` and `dataset`, as for a `Workload`.

        Returns:
            The workload. The losses of its steps show whether its points do equal work.
        """
        if not isinstance(command, str):
            command = tuple(command) if isinstance(command, Sequence) else (command,)
        texts = str(tensorboard or ""), str(folder or "")
        template = Command(command, shell, dict(metrics or {}), *texts, fresh_process=bool(fresh_process))
        return CommandWorkload(name=name or template.title, command=template, **_with_chooser(fields))

    def train_size(self, config: Config) -> int | None:
        return self.num_train_samples(config) if callable(self.num_train_samples) else self.num_train_samples

    @property
    def has_class_loss(self) -> bool:
        """True if the loss is torch's cross-entropy, so that its outputs are scores of classes."""
        loss = self.loss.func if isinstance(self.loss, partial) else self.loss
        kind: Any = loss if hasattr(loss, "__qualname__") else type(loss)
        # By their names: nothing here imports torch.
        return loss is None or f"{kind.__module__}.{kind.__qualname__}" in CLASS_LOSSES

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that raypar computes for it."""
        if self.metrics is not None:
            return tuple(map(str, self.metrics)) if isinstance(self.metrics, Mapping) else ()
        named = self.metric.name if isinstance(self.metric, Metric) else self.metric
        return ("accuracy",) if self.has_class_loss or named == "accuracy" else ()

    def _default_metric(self) -> str:
        """Return "val_loss", unless another metric is certain."""
        if "accuracy" in self.metric_names:
            return "accuracy"
        # A direction without a name applies to the only metric.
        return self.metric_names[0] if self.mode and len(self.metric_names) == 1 else "val_loss"

    def _reported_metric(self, name: str, mode: str) -> Metric:
        return Metric(name, mode, SHARE if self.metrics is None and name == "accuracy" else "")

    def mistakes(self) -> Iterator[Mistake]:
        if not self.metric and self.metric_of() == Metric("val_loss", "max"):
            hint = 'name the metric, metric="f1", or leave mode out'
            yield Mistake("workload.mode", "max", "is given without metric=, so it would apply to val_loss", hint)
        for part in ("model", "data"):
            hint = f"give the Workload {part}=, a function of the trial's config"
            yield from _function_mistakes(self, part, hint=hint)
        yield from _function_mistakes(self, "optimizer", "loss", "prepare", "save", "generate", "layers", "tensor_plan")
        size = self.num_train_samples
        is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        if size is not None and not callable(size) and not is_size:
            hint = "give a number, or a function of the config that returns it, or leave it out"
            yield Mistake("workload.num_train_samples", size, "must be a whole number of at least 1", hint=hint)
        if not isinstance(self.loaders, (tuple, list)) or not self.loaders or set(self.loaders) - {*LOADERS}:
            problem = f"must be a tuple of one or more of {', '.join(LOADERS)}"
            yield Mistake("workload.loaders", self.loaders, problem, hint=f"set loaders={LOADERS}, or leave it out")
        if not isinstance(self.metrics, Mapping | None):
            yield Mistake("workload.metrics", self.metrics, "must be a dict", hint='set metrics={"name": …}')


@dataclass(frozen=True, kw_only=True)
class TrainLoopWorkload(AnyWorkload):
    """A Ray Train ``train_loop_per_worker(config)``; `Workload.from_train_loop` makes it.

    Attributes:
        train_loop: the loop.
    """

    kind = "train loop"
    takes_any_key = True

    metric: str | Metric = "accuracy"
    train_loop: Callable[[dict[str, Any]], Any]

    def mistakes(self) -> Iterator[Mistake]:
        hint = "give Workload.from_train_loop a function of the config"
        yield from _function_mistakes(self, "train_loop", hint=hint)
        yield from super().mistakes()


@dataclass(frozen=True, kw_only=True)
class CommandWorkload(AnyWorkload):
    """A program to run; `Workload.from_command` makes it.

    Attributes:
        command: its command line, and how its output is read.
    """

    kind = "command"

    metric: str | Metric = "loss"
    command: Command

    @property
    def hyperparameters(self) -> Mapping[str, Value | Option]:
        in_braces = Option(None, object, "in braces in the command", optional=True)
        names = (name for name in self.command.names if name not in PLACEMENT_OPTIONS)
        return {**dict.fromkeys(names, in_braces), **self.options}

    @property
    def files(self) -> tuple[str, ...]:
        return self.command.files

    @property
    def script(self) -> str:
        # Only the shell knows what it runs.
        return "" if self.command.shell else next(iter(self.command.scripts), "")

    def mistakes(self) -> Iterator[Mistake]:
        yield from self.command.mistakes()
        yield from super().mistakes()

    def point_mistakes(self, config: Config, where: str = "") -> Iterator[Mistake]:
        unset = [name for name in self.command.names if config[name] is None]
        for key in unset:
            hint = f'give it a value, config={{"{key}": …}}, or a grid in the space; '
            hint += suggest(key, list(PLACEMENT_OPTIONS))
            yield Mistake(f"{where}{key}", None, "is in braces in the command and has no value", hint=hint)
        if not unset and (wrong := self.command.problem(config)):
            hint = "change the format in braces, or the value"
            yield Mistake(f"{where}workload.command", self.command.template, wrong, hint=hint)

    def _reported_metric(self, name: str, mode: str) -> Metric:
        unit = PERCENT if self.command.is_per_cent(name) else ""
        return Metric(name, mode or direction_of(name) or "min", unit)


def _function_mistakes(workload: AnyWorkload, *parts: str, hint: str = "") -> Iterator[Mistake]:
    """Yield the fields that hold no function; `hint`: the fix where one is needed, empty where it may be left out."""
    for part in parts:
        value = getattr(workload, part)
        if not callable(value) and (value is not None or hint):
            fix = hint or "give a function, or leave it out"
            yield Mistake(f"workload.{part}", value, "must be a function", hint=fix)
