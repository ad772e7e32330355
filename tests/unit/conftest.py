"""What several tests look at and takes long to make."""

from __future__ import annotations

import pytest
from figure_parts import made
from html_studies import results

from raypar.analysis.speedup import StudyAnalysis
from raypar.report.figures_vega import Figure


@pytest.fixture(scope="session")
def full() -> tuple[StudyAnalysis, dict[str, Figure]]:
    return made(results())
