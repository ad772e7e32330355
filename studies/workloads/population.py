"""Population of perceptrons on MNIST, with different learning rates, as one trial.

M. Jaderberg et al., "Population Based Training of Neural Networks", 2017: the worst models continue from the weights of
the best, with a learning rate near theirs.
"""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchvision.datasets import MNIST

from raypar import Workload
from raypar.workloads.datasets import ensure_image_set

MIN_LR, MAX_LR = 0.001, 1.0
SHARE_COPIED = 0.25  # this share continues from the models of as many others
RESAMPLED = 0.25  # probability of a new learning rate instead of one near the copied one


def split(train: bool, first: int, last: int) -> tuple[Tensor, Tensor]:
    data = MNIST(ensure_image_set("MNIST"), train=train)
    return (data.data[first:last].flatten(1) / 255 - 0.1307) / 0.3081, data.targets[first:last]


class Member:
    """Model of the population. It has its own random numbers, so it trains alike on any number of workers."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(f"{torch.initial_seed()}/{number}")
        self.order = torch.Generator().manual_seed(self.random.getrandbits(32))
        with torch.random.fork_rng():
            torch.manual_seed(self.random.getrandbits(32))
            self.model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.draw_lr(), momentum=0.9)

    def draw_lr(self) -> float:
        return MIN_LR * (MAX_LR / MIN_LR) ** self.random.random()

    def train(self, inputs: Tensor, targets: Tensor, batch_size: int) -> None:
        for batch in torch.randperm(len(targets), generator=self.order).split(batch_size):
            self.optimizer.zero_grad()
            cross_entropy(self.model(inputs[batch]), targets[batch]).backward()
            self.optimizer.step()

    @torch.no_grad()
    def accuracy(self, inputs: Tensor, targets: Tensor) -> float:
        return (self.model(inputs).argmax(1) == targets).float().mean().item()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        # Copies, since an optimizer keeps the very tensors that it loads.
        return deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def continue_from(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])
        (group,) = self.optimizer.param_groups
        near = group["lr"] * self.random.choice((0.8, 1.2))
        group["lr"] = self.draw_lr() if self.random.random() < RESAMPLED else near


def of_all(own: dict[int, Any]) -> dict[int, Any]:
    """Return the union of every worker's dictionary."""
    parts = [own]
    if dist.is_initialized():
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, own)
    return {key: value for part in parts for key, value in part.items()}


def train_population(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    numbers = range(context.get_world_rank(), config["num_members"], context.get_world_size())
    members = {number: Member(number) for number in numbers}
    train = split(True, 0, config["num_images"])
    validation, test = split(True, 50_000, 60_000), split(False, 0, 10_000)
    num_copied = int(SHARE_COPIED * config["num_members"])
    for epoch in range(config["num_epochs"]):
        for member in members.values():
            member.train(*train, config["batch_size"])
        # The best by its validation accuracy is reported with its test accuracy.
        scores = of_all({n: (member.accuracy(*validation), member.accuracy(*test)) for n, member in members.items()})
        ranking = sorted(scores, key=lambda number: (-scores[number][0], number))
        ray.train.report({"accuracy": scores[ranking[0]][1], "epoch": epoch})
        if config["copy_best"] and (epoch + 1) % config["interval"] == 0:
            best, worst = ranking[:num_copied], ranking[-num_copied:]
            states = of_all({n: member.state() for n, member in members.items() if n in best})
            for source, number in zip(best, worst, strict=True):
                if number in members:
                    members[number].continue_from(states[source])


def prepare(_: object) -> None:
    ensure_image_set("MNIST")


population = Workload.from_train_loop(
    train_population,
    name="population",
    metric="accuracy",
    options={
        "copy_best": True,
        "num_members": 8,
        "num_epochs": 8,
        "interval": 2,  # epochs between copies
        "num_images": 10_000,
        "batch_size": 128,
    },
    prepare=prepare,
    dataset="MNIST, the first 10,000 images",
)
