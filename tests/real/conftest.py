"""One private Ray and one fork server for all tests that need them."""

import atexit
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from raypar.run.cluster import this_machine
from raypar.run.private_ray import private_ray
from raypar.run.ranks import ForkServer
from raypar.train.affinity import allowed_cores

HERE = Path(__file__).parent
NUM_CORES = len(allowed_cores())
# Tests don't wait for other studies on this machine.
_locks = tempfile.TemporaryDirectory()
atexit.register(_locks.cleanup)
os.environ["RAYPAR_LOCK_DIR"] = f"{_locks.name}/locks"
sys.path += [str(HERE.parent), str(HERE.parent / "unit")]  # for faultlab and netlab, and for results made by hand
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:  # under nohup; processes that tests start would inherit it
        signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason=f"gangs of two workers need two cores; this machine allows {NUM_CORES}")
    for item in items:
        if NUM_CORES < 2 and HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def fork_address():
    """Start a private Ray and a fork server; yield the server's address."""
    from harness import PRELOAD

    with contextlib.closing(ForkServer(PRELOAD, (str(HERE),))) as server, private_ray(this_machine()):
        yield server.address


@pytest.fixture
def cli(tmp_path):
    """The command line in an empty folder."""
    from harness import Cli

    return Cli(tmp_path)
