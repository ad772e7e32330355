"""Observation of training code that raypar didn't write: what `raypar.observe` recorded of each rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass
from itertools import repeat
from typing import Any, get_args, get_origin, get_type_hints

from raypar.study.conditions import Stored
from raypar.study.profile import Breakdown

BY_OPTIMIZER, BY_BACKWARD = "optimizer steps", "backward passes"


@dataclass(frozen=True, kw_only=True)
class ObservedLoader:
    """A ``DataLoader`` that a rank iterated over.

    Attributes:
        site: file and line that creates it.
        is_trained_on: its batches are trained on, not evaluated.
        sampler, dataset: names of their classes.
        is_shuffled: the sampler draws a random order.
        num_samples: length of the data set; -1: unknown.
        num_iterations: number of times that the rank iterates over it.
        first_batch_s: median wait for the first batch of an iteration, including the start of its workers.
        batch_s: median wait for any other batch.
        digests: numbers for the first few batches of its first iterations, ``[iteration][batch]``. Equal batches have
            equal digests, and different batches nearly always have different ones.
    """

    site: str = ""
    is_trained_on: bool = True
    num_workers: int = 0
    batch_size: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    drop_last: bool = False
    sampler: str = ""
    is_shuffled: bool = False
    dataset: str = ""
    num_samples: int = -1
    num_iterations: int = 1
    first_batch_s: float | None = None
    batch_s: float | None = None
    digests: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ObservedDdp:
    """A ``DistributedDataParallel`` model, as its own logging data describe it.

    Attributes:
        bucket_bytes: capacity of a bucket of gradients.
        has_unused_parameters: some parameters have no gradient in a step.
    """

    bucket_bytes: float = 0
    find_unused_parameters: bool = False
    has_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    parameter_bytes: float = 0


@dataclass(frozen=True, kw_only=True)
class ObservedRank:
    """One rank's training. Times are in seconds.

    Attributes:
        rank, num_ranks: those of its process group. Without one: the rank that torchrun gives the process, or 0; and 1.
        num_steps: all steps, including the first ones, which are not timed.
        num_skipped: steps that a `GradScaler` skips because gradients overflow.
        num_warmup_steps: steps at the beginning, which are not timed.
        breakdown: mean step after the warm-up, without evaluation and checkpoints.
        passes_per_step: backward passes; more than 1 with gradient accumulation or several losses.
        samples_per_step, tokens_per_step: samples and tokens in the loaded batches; 0: unknown.
        eval_s, save_s: evaluations and checkpoints after the first step.
        losses: number of the step, from 1, and its loss, summed over its backward passes.
        optimizers, learning_rates: class and first learning rate of each, in the order of their first steps.
        num_parameters: of each optimizer.
        parameters: number of the step, from 1, and a digest of some parameters after it.
        sends: exchanges tensors with single other ranks, as the stages of a pipeline do.
        num_threads, num_cores: threads of torch's operations, and cores that the process may use.
        num_batch_norms: layers that normalise by this rank's batch alone.
        num_item_calls: values read from a GPU in a step (median); each read waits for the GPU.
        num_blocking_copies: copies of batches to a GPU in a step (median) that wait, because memory is not pinned or
            ``non_blocking=True`` is missing.
        operations: name and seconds per step of the operations in profiled steps, the largest first.
        max_rss_bytes, peak_allocated_bytes, peak_reserved_bytes: memory of the process, and of its GPU.
        problems: what could not be observed.
    """

    rank: int = 0
    num_ranks: int = 1
    counted_by: str = BY_OPTIMIZER
    num_steps: int = 0
    num_skipped: int = 0
    num_warmup_steps: int = 0
    breakdown: Breakdown
    passes_per_step: float = 1
    samples_per_step: float = 0
    tokens_per_step: float = 0
    eval_s: float = 0
    save_s: float = 0
    losses: tuple[tuple[int, float], ...] = ()
    optimizers: tuple[str, ...] = ()
    learning_rates: tuple[float, ...] = ()
    num_parameters: tuple[int, ...] = ()
    parameters: tuple[tuple[int, float], ...] = ()
    sends: bool = False
    loaders: tuple[ObservedLoader, ...] = ()
    ddp: tuple[ObservedDdp, ...] = ()
    num_threads: int = 0
    num_cores: int = 0
    num_batch_norms: int = 0
    num_item_calls: float = 0
    num_blocking_copies: float = 0
    operations: tuple[tuple[str, float], ...] = ()
    device_name: str = ""
    max_rss_bytes: float | None = None
    peak_allocated_bytes: float | None = None
    peak_reserved_bytes: float | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Observation of a trial's ranks, in order."""

    ranks: tuple[ObservedRank, ...] = ()

    @property
    def samples_per_step(self) -> float:
        """Samples of a step, on all ranks together; 0: unknown."""
        samples = [rank.samples_per_step for rank in self.ranks]
        return sum(samples) if all(samples) else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of all ranks together, which the slowest one limits; None: unknown."""
        tokens = [rank.tokens_per_step for rank in self.ranks]
        return sum(tokens) / max(rank.breakdown.step_s for rank in self.ranks) if tokens and all(tokens) else None

    @property
    def losses(self) -> dict[int, float]:
        """Mean loss of the ranks by step, for steps whose loss is known on all of them."""
        by_rank = [dict(rank.losses) for rank in self.ranks]
        if not by_rank:
            return {}
        steps = [step for step in by_rank[0] if all(step in losses for losses in by_rank)]
        return {step: sum(losses[step] for losses in by_rank) / len(by_rank) for step in steps}

    def to_stored(self) -> dict[str, Any]:
        """Return the observation for JSON."""
        return asdict(self)

    @classmethod
    def from_stored(cls, raw: Stored) -> Observation | None:
        """Restore an observation from the result of `to_stored`; None for any other mapping."""
        try:
            return _restored(cls, raw) if raw else None
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


def _restored(hint: Any, value: Any) -> Any:
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _restored(hints[name], each) for name, each in value.items()})  # type: ignore[operator]
    if get_origin(hint) is tuple:
        args = get_args(hint)
        kinds = repeat(args[0]) if args[-1] is ... else args
        return tuple(_restored(kind, each) for kind, each in zip(kinds, value, strict=False))
    return value
