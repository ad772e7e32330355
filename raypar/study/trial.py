"""Trials: the assignment (`TrialSpec`) and the outcome (`TrialResult`)."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Required, TypeAlias, TypedDict

from raypar.study.conditions import IMPORTED, Conditions, Stored
from raypar.study.observation import BY_BACKWARD, BY_OPTIMIZER, Observation
from raypar.study.profile import Profile
from raypar.study.space import Value
from raypar.study.workload import Config
from raypar.units import counted, value_of

LoadSample: TypeAlias = tuple[str, float, int, int]  # of a machine: key, value, Unix time in ms, step


class TensorRecord(TypedDict):
    """Type of a tensor, and the shape of one sample."""

    dtype: str
    shape: list[int]


class SplitRecord(TypedDict, total=False):
    """One split of a data set; one that is read sample by sample has only its size."""

    num_samples: Required[int]
    digest: str
    inputs: TensorRecord
    targets: TensorRecord


class DataRecord(TypedDict, total=False):
    """Data set of a trial, as stored; empty if unknown.

    Attributes:
        source: module and name of the workload's function.
        splits: "train", "val" and "test", as far as they exist.
    """

    name: str
    source: str
    splits: dict[str, SplitRecord]


# Key in the reports of training code that raypar didn't write: seconds from the start of the trial's processes.
SINCE_LAUNCH = "since_launch_s"
TRAINED = "trained_s"  # seconds of training up to a report, which searchers and schedulers see
# Hyperparameter of a study that compares two versions of the code (`raypar ab`): the version's label.
REVISION = "revision"
# Options that change nothing about a trial's result.
IDENTITY_IGNORED = frozenset(("checkpoint_every_epochs",))
# Options added later: with these values, a trial keeps the identity that it had without them.
IDENTITY_DEFAULTS = {
    "nodes": "pack",
    "node_label": None,
    "stop_on_nan": True,
    "max_memory": None,
    "find_unused_parameters": None,
    "activation_checkpointing": False,
    "shard_size": None,
    "noise_scale": False,
    "keep_checkpoints": False,
}


@dataclass(frozen=True)
class StateTraits:
    """Properties of a trial's final state.

    Attributes:
        is_result: it need not be run again.
        is_usable: its model and metrics are valid; a searcher may learn from them.
        is_measured: it ran to its end as well, so its time counts.
        is_rare: lists of studies have a column for it only if there is such a trial.
        plural: its form for several trials; empty: the same as for one.
    """

    is_result: bool = True
    is_usable: bool = False
    is_measured: bool = False
    is_rare: bool = False
    plural: str = ""

    @property
    def is_unusable(self) -> bool:
        """True if the trial need not be run again, but gave no model: it diverged, or does not fit."""
        return self.is_result and not self.is_usable


class TrialState(StrEnum):
    """Final state of a trial."""

    traits: StateTraits

    def __new__(cls, value: str, traits: StateTraits = StateTraits()) -> TrialState:
        state = str.__new__(cls, value)
        state._value_, state.traits = value, traits
        return state

    FINISHED = "finished", StateTraits(is_usable=True, is_measured=True)
    STOPPED = "stopped", StateTraits(is_usable=True)  # by a scheduler: complete up to its last epoch
    DIVERGED = "diverged", StateTraits()  # its loss is no longer a finite number
    # It needs more memory than its GPU, or its max_memory, has.
    DOES_NOT_FIT = "does not fit", StateTraits(is_rare=True, plural="do not fit")
    FAILED = "failed", StateTraits(is_result=False)

    @property
    def counter(self) -> str:
        """Key under which trials are counted: ``num_failed``; usable ones are all ``num_finished``."""
        return "num_finished" if self.traits.is_usable else f"num_{self.value.replace(' ', '_')}"

    def said_of(self, number: int) -> str:
        """Return the state as text for a number of trials or points: ``does not fit``, ``do not fit``."""
        return self.value if number == 1 else self.traits.plural or self.value


# State that each counter is named after.
COUNTERS = {state.counter: state for state in TrialState if state.traits.is_measured or not state.traits.is_usable}


@dataclass(frozen=True)
class FailureTraits:
    """Consequences of a failure.

    Attributes:
        is_retried: the trial is restarted, since the next attempt may succeed.
        is_deterministic: it comes from the trial's code or its needs, so trials of the same point may fail alike.
        own_retries: maximum number of restarts for this reason, instead of the study's ``max_retries``; None: those.
    """

    is_retried: bool = False
    is_deterministic: bool = False
    own_retries: int | None = None


class FailureKind(StrEnum):
    traits: FailureTraits

    def __new__(cls, value: str, traits: FailureTraits = FailureTraits()) -> FailureKind:
        kind = str.__new__(cls, value)
        kind._value_, kind.traits = value, traits
        return kind

    ERROR = "error", FailureTraits(is_deterministic=True)  # user code raised
    CRASH = "crash", FailureTraits(is_retried=True, is_deterministic=True)  # a rank died: signal, exit
    KILLED = "killed", FailureTraits(is_retried=True)  # a rank died of a signal that other processes send
    DOES_NOT_FIT = "does_not_fit"  # its own GPU refused it memory, or it exceeded max_memory
    # An allocation was refused, or the kernel killed a rank for its memory.
    OUT_OF_MEMORY = "out_of_memory", FailureTraits(is_deterministic=True)
    # A GPU failed: an uncorrectable memory error, or it fell off the bus.
    DEVICE = "device", FailureTraits(is_retried=True)
    # A rank lost its connection to another one, for an unknown reason.
    PEER_LOST = "peer_lost", FailureTraits(is_retried=True)
    HUNG = "hung", FailureTraits(is_retried=True)  # exceeded its time limit
    GANG_LOST = "gang_lost", FailureTraits(is_retried=True)  # a worker, node or controller of the gang died
    # A node of its gang left on purpose: a preempted spot machine, or one that was removed from the cluster.
    PREEMPTED = "preempted", FailureTraits(is_retried=True, own_retries=20)
    REFUSED = "refused"  # could never be placed
    SKIPPED = "skipped"  # never started: the first attempts at its point had all ended with one error
    INVALID = "invalid"  # no trial can be trained with the workload's data or model: ends the study


@dataclass(frozen=True)
class Placement:
    """Shape of a gang, and the code that it serves: trials of the same placement can share one."""

    num_workers: int
    cpus_per_worker: int
    device: str  # "cpu", "cuda" or "mps"; never "auto"
    nodes: Value = "pack"  # or "spread", or a number of nodes
    node_label: str | None = None
    revision: str = ""  # label of the code, where a study compares two

    @classmethod
    def of(cls, config: Config) -> Placement:
        """Return the placement of a complete config; older stored configs lack `nodes` and `node_label`."""
        workers, cores, device = (config[key] for key in ("num_workers", "cpus_per_worker", "device"))
        return cls(
            workers,
            cores,
            device,
            config.get("nodes", "pack"),
            config.get("node_label"),
            str(config.get(REVISION, "")),
        )

    @property
    def num_cpus(self) -> int:
        return self.num_workers * self.cpus_per_worker

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker" + ("s" if self.num_workers > 1 else "")
        cores = f"{self.cpus_per_worker} core" + ("s" if self.cpus_per_worker > 1 else "")
        # Ray doesn't count Apple's GPU, which is part of the machine.
        text = f"{workers} × {cores}" + {"cuda": " + 1 GPU", "mps": " + mps"}.get(self.device, "")
        if isinstance(self.nodes, int):
            text += f" on {counted(self.nodes, 'node')}"
        elif self.nodes == "spread":
            text += ", spread over the nodes"
        return text + "".join(f", {part}" for part in (self.node_label, self.revision) if part)


@dataclass(frozen=True)
class TrialSpec:
    """One point of a study's space, once.

    Attributes:
        study: the study's name.
        workload: the workload's name.
        point: the swept hyperparameters.
        config: all hyperparameters, including swept ones and defaults.
        repeat: number of the repeat, from 0, which is also that of its block.
        seed: seed of model, data order and workload; the same for every point of a block.
        order: position in the study's execution order, from 0.
    """

    study: str
    workload: str
    point: Mapping[str, Value]
    config: Mapping[str, Value]
    repeat: int
    seed: int
    order: int = 0

    @cached_property
    def identity(self) -> str:
        """Hash of everything that determines the result, 16 hex digits."""
        return self._hash(self.repeat, self.seed)

    @cached_property
    def point_identity(self) -> str:
        """Hash that all repeats of a point share: 16 hex digits."""
        return self._hash()

    def _hash(self, *which: int) -> str:
        config = sorted(
            (key, value)
            for key, value in self.config.items()
            if (key not in IDENTITY_IGNORED or key in self.point) and (key, value) not in IDENTITY_DEFAULTS.items()
        )
        content = [self.study, self.workload, config, *which]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:16]

    @cached_property
    def placement(self) -> Placement:
        return Placement.of(self.config)

    @property
    def label(self) -> str:
        """``batch_size=64 num_workers=2 #1``, for people."""
        return f"{self.point_name} #{self.repeat + 1}"

    @cached_property
    def point_name(self) -> str:
        """``batch_size=64 num_workers=2``: the `point_label` of its point."""
        return point_label(self.point)


