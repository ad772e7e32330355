"""The measured steps of a study that a prediction rests on: which trials, by worker count and batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypar.errors import RayparError
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialState, latest
from raypar.units import value_of

# What a prediction is for, and so what points may differ in: everything else has to be chosen.
FREE_KEYS = ("num_workers", "batch_size", "per_worker_batch_size")


@dataclass(frozen=True)
class Measured:
    """One point: a worker count with a batch size.

    Attributes:
        batch_size: global: samples of a step.
        step_times_s: one mean step time for each repeat: of the timed region, a short last batch counted by its share.
    """

    num_workers: int
    batch_size: int
    step_times_s: tuple[float, ...]

    @property
    def samples_per_worker(self) -> float:
        return self.batch_size / self.num_workers


def choose_results(results: Sequence[TrialResult], settings: Mapping[str, Value]) -> tuple[TrialResult, ...]:
    """The finished, timed trials of one point, but for workers and batch size.

    Args:
        results: all of a study.
        settings: hyperparameters to choose by; `FREE_KEYS` among them are left alone.

    Raises:
        RayparError: there are none, or the trials differ in something that was not chosen.
    """
    known = {key for result in results for key in result.spec.config}
    if unknown := [key for key in settings if key not in known]:
        raise RayparError(f"--set {unknown[0]}: no trial has such a hyperparameter", hint="check its name")
    wanted = {key: value for key, value in settings.items() if key not in FREE_KEYS}
    finished = [r for r in latest(results) if r.state is TrialState.FINISHED]
    timed = [r for r in finished if r.train_time_s and r.throughput_samples_per_s]
    if finished and not timed:
        raise RayparError(
            "the study trains by a train loop of its own: raypar can't look into its steps",
            hint="predict from a study of a raypar workload",
        )
    chosen = [r for r in timed if all(r.spec.config.get(key) == value for key, value in wanted.items())]
    if not chosen:
        what = " ".join(f"{key}={value_of(value)}" for key, value in wanted.items())
        raise RayparError(f"no finished trial{' with ' + what if what else ''}", hint="`raypar show` lists the trials")
    for key in dict.fromkeys(key for r in chosen for key in r.spec.point if key not in FREE_KEYS):
        values = list(dict.fromkeys(r.spec.config.get(key) for r in chosen))
        if len(values) > 1:
            told = ", ".join(map(value_of, values))
            raise RayparError(f"the trials differ in {key}: {told}", hint=f"choose: --set {key}={value_of(values[0])}")
    return tuple(chosen)


def measured_points(results: Sequence[TrialResult]) -> tuple[Measured, ...]:
    """The step times of finished, timed trials, by worker count and batch size."""
    found: dict[tuple[int, int], list[float]] = {}
    for result in sorted(results, key=lambda r: r.spec.repeat):
        config: Mapping[str, Any] = result.spec.config
        rate = result.throughput_samples_per_s
        if rate:
            found.setdefault((config["num_workers"], config["batch_size"]), []).append(config["batch_size"] / rate)
    return tuple(Measured(*key, tuple(times)) for key, times in sorted(found.items()))


def epoch_samples(result: TrialResult) -> int:
    """Samples of an epoch of a finished, timed trial."""
    assert result.throughput_samples_per_s is not None and result.train_time_s is not None
    config: Mapping[str, Any] = result.spec.config
    return max(1, round(result.throughput_samples_per_s * result.train_time_s / max(1, config.get("epochs") or 1)))


def variation_of(results: Sequence[TrialResult]) -> float | None:
    """The median, over the trials of one worker, of the coefficient of variation of their step times.

    An epoch's last step is left out where its batch is short. None where no trial has step times.
    """
    found = []
    for result in results:
        config: Mapping[str, Any] = result.spec.config
        if config["num_workers"] != 1 or not result.step_times_s:
            continue
        times = np.array(result.step_times_s[0])
        steps, short = divmod(epoch_samples(result), config["batch_size"])
        if short and steps and not config.get("drop_last"):
            times = times[np.arange(len(times)) % (steps + 1) != steps]
        if len(times) > 1 and np.mean(times) > 0:
            found.append(float(np.std(times, ddof=1) / np.mean(times)))
    return float(np.median(found)) if found else None
