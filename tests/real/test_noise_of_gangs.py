"""The gradient noise scale of a gang: exact where samples can be counted, and without a trace in the training."""

import pytest
import torch
from ranks import Reports, on_ranks
from torch import nn
from torch.func import functional_call, grad, vmap

from raypar import Data, Split, Workload
from raypar.analysis.gradient_noise import noise_scale_estimate
from raypar.study.conditions import Conditions
from raypar.study.gradient_noise import measured_blocks
from raypar.study.options import resolve
from raypar.train.loop import train

NUM_SAMPLES, BATCH_SIZE = 600, 30


def _model(_=None):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def _split():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 8, generator=generator)
    return Split(inputs, (inputs[:, :3] + torch.randn(NUM_SAMPLES, 3, generator=generator)).argmax(1))


SMALL = Workload(
    name="small",
    model=_model,
    data=lambda _: Data(train=_split(), val=_split()),
    defaults={"batch_size": BATCH_SIZE, "optimizer": "momentum", "lr": 0.1, "epochs": 2},
)


def exact():
    """Return tr(Σ) and |G|² of the samples at the initial weights, by plain torch."""
    model, split = _model().double(), _split()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x, y):
        return nn.functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    of_each = vmap(grad(loss), (None, 0, 0))(weights, split.inputs.double(), split.targets)
    gradients = torch.cat([g.flatten(1) for g in of_each.values()], dim=1)
    trace = float(gradients.var(0).sum())
    return trace, float(gradients.mean(0).square().sum()) - trace / NUM_SAMPLES


def _trainings(*configs):
    """Return each training's outcome and reports on this rank."""

    def do(context):
        done = []
        for config in configs:
            reports = Reports()
            complete = resolve(SMALL, {**config, "num_workers": context.world_size})
            done.append((train(SMALL, complete, 0, context, reports, start_s=0.0), reports))
        return done

    return do


def _bits(reports):
    return [float(report[key]).hex() for report in reports for key in ("train_loss", "val_loss")]


FROZEN = {"lr": 1e-12, "epochs": 20, "noise_scale": True}
VARIANTS = (
    {},
    {"overlap": False},
    {"bucket_mb": 0},
    {"compression": "bf16"},
    {"accumulation_steps": 2, "clip_grad_norm": 0.5},
    {"precision": "fp16"},
    {"batch_size": 28},  # a last batch of 12; shares of unequal sizes on three ranks
)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_gang_measures_the_exact_noise_scale_and_trains_as_without_it(num_ranks):
    frozen = (FROZEN, {**FROZEN, "batch_size": 28}, {**FROZEN, "accumulation_steps": 2, "precision": "fp16"})
    pairs = [{**variant, "noise_scale": notes} for variant in VARIANTS for notes in (False, True)]
    ranks = on_ranks(_trainings(*frozen, *pairs), num_ranks)
    trace, square = exact()
    for i in range(len(frozen)):
        assert all(rank[i][0].conditions.gradient_noise is None for rank in ranks[1:])
        blocks = measured_blocks(Conditions(ranks=(ranks[0][i][0].conditions,)))
        estimate = noise_scale_estimate([blocks])
        assert len(blocks) == 20
        assert estimate.low <= trace / square <= estimate.high
        assert estimate.value == pytest.approx(trace / square, rel=0.1)
        assert sum(b.trace for b in blocks) / 20 == pytest.approx(trace, rel=0.05)
        assert sum(b.square for b in blocks) / 20 == pytest.approx(square, rel=0.1)
    for i, variant in enumerate(VARIANTS):
        without, noted = (ranks[0][len(frozen) + 2 * i + j] for j in range(2))
        assert _bits(noted[1]) == _bits(without[1]), variant
        assert without[0].conditions.gradient_noise is None
        assert measured_blocks(Conditions(ranks=(noted[0].conditions,))), variant
    plain, after = (_bits(ranks[0][len(frozen) + i][1]) for i in (0, 2))
    assert plain == after  # the order of sending changes no bit either
