"""Gradient noise scale: estimates against exact sums over samples, in training and in a report."""

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from results import make_result
from torch import nn
from torch.func import functional_call, grad, vmap
from training import trained

from raypar import Data, Split, Workload
from raypar.analysis.analyse import Question, analyse
from raypar.analysis.gradient_noise import noise_scale_estimate, noise_scale_lines
from raypar.analysis.points import PointAnalysis
from raypar.study.conditions import Conditions, RankConditions
from raypar.study.gradient_noise import (
    MAX_BLOCKS,
    Moments,
    in_blocks,
    measured_blocks,
    moments_of,
    noise_scale,
)

NUM_SAMPLES = 24
FROZEN_LR = 1e-12


def _model(_):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _data(_):
    inputs = torch.randn(NUM_SAMPLES, 5, generator=torch.Generator().manual_seed(1))
    targets = (inputs[:, :3] + torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(2))).argmax(1)
    return Data(train=Split(inputs, targets), val=Split(inputs, targets))


def summed(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def paired(outputs, targets):
    return summed(outputs, targets), len(targets)


SMALL = Workload(name="small", model=_model, data=_data, defaults={"lr": FROZEN_LR, "batch_size": NUM_SAMPLES})


def exact_gradients():
    """Return the gradient of each sample at the initial weights, ``(samples, weights)``, by plain torch."""
    model = _model({}).double()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x, y):
        return nn.functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    split = _data({}).train
    of_each = vmap(grad(loss), (None, 0, 0))(weights, split.inputs.double(), split.targets)
    return torch.cat([g.flatten(1) for g in of_each.values()], dim=1)


def exact_moments(gradients):
    """Return tr(Σ), with the sample covariance, and |G|² less the noise of the samples' mean."""
    trace = float(gradients.var(0).sum())
    mean_square = float(gradients.mean(0).square().sum())
    return trace, mean_square - trace / len(gradients)


def moments_of_parts(gradients, sizes):
    """Return the moments of a batch of all gradients, in consecutive parts."""
    parts = gradients.split(sizes)
    small = float(torch.stack([part.mean(0).square().sum() for part in parts]).mean())
    per_sample = sum(1 / size for size in sizes) / len(sizes)
    return moments_of(small, float(gradients.mean(0).square().sum()), per_sample, 1 / len(gradients))


