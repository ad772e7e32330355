"""Training on one rank in this process, and a workload whose data and model draw from every generator."""

import random

import numpy as np
import torch
from torch import nn

from raypar import Data, Split, Workload
from raypar.parallel.strategy import DistContext
from raypar.study.options import resolve
from raypar.train.loop import train

ALONE = DistContext(0, 1, torch.device("cpu"))


class Reports(list):
    """Channel that keeps the reports."""

    def report(self, metrics):
        self.append(metrics)
        return True


def trained(workload, seed=0, **config):
    """Return the outcome of a training and its reports."""
    reports = Reports()
    return train(workload, resolve(workload, config), seed, ALONE, reports, start_s=0.0), reports


def seed_data():
    """Seed the generators that `train` leaves to the process."""
    random.seed(7)
    np.random.seed(7)


def _noisy(inputs):
    noise = torch.from_numpy(np.random.normal(0, 0.1, inputs.shape)).to(inputs.dtype)
    return (inputs + noise) * (1 + 0.1 * random.random()) + 0.1 * torch.rand(())


class Centered(nn.Module):
    """Subtract a running mean.

    The state has a buffer that is not persistent, an expanded buffer, and a number of updates that is not a tensor.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("ones", torch.ones(1).expand(3), persistent=False)
        self.extra = {"num_updates": 0}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def forward(self, x):
        if self.training:
            self.extra["num_updates"] += 1
            self.mean.lerp_(x.detach().mean(0).to(self.mean), 1 / self.extra["num_updates"])
        return (x - self.mean) * self.ones


def _model(config):
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3), Centered()
    return nn.Sequential(*layers)


def _data(config):
    inputs = torch.randn(90, 6, generator=torch.Generator().manual_seed(1))
    targets = inputs[:, :3].argmax(1)
    # The last batch of an epoch is a short one.
    return Data(train=Split(inputs[:60], targets[:60]), val=Split(inputs[60:], targets[60:]), transform=_noisy)


NOISY = Workload(name="w", model=_model, data=_data, defaults={"batch_size": 16, "epochs": 2})
