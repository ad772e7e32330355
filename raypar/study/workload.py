"""What is trained: a model, data, a loss and metrics, as plain functions of a trial's config.

Nothing here imports torch: a study file stays quick to load, and the functions import what they need when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from raypar.study.space import Value

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

Config: TypeAlias = Mapping[str, Any]


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
    """What a workload's ``data`` function returns.

    Attributes:
        train: the training samples.
        val: the samples that ``val_loss`` and the metrics are taken on.
        transform: applied to a batch of inputs in the worker (say, uint8 to normalised float32).
        train_dataset: a map-style dataset of the same training samples in the same order, ready for the model, for
            ``loader="dataloader"`` where samples are to be prepared one by one; without it that loader serves
            ``train`` sample by sample, and `transform` is applied to its batches.
    """

    train: Split
    val: Split
    transform: Callable[[Tensor], Tensor] | None = None
    train_dataset: Dataset[Any] | None = None


def _no_preparation(config: Config) -> None:
    """A data set that is embedded needs nothing."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained; holds no training code.

    Attributes:
        name: how plans, reports and the store call it.
        model: builds the network. Called once per trial and rank, after seeding.
        data: loads the data. Called once per trial and rank; may read :func:`raypar.workloads.datasets.data_dir`.
        num_train_samples: size of the training set, known without loading it, so that a plan can be
            checked; None: unknown.
        loss: ``loss(outputs, targets) -> scalar``, a mean over the batch; None means cross-entropy.
        metrics: name to ``metric(outputs, targets) -> per-sample scores, shape (batch,)``, averaged over ``Data.val``;
            None means accuracy.
        options: the workload's own hyperparameters with their defaults; a default's type is the option's type.
        defaults: what raypar's own options are here, unless a study says otherwise (``{"lr": 0.1}``).
        prepare: makes sure on the driver, before anything starts, that the data is there; raises DataError.
        preload: modules that the model or data functions import, imported ahead so that no trial pays for it.
        description: one line for a person.
        train_loop: an existing ``train_loop_per_worker(config)``; then nothing above but name and options counts.
    """

    name: str
    model: Callable[[Config], nn.Module] | None = None
    data: Callable[[Config], Data] | None = None
    num_train_samples: int | None = None
    loss: Callable[[Any, Any], Any] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None
    options: Mapping[str, Value] = field(default_factory=dict)
    defaults: Mapping[str, Value] = field(default_factory=dict)
    prepare: Callable[[Config], None] = _no_preparation
    preload: tuple[str, ...] = ()
    description: str = ""
    train_loop: Callable[[dict[str, Any]], Any] | None = None

    @classmethod
    def from_train_loop(
        cls,
        train_loop_per_worker: Callable[[dict[str, Any]], Any],
        *,
        name: str | None = None,
        preload: tuple[str, ...] = ("torchvision", "ray.train.torch"),
        description: str = "",
    ) -> Workload:
        """Take a Ray Train ``train_loop_per_worker(config)`` as it is.

        It is called with the trial's config, reports through ``ray.train.report`` and may use ``ray.train.torch``.
        Every key of the study's config and space that raypar does not know is handed to it unchecked.
        """
        return cls(
            name=name or str(getattr(train_loop_per_worker, "__name__", "train_loop")),
            train_loop=train_loop_per_worker,
            preload=preload,
            description=description,
        )

    @property
    def is_train_loop(self) -> bool:
        return self.train_loop is not None
