"""What several tests look at and takes long to make, and how properties are tried."""

import atexit
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from recording import new_store

# For plainlab, which benchmarks and tests/real use too, and for the workloads beside the studies.
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "studies")]

# Small layers only wait for a second thread, and very long beside other tests; before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

# As under nohup or in a shell's background; whatever tests start would inherit it.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Tests wait for no study of this machine, nor for each other.
_locks = tempfile.TemporaryDirectory()
atexit.register(_locks.cleanup)
os.environ["RAYPAR_LOCK_DIR"] = f"{_locks.name}/locks"

# A busy machine is no failure. `make test` draws few examples, the same every time; `make test-all` draws many, others
# each time (`--hypothesis-profile=thorough`).
PATIENT = settings(deadline=None, suppress_health_check=(HealthCheck.too_slow,))
settings.register_profile("quick", PATIENT, max_examples=25, derandomize=True, database=None)
settings.register_profile("thorough", PATIENT, max_examples=200, derandomize=False, print_blob=True)
settings.load_profile("quick")


@pytest.fixture
def no_ray_of_others(monkeypatch):
    """No other user of this machine runs a Ray, such as that of a test of clusters."""
    monkeypatch.setattr("raypar.run.cluster.is_of_others", lambda _: False)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    new_store(tmp_path)
    return tmp_path


@pytest.fixture
def uri(project):
    from raypar.track.store import default_tracking_uri

    return default_tracking_uri(project)


@pytest.fixture(scope="module")
def imported():
    """What a first import starts (a look for libraries, a probe for IPv6) is not a command's doing."""
    import ray  # noqa: F401
    import torch  # noqa: F401

    from raypar.track.client import import_mlflow

    import_mlflow()


@pytest.fixture
def modules_as_they_were():
    """What loading study files has brought into this process is gone after the test."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("raypar_study_", "helper_of_", "package_of_")):
            del sys.modules[name]
