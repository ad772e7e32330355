"""Calibration from a study's results, and predictions: their values, limits, extrapolation, refusals."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result, stored_conditions

from raypar.analysis.laws import Scaling
from raypar.errors import RayparError
from raypar.predict.calibration import (
    USUAL_VARIATIONS,
    ObservedPoint,
    calibrate,
    choose_results,
    epoch_samples,
    fit_study_network,
    observed_points,
    quiet_results,
    variation_of,
)
from raypar.predict.network import Network, Topology
from raypar.predict.predict import JobSpec, communication_of, job_spec_of, predict, worker_counts
from raypar.predict.step_model import Communication, LayerCost, Limit, expected_max_of_normals, simulate_steps
from raypar.study.trial import TrialState

LAYERS = tuple(LayerCost(f"layer{i}", 2_000_000, 0.2, 0.1) for i in range(4))
LINK = Network(2e-4, 2e8)
HOW = Communication(LINK)
FAST = Network(0.0, 1e15)
FIXED_S, PER_SAMPLE_S = 0.004, 0.001


def step_s(num_workers, batch_size):
    """Return the step time of the simulated study."""
    compute_s, variation = np.array([PER_SAMPLE_S * batch_size / num_workers]), USUAL_VARIATIONS[0]
    steps = {"compute_s": compute_s, "optimizer_s": FIXED_S, "variation": variation}
    times = simulate_steps(LAYERS, np.array([num_workers]), HOW, **steps)
    return times.at(0).step_time_s


def points(counts=(1, 2, 4, 8), batches=(64, 256), noise=(0.98, 1.0, 1.02)):
    return [ObservedPoint(n, b, tuple(step_s(n, b) * factor for factor in noise)) for n in counts for b in batches]


def result(num_workers, batch_size, repeat=0, **config):
    """A trial of 1,000 samples and two epochs."""
    time_s = 2000 / batch_size * step_s(num_workers, batch_size)
    point = {"num_workers": num_workers, "batch_size": batch_size}
    return make_result(point, repeat, time_s, num_samples=2000, config={"epochs": 2, **config})


def strong(batch_size=256):
    return JobSpec(Scaling.STRONG, batch_size, num_samples=1024, epochs=3)


# ---- from results to points


def test_a_step_is_the_batch_over_the_throughput():
    observed = observed_points([result(2, 64, 1), result(2, 64), result(1, 64)])
    assert [(p.num_workers, p.batch_size, len(p.step_times_s)) for p in observed] == [(1, 64, 1), (2, 64, 2)]
    assert observed[1].step_times_s == pytest.approx((step_s(2, 64), step_s(2, 64)))
    assert epoch_samples(result(1, 64)) == 1000


def test_trials_that_differ_only_in_workers_and_batch_are_chosen():
    keys = ("num_workers", "batch_size", "lr")
    results = [make_result(dict(zip(keys, values, strict=True))) for values in product((1, 2), (32, 64), (0.1, 0.2))]
    chosen = choose_results(results, {"lr": 0.2, "batch_size": 32})
    assert [r.spec.config["lr"] for r in chosen] == [0.2] * 4
    with pytest.raises(RayparError, match=r"the trials differ in lr: 0\.1, 0\.2") as caught:
        choose_results(results, {})
    assert caught.value.hint == "choose: --set lr=0.1"


@pytest.mark.parametrize(
    ("results", "settings", "problem"),
    [
        ([make_result({"lr": 0.1})], {"speed": 3}, "no trial has this hyperparameter"),
        ([make_result({}, state=TrialState.FAILED)], {}, "no finished trial"),
        ([make_result({}, train_time_s=None)], {}, "can't instrument the steps"),
    ],
)
def test_trials_without_step_times_are_refused(results, settings, problem):
    with pytest.raises(RayparError, match=problem):
        choose_results(results, settings)


def test_the_variation_excludes_short_last_steps():
    # 250 samples in batches of 100: every third batch is a half one.
    steps = (1.0, 1.2, 0.5, 1.0, 1.2, 0.5)
    config = {"batch_size": 100, "epochs": 2}
    alone = make_result({"num_workers": 1}, num_samples=500, step_times_s=(steps,), config=config)
    several = make_result({"num_workers": 2}, num_samples=500, step_times_s=((1.0, 9.0),) * 2, config=config)
    expected = np.std([1.0, 1.2, 1.0, 1.2], ddof=1) / 1.1
    assert variation_of([alone, several]) == pytest.approx(expected)
    assert variation_of([several, make_result({"num_workers": 1})]) is None


# ---- calibration


def test_two_batch_sizes_separate_fixed_time_and_time_per_sample():
    fitted = calibrate(points(), LAYERS, 0.05)
    assert (fitted.fixed_s, fitted.per_sample_s) == pytest.approx((FIXED_S, PER_SAMPLE_S))
    assert (fitted.variation, fitted.is_variation_measured, fitted.notes) == (0.05, True, ())
    assert fitted.draws is not None and fitted.draws.shape[1] == 2
    low, high = np.quantile(fitted.draws[:, 1], [0.025, 0.975])
    assert 0.9 * PER_SAMPLE_S < low < PER_SAMPLE_S < high < 1.1 * PER_SAMPLE_S


def test_one_batch_size_gives_a_note_and_one_repeat_no_intervals():
    fitted = calibrate(points(batches=(64,), noise=(1.0,)), LAYERS)
    assert (fitted.fixed_s, fitted.per_sample_s) == (0, pytest.approx(step_s(1, 64) / 64))
    assert "only with a batch of 64" in fitted.notes[0]
    assert fitted.draws is None
    assert predict(fitted, strong(), HOW, [2], is_measured_network=True).predictions[0].step_time_s.low is None


@pytest.mark.parametrize("measured", [None, 0.0])
def test_workers_always_vary(measured):
    fitted = calibrate(points(), LAYERS, measured)
    assert (fitted.variation, fitted.is_variation_measured) == (0.01, False)
    assert fitted.notes == ("the variation of steps was not measured: 1 to 3 % is usual, and 1 % is assumed",)
    job = JobSpec(Scaling.WEAK, 256, num_samples=1024)
    (many,) = predict(fitted, job, replace(HOW, network=FAST), [1024]).predictions
    slowest = 1 + 0.01 * float(expected_max_of_normals(np.array(1024)))
    assert many.step_time_s.value == pytest.approx(FIXED_S + 256 * PER_SAMPLE_S * slowest)
    assert many.efficiency.value < 0.97


@pytest.mark.parametrize(
    ("counts", "latency_s", "note"),
    [
        ((1, 2, 4, 8), LINK.latency_s, "latency and bandwidth fitted to the steps of 2, 4, 8 workers"),
        ((1, 2), 50e-6, "bandwidth, with a latency of 50 µs, fitted to the steps of 2 workers"),
    ],
)
def test_a_network_is_fitted_to_the_steps_of_several_workers(counts, latency_s, note):
    network, source = fit_study_network(calibrate(points(counts=counts), LAYERS), HOW)
    assert network.bandwidth_bytes_per_s == pytest.approx(LINK.bandwidth_bytes_per_s, rel=0.05)
    assert network.latency_s == pytest.approx(latency_s, rel=0.1) and source.endswith(note)


BUSY, BUSIER = ({"cores": [[0]], "foreign_cpu_share": [share]} for share in (0.2, 0.5))


def test_disturbed_trials_are_not_used():
    quiet = [result(n, 64, r) for n in (1, 2) for r in range(2)]
    kept, sentence = quiet_results(quiet)
    assert (kept, sentence) == (tuple(quiet), "")
    mixed = [
        replace(quiet[0], conditions=stored_conditions(BUSIER)),
        quiet[1],
        replace(quiet[2], conditions=stored_conditions(BUSY)),
        quiet[3],
    ]
    kept, sentence = quiet_results(mixed)
    assert kept == (quiet[1], quiet[3]) and sentence == "2 of 4 trials were disturbed by other load and are not used"
    # Trials with little load are used if there are no others.
    little = [replace(r, conditions=stored_conditions(BUSY)) for r in quiet]
    assert quiet_results(little) == (tuple(little), "")
    with pytest.raises(RayparError, match=r"other load disturbed all trials of one worker \(3 of 4 trials in total\)"):
        quiet_results([replace(r, conditions=stored_conditions(BUSIER)) for r in quiet[:3]] + quiet[3:])


def scaled(factors):
    """The points of the study, with factors on the step times of some worker counts."""
    return [
        replace(p, step_times_s=tuple(t * factors.get(p.num_workers, 1.0) for t in p.step_times_s)) for p in points()
    ]


@pytest.mark.parametrize(("factor", "problem"), [(0.3, "links of 2.00 TB/s or more"), (9e5, "which no machine has")])
def test_an_implausible_network_is_refused(factor, problem):
    with pytest.raises(RayparError, match="can't fit a network to the steps of several workers: ") as caught:
        fit_study_network(calibrate(scaled(dict.fromkeys((2, 4, 8), factor)), LAYERS), HOW)
    assert problem in caught.value.message and "--network" in caught.value.hint


# ---- prediction


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize("batch_size", [256, 64, 128])
def test_a_model_that_contradicts_the_measurements_gives_no_bound(is_measured, batch_size):
    calibration = calibrate(scaled({2: 0.4}), LAYERS)
    with pytest.raises(RayparError, match="contradicts the measurements, so it gives no bound: 2 workers, batch"):
        predict(calibration, strong(batch_size), HOW, [64], is_measured_network=is_measured)


@given(st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.floats(0.3, 3), min_size=1), st.booleans())
def test_no_measurement_in_the_table_is_much_faster_than_its_bound(factors, is_measured):
    calibration = calibrate(scaled(factors), LAYERS)
    try:
        sweep = predict(calibration, strong(), HOW, [1, 2, 4, 8], is_measured_network=is_measured)
    except RayparError:
        return
    shown = [p for p in sweep.predictions if p.measured]
    assert shown and all(p.measured.value > 0.95 * p.step_time_s.value for p in shown)


def test_the_simulated_step_is_predicted():
    sweep = predict(calibrate(points(), LAYERS), strong(), HOW, [1, 2, 64], is_measured_network=True)
    one, two, many = sweep.predictions
    for p in (one, two, many):
        expected = step_s(p.num_workers, 256)
        assert p.step_time_s.value == pytest.approx(expected)
        assert p.throughput_samples_per_s.value == pytest.approx(256 / expected)
        assert p.speedup.value == pytest.approx(step_s(1, 256) / expected)
        assert p.efficiency.value == pytest.approx(p.speedup.value / p.num_workers)
        assert p.training_s.value == pytest.approx(3 * 4 * expected) and p.epoch_s.value == pytest.approx(4 * expected)
    assert one.speedup.value == 1 and one.speedup.low == one.speedup.high == 1
    assert two.measured is not None and two.measured.value == pytest.approx(step_s(2, 256))
    assert many.measured is None
    assert two.step_time_s.low is not None and two.step_time_s.low < two.step_time_s.value
    # Extrapolations have no interval.
    beyond = (many.step_time_s, many.throughput_samples_per_s, many.speedup, many.efficiency, many.training_s)
    assert [e.low for e in beyond] == [None] * 5


def test_weak_scaling_keeps_the_batch_of_a_worker():
    (p,) = predict(calibrate(points(), LAYERS), JobSpec(Scaling.WEAK, 64, num_samples=1024), HOW, [16]).predictions
    assert (p.batch_size, p.efficiency.value) == (1024, pytest.approx(step_s(1, 64) / step_s(16, 1024)))
    assert p.speedup.value == pytest.approx(16 * p.efficiency.value)
    # The fixed time of a step is not a loss if the batch of a worker stays the same.
    fast = predict(calibrate(points(), LAYERS), JobSpec(Scaling.WEAK, 16, 1000), replace(HOW, network=FAST), [64])
    assert fast.predictions[0].limit is Limit.COMPUTE


@pytest.mark.parametrize(
    ("job", "count", "measured", "beyond"),
    [
        (strong(), 4, {"network", "sending"}, ()),
        (strong(), 8, {"network", "sending"}, ("workers",)),
        (strong(), 2, {"sending"}, ("network",)),
        (strong(), 2, {"network"}, ("sending",)),
        (strong(), 2, set(), ("network",)),
        (strong(), 1, {"sending"}, ()),
        (strong(), 8, {"sending"}, ("workers", "batch", "network")),
        (JobSpec(Scaling.WEAK, 300, 1000), 1, {"network", "sending"}, ("batch",)),
    ],
)
def test_extrapolation_is_marked(job, count, measured, beyond):
    calibration = calibrate(points(counts=(1, 2, 4)), LAYERS)
    are_measured = {f"is_measured_{part}": part in measured for part in ("network", "sending")}
    (prediction,) = predict(calibration, job, HOW, [count], **are_measured).predictions
    assert prediction.extrapolated == beyond
    assert (prediction.measured is not None) == (beyond == ())


def test_the_workers_of_a_node_share_its_input_pipeline():
    job, nodes = replace(strong(), input_samples_per_s=1000.0), replace(HOW, network=Topology(4, LINK, LINK))
    predictions = predict(calibrate(points(), LAYERS), job, nodes, [4, 8]).predictions
    assert [p.step_time_s.value for p in predictions] == pytest.approx([256 / 1000, 128 / 1000])


def test_workers_without_a_sample_are_excluded():
    calibration = calibrate(points(), LAYERS)
    sweep = predict(calibration, strong(16), HOW, [8, 16, 32])
    assert ([p.num_workers for p in sweep.predictions], sweep.most_workers) == ([8, 16], 16)
    with pytest.raises(RayparError, match="too few samples for 32 workers"):
        predict(calibration, strong(16), HOW, [32])


def test_the_fastest_count_is_searched_up_to_the_largest():
    given = calibrate(points(), LAYERS), strong(), replace(HOW, network=Network(5e-3, 1e9))
    sweep, every = predict(*given, [1, 64]), predict(*given, range(1, 65)).predictions
    assert 1 < sweep.fastest < 64
    assert max(every, key=lambda p: p.throughput_samples_per_s.value).num_workers == sweep.fastest


@given(st.integers(2, 4096), st.floats(0, 0.5), st.sampled_from(list(Scaling)))
def test_no_count_is_more_than_perfectly_efficient(num_workers, variation, scaling):
    calibration = calibrate(points(noise=(1.0,)), LAYERS, variation)
    prediction = predict(calibration, JobSpec(scaling, 4096, 10_000), HOW, [num_workers]).predictions[0]
    assert 0 < prediction.efficiency.value <= 1 + 1e-9


def test_worker_counts_are_powers_of_two_and_requested_or_measured_ones():
    assert worker_counts([12], [1, 3, 48]) == (1, 2, 3, 4, 8, 12)


# ---- what a study trains, and how


def test_the_job_follows_from_the_study():
    results = [result(1, 64), result(2, 64)]
    assert job_spec_of(results, {}) == JobSpec(Scaling.STRONG, 64, 1000, 2)
    weak = [result(n, 64 * n, per_worker_batch_size=64, accumulation_steps=2) for n in (1, 2)]
    assert job_spec_of(weak, {}) == JobSpec(Scaling.WEAK, 64, 1000, 2, accumulation_steps=2)
    assert job_spec_of(weak, {"per_worker_batch_size": 128}).batch_size == 128
    assert job_spec_of([result(1, 64), result(1, 32)], {"batch_size": 512}).batch_size == 512
    assert job_spec_of([result(1, 64)], {}, Scaling.WEAK).scaling is Scaling.WEAK


@pytest.mark.parametrize(
    ("settings", "problem"), [({}, "differ in their batch: 32, 64"), ({"batch_size": "big"}, "--set batch_size=big")]
)
def test_one_of_several_batches_must_be_chosen(settings, problem):
    with pytest.raises(RayparError, match=problem):
        job_spec_of([result(1, 64), result(1, 32)], settings)


def test_communication_follows_the_config_unless_overridden():
    assert communication_of({}, LINK, "ring") == Communication(LINK, "ring")
    config = {"strategy": "ddp", "bucket_mb": 4.0, "overlap": False, "compression": "fp16"}
    expected = Communication(LINK, "tree", bucket_bytes=4 * 2**20, overlap=False, compression=0.5)
    assert communication_of(config, LINK, "tree") == expected
    assert communication_of({**config, "precision": "fp64"}, LINK).compression == 0.25
    overridden = communication_of(config, LINK, "tree", bucket_mb=0, overlap=True)
    assert (overridden.bucket_bytes, overridden.overlap) == (0, True)
    for refused in ({"strategy": "pipeline"}, {"compression": "powersgd"}):
        with pytest.raises(RayparError, match=r"pipeline|powersgd"):
            communication_of(refused, LINK)
