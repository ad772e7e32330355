"""Workloads: a model, data, a loss and metrics, as plain functions of a trial's config.

Nothing here imports torch: a study file stays quick to load, and the functions import what they need when they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from raypar.errors import suggest
from raypar.study.command import Command
from raypar.study.space import Value

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

Config: TypeAlias = Mapping[str, Any]

DEFAULT_CHOOSER = "raypar"  # of a metric that is named nowhere


@dataclass(frozen=True)
class Split:
    """One part of a data set, held in memory.

    Attributes:
        inputs: shape ``(num_samples, ...)``, any dtype; small dtypes (uint8) are turned to floats batch by batch.
        targets: shape ``(num_samples, ...)``.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Data:
    """Samples as a workload's ``data`` function returns them.

    Attributes:
        train: the training samples; None where they are too many to be held in memory (then `train_dataset`).
        val: the samples that ``val_loss`` and the metrics are taken on; None: `val_dataset`.
        transform: applied to a batch of inputs in the worker (say, uint8 to normalised float32).
        train_dataset: a map-style dataset of the same training samples in the same order, ready for the model, for
            ``loader="dataloader"`` where samples are to be prepared one by one; without it that loader serves
            ``train`` sample by sample, and `transform` is applied to its batches.
        val_dataset: the like for `val`, used only where that is None.
        test: samples that no trial sees: only the models that were chosen on `val`, once, at a study's end.
    """

    train: Split | None = None
    val: Split | None = None
    transform: Callable[[Tensor], Tensor] | None = None
    train_dataset: Dataset[Any] | None = None
    val_dataset: Dataset[Any] | None = None
    test: Split | None = None


