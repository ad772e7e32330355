"""One private Ray and one fork server for all tests that need them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from telling import HERE, PRELOAD

from raypar.run.cluster import this_machine
from raypar.run.private_ray import private_ray
from raypar.run.ranks import ForkServer
from raypar.train.affinity import allowed_cores

NUM_CORES = len(allowed_cores())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`two_cores` and `ray` tests run gangs of two workers, each on a core of its own."""
    if NUM_CORES >= 2:
        return
    skip = pytest.mark.skip(reason=f"two workers need two cores; this machine allows {NUM_CORES}")
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def fork_address() -> Iterator[str]:
    """Of a fork server in a private Ray: what a `TuneRunner` wants."""
    with contextlib.closing(ForkServer(PRELOAD, (str(HERE),))) as server, private_ray(this_machine(), ()):
        yield server.address
