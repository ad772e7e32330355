"""What crosses the border between a runner and a rank: a `RankJob` in, reports and a `RankOutcome` out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypar.study.trial import Failure, TrialResult, TrialSpec, TrialState
from raypar.train import telemetry as machines

# In a trial's artifacts.
MODEL_FOLDER = "model"
PROFILE_FOLDER = "profile"
# Beside the artifacts.
CHECKPOINT_FOLDER = "checkpoints"
NUM_PROFILED_STEPS = 20  # unless a person says otherwise


@dataclass(frozen=True)
class RankJob:
    """One rank's part of one trial.

    Attributes:
        workload: the Workload, pickled by value where the study file defines it.
        master_address: host and port at which rank 0 listens for the others.
        master_listens: rank 0 was handed a listening socket as a file descriptor.
        cores: what the rank is pinned to; empty: not pinned.
        environment: variables set before torch looks at them.
        sys_path: folders from which the study's own modules are imported.
        requested_at_s: ``time.monotonic()`` on this node when the rank was asked for.
        log_path: where the rank's output goes.
        artifact_dir: where rank 0 leaves what is kept beside the numbers: the trained model in `MODEL_FOLDER`, if the
            config keeps it, and a profile's traces in `PROFILE_FOLDER`.
        ships_artifacts: that folder is on another machine than the driver's: it goes into the outcome as well.
        num_profiled_steps: to be looked into after the training; 0: none.
        only_profiles: the training is left out.
    """

    workload: bytes
    config: Mapping[str, Any]
    seed: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_address: tuple[str, int]
    cores: tuple[int, ...]
    environment: Mapping[str, str]
    sys_path: tuple[str, ...]
    requested_at_s: float
    log_path: str
    artifact_dir: str
    ships_artifacts: bool
    num_profiled_steps: int = 0
    only_profiles: bool = False


@dataclass(frozen=True)
class RankOutcome:
    """What one rank has to tell at its end; times in seconds on its own clock.

    Attributes:
        counted: over the timed regions; None where there were none.
        artifacts: contents of the job's `artifact_dir`, packed by `raypar.train.saved_model.pack`; empty otherwise.
        profile: what `raypar.train.profile` recorded, as JSON has it; empty if nothing was.
        data: rank 0's `raypar.train.data`; empty on the others.
    """

    stopped: bool = False
    startup_s: float | None = None
    data_time_s: float | None = None
    warmup_s: float | None = None
    train_time_s: float | None = None
    eval_time_s: float | None = None
    wall_s: float = 0.0
    num_samples: int | None = None
    step_times_s: tuple[float, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    counters: machines.RankCounters | None = None
    artifacts: bytes = b""
    profile: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


class StopTrial(BaseException):
    """Raised out of a report where the runner wants the trial to end there; not an Exception, so that a train
    loop's ``except Exception`` doesn't swallow it."""


class Channel(Protocol):
    """A rank's line to its runner."""

    def report(self, metrics: Mapping[str, float]) -> bool:
        """Every rank calls it at the same points. False: stop here; all ranks get the same answer."""
        ...


def merge(
    spec: TrialSpec,
    outcomes: Mapping[int, RankOutcome],
    reports: tuple[Mapping[str, float], ...],
    *,
    attempts: int,
    started_at: float,
    environment: Mapping[str, Any],
    failure: Failure | None,
) -> TrialResult:
    """The ranks' outcomes as one result: of each time the slowest rank's, of each environment value the list."""
    ranks = [outcomes[rank] for rank in sorted(outcomes)]

    def slowest(name: str) -> float | None:
        values = [getattr(o, name) for o in ranks if getattr(o, name) is not None]
        return max(values) if values else None

    train_time_s = slowest("train_time_s")
    counts = [o.num_samples for o in ranks if o.num_samples is not None]
    if failure is not None:
        state = TrialState.FAILED
    else:
        state = TrialState.STOPPED if any(o.stopped for o in ranks) else TrialState.FINISHED
    keys = dict.fromkeys(key for o in ranks for key in o.environment)
    measured, energy_j = _measured([o.counters for o in ranks])
    return TrialResult(
        spec=spec,
        state=state,
        attempts=attempts,
        started_at=started_at,
        wall_s=slowest("wall_s"),
        startup_s=slowest("startup_s"),
        data_time_s=slowest("data_time_s"),
        warmup_s=slowest("warmup_s"),
        train_time_s=train_time_s,
        eval_time_s=slowest("eval_time_s"),
        throughput_samples_per_s=sum(counts) / train_time_s if counts and train_time_s else None,
        reports=reports,
        step_times_s=tuple(o.step_times_s for o in ranks),
        energy_j=energy_j,
        environment={**environment, **{key: [o.environment.get(key) for o in ranks] for key in keys}, **measured},
        failure=failure,
        profile={"recorded": [o.profile for o in ranks]} if ranks and all(o.profile for o in ranks) else {},
        data=next((o.data for o in ranks if o.data), {}),
    )


def _measured(counters: Sequence[machines.RankCounters | None]) -> tuple[dict[str, Any], float | None]:
    """What the ranks' counters say together, for the environment; and the energy in joules."""
    known = [c for c in counters if c is not None]
    if not known or len(known) < len(counters):
        return {}, None
    found: dict[str, Any] = {"num_node_cores": [c.num_cores for c in known]}
    loads = machines.other_loads(known)
    if any(load is not None for load in loads):
        found["other_load_cores"] = loads
    if why_not := dict.fromkeys(reason for c in known for reason in c.no_energy):
        found["no_energy"] = "; ".join(why_not)
    energy = machines.energy(known)
    return (found | {"energy_of": energy[1]}, energy[0]) if energy else (found, None)
