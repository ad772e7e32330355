"""What several tests look at and takes long to make, and how properties are tried."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from figure_parts import made
from html_studies import results
from hypothesis import HealthCheck, settings

from raypar.analysis.speedup import StudyAnalysis
from raypar.report.figures_vega import Figure

# A busy machine is no failure: over whatever profile is in force (that of CI draws the same examples every time).
settings.register_profile("busy machine", settings(), deadline=None, suppress_health_check=(HealthCheck.too_slow,))
settings.load_profile("busy machine")


@pytest.fixture(scope="session")
def full() -> tuple[StudyAnalysis, dict[str, Figure]]:
    return made(results())


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Making the tables takes seconds: once."""
    from raypar.track.client import connect

    path = tmp_path_factory.mktemp("db") / "mlflow.db"
    connect(f"sqlite:///{path}")
    return path


@pytest.fixture
def project(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def uri(project: Path) -> str:
    from raypar.track.store import default_tracking_uri

    return default_tracking_uri(project)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small layers only wait for a second one, and on a busy machine very long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def modules_as_they_were() -> Iterator[None]:
    """What loading study files has brought into this process is gone after the test."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("raypar_study_", "helper_of_", "package_of_")):
            del sys.modules[name]
