"""What several tests look at and takes long to make, and how properties are tried."""

from __future__ import annotations

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
