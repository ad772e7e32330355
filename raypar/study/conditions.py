"""Conditions of a trial: its hardware and software, and measurements of its machines while it was timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from types import UnionType
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from raypar.study.space import LARGEST_FLOAT

IMPORTED = "import"  # in place of a source of steps
Stored: TypeAlias = Mapping[str, Any]  # parsed JSON; other programs may have written anything


@dataclass(frozen=True, kw_only=True)
class CpuConditions:
    """Load and clocks of a rank's cores over the timed regions.

    Attributes:
        cpu_wait_share: share of its threads' runnable time in which they waited for a core.
        foreign_cpu_share: share of its cores' time that other processes took.
        raypar_load_cores: cores that raypar and Ray kept busy, on average.
        other_load_cores: cores of its machine that were busy with other work, on average.
        cpu_mhz_first, cpu_mhz_mean, cpu_mhz_last: clock of its cores at the ends of the regions.
        throttles: number of times that a core or its package slowed down because of heat.
    """

    cpu_wait_share: float | None = None
    foreign_cpu_share: float | None = None
    raypar_load_cores: float | None = None
    other_load_cores: float | None = None
    cpu_mhz_first: float | None = None
    cpu_mhz_mean: float | None = None
    cpu_mhz_last: float | None = None
    throttles: float | None = None


@dataclass(frozen=True, kw_only=True)
class GpuConditions:
    """State of a rank's GPU over the timed regions.

    Attributes:
        gpu_mhz_first, gpu_mhz_mean, gpu_mhz_last: clock of its multiprocessors at the ends of the regions.
        gpu_max_mhz: highest clock that the GPU has.
        gpu_slowdowns: regions after which heat or a power brake slowed the GPU down.
        gpu_celsius: highest temperature.
        gpu_other_processes: maximum number of other users' processes on the GPU at a time.
    """

    gpu_mhz_first: float | None = None
    gpu_mhz_mean: float | None = None
    gpu_mhz_last: float | None = None
    gpu_max_mhz: float | None = None
    gpu_slowdowns: float | None = None
    gpu_celsius: float | None = None
    gpu_other_processes: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankConditions(CpuConditions, GpuConditions):
    """Conditions of one rank; None: unknown, or not measured.

    Attributes:
        cores: cores that it was pinned to; empty: not pinned.
        num_node_cores: cores of its machine.
        transport: what carries messages to the other ranks, see `raypar.train.transport`.
        peak_memory_bytes: peak memory allocated by its training, see `raypar.measure.memory`.
        peak_rss_bytes: peak memory taken from the machine.
        peak_reserved_bytes: peak memory taken from its GPU.
        steps_from, laps_cover: source and extent of the times of training code that raypar didn't write, see
            `raypar.measure.laps`; `IMPORTED` and what was imported for runs of others; None for raypar's own loop.
        batch_norm_parts: number of parts of a batch that batch norm normalises separately.
        without_gradient: parameters that get no gradient in some step.
        finds_unused: DDP searches for these in each step.
        resumed_at_epoch: epoch of the checkpoint from which it continued.
        checkpoint_s: seconds that saving checkpoints took.
        report_s: seconds between timed steps and evaluations: reading counters, gathering the model, reporting.
        saving_s: seconds that saving checkpoints and the model took.
        profile_s: seconds that profiling its steps took, after the training.
        is_untrained: it only warmed up, to count memory, or was only profiled; its times mean nothing.
        not_resumed: why it could not continue from a checkpoint.
        not_observed: why the steps of its script were not observed.
        logged_elsewhere: where the code wanted to log to MLflow, other than the trial's run: "experiment 'mine'".
        quantities: values measured by monitors, by `Quantity.key`.
        gradient_noise: `raypar.study.gradient_noise.Moments` of blocks of steps, of all ranks; only on the first.
    """

    cores: tuple[int, ...] | None = None
    num_threads: int | None = None
    device_name: str | None = None
    cpu_model: str | None = None
    pid: int | None = None
    num_node_cores: int | None = None
    transport: str | None = None
    peak_memory_bytes: float | None = None
    peak_rss_bytes: float | None = None
    peak_reserved_bytes: float | None = None
    steps_from: str | None = None
    laps_cover: str | None = None
    batch_norm_parts: int | None = None
    without_gradient: tuple[str, ...] | None = None
    finds_unused: bool | None = None
    resumed_at_epoch: float | None = None
    checkpoint_s: float | None = None
    report_s: float | None = None
    saving_s: float | None = None
    profile_s: float | None = None
    not_resumed: str | None = None
    not_observed: str | None = None
    is_untrained: bool | None = None
    logged_elsewhere: tuple[str, ...] | None = None
    quantities: Mapping[str, float] | None = None
    gradient_noise: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions of a trial.

    Attributes:
        ranks: ranks that ended with an outcome, in order.
        node: host name of each rank's machine.
        gang: the gang that it ran in; empty: none.
        nth_in_gang: position among the gang's trials, from 1.
        num_beside: maximum number of other trials of the study at the same time.
        num_sharing: the same for trials on one of its machines.
        num_sharing_network: the same for trials over several machines, if it ran on several itself.
        preempted: of each earlier attempt that was lost with its nodes: which, and how: "node spot-3 was preempted".
        shared_with: names of other studies on its machine, separated by commas; empty: none.
        stalls_s: stalled seconds of each timed step, see `raypar.measure.telemetry`.
        energy_of: what its energy includes: "CPU packages", "GPUs" or both; empty: it has none.
        no_energy: why some energy can't be read.
    """

    ranks: tuple[RankConditions, ...] = ()
    node: tuple[str, ...] = ()
    gang: str = ""
    nth_in_gang: int | None = None
    num_beside: int | None = None
    num_sharing: int | None = None
    num_sharing_network: int | None = None
    preempted: tuple[str, ...] = ()
    shared_with: str = ""
    stalls_s: tuple[float, ...] = ()
    energy_of: str = ""
    no_energy: str = ""

    @property
    def is_foreign(self) -> bool:
        """True if raypar can't instrument the training code: a train loop or a command."""
        return bool(self.of_ranks("steps_from"))

    @property
    def is_imported(self) -> bool:
        """True if raypar did not run the trial (`raypar store import`)."""
        return IMPORTED in self.of_ranks("steps_from")

    @property
    def is_untrained(self) -> bool:
        """True if the trial only warmed up, or was only profiled."""
        return any(self.of_ranks("is_untrained"))

    def untrained(self) -> Conditions:
        """Return the conditions of a trial that only warmed up."""
        ranks = self.ranks or (RankConditions(),)
        return replace(self, ranks=tuple(replace(rank, is_untrained=True) for rank in ranks))

    def of_ranks(self, name: str) -> list[Any]:
        """Return the known values of a field of `RankConditions`."""
        return [value for rank in self.ranks if (value := getattr(rank, name)) is not None]

    def largest(self, name: str) -> float | None:
        """Return the largest value of any rank; None if none is known."""
        return max(self.of_ranks(name), default=None)

    def names(self, key: str) -> tuple[str, ...]:
        """Return the ranks' distinct values of ``node``, ``device_name`` or ``cpu_model``."""
        return tuple(dict.fromkeys(self.node if key == "node" else self.of_ranks(key)))

    def to_stored(self) -> dict[str, Any]:
        """Return the conditions for JSON: lists by rank under the fields' names, without unknown values."""
        stored = {name: value for name in _OF_TRIAL if (value := getattr(self, name)) not in (None, "", ())}
        for name in _OF_RANKS:
            if self.of_ranks(name):
                stored[name] = [getattr(rank, name) for rank in self.ranks]
        return stored

    @classmethod
    def from_stored(cls, stored: Stored) -> Conditions:
        """Restore conditions from the result of `to_stored`; values of a wrong type become unknown."""
        by_rank = {name: value for name in _OF_RANKS if isinstance(value := stored.get(name), (list, tuple))}
        ranks = [
            {name: _read(_OF_RANKS[name], values[i]) for name, values in by_rank.items() if i < len(values)}
            for i in range(max(map(len, by_rank.values()), default=0))
        ]
        of_trial = {name: _read(kind, stored.get(name)) for name, kind in _OF_TRIAL.items()}
        values = {name: value for name, value in of_trial.items() if value is not None}
        return cls(ranks=tuple(RankConditions(**rank) for rank in ranks), **values)


def _kinds(of: type, names: Iterable[str]) -> dict[str, Any]:
    """Return the type of each field, without None."""
    hints = get_type_hints(of)
    return {n: get_args(hints[n])[0] if isinstance(hints[n], UnionType) else hints[n] for n in names}


_OF_RANKS = _kinds(RankConditions, [field.name for field in fields(RankConditions)])
_OF_TRIAL = _kinds(Conditions, [field.name for field in fields(Conditions) if field.name != "ranks"])


def _read(kind: Any, value: Any) -> Any:
    """Return a stored value if it has this type, else None."""
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            return (value,) if isinstance(value, str) and get_args(kind)[0] is str else None
        values = tuple(_read(get_args(kind)[0], each) for each in value)
        return None if None in values else values
    if get_origin(kind) is Mapping:
        return {k: v for k, v in value.items() if _read(float, v) is not None} if isinstance(value, Mapping) else None
    if kind in (int, float):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_FLOAT
        return value if is_number and (kind is float or value == int(value)) else None
    return value if isinstance(value, kind) else None
