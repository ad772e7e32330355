"""Workloads of gpu_check.py's trials; the ranks import this module. All data is embedded or generated."""

from __future__ import annotations

import resource
import time
from dataclasses import replace

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypar.measure import telemetry
from raypar.measure.energy import EnergyCounter
from raypar.study.workload import Config, Data, Option, Workload
from raypar.workloads import digits, transformer, wide_mlp

CHUNK_BYTES = 256 * 2**20


def build_cnn(_: Config) -> nn.Module:
    """Build two convolutions and a fully connected layer for the digits' rows of 8x8 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


cnn = replace(digits, name="digits_cnn", model=build_cnn, options={})

# Workloads and their options.
NETWORKS: dict[str, tuple[Workload, Config]] = {
    "mlp": (digits, {"hidden_size": 256}),
    "cnn": (cnn, {}),
    "transformer": (transformer, {"num_blocks": 1, "num_sequences": 1024}),
}


def data_after_all_reduce(config: Config) -> Data:
    """Return digits, after an all-reduce on the device, of a group of one where the trial has a single rank.

    Raises:
        RuntimeError: the sum is wrong; and whatever the collective raises.
    """
    is_alone = not dist.is_initialized()
    if is_alone:
        backend = "nccl" if config["device"] == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    ones = torch.ones(2**20, device=config["device"])
    dist.all_reduce(ones)
    if not bool((ones == dist.get_world_size()).all()):
        raise RuntimeError(f"an all-reduce of ones over {dist.get_world_size()} ranks gave {ones.unique().tolist()}")
    if is_alone:
        dist.destroy_process_group()
    return digits.data(config)


all_reducing = replace(digits, name="all_reducing", data=data_after_all_reduce)


def data_with_package(config: Config) -> Data:
    """Return `wide_mlp`'s data; this rank then reads the energy of a made-up CPU package instead of the machine's."""
    watts = config["package_w"]
    counters = [EnergyCounter(lambda: watts * time.perf_counter())] if watts else []
    telemetry.package_counters = lambda: counters
    return wide_mlp.data(config)


metered = replace(
    wide_mlp,
    name="metered",
    data=data_with_package,
    options={**wide_mlp.options, "package_w": Option(0.0, float, "watts of the made-up package; 0: there is none")},
)


class Hoarder(nn.Module):
    """Network that keeps allocating in its first training step, until it is refused.

    Args:
        is_limited: allow this process one more chunk than it has, so that the machine's memory is not used up.
    """

    def __init__(self, network: nn.Module, is_limited: bool) -> None:
        super().__init__()
        self._network, self._is_limited = network, is_limited

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self._is_limited:
                limit = psutil.Process().memory_info().vms + 3 * CHUNK_BYTES // 2
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            chunks = []
            while True:
                chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=x.device))
        return self._network(x)


hoarding = replace(
    digits,
    name="hoarding",
    model=lambda config: Hoarder(digits.model(config), config["is_limited"]),
    options={**digits.options, "is_limited": False},
)
