"""Two processes, every strategy side by side: after each step they have the same weights."""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from raypar.parallel.place import Place
from raypar.parallel.strategy import build_strategy
from raypar.study.options import STRATEGIES
from raypar.train.affinity import allowed_cores

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(allowed_cores()) < 2, reason="two workers need two cores"),
]

NUM_STEPS = 5
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def _model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Sigmoid(), nn.Linear(8, 3)).double()
    model.append(nn.Linear(3, 3).double().requires_grad_(False))  # frozen: part of no gradient
    return model


def _rank(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    place = Place(rank, 2, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(NUM_STEPS, 2, 10, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (NUM_STEPS, 2, 10), generator=generator)
    for make in MAKERS.values():
        bare = {name: copy.deepcopy(_model()) for name in STRATEGIES}
        strategies = {name: build_strategy(name, model, place) for name, model in bare.items()}
        optimizers = {name: make([p for p in model.parameters() if p.requires_grad]) for name, model in bare.items()}
        start = copy.deepcopy(_model().state_dict())
        for step in range(NUM_STEPS):
            for name, strategy in strategies.items():
                optimizers[name].zero_grad()
                nn.functional.cross_entropy(strategy.module(inputs[step, rank]), targets[step, rank]).backward()
                strategy.combine()
                if strategy.steps_here:
                    optimizers[name].step()
                strategy.spread()
            first, second = (bare[name].state_dict() for name in STRATEGIES)
            for key, value in first.items():
                if "running" not in key:  # each rank of DDP has its own running means, and the master's count
                    torch.testing.assert_close(second[key], value, rtol=1e-12, atol=1e-12)
            assert not torch.equal(first["0.weight"], start["0.weight"])
        shared = [torch.empty_like(p) for p in bare["gather_broadcast"].state_dict().values()]
        for copied, value in zip(shared, bare["gather_broadcast"].state_dict().values(), strict=True):
            copied.copy_(value)
            dist.broadcast(copied, src=0)
            assert torch.equal(copied, value)  # to the bit, batch norm's means as well
    dist.destroy_process_group()


def test_gather_and_broadcast_gives_the_weights_of_all_reduce_after_every_step() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (port,), nprocs=2)  # raises what a rank raised
