"""Does the step model predict a worker count that it has not seen, within the interval that was measured?

Every worker count of several workers is held out in turn and predicted from the others. Where there is only one such
count, its network comes from a probe between two workers of this machine. With --study, a study's stored results are
taken; else ResNet-18 is trained here by two workers, 64 images a step, and predicted from what computing alone takes:
of two workers at once that send nothing (local SGD that never averages), with 32 and with 64 images each. They share
the machine's memory and caches as two workers that train together do; one worker alone is faster than either of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import begin, local_trial, parser_for, progress, scratch, tell

from raypar import units, workloads
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
# Batch of all workers, and whether they send their gradients.
CONFIGS = ((64, True), (64, False), (128, False))
NEVER = 10**6  # steps between two averages
NUM_IMAGES = 640


def stored(name: str) -> list[TrialResult]:
    """A study's results from the store of this folder, with their step times."""
    store = Store(default_tracking_uri(Path.cwd()), Path.cwd())
    results = store.results(name)
    if not results:
        raise SystemExit(f"no study `{name}` in the store of {Path.cwd()}")
    return [replace(r, step_times_s=store.step_times(name, r.spec.identity)) for r in results]


def measured(folder: Path, num_rounds: int) -> list[TrialResult]:
    """Every config once a round, in random order; those that send nothing as trials of one worker."""
    found = []
    for i in range(num_rounds):
        for batch_size, sends in random.Random(i).sample(CONFIGS, len(CONFIGS)):
            config = {"num_workers": NUM_WORKERS, "batch_size": batch_size, "num_images": NUM_IMAGES, "device": "cpu"}
            silent = {} if sends else {"strategy": "local_sgd", "sync_every": NEVER}
            result = local_trial("resnet", {**config, **silent}, folder / f"round{i}", repeat=i)
            found.append(result if sends else of_one_worker(result))
            progress(f"round {i + 1}/{num_rounds}: batch {batch_size}, {'sending' if sends else 'computing alone'}")
    return found


def of_one_worker(result: TrialResult) -> TrialResult:
    """What one of several workers computed beside the others, as a trial of its own."""
    own = {"num_workers": 1, "batch_size": result.spec.config["batch_size"] // NUM_WORKERS}
    usual = {key: OPTIONS[key].default for key in ("strategy", "sync_every")}
    assert result.throughput_samples_per_s is not None
    return replace(
        result,
        spec=replace(result.spec, config={**result.spec.config, **usual, **own}),
        throughput_samples_per_s=result.throughput_samples_per_s / NUM_WORKERS,
        step_times_s=result.step_times_s[:1],
    )


@dataclass(frozen=True)
class HeldOut:
    """A measured point and its prediction from the points of other worker counts; None where they don't suffice."""

    num_workers: int
    batch_size: int
    measured: Estimate
    predicted: Estimate | None

    @property
    def is_within(self) -> bool | None:
        """True where the predicted value lies in the measured interval; None where either is missing."""
        if self.predicted is None or self.measured.low is None:
            return None
        return not self.measured.excludes(self.predicted.value)


def cross_validate(
    calibration: Calibration, communication: Communication, network: Network | None, accumulation_steps: int
) -> list[HeldOut]:
    """Predict every measured point of several workers without the points of its worker count.

    Args:
        calibration: of the whole study.
        communication: how the study's gradients were sent; its network is ignored.
        network: the one that the study ran on, as a probe has it; None: fitted to the other worker counts.
        accumulation_steps: micro-batches of a step.
    """
    points = []
    for point in calibration.of_several:
        others = [p for p in calibration.points if p.num_workers != point.num_workers]
        rest = calibrate(others, calibration.layers, calibration.variation)
        predicted = None
        if network is not None or rest.of_several:
            link = network or fit_study_network(rest, communication, accumulation_steps)[0]
            job = JobSpec(Scaling.STRONG, point.batch_size, 1, accumulation_steps=accumulation_steps)
            how = replace(communication, network=link)
            predicted = BootstrapSteps(rest, job, how, np.array([point.num_workers])).estimate(lambda t: t[..., 0])
        points.append(HeldOut(point.num_workers, point.batch_size, median_estimate(point.step_times_s), predicted))
    return points


def show(point: HeldOut) -> None:
    title = f"{units.counted(point.num_workers, 'worker')}, batch {point.batch_size}"
    seen = point.measured
    measured_s = units.seconds_interval(seen.value, seen.low, seen.high)
    if point.predicted is None:
        tell(title, f"measured {measured_s}; not predicted: no other count of several workers was measured")
        return
    verdict = {True: "within", False: "OUTSIDE", None: "no interval to lie in"}[point.is_within]
    error = 100 * (point.predicted.value / seen.value - 1)
    tell(title, f"predicted {units.seconds(point.predicted.value)}, measured {measured_s}: {verdict}, {error:+.1f} %")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--study", help="of the store in this folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="choose its point")
    parser.add_argument("--rounds", type=int, default=5, help="[default: 5]")
    args = begin(parser)
    settings = dict(setting.split("=", 1) for setting in args.set)
    with scratch() as folder:
        results = stored(args.study) if args.study else measured(folder, 2 if args.quick else args.rounds)
        chosen = choose_results(results, {key: parse_value(text) for key, text in settings.items()})
        config = chosen[0].spec.config
        layers = layer_costs(getattr(workloads, chosen[0].spec.workload), config)
        calibration = calibrate(observed_points(chosen), layers, variation_of(chosen))
        tell(
            "one worker: a step, a sample",
            f"{units.seconds(calibration.fixed_s)}, "
            f"{units.seconds(calibration.per_sample_s)}; steps vary by {units.percent(calibration.variation, 1)}",
        )
        network = None
        if len({p.num_workers for p in calibration.of_several}) < 2:
            network = fit_network(probe_all_reduces(2, folder / "probe"), 2)
            tell(
                "the network, by a probe",
                f"{units.seconds(network.latency_s)}, {units.size(network.bandwidth_bytes_per_s)}/s",
            )
        accumulated = config.get("accumulation_steps")
        # What goes through this machine's memory is copied by the cores that compute: nothing of it is hidden.
        hides = None if network is None else False
        how = communication_of(config, network or Network(0.0, 1.0), "ring", overlap=hides)
        points = cross_validate(calibration, how, network, accumulated if isinstance(accumulated, int) else 1)
    for point in points:
        show(point)
    judged = [point.is_within for point in points if point.is_within is not None]
    tell("held-out points within their measured interval", f"{sum(judged)} of {len(judged)}")


if __name__ == "__main__":
    main()
