"""All-reduces of several sizes are timed in a process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from raypar.predict.probe import all_reduce_times


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_every_size_is_timed_in_whole_numbers_of_floats() -> None:
    timings = list(all_reduce_times(torch.device("cpu"), (1, 4096, 70_001), num_repeats=3))
    assert [size for size, _ in timings] == [4, 4096, 70_000]
    assert all(seconds > 0 for _, seconds in timings)
