"""Ranges of efficiency from published trainings: the Gaussian process by hand, and what measurements do."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal, norm

from raypar.analysis.laws import Scaling
from raypar.analysis.scaling import Measurement, Runs
from raypar.predict.facts import fabric_of, facts_of, family_of_layers, link_kind
from raypar.predict.network import parse_network
from raypar.predict.outlook import MeasuredRates, look_ahead
from raypar.predict.overhead import (
    FEATURES,
    PRIOR_FILE,
    Deviations,
    Fabric,
    Facts,
    GangSize,
    Link,
    MeasuredEfficiency,
    ModelFamily,
    Prior,
    most_informative,
    predict_efficiency,
)
from raypar.predict.step_model import LayerCost
from raypar.study.strategy import Exchange, exchange_of

ONE = GangSize(1)
PRIOR = Prior.shipped()
FACTS = Facts(scaling=Scaling.WEAK)
efficiencies = st.floats(0.05, 0.99)


def simple(training=0.6, noise=0.2, slope=0.0, source=0.0, error=0.0):
    """A prior whose log overhead is -2 + 0.5 growth, with coefficients that are certain."""
    mean = np.zeros(len(FEATURES))
    mean[:2] = -2.0, 0.5
    nothing = np.zeros((len(FEATURES), len(FEATURES)))
    return Prior(mean, nothing, Deviations(source, training, slope, noise, error), 0)


def test_without_a_measurement_the_range_is_that_of_a_normal_log_overhead():
    (found,) = predict_efficiency(simple(), FACTS, ONE, [GangSize(8)])
    mean, deviation = -2 + 0.5 * 2, np.hypot(0.6, 0.2)  # growth of three doublings: log2(1 + 3)
    by_hand = [1 / (1 + np.exp(mean + deviation * norm.ppf(q))) for q in (0.5, 0.95, 0.05)]
    assert [found.median, found.low, found.high] == pytest.approx(by_hand)


def test_a_measurement_conditions_the_process_as_the_normal_distribution_does():
    prior, efficiency = simple(training=0.6, noise=0.2, slope=0.3, source=0.4), 0.8
    (found,) = predict_efficiency(prior, FACTS, ONE, [GangSize(16)], [MeasuredEfficiency(GangSize(2), efficiency)])
    growth = np.array([1.0, np.log2(5)])
    covariance = 0.4**2 + 0.6**2 + 0.3**2 * np.outer(growth - 1, growth - 1) + np.diag([0.2**2, 0.2**2])
    joint = multivariate_normal([-2 + 0.5 * g for g in growth], covariance)
    at = np.linspace(-8, 6, 20_001)
    density = joint.pdf(np.column_stack([np.full_like(at, np.log(1 / efficiency - 1)), at]))
    cumulative = np.cumsum(density) / np.sum(density)
    low, median, high = (at[np.searchsorted(cumulative, q)] for q in (0.05, 0.5, 0.95))
    by_hand = [1 / (1 + np.exp(z)) for z in (median, high, low)]
    assert [found.median, found.low, found.high] == pytest.approx(by_hand, abs=2e-3)


def test_the_bound_of_a_step_model_adds_to_the_overhead():
    free, bounded = (predict_efficiency(simple(), FACTS, ONE, [GangSize(8)], (), [b])[0] for b in (0.0, 0.5))
    assert 1 / bounded.median - 1 / free.median == pytest.approx(0.5)
    explained = [MeasuredEfficiency(GangSize(4), 0.6, bound=1 / 0.6 - 1)]  # nothing is left for other overheads
    (after,) = predict_efficiency(simple(), FACTS, ONE, [GangSize(8)], explained, [0.5])
    assert bounded.median < after.median < 1 / 1.5


@given(efficiencies, efficiencies, st.integers(1, 6), st.floats(0, 0.05))
def test_measurements_narrow_a_range_in_logarithms_and_keep_it_in_order(first, second, doublings, error):
    target = GangSize(2 ** (doublings + 2))
    known = [MeasuredEfficiency(GangSize(2), first, error), MeasuredEfficiency(GangSize(4), second, error)]
    ranges = [predict_efficiency(PRIOR, FACTS, ONE, [target], known[:n])[0] for n in (0, 2)]
    for each in ranges:
        assert 0 <= each.low < each.median < each.high <= 1
    logits = [np.log(1 / r.low - 1) - np.log(1 / r.high - 1) for r in ranges]
    # A published efficiency near 1 says less about the logarithm: then the noise grows with what it predicts.
    if 0.2 < first < 0.9 and 0.2 < second < 0.9:
        assert logits[1] < logits[0]


def test_the_smallest_count_is_exact_and_more_overhead_is_expected_of_slower_links():
    gangs = [ONE, GangSize(16, 2)]
    by_network = {
        fabric: predict_efficiency(PRIOR, Facts(between=fabric, within=Link.FAST), ONE, gangs) for fabric in Fabric
    }
    assert all(ranges[0].median == ranges[0].low == ranges[0].high == 1 for ranges in by_network.values())
    assert by_network[Fabric.TCP][1].median < by_network[Fabric.RDMA][1].median
    shared = predict_efficiency(PRIOR, Facts(within=Link.BUS), ONE, gangs)[1]
    assert shared.median < predict_efficiency(PRIOR, Facts(within=Link.FAST), ONE, gangs)[1].median


def test_the_shipped_prior_is_read_as_it_was_written():
    raw = json.loads(PRIOR_FILE.read_text())
    assert list(raw["coefficients"]) == list(FEATURES) and json.loads(PRIOR.as_json()) == raw


def test_the_advice_is_the_measurement_that_narrows_the_range():
    candidates = [GangSize(2), GangSize(4), GangSize(8)]
    chosen, after = most_informative(PRIOR, FACTS, ONE, GangSize(64), [], candidates)
    before = predict_efficiency(PRIOR, FACTS, ONE, [GangSize(64)])[0]
    assert chosen in candidates and after.width < 0.9 * before.width
    assert most_informative(PRIOR, FACTS, ONE, GangSize(64), [], []) is None


# ---- facts


@pytest.mark.parametrize(
    ("config", "exchange"),
    [
        ({"strategy": "ddp", "device": "cuda"}, Exchange.ALL_REDUCE),
        ({"strategy": "ddp", "device": "cpu"}, Exchange.HOST),
        ({"strategy": "fsdp", "device": "cpu"}, Exchange.SHARDED),
        ({"strategy": "pipeline", "device": "cuda"}, Exchange.MODEL),
        ({"strategy": "gather_broadcast", "device": "cuda"}, Exchange.HOST),
        ({"strategy": "of a package that is gone", "device": "cuda"}, Exchange.ALL_REDUCE),
        ({}, Exchange.ALL_REDUCE),
    ],
)
def test_the_exchange_follows_from_the_strategy_and_the_device(config, exchange):
    assert exchange_of(config) is exchange


def test_facts_follow_from_links_and_layers():
    assert [link_kind(parse_network(text)) for text in ("200GB/s", "12GB/s")] == [Link.FAST, Link.BUS]
    assert [fabric_of(latency) for latency in (None, 2e-6, 50e-6)] == [None, Fabric.RDMA, Fabric.TCP]
    convolution, linear = LayerCost("a", 4_000, 0.6, 0.2, 1, "Conv2d"), LayerCost("b", 8_000, 0.1, 0.1, 1, "Linear")
    assert family_of_layers([convolution, linear]) is ModelFamily.CONVOLUTIONAL
    assert family_of_layers([linear]) is ModelFamily.OTHER and family_of_layers([LayerCost("c", 1, 0.6, 0.4)]) is None
    assert facts_of(layers=[convolution, linear]).num_parameters == 3_000


# ---- outlook


def test_rates_come_from_times_and_throughputs():
    times = Runs({1: (10.0,), 2: (6.0,)})
    strong, weak = (MeasuredRates.of_runs(times, scaling) for scaling in (Scaling.STRONG, Scaling.WEAK))
    assert strong.rates == {1: (0.1,), 2: (1 / 6,)} and weak.rates == {1: (0.1,), 2: (2 / 6,)}
    assert [m.work(2) / m.rates[2][0] for m in (strong, weak)] == [6.0, 6.0]
    rates = MeasuredRates.of_runs(Runs({4: (50.0,)}, Measurement.THROUGHPUT, unit="images/s"), Scaling.STRONG)
    assert rates.rates == {4: (50.0,)} and rates.unit == "images/s" and rates.base == 4


def test_an_outlook_shows_measured_counts_and_is_compared_with_the_smallest():
    rates = MeasuredRates({2: (200.0, 202.0), 4: (380.0, 384.0)})
    outlook = look_ahead(rates, FACTS, [1, 2, 4, 8], nodes_of=2)
    assert [e.num_workers for e in outlook.expected] == [2, 4, 8]  # one worker was not measured
    two, four, eight = outlook.expected
    assert two.speedup.value == 1 and two.rate.value == 201 and four.measured.value == 382
    assert four.efficiency.low < 382 / 402 < four.efficiency.high and eight.measured is None
    assert [e.num_nodes for e in outlook.expected] == [1, 2, 4]
    assert eight.rate.value == pytest.approx(eight.speedup.value * 201)


def test_a_count_measured_on_other_links_is_not_used():
    rates = MeasuredRates({1: (100.0,), 2: (190.0,)})
    with_it = look_ahead(rates, FACTS, [16])
    without = look_ahead(rates, FACTS, [16], is_comparable=lambda n: n == 1)
    assert (with_it.num_measured, without.num_measured) == (2, 1)
    assert [e.measured is None for e in without.expected] == [False, True, True]
    assert without.expected[-1].efficiency.low < with_it.expected[-1].efficiency.low
