"""Trial results made by hand, for tests that need no runner."""

from raypar.analysis.points import PointAnalysis
from raypar.analysis.stats import Estimate, Method
from raypar.study.conditions import Conditions
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec, TrialState

CONFIG = {"num_workers": 1, "cpus_per_worker": 1, "device": "cpu", "batch_size": 64, "epochs": 3, "lr": 0.1}


def make_spec(point, repeat=0, *, study="mnist", **config):
    """Return the spec of a point; `config` replaces defaults in CONFIG."""
    return TrialSpec(study, "mnist_mlp", dict(point), {**CONFIG, **config, **point}, repeat, seed=repeat)


def make_result(
    point,
    repeat=0,
    train_time_s=4.0,
    accuracy=0.97,
    *,
    num_samples=180_000,
    state=TrialState.FINISHED,
    wall_s=None,
    step_times_s=(),
    failure="boom",
    config=None,
    environment=None,
    started_at=0.0,
):
    """Return the result of a trial, with the throughput that follows from samples and time."""
    spec = make_spec(point, repeat, **(config or {}))
    if state is TrialState.FAILED:
        return TrialResult(spec, state, started_at=started_at, failure=Failure(FailureKind.ERROR, failure))
    throughput = num_samples / train_time_s if train_time_s else None
    return TrialResult(
        spec,
        state,
        started_at=started_at,
        wall_s=wall_s if wall_s is not None else (train_time_s or 4.0) + 1.0,
        train_time_s=train_time_s,
        throughput_samples_per_s=throughput,
        reports=({"epoch": 3, "accuracy": accuracy},) if accuracy is not None else (),
        step_times_s=step_times_s,
        conditions=Conditions.from_stored(
            environment if environment is not None else {"cores": [[0]], "foreign_cpu_share": [0.01]}
        ),
    )


stored_conditions = Conditions.from_stored  # {"node": ["n1", "n2"], "num_beside": 1, …}


def clear(value, width=1e-3):
    """Return a speedup whose interval extends by a factor of 1 + `width` to both sides."""
    return Estimate(value, value / (1 + width), value * (1 + width), 3, 0.95, Method.T_LOG)


def tied(value):
    return Estimate(value, 0.5, 2.0, 3, 0.95, Method.T_LOG)


def curve_of(speedups, key="hidden_size", workers=2, **rest):
    """Return points of one worker and of `workers` for each value of a hyperparameter; a number is a clear speedup."""
    return [
        PointAnalysis({key: value, **rest, "num_workers": n}, is_baseline=n == 1, speedup=ratio)
        for value, speedup in speedups.items()
        for n, ratio in ((1, clear(1.0)), (workers, clear(speedup) if isinstance(speedup, float) else speedup))
    ]