@given(seed=st.integers(0, 10**6), sizes=st.sampled_from([(1, 1), (2, 2), (1, 4), (1, 2, 2), (1, 1, 1, 2), (3, 2)]))
def test_parts_of_any_sizes_estimate_trace_and_square_without_bias(seed, sizes):
    """The mean of the estimates over all orders of the samples is exact."""
    gradients = torch.randn(sum(sizes), 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    estimates = [moments_of_parts(gradients[list(order)], sizes) for order in permutations(range(len(gradients)))]
    assert tuple(np.mean(estimates, axis=0))[:2] == pytest.approx(exact_moments(gradients), rel=1e-9, abs=1e-9)


LOSSES = {"mean": None, "sum": summed, "pair": paired}


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16"])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_accumulated_batch_gives_the_exact_trace_and_square(loss, precision):
    workload = replace(SMALL, loss=LOSSES[loss]) if LOSSES[loss] else SMALL
    # Each part is one sample: the estimates are those of the samples, in any order.
    lr = FROZEN_LR / NUM_SAMPLES
    config = {"accumulation_steps": NUM_SAMPLES, "epochs": 3, "precision": precision, "lr": lr, "clip_grad_norm": 1e-3}
    outcome, reports = trained(workload, noise_scale=True, **config)
    (block,) = measured_blocks(Conditions(ranks=(outcome.conditions,)))
    trace, square = exact_moments(exact_gradients())
    factor = NUM_SAMPLES**2 if loss == "sum" else 1
    tolerance = {"fp64": 1e-9, "fp32": 1e-4, "fp16": 1e-2}[precision]
    assert block.trace == pytest.approx(trace * factor, rel=tolerance)
    assert block.square == pytest.approx(square * factor, rel=tolerance * 10)
    assert reports[-1]["noise_scale"] == pytest.approx(trace / square, rel=tolerance * 10)


def test_a_smaller_last_batch_does_not_count_and_no_weight_changes():
    config = {"batch_size": 10, "accumulation_steps": 3, "epochs": 2, "lr": 0.3, "precision": "fp64"}
    plain, noted = trained(SMALL, **config), trained(SMALL, noise_scale=True, **config)
    assert [r["val_loss"] for r in noted[1]] == [r["val_loss"] for r in plain[1]]
    assert plain[0].conditions.gradient_noise is None and "noise_scale" not in plain[1][0]
    only_full = trained(SMALL, noise_scale=True, **config, drop_last=True)
    assert noted[0].conditions.gradient_noise[0] != only_full[0].conditions.gradient_noise[0]  # other weights, then
    first = {**config, "epochs": 1}
    with_last, without = (
        trained(SMALL, noise_scale=True, **first, drop_last=drops)[0].conditions.gradient_noise for drops in (0, 1)
    )
    assert with_last == without


def test_one_worker_without_parts_measures_nothing():
    outcome, reports = trained(SMALL, noise_scale=True)
    assert outcome.conditions.gradient_noise is None and "noise_scale" not in reports[0]


@given(st.integers(0, 500))
def test_blocks_are_means_of_all_steps(num_steps):
    steps = [Moments(float(i), 2.0 * i, 1.0) for i in range(num_steps)]
    blocks = in_blocks(steps)
    assert len(blocks) <= MAX_BLOCKS and bool(blocks) is bool(steps)
    if steps and num_steps % len(blocks) == 0:
        assert np.mean([b.trace for b in blocks]) == pytest.approx(np.mean([s.trace for s in steps]))


def test_the_noise_scale_is_weighted_by_progress():
    """A batch of 100: first, the noise scale is 100, later 900. The later steps make a fifth of the progress."""
    early, late = Moments(100.0, 1.0, 2.0), Moments(900.0, 1.0, 10.0)
    assert noise_scale([early]) == 100 and noise_scale([late]) == 900
    assert noise_scale([early, late]) == pytest.approx((100 * 1 / 2 + 900 * 1 / 10) / (1 / 2 + 1 / 10))
    assert noise_scale([]) is noise_scale([Moments(1.0, -1.0, 1.0)]) is noise_scale([Moments(-1.0, 1.0, 1.0)]) is None
    assert noise_scale([Moments(0.0, 0.0, 0.0)]) is None


def drawn(seed, scale, batch=64, num_steps=400, dimension=50):
    """Draw steps of a training whose noise scale grows fourfold; return their blocks and the scale by progress."""
    rng = np.random.default_rng(seed)
    mean = np.zeros(dimension)
    steps, top, bottom = [], 0.0, 0.0
    for i in range(num_steps):
        local = scale * 4 ** (i / num_steps) / 2
        mean[0] = math.sqrt(1 / local)  # with Σ = identity / dimension
        halves = mean + rng.normal(size=(2, dimension)) / math.sqrt(dimension * batch / 2)
        small, big = float((halves**2).sum(1).mean()), float((halves.mean(0) ** 2).sum())
        steps.append(moments_of(small, big, 2 / batch, 1 / batch))
        weight = 1 / (1 + local / batch)
        top, bottom = top + weight * local, bottom + weight
    return in_blocks(steps), top / bottom


def test_intervals_hold_the_exact_value_as_often_as_they_say():
    held = 0
    for seed in range(200):
        blocks, exact = drawn(seed, 100)
        estimate = noise_scale_estimate([blocks])
        held += estimate.low <= exact <= estimate.high
        assert estimate.low <= estimate.value <= estimate.high
    assert 0.90 <= held / 200 <= 1.0


def test_hopeless_noise_has_no_upper_bound():
    blocks, _ = drawn(1, 100_000, num_steps=100)
    estimates = [noise_scale_estimate([drawn(seed, 100_000, num_steps=100)[0]]) for seed in range(30)]
    assert any(e is not None and e.high == math.inf and e.low > 100 for e in estimates)
    assert noise_scale_estimate([blocks[:1]]) is None or noise_scale_estimate([blocks[:1]]).low is None


def measured(num_workers, blocks, repeat=0, batch_size=64):
    conditions = Conditions(ranks=(RankConditions(gradient_noise=tuple(blocks)), RankConditions()))
    result = make_result({"num_workers": num_workers}, repeat, 8.0 / num_workers)
    config = {**result.spec.config, "batch_size": batch_size}
    return replace(result, conditions=conditions, spec=replace(result.spec, config=config))


QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))


def test_a_report_says_beyond_which_batch_more_workers_buy_no_progress():
    results = [measured(2, drawn(seed, 480, 512)[0], seed, 512) for seed in range(2)]
    analysis = analyse(QUESTION, results)
    (said,) = [line for line in analysis.statements if "samples a step" in line]
    assert said.startswith("Beyond about 512 samples a step, more workers buy throughput, not progress: gradient noise")
    assert said.endswith("] at num_workers=2.")
    (point,) = analysis.points
    assert isinstance(point, PointAnalysis)
    assert 300 < point.quantities["noise_scale_samples"].value < 700
    assert not [f for f in analysis.warnings if f.check == "beyond_noise_scale"]
    wide = [measured(2, drawn(1, 480, 512)[0], 0, 8192)]
    (finding,) = [f for f in analyse(QUESTION, wide).warnings if f.check == "beyond_noise_scale"]
    assert finding.detail.startswith("1 of 1 point had a batch beyond the gradient noise scale: num_workers=2 (8,192")
    unknown = analyse(QUESTION, [measured(2, drawn(3, 100_000, num_steps=100)[0])])
    assert not any("Beyond" in line for line in unknown.statements)


def test_stored_moments_of_another_form_count_as_unknown():
    conditions = Conditions.from_stored({"gradient_noise": [[[1.0, 2.0], ["x", 1, 2]], None], "cores": [[0], [1]]})
    assert measured_blocks(conditions) == ()
    stored = Conditions(ranks=(RankConditions(gradient_noise=(Moments(1.0, 2.0, 3.0),)), RankConditions())).to_stored()
    assert measured_blocks(Conditions.from_stored(stored)) == (Moments(1.0, 2.0, 3.0),)
    assert noise_scale_lines([]) == []