@dataclass(frozen=True)
class Statistic:
    """Metric that is no mean of per-sample scores, say a macro-F1.

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
        kind: the type of its values (an int will do for a float); `object`: `check` decides.
        doc: its meaning, for people.
        check: returns what is wrong with a value (``"must be at least 1"``), or None.
        optional: None is allowed, and means what `doc` says.
        strategies: the values of `strategy` under which it has an effect; empty: all.
    """

    default: Value
    kind: type
    doc: str
    check: Callable[[Value], str | None] = lambda _: None
    optional: bool = False
    strategies: tuple[str, ...] = ()


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
    """Do nothing, as an embedded data set needs."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, data, loss and metrics; holds no training code.

    Attributes:
        name: its name in plans, reports and the store.
        model: builds the network. Called once per trial and rank, after seeding.
        data: loads the data. Called once per trial and rank; may read `raypar.workloads.datasets.data_dir()`.
        num_train_samples: size of the training set, or a function of the config that returns it without loading
            the data, so that a plan can be checked; None: unknown.
        loss: ``loss(outputs, targets) -> scalar``, a mean over the batch; None means cross-entropy.
        metrics: name to ``metric(outputs, targets) -> per-sample scores, shape (batch,)``, averaged over ``Data.val``,
            or to a `Statistic`; None means accuracy.
        metric: key of the reports that a study of it is judged by, unless it names another.
        mode: "max" or "min" of it is better.
        metric_chosen_by: who chose the metric if the user did not, to be named where a recommendation rests on it.
        options: the workload's own hyperparameters, each with its default (whose type is the option's) or an `Option`.
        defaults: raypar's own options here, unless a study sets them (``{"lr": 0.1}``).
        loaders: the values that `loader` may have: a set too large for memory has no "resident".
        prepare: makes sure on the driver, before anything starts, that the data is there; raises DataError.
        preload: modules that the model or data functions import, imported ahead so that no trial pays for it.
        description: one line for a person.
        dataset: the data set's name and size, for people.
        has_test: `data` gives a test split.
        save: writes a trained model into an (empty) folder, for ``keep_model``; None: its weights as ``weights.pt``.
        generate: ``generate(folder, prompt, max_new_tokens) -> text`` by a model that `save` wrote.
        layers: the model's layers in the order of the forward pass, such that ``nn.Sequential(*layers)`` computes the
            same and no layer changes its input in place, for strategies that cut the model; they hold the model's own
            parameters. May raise RayparError: this model can't be cut. None: the model itself where it is an
            ``nn.Sequential``.
        tensor_plan: names of ``nn.Linear`` layers of the model to how each is split among workers: "column" (by
            output features) or "row" (by input features, after a column one). None: pairs of ``nn.Linear`` in an
            ``nn.Sequential`` with only elementwise layers between them.
        train_loop: an existing ``train_loop_per_worker(config)``, instead of model and data.
        command: a program to run, instead of a model; see `from_command`.
    """

    name: str
    model: Callable[[Config], nn.Module] | None = None
    data: Callable[[Config], Data] | None = None
    num_train_samples: int | Callable[[Config], int | None] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any] | Statistic] | None = None
    metric: str = "accuracy"
    mode: str = "max"
    metric_chosen_by: str = ""
    options: Mapping[str, Value | Option] = field(default_factory=dict)
    defaults: Mapping[str, Value] = field(default_factory=dict)
    loaders: tuple[str, ...] = ("resident", "dataloader")
    prepare: Callable[[Config], object] = _no_preparation
    preload: tuple[str, ...] = ()
    description: str = ""
    dataset: str = ""
    has_test: bool = False
    save: Callable[[nn.Module, Config, Path], None] | None = None
    generate: Callable[[Path, str, int], str] | None = None
    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    tensor_plan: Callable[[nn.Module], Mapping[str, str]] | None = None
    train_loop: Callable[[dict[str, Any]], Any] | None = None
    command: Command | None = None

    @classmethod
    def from_train_loop(
        cls,
        train_loop_per_worker: Callable[[dict[str, Any]], Any],
        *,
        name: str | None = None,
        options: Mapping[str, Value | Option] | None = None,
        defaults: Mapping[str, Value] | None = None,
        metric: str = "",
        mode: str = "max",
        metric_chosen_by: str = "",
        preload: tuple[str, ...] = ("torchvision", "ray.train.torch"),
        prepare: Callable[[Config], object] = _no_preparation,
        description: str = "",
        dataset: str = "",
    ) -> Workload:
        """Take a Ray Train ``train_loop_per_worker(config)`` as it is.

        It is called with the trial's config, reports through ``ray.train.report`` and may use ``ray.train.torch``.
        Every key of the study's config and space that neither raypar nor `options` knows is handed to it unchecked.
        Each step is timed where the loop calls ``raypar.step()``; else what lies between two reports, where these have
        an ``epoch`` or a ``step`` of the loop's own; else the whole trial.

        Args:
            train_loop_per_worker: the loop, an importable function.
            name: its name in plans, reports and the store; None: the function's name.
            options: the loop's hyperparameters, each with its default or an `Option`.
            defaults: raypar's own options here, unless a study sets them.
            metric: key of the reports that a study of it is judged by, unless it names another; empty: "accuracy".
            mode: "max" or "min" of it is better.
            metric_chosen_by: who chose the metric if you did not; the report names it.
            preload: modules that it imports, imported ahead so that no trial pays for it.
            prepare: makes sure on the driver, before anything starts, that the data is there; raises DataError.
            description: one line for a person.
            dataset: the data set's name and size, for people.

        Returns:
            The workload. Its metrics are those that the loop reports.
        """
        return cls(
            name=name or str(getattr(train_loop_per_worker, "__name__", "train_loop")),
            train_loop=train_loop_per_worker,
            options=options or {},
            defaults=defaults or {},
            metric=metric or "accuracy",
            mode=mode,
            metric_chosen_by=metric_chosen_by or ("" if metric else DEFAULT_CHOOSER),
            preload=preload,
            prepare=prepare,
            description=description,
            dataset=dataset,
        )

    @classmethod
    def from_command(
        cls,
        command: str | Sequence[str],
        *,
        metrics: Mapping[str, str] | None = None,
        tensorboard: str = "",
        folder: str = "",
        shell: bool = False,
        name: str | None = None,
        options: Mapping[str, Value | Option] | None = None,
        defaults: Mapping[str, Value] | None = None,
        metric: str = "",
        mode: str = "min",
        metric_chosen_by: str = "",
        prepare: Callable[[Config], object] = _no_preparation,
        description: str = "",
        dataset: str = "",
    ) -> Workload:
        """Take a command line, such as ``"torchrun --nproc-per-node={num_workers} train.py --lr {lr}"``.

        It is run once on each machine of a trial, on the cores of all its workers there.
        Reports are its output's JSON lines (``{"step": 10, "loss": 0.5}``), calls of ``raypar.report`` in the script,
        and what `metrics` finds. An exit code other than 0 is a failure.

        Args:
            command: the command line, or its words, with any hyperparameter in braces, and ``{num_nodes}``,
                ``{node_rank}``, ``{workers_per_node}``, ``{master_addr}``, ``{master_port}``, ``{seed}``, ``{repeat}``
                and ``{output_dir}``. Values are filled in after it is split into words: they need no quotes.
            metrics: name to a regular expression, whose first group is the value: ``{"loss": r"loss: ([0-9.]+)"}``.
            tensorboard: folder of event files, whose scalars are reported at the end: ``"{output_dir}/runs"``.
            folder: where it runs, from the study file's folder on; ``"{output_dir}"``: an empty one for each trial.
            shell: hand the text to ``/bin/sh``; values are quoted.
            name: its name in plans, reports and the store; None: the script's file name.
            options: the command's hyperparameters, each with its default or an `Option`; those in braces need no entry.
            defaults: raypar's own options here, unless a study sets them.
            metric: key of the reports that a study of it is judged by, unless it names another; empty: "loss".
            mode: "max" or "min" of it is better.
            metric_chosen_by: who chose the metric if you did not; the report names it.
            prepare: makes sure on the driver, before anything starts, that the data is there; raises DataError.
            description: one line for a person.
            dataset: the data set's name and size, for people.

        Returns:
            The workload. That its points do equal work is not proven: raypar doesn't see what is trained.
        """
        words = command if isinstance(command, str) or not isinstance(command, Sequence) else tuple(command)
        template = Command(words, shell, dict(metrics or {}), tensorboard, folder)
        return cls(
            name=name or template.title,
            command=template,
            options=options or {},
            defaults=defaults or {},
            metric=metric or "loss",
            mode=mode,
            metric_chosen_by=metric_chosen_by or ("" if metric else DEFAULT_CHOOSER),
            prepare=prepare,
            description=description,
            dataset=dataset,
        )

    def train_size(self, config: Config) -> int | None:
        """Return the number of training samples under a config; None if unknown beforehand."""
        return self.num_train_samples(config) if callable(self.num_train_samples) else self.num_train_samples

    @property
    def foreign_kind(self) -> str:
        """``train loop`` or ``command``, into which raypar can't look; empty where the training code is its own."""
        return "train loop" if self.train_loop is not None else "command" if self.command is not None else ""
