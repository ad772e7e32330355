"""Calibration of the step model from a study's measured steps.

A single worker takes ``fixed_s + per_sample_s * samples`` per step, fitted to its batch sizes. With several workers,
the rest of a step is communication by the step model. Its network can be fitted to the steps, in which case contention
between workers of a machine (memory bandwidth, caches) counts as communication.

Intervals are percentiles of a bootstrap over each point's repeats. They cover the noise of the measurements, not the
error of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from raypar.analysis.load import MAX_TRUSTED, disturbing_load
from raypar.errors import RayparError
from raypar.predict.network import Floats, Network
from raypar.predict.step_model import Communication, LayerCost, StepTime, simulate_steps
from raypar.study.space import Value
from raypar.study.trial import TrialResult, latest
from raypar.units import counted, seconds, size, value_of

# Predictions are for other values of these, so points may differ in them. Everything else has to be chosen.
FREE_KEYS = ("num_workers", "batch_size", "per_worker_batch_size")
NUM_DRAWS = 200
BOOTSTRAP_SEED = 19930101
# TCP between processes of a machine; used if there is only one worker count, which does not determine the latency.
LOCAL_LATENCY_S = 50e-6
# Usual range of the coefficient of variation of a worker's step times, used if none was measured. Without variation,
# there would be no wait for the slowest worker.
USUAL_VARIATIONS = (0.01, 0.03)
# Bounds of a fitted network, from a slow modem to the links of the fastest GPUs. A fit that ends at one of them, except
# the lowest latency, is not plausible.
_BANDWIDTHS = (1e4, 2e12)
_LATENCIES_S = (1e-6, 1.0)
AT_BOUND = 0.01  # relative


@dataclass(frozen=True)
class ObservedPoint:
    """Step times of a worker count with a batch size.

    Attributes:
        batch_size: samples per step, of all workers.
        step_times_s: mean step time of each repeat in the timed region; a short last batch counts by its share.
    """

    num_workers: int
    batch_size: int
    step_times_s: tuple[float, ...]


def choose_results(results: Sequence[TrialResult], settings: Mapping[str, Value]) -> tuple[TrialResult, ...]:
    """Return the finished, timed trials that differ only in workers and batch size.

    Args:
        settings: hyperparameters to select by, except `FREE_KEYS`.

    Raises:
        RayparError: there are none, or the trials differ in a hyperparameter that was not selected.
    """
    keys = {key for result in results for key in result.spec.config}
    if unknown := [key for key in settings if key not in keys]:
        raise RayparError(f"--set {unknown[0]}: no trial has this hyperparameter", hint="check its name")
    filters = {key: value for key, value in settings.items() if key not in FREE_KEYS}
    finished = [r for r in latest(results) if r.is_measured and not r.conditions.stalls_s]
    timed = [r for r in finished if r.train_time_s and r.throughput_samples_per_s and not r.conditions.is_foreign]
    if finished and not timed:
        problem = "raypar can't instrument the steps of this study's training code"
        raise RayparError(problem, hint="predict from a study of a raypar workload")
    chosen = [r for r in timed if all(r.spec.config.get(key) == value for key, value in filters.items())]
    if not chosen:
        which = "".join(f" {key}={value_of(value)}" for key, value in filters.items())
        message = f"no finished trial{' with' + which if which else ''}"
        raise RayparError(message, hint="`raypar store show` lists the trials")
    for key in dict.fromkeys(key for r in chosen for key in r.spec.point if key not in FREE_KEYS):
        values = list(dict.fromkeys(r.spec.config.get(key) for r in chosen))
        if len(values) > 1:
            texts = ", ".join(map(value_of, values))
            raise RayparError(f"the trials differ in {key}: {texts}", hint=f"choose: --set {key}={value_of(values[0])}")
    return tuple(chosen)


def quiet_results(results: Sequence[TrialResult]) -> tuple[tuple[TrialResult, ...], str]:
    """Return the trials to calibrate from, without those disturbed by other load, and a sentence on the excluded ones.

    A slightly disturbed trial counts if its worker count and batch have no undisturbed one: on small machines, Ray's
    processes are such load.

    Raises:
        RayparError: all trials of one worker are excluded.
    """
    loads = {id(r): disturbing_load(r) for r in results}
    trusted = [r for r in results if (load := loads[id(r)]) is None or load.share_of_cores <= MAX_TRUSTED]
    quiet = {_counted(r) for r in trusted if loads[id(r)] is None}
    kept = tuple(r for r in trusted if loads[id(r)] is None or _counted(r) not in quiet)
    num_excluded = len(results) - len(kept)
    if any(_counted(r)[0] == 1 for r in results) and not any(_counted(r)[0] == 1 for r in kept):
        raise RayparError(
            f"other load disturbed all trials of one worker ({num_excluded} of {len(results)} trials in total): their "
            "times don't show how long computing takes",
            hint="run the study again on an idle machine, with --fresh",
        )
    trials = counted(len(results), "trial")
    return kept, f"{num_excluded} of {trials} were disturbed by other load and are not used" if num_excluded else ""


def _counted(result: TrialResult) -> tuple[int, Value]:
    return result.spec.placement.num_workers, result.spec.config.get("batch_size")  # a script may have no such option


def observed_points(results: Sequence[TrialResult]) -> tuple[ObservedPoint, ...]:
    """Return the step times of finished, timed trials, by worker count and batch size."""
    times_s: dict[tuple[int, int], list[float]] = {}
    for result in sorted(results, key=lambda r: r.spec.repeat):
        config: Mapping[str, Any] = result.spec.config
        rate = result.throughput_samples_per_s
        if rate:
            times_s.setdefault((config["num_workers"], config["batch_size"]), []).append(config["batch_size"] / rate)
    return tuple(ObservedPoint(*key, tuple(times)) for key, times in sorted(times_s.items()))


def epoch_samples(result: TrialResult) -> int:
    """Return the samples of an epoch of a finished, timed trial."""
    assert result.throughput_samples_per_s is not None and result.train_time_s is not None
    config: Mapping[str, Any] = result.spec.config
    return max(1, round(result.throughput_samples_per_s * result.train_time_s / max(1, config.get("epochs") or 1)))


def variation_of(results: Sequence[TrialResult]) -> float | None:
    """Return the median coefficient of variation of the step times of trials of one worker; None without step times.

    The last step of an epoch is excluded if its batch is short.
    """
    variations = []
    for result in results:
        config: Mapping[str, Any] = result.spec.config
        if config["num_workers"] == 1 and result.step_times_s:
            times = np.array(result.step_times_s[0])
            steps, short = divmod(epoch_samples(result), config["batch_size"])
            if short and steps and not config.get("drop_last"):
                times = times[np.arange(len(times)) % (steps + 1) != steps]
            if len(times) > 1 and np.mean(times) > 0:
                variations.append(float(np.std(times, ddof=1) / np.mean(times)))
    return float(np.median(variations)) if variations else None


@dataclass(frozen=True)
class Calibration:
    """Fitted costs of a step.

    Attributes:
        points: measured points, by worker count and batch size.
        fixed_s: part of one worker's step that doesn't depend on its batch: optimizer, launches, Python.
        per_sample_s: part of one worker's step for each of its samples.
        variation: coefficient of variation of one worker's step times.
        is_variation_measured: True if `variation` is from the study; otherwise it is the lowest of `USUAL_VARIATIONS`.
        draws: bootstrap draws of fixed_s and per_sample_s, shape ``(draws, 2)``; None if a point ran only once.
        notes: sentences on assumptions.
    """

    layers: tuple[LayerCost, ...]
    points: tuple[ObservedPoint, ...]
    fixed_s: float
    per_sample_s: float
    variation: float
    is_variation_measured: bool
    draws: Floats | None
    notes: tuple[str, ...]

    def step_times(
        self,
        num_workers: NDArray[Any],
        batch_size: Floats,
        communication: Communication,
        *,
        costs: Floats | None = None,
        data_s: float | Floats = 0.0,
        accumulation_steps: int = 1,
    ) -> StepTime[Floats]:
        """Return the steps for worker counts and global batches, which are broadcast; see `simulate_steps`.

        Args:
            costs: draws of fixed_s and per_sample_s, shape ``(draws, 2)``, that replace the calibrated ones.
        """
        fixed_s, per_sample_s = np.array([self.fixed_s, self.per_sample_s]) if costs is None else costs.T[..., None]
        return simulate_steps(
            self.layers,
            num_workers,
            communication,
            compute_s=per_sample_s * batch_size / num_workers,
            optimizer_s=fixed_s,
            data_s=data_s,
            variation=self.variation,
            accumulation_steps=accumulation_steps,
        )


def calibrate(
    points: Sequence[ObservedPoint], layers: Sequence[LayerCost], variation: float | None = None
) -> Calibration:
    """Fit the step time of one worker to the points of one worker.

    Args:
        variation: coefficient of variation of step times; None or 0: not measured.

    Raises:
        RayparError: no point has one worker.
    """
    alone = [p for p in points if p.num_workers == 1]
    if not alone:
        raise RayparError(
            "no trial of one worker: computation and communication can't be separated",
            hint="run the study with --set num_workers=1 as well",
        )
    notes = []
    if len({p.batch_size for p in alone}) == 1:
        notes.append(
            f"one worker was measured only with a batch of {alone[0].batch_size}: its time is assumed to be "
            "proportional to the batch, which is too optimistic for smaller ones"
        )
    least, most = (f"{100 * v:g}" for v in USUAL_VARIATIONS)
    if not variation:
        notes.append(f"the variation of steps was not measured: {least} to {most} % is usual, and {least} % is assumed")
    batches = np.array([p.batch_size for p in alone], dtype=np.float64)
    fixed_s, per_sample_s = _fitted_compute(batches, np.array([np.median(p.step_times_s) for p in alone]))
    draws = None
    if min(len(p.step_times_s) for p in points) > 1:
        rng = np.random.default_rng(BOOTSTRAP_SEED)
        logs = [_drawn_medians(np.log(p.step_times_s), rng) for p in alone]
        draws = np.array([_fitted_compute(batches, row) for row in np.exp(np.stack(logs, axis=1))])
    return Calibration(
        layers=tuple(layers),
        points=tuple(points),
        fixed_s=fixed_s,
        per_sample_s=per_sample_s,
        variation=variation or USUAL_VARIATIONS[0],
        is_variation_measured=bool(variation),
        draws=draws,
        notes=tuple(notes),
    )


def _drawn_medians(logs: Floats, rng: np.random.Generator) -> Floats:
    """Return medians of `NUM_DRAWS` bootstrap resamples of at least two repeats.

    The repeats are first spread by sqrt(n / (n - 1)) around their mean, because n draws with replacement vary too
    little by this factor.
    """
    size, mean = len(logs), np.mean(logs)
    spread = mean + math.sqrt(size / (size - 1)) * (logs - mean)
    return np.asarray(np.median(spread[rng.integers(size, size=(NUM_DRAWS, size))], axis=1))


def fit_study_network(
    calibration: Calibration, communication: Communication, accumulation_steps: int = 1
) -> tuple[Network, str]:
    """Fit a link to the steps of several workers; return it and a sentence on the fit.

    Minimises the squared errors of the logarithms of the step times. A single worker count determines only the
    bandwidth; the latency is then `LOCAL_LATENCY_S`.

    Args:
        communication: how the study sent its gradients; its network is ignored.

    Raises:
        RayparError: no point has several workers, or no plausible network explains the steps.
    """
    several = [p for p in calibration.points if p.num_workers > 1]
    if not several:
        raise RayparError(
            "no trial of several workers: the study has no data on a network",
            hint="set the network: --network 100Gbit, or --network measured",
        )
    workers = np.array([p.num_workers for p in several])
    batches = np.array([p.batch_size for p in several], dtype=np.float64)
    logs = np.log([np.median(p.step_times_s) for p in several])
    fits_latency = len(set(workers.tolist())) > 1

    def network_of(parameters: Floats) -> Network:
        latency_s = math.exp(parameters[1]) if fits_latency else LOCAL_LATENCY_S
        return Network(latency_s, math.exp(parameters[0]))

    def errors(parameters: Floats) -> Floats:
        how = replace(communication, network=network_of(parameters))
        times = calibration.step_times(workers, batches, how, accumulation_steps=accumulation_steps)
        return np.asarray(np.log(times.step_time_s) - logs)

    limits = [_BANDWIDTHS, _LATENCIES_S] if fits_latency else [_BANDWIDTHS]
    bounds = np.log(np.array(limits)).T
    # Several starts: where all communication is hidden, the gradient is zero.
    latencies_s = (1e-5, 1e-3) if fits_latency else (LOCAL_LATENCY_S,)
    starts = [np.log(start[: len(limits)]) for start in product((1e7, 1e8, 1e9, 1e10), latencies_s)]
    fits = [least_squares(errors, start, bounds=bounds) for start in starts]
    network = network_of(min(fits, key=lambda fit: float(fit.cost)).x)
    _check_plausible(network)
    counts = ", ".join(str(n) for n in sorted(set(workers.tolist())))
    how = "latency and bandwidth" if fits_latency else f"bandwidth, with a latency of {LOCAL_LATENCY_S * 1e6:.0f} µs,"
    return network, f"network of the measurements: {how} fitted to the steps of {counts} workers"


def _check_plausible(network: Network) -> None:
    bandwidth, latency_s = network.bandwidth_bytes_per_s, network.latency_s
    least, most = _BANDWIDTHS[0] * (1 + AT_BOUND), _BANDWIDTHS[1] * (1 - AT_BOUND)
    problem = ""
    if bandwidth >= most:
        problem = f"this would take links of {size(bandwidth)}/s or more, so communication doesn't show in them"
    elif bandwidth <= least or latency_s >= _LATENCIES_S[1] * (1 - AT_BOUND):
        problem = f"this would take links of {size(bandwidth)}/s and {seconds(latency_s)}, which no machine has"
    if problem:
        hint = "set the network: --network 100Gbit; or run the study again on an idle machine, with --fresh"
        raise RayparError(f"can't fit a network to the steps of several workers: {problem}", hint=hint)


def _fitted_compute(batches: Floats, times_s: Floats) -> tuple[float, float]:
    """Fit seconds per step and seconds per sample, both at least 0, by least squares of the relative errors."""
    if len(set(batches.tolist())) == 1:
        return 0.0, float(np.median(times_s) / batches[0])
    columns = np.stack([np.ones_like(batches), batches], axis=1) / times_s[:, None]
    (fixed_s, per_sample_s), _ = nnls(columns, np.ones_like(times_s))
    return float(fixed_s), float(per_sample_s)
