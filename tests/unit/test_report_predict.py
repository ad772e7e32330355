"""A prediction's bars, plot and file; its sentences stand in ``tests/golden/cases``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raypar.errors import RayparError
from raypar.predict.network import Network
from raypar.report.predict import BAR_WIDTH, check_plot_path, plot_of, print_prediction

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.cases import prediction, printed


def test_the_parts_of_a_step_fill_a_bar() -> None:
    for how in ({}, {"network": Network(1e-3, 1e8)}, {"overlap": False}):
        text = printed(print_prediction, prediction(variation=0.1, **how)).split("Where the time of a step goes:")[1]
        bars = [line[8:].removesuffix("  *") for line in text.splitlines() if line[:8].strip().isdigit()]
        assert {len(bar) for bar in bars} == {BAR_WIDTH} and len(bars) == 5


def test_the_plot_has_the_predicted_and_the_ideal_curve_and_what_was_measured() -> None:
    above, below = plot_of(prediction(asked=64)).spec["vconcat"]
    rows = above["data"]["values"]
    assert {row["series"] for row in rows} == {"predicted", "extrapolated", "ideal"}
    assert [row["workers"] for row in rows if row["series"] == "predicted"] == [1]  # of one worker alone
    extrapolated = [row["workers"] for row in rows if row["series"] == "extrapolated"]
    assert extrapolated[0] == 1 and extrapolated[-1] == 64 and len(extrapolated) > 40
    assert [row["workers"] for row in above["layer"][1]["data"]["values"]] == [1]
    assert all(row["efficiency"] <= 1 for row in below["data"]["values"])


def test_a_plot_needs_a_known_format_and_a_folder(tmp_path: Path) -> None:
    check_plot_path(tmp_path / "curve.svg")
    for path, problem in ((tmp_path / "curve", "format"), (tmp_path / "no" / "curve.png", "there is no folder")):
        with pytest.raises(RayparError, match=problem) as caught:
            check_plot_path(path)
        assert caught.value.hint
