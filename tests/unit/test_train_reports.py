"""Losses and gradient norms in reports, where fp16 skips steps, a rank lacks samples, or the model keeps a cache."""

import math

import pytest
import torch
from torch import nn
from training import ALONE, trained

from raypar import Data, Split, Workload
from raypar.parallel.base import Strategy
from raypar.parallel.loss import Kind, Loss
from raypar.parallel.strategy import Batch, Task
from raypar.study.options import resolve
from raypar.train.data import shares
from raypar.train.loss_kind import as_ratio
from raypar.train.precision import numerics_of
from raypar.train.step import Stepper

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3


def workload(model, inputs=X, targets=Y, **more):
    split = Split(inputs, targets)
    settings = {"metrics": {}, "metric": "val_loss", **more}
    return Workload(name="w", model=model, data=lambda _: Data(train=split, val=split), **settings)


def test_steps_that_fp16_skips_do_not_count_in_the_gradient_norm():
    alike = workload(lambda _: nn.Linear(6, 3), 10 * X[:1].expand(8, 6), torch.zeros(8, dtype=torch.int64))
    config = {"batch_size": 1, "epochs": 2, "lr": 1e-9, "clip_grad_norm": 1.0, "num_warmup_steps": 0}
    norms, expected = (
        [report.get("grad_norm") for report in trained(alike, precision=precision, **config)[1]]
        for precision in ("fp16", "fp32")
    )
    assert norms == pytest.approx(expected, rel=0.01)
    config |= {"batch_size": 8, "epochs": 1}
    assert "grad_norm" not in trained(alike, precision="fp16", **config)[1][0]  # the only step is skipped


class OverflowsOnce(nn.Linear):
    """Model whose outputs are infinite in training for the last sample."""

    def forward(self, x):
        outputs = super().forward(x)
        return torch.where(x[:, :1] == X[-1, 0], math.inf, outputs) if self.training else outputs


def test_a_loss_that_is_a_sum_is_the_mean_of_the_steps_that_fp16_does_not_skip():
    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")

    def train_loss(model, num_samples):
        config = {"precision": "fp16", "batch_size": 1, "epochs": 1, "lr": 1e-9, "num_warmup_steps": 0}
        of_sums = workload(lambda _: model(6, 3), loss=loss)
        return trained(of_sums, num_samples=num_samples, **config)[1][0]["train_loss"]

    assert train_loss(OverflowsOnce, 8) == pytest.approx(train_loss(nn.Linear, 7), rel=1e-3)


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_a_rank_without_samples_adds_nothing_to_the_weight_of_a_batch(num_samples):
    num_ranks, weights = 3, torch.tensor([1.0, 5.0, 25.0])
    weighted = workload(lambda _: nn.Linear(6, 3), loss=nn.CrossEntropyLoss(weight=weights))
    config = resolve(weighted, {"batch_size": 8})
    noted = []

    class Rank(Strategy):
        def global_weight(self, weight):
            noted.append(float(weight))
            return weight + 1

    loss = Loss(as_ratio(weighted.loss), Kind.RATIO)
    for rank in range(num_ranks):
        strategy = Rank(Task(weighted, config, nn.Linear(6, 3), None, ALONE))
        stepper = Stepper(strategy, numerics_of(config, ALONE.device), loss, config, 1, workload=weighted)
        for share in shares(torch.arange(num_samples), 8, rank, num_ranks, drop_last=False):
            stepper.step(Batch(X[share.indices], Y[share.indices], *share[1:]))
    assert sum(noted) == weights[Y[:num_samples]].sum()


class Growing(nn.Module):
    """Model that keeps factors for the largest batch so far."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("factors", torch.ones(0, 1), persistent=False)

    def forward(self, x):
        if len(x) > len(self.factors):
            self.factors = torch.linspace(1, 2, len(x))[:, None]
        return self.layer(x) * self.factors[: len(x)]


@pytest.mark.parametrize("batch_size", [4, 30])
def test_a_model_trains_with_a_cache_that_grows_in_warm_up_and_evaluations(batch_size):
    growing = workload(lambda _: Growing(), X.repeat(5, 1), Y.repeat(5))  # more than the checks before training take
    assert len(trained(growing, batch_size=batch_size, epochs=2)[1]) == 2