def point_label(point: Mapping[str, Value]) -> str:
    """``batch_size=64 num_workers=2``; ``the only point`` for a study that sweeps nothing."""
    return " ".join(f"{k}={value_of(v)}" for k, v in point.items()) or "the only point"


@dataclass(frozen=True)
class Failure:
    """Why a trial failed.

    Attributes:
        rank: the rank that failed first; None if the gang as a whole was lost.
        log_path: file with that rank's output.
    """

    kind: FailureKind
    message: str
    rank: int | None = None
    traceback: str = ""
    log_path: str = ""

    @property
    def summary(self) -> str:
        """First line of the message."""
        return (self.message.strip().splitlines() or [""])[0]


@dataclass(frozen=True)
class TrialResult:
    """Outcome of a trial. Times are seconds of a monotonic clock, slowest rank.

    Attributes:
        attempts: number of starts; more than 1 after infrastructure failures.
        started_at: Unix time at which its ranks were started.
        wall_s: from the start of its ranks to their end.
        startup_s: from the start of its ranks to the first warm-up step: process group, data, model.
        data_time_s: part of `startup_s` for loading and preparing the data.
        warmup_s: warm-up steps, which are undone.
        train_time_s: the timed region: all counted steps, without evaluation. None if raypar can't instrument the
            training code, and it reports no steps.
        eval_time_s: evaluations.
        energy_j: joules of the timed region, over all nodes (``conditions.energy_of``); None: can't be read.
        throughput_samples_per_s: samples of the timed region, whole gang, over `train_time_s`.
        reports: one mapping per epoch, or per report of a train loop or a command, which have `SINCE_LAUNCH`.
        step_times_s: raw step times, ``[rank][step]`` over all epochs.
        conditions: its hardware and software, and measurements of its machines.
        profile: parts of its steps; None: not profiled.
        observation: what its ranks did, for training code that raypar didn't write; None: not observed.
        data: data set that it was trained and judged on.
        code: digests of the study's source files, see `raypar.provenance`; empty if unknown.
        load: samples of its machines' load; not part of the stored result.
    """

    spec: TrialSpec
    state: TrialState
    attempts: int = 1
    started_at: float = 0.0
    wall_s: float | None = None
    startup_s: float | None = None
    data_time_s: float | None = None
    warmup_s: float | None = None
    train_time_s: float | None = None
    eval_time_s: float | None = None
    energy_j: float | None = None
    throughput_samples_per_s: float | None = None
    reports: tuple[Mapping[str, float], ...] = ()
    step_times_s: tuple[tuple[float, ...], ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    failure: Failure | None = None
    profile: Profile | None = None
    observation: Observation | None = None
    data: DataRecord = field(default_factory=DataRecord)
    code: Mapping[str, str] = field(default_factory=dict)
    load: tuple[LoadSample, ...] = ()

    @property
    def is_complete(self) -> bool:
        """True if the trial need not be run again."""
        return self.state.traits.is_result

    @property
    def is_measured(self) -> bool:
        """True if its time and its metrics count."""
        return self.state.traits.is_measured

    @property
    def final(self) -> Mapping[str, float]:
        """Last report; empty if there was none."""
        return self.reports[-1] if self.reports else {}

    @property
    def reason(self) -> str:
        """Reason why a trial failed, diverged or does not fit, in one line; empty for others, or if unknown."""
        if self.failure is not None:
            return self.failure.summary
        if not self.state.traits.is_unusable:
            return ""
        bad = next(((report, losses) for report in self.reports if (losses := bad_losses(report))), None)
        if bad is None:
            return ""
        report, losses = bad
        key, value = next(iter(losses.items()))
        epoch = report.get("epoch")
        return f"{key}={value}" + (f" at epoch {epoch:g}" if isinstance(epoch, (int, float)) else "")

    def to_json(self) -> str:
        raw = asdict(replace(self, conditions=Conditions(), profile=None, observation=None, load=()))
        stored = {("environment" if key == "conditions" else key): value for key, value in raw.items() if key != "load"}
        stored |= {"environment": self.conditions.to_stored()}
        stored |= {"profile": self.profile.to_stored() if self.profile else {}}
        stored.pop("observation")
        if self.observation is not None:
            stored["observation"] = self.observation.to_stored()
        return json.dumps(stored, separators=(",", ":"))


def result_from_json(text: str) -> TrialResult:
    """Restore a result from `TrialResult.to_json`.

    Raises ValueError, KeyError, TypeError or AttributeError for other texts.

    Results from before the state existed count as diverged if their last loss is not finite.
    """
    raw = json.loads(text)
    failure, conditions = raw["failure"], Conditions.from_stored(raw.pop("environment", {}))
    state = end_state(TrialState(raw["state"]), raw["reports"])
    if raw.get("warmup_s") is not None and raw.get("train_time_s") is None and state.traits.is_measured:
        conditions = conditions.untrained()  # earlier results don't say so
    return TrialResult(
        **{
            **raw,
            "spec": spec_from_dict(raw["spec"]),
            "state": state,
            "reports": tuple(raw["reports"]),
            "step_times_s": tuple(tuple(times) for times in raw["step_times_s"]),
            "conditions": conditions,
            "profile": Profile.from_stored(raw.get("profile", {})),
            "observation": Observation.from_stored(raw.get("observation", {})),
            "failure": Failure(**{**failure, "kind": FailureKind(failure["kind"])}) if failure else None,
        }
    )


STEPS = ("raypar.step", BY_OPTIMIZER, BY_BACKWARD)  # of `timed_work`: it covers all steps of a trial


def timed_work(result: TrialResult) -> str | None:
    """Return the work that ``train_time_s`` covers: ``raypar.step``, ``epochs 1 to 5``.

    Empty for raypar's own training loop. None if other trials' times can't be compared with it: there are no steps or
    laps, or it is unknown what they cover, as in results of earlier versions.
    """
    conditions = result.conditions
    if not conditions.is_foreign:
        return ""
    # Only a command's first machine has any.
    sources = set(conditions.of_ranks("steps_from")) - {""}
    works = set(conditions.of_ranks("laps_cover")) - {""} if sources in ({"reports"}, {IMPORTED}) else sources
    return str(works.pop()) if len(works) == 1 and result.train_time_s is not None else None


def is_timed_whole(result: TrialResult) -> bool:
    """Return whether ``train_time_s`` covers all the training, rather than some laps of it."""
    covers_all = not result.conditions.is_foreign or timed_work(result) in STEPS
    return result.train_time_s is not None and covers_all


def gang_step_times_s(result: TrialResult) -> tuple[float, ...]:
    """Return the slowest rank's time of each step, in seconds."""
    return tuple(max(times) for times in zip(*result.step_times_s, strict=False))


def spec_from_dict(raw: Stored) -> TrialSpec:
    """Return a spec from its ``dataclasses.asdict`` form as JSON gives it back (lists for tuples)."""

    def values(mapping: Stored) -> dict[str, Value]:
        return {k: tuple(v) if isinstance(v, list) else v for k, v in mapping.items()}

    return TrialSpec(**{**raw, "point": values(raw["point"]), "config": values(raw["config"])})


# Words of keys that are not losses of the report's epoch: best_val_loss (first infinite), loss_scale.
_NO_LOSS = frozenset(("best", "min", "lowest", "scale", "scaler"))


def bad_losses(report: Mapping[str, float], metric: str = "") -> dict[str, float]:
    """Return the losses of a report that are not finite, by their keys.

    Args:
        metric: the study's metric, which replaces the loss in a report without one.
    """
    losses = {key: value for key, value in report.items() if is_loss(key)}
    if not losses and metric in report:
        losses = {metric: report[metric]}
    return {key: value for key, value in losses.items() if isinstance(value, float) and not math.isfinite(value)}


def trained_s(report: Mapping[str, float], before_s: float) -> float:
    """Return the seconds of training up to a report; the time since launch for code that raypar can't instrument.

    Args:
        before_s: seconds up to the report before it.
    """
    if (since_launch_s := report.get(SINCE_LAUNCH)) is not None:
        return since_launch_s
    return before_s + report.get("train_time_s", 0.0)


def is_loss(key: str) -> bool:
    """Return whether a key names a loss: ``loss``, ``train_loss``, ``eval/loss``, ``valLoss``."""
    words = {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", key)}
    return "loss" in words and not words & _NO_LOSS


def end_state(state: TrialState, reports: Sequence[Mapping[str, float]], metric: str = "") -> TrialState:
    """Return the final state of a trial: diverged if its last loss is not finite; `metric`: as for `bad_losses`."""
    is_diverged = state.traits.is_usable and reports and bad_losses(reports[-1], metric)
    return TrialState.DIVERGED if is_diverged else state


def latest(results: Iterable[TrialResult]) -> tuple[TrialResult, ...]:
    """Return one result per trial, the oldest first: its last complete one, else its last failure."""
    chosen: dict[str, TrialResult] = {}
    for result in results:
        other = chosen.get(result.spec.identity)
        if other is None or (result.is_complete, result.started_at) >= (other.is_complete, other.started_at):
            chosen[result.spec.identity] = result
    return tuple(sorted(chosen.values(), key=lambda r: (r.started_at, r.spec.order)))


def gain(mode: str, value: float) -> float:
    """Return a metric's value such that more is better: negated if its mode is "min"."""
    return -value if mode == "min" else value


def best_report(reports: Sequence[Mapping[str, float]], metric: str, mode: str) -> int | None:
    """Return the index of the report whose weights a trial keeps: the first best one; None: all have diverged.

    A report without the metric counts as better than all before.
    """
    best: int | None = None
    for i, report in enumerate(reports):
        score = report.get(metric)
        if bad_losses(report) or (score is not None and not math.isfinite(score)):
            continue
        last = None if best is None else reports[best].get(metric)
        if score is None or last is None or gain(mode, score) > gain(mode, last):
            best = i
    return best


def best_first(results: Iterable[TrialResult], metric: str, mode: str) -> list[TrialResult]:
    """Return the finished trials, ordered by their best reports, whose weights are kept; without the metric: last."""

    def best(result: TrialResult) -> float:
        gains = (gain(mode, report[metric]) for report in result.reports if metric in report)
        return max((value for value in gains if math.isfinite(value)), default=-math.inf)

    return sorted((r for r in results if r.is_measured), key=best, reverse=True)
