"""Does the step model predict a worker count that it has not seen, within the interval that was measured?

Every worker count of several workers is left out in turn and predicted from the others. Where there is only one such
count, its network comes from a probe between two workers of this machine. With --study, a study's stored results are
taken; else ResNet-18 is trained here by two workers, 64 images a step, and predicted from what computing alone takes:
of two workers at once that send nothing (local SGD that never averages), with 32 and with 64 images each. They share
the machine's memory and caches as two workers that train together do; one worker alone is faster than either of them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from common import begin, local_trial, parser_for, progress, scratch, tell

from raypar import units, workloads
from raypar.predict.calibration import calibrate, choose_results, measured_points, variation_of
from raypar.predict.layers import layer_costs
from raypar.predict.network import Network, fit_network
from raypar.predict.predict import LeftOut, communication_of, leave_one_out
from raypar.predict.probe import probe_all_reduces
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


def show(left: LeftOut) -> None:
    title = f"{units.counted(left.num_workers, 'worker')}, batch {left.batch_size}"
    seen = left.measured
    measured_s = units.seconds_interval(seen.value, seen.low, seen.high)
    if left.predicted is None or left.error is None:
        tell(title, f"measured {measured_s}; not predicted: {left.why_not}")
        return
    verdict = {True: "within", False: "OUTSIDE", None: "no interval to lie in"}[left.is_within]
    told = (
        f"predicted {units.seconds(left.predicted.value)}, measured {measured_s}: {verdict}, {100 * left.error:+.1f} %"
    )
    tell(title, told)


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
        calibration = calibrate(measured_points(chosen), layers, variation_of(chosen))
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
        found = leave_one_out(
            calibration, how, network, accumulation_steps=accumulated if isinstance(accumulated, int) else 1
        )
    for left in found:
        show(left)
    judged = [left.is_within for left in found if left.is_within is not None]
    tell("left-out points within their measured interval", f"{sum(judged)} of {len(judged)}")


if __name__ == "__main__":
    main()
