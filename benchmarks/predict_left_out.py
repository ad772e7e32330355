"""Cross-validation of the step model: each worker count is held out and predicted from the others.

A prediction should lie within the measured interval. If only one count of several workers was measured, the network
comes from a probe between two workers of this machine. With --study, the results come from the store; otherwise
ResNet-18 is trained here by two workers, 64 images a step, and predicted from compute time alone: that of two workers
at once that send nothing (local SGD that never averages), with 32 and with 64 images each. They share memory and caches
as two workers that train together do; a single worker is faster than either.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import begin, local_trial, parser_for, print_row, progress, scratch, workload_named

from raypar import units
from raypar.analysis.laws import Scaling
from raypar.analysis.stats import Estimate, median_estimate
from raypar.predict.calibration import (
    Calibration,
    calibrate,
    choose_results,
    fit_study_network,
    observed_points,
    variation_of,
)
from raypar.predict.layers import layer_costs
from raypar.predict.network import Network, fit_network
from raypar.predict.predict import BootstrapSteps, JobSpec, communication_of
from raypar.predict.probe import probe_all_reduces
from raypar.predict.step_model import Communication
from raypar.study.options import OPTIONS
from raypar.study.overrides import parse_value
from raypar.study.trial import TrialResult
from raypar.track.store import Store, default_tracking_uri

NUM_WORKERS = 2
# Global batch size, and True if the workers send their gradients.
CONFIGS = ((64, True), (64, False), (128, False))
NEVER = 10**6  # steps between two averages
NUM_IMAGES = 640


def stored(name: str) -> list[TrialResult]:
    """Return a study's results from the store of this folder, with their step times."""
    store = Store(default_tracking_uri(Path.cwd()), Path.cwd())
    results = store.results(name)
    if not results:
        raise SystemExit(f"no study `{name}` in the store of {Path.cwd()}")
    return [replace(r, step_times_s=store.step_times(name, r.spec.identity)) for r in results]


def measure(folder: Path, num_rounds: int) -> list[TrialResult]:
    """Run every config once a round, in random order; those that send nothing count as trials of one worker."""
    results = []
    for i in range(num_rounds):
        for batch_size, sends in random.Random(i).sample(CONFIGS, len(CONFIGS)):
            config = {"num_workers": NUM_WORKERS, "batch_size": batch_size, "num_images": NUM_IMAGES, "device": "cpu"}
            silent = {} if sends else {"strategy": "local_sgd", "sync_every": NEVER}
            result = local_trial("resnet", {**config, **silent}, folder / f"round{i}", repeat=i)
            results.append(result if sends else as_one_worker(result))
            progress(f"round {i + 1}/{num_rounds}: batch {batch_size}, {'sending' if sends else 'computing alone'}")
    return results


def as_one_worker(result: TrialResult) -> TrialResult:
    """Return one worker's share of a trial without communication, as a trial of one worker."""
    share = {"num_workers": 1, "batch_size": result.spec.config["batch_size"] // NUM_WORKERS}
    defaults = {key: OPTIONS[key].default for key in ("strategy", "sync_every")}
    assert result.throughput_samples_per_s is not None
    return replace(
        result,
        spec=replace(result.spec, config={**result.spec.config, **defaults, **share}),
        throughput_samples_per_s=result.throughput_samples_per_s / NUM_WORKERS,
        step_times_s=result.step_times_s[:1],
    )


@dataclass(frozen=True)
class HeldOut:
    """A measured point and its prediction from the points of other worker counts; None if they don't suffice."""

    num_workers: int
    batch_size: int
    measured: Estimate
    predicted: Estimate | None

    @property
    def is_within(self) -> bool | None:
        """True if the predicted value is in the measured interval; None if either is missing."""
        if self.predicted is None or self.measured.low is None:
            return None
        return not self.measured.excludes(self.predicted.value)


def cross_validate(
    calibration: Calibration, communication: Communication, network: Network | None, accumulation_steps: int
) -> list[HeldOut]:
    """Predict every measured point of several workers without the points of its worker count.

    Args:
        calibration: of all points of the study.
        communication: how the study's gradients were sent; its network is ignored.
        network: the probed network of the study; None: fitted to the other worker counts.
        accumulation_steps: micro-batches of a step.
    """
    points = []
    for point in calibration.points:
        if point.num_workers == 1:
            continue
        others = [p for p in calibration.points if p.num_workers != point.num_workers]
        rest = calibrate(others, calibration.layers, calibration.variation)
        predicted = None
        if network is not None or any(p.num_workers > 1 for p in others):
            link = network or fit_study_network(rest, communication, accumulation_steps)[0]
            job = JobSpec(Scaling.STRONG, point.batch_size, 1, accumulation_steps=accumulation_steps)
            how = replace(communication, network=link)
            predicted = BootstrapSteps(rest, job, how, np.array([point.num_workers])).estimate(lambda t: t[..., 0])
        points.append(HeldOut(point.num_workers, point.batch_size, median_estimate(point.step_times_s), predicted))
    return points


def show(point: HeldOut) -> None:
    title = f"{units.counted(point.num_workers, 'worker')}, batch {point.batch_size}"
    measured_s = units.seconds_interval(point.measured)
    if point.predicted is None:
        print_row(title, f"measured {measured_s}; not predicted: no other count of several workers was measured")
        return
    verdict = {True: "within", False: "OUTSIDE", None: "no interval measured"}[point.is_within]
    error = 100 * (point.predicted.value / point.measured.value - 1)
    predicted_s = units.seconds(point.predicted.value)
    print_row(title, f"predicted {predicted_s}, measured {measured_s}: {verdict}, {error:+.1f} %")


def main() -> None:
    parser = parser_for(__doc__, rounds=5, quick_rounds=2)
    parser.add_argument("--study", help="a study in the store of this folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="choose the study's point")
    args = begin(parser)
    settings = dict(setting.split("=", 1) for setting in args.set)
    with scratch() as folder:
        results = stored(args.study) if args.study else measure(folder, args.rounds)
        chosen = choose_results(results, {key: parse_value(text) for key, text in settings.items()})
        config = chosen[0].spec.config
        layers = layer_costs(workload_named(chosen[0].spec.workload), config)
        calibration = calibrate(observed_points(chosen), layers, variation_of(chosen))
        print_row(
            "one worker: a step, a sample",
            f"{units.seconds(calibration.fixed_s)}, "
            f"{units.seconds(calibration.per_sample_s)}; steps vary by {units.percent(calibration.variation, 1)}",
        )
        network = None
        if len({p.num_workers for p in calibration.points} - {1}) < 2:
            network = fit_network(probe_all_reduces(2, folder / "probe"), 2)
            print_row(
                "the network, by a probe",
                f"{units.seconds(network.latency_s)}, {units.size(network.bandwidth_bytes_per_s)}/s",
            )
        accumulation_steps = config.get("accumulation_steps")
        # Within a machine the cores that compute also copy the gradients: nothing overlaps.
        overlap = None if network is None else False
        communication = communication_of(config, network or Network(0.0, 1.0), "ring", overlap=overlap)
        num_parts = accumulation_steps if isinstance(accumulation_steps, int) else 1
        points = cross_validate(calibration, communication, network, num_parts)
    for point in points:
        show(point)
    verdicts = [point.is_within for point in points if point.is_within is not None]
    print_row("held-out points within their measured interval", f"{sum(verdicts)} of {len(verdicts)}")


if __name__ == "__main__":
    main()
