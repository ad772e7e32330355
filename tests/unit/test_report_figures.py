"""What all figures of a study have in common: words, colours, safe names, files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from figure_parts import made, walk
from html_studies import question, results
from hypothesis import given
from hypothesis import strategies as st

from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.errors import RayparError
from raypar.report.figures import figures_of, write_figures
from raypar.report.vega import Figure, OmittedFigure, for_page, static_svg, thinned

HOSTILE = "</script><script>alert(1)</script> a.b['c'] \" ' & {{7*7}}"


def test_a_study_with_everything_has_every_figure_with_a_title_and_words(
    full: tuple[StudyAnalysis, dict[str, Figure]],
) -> None:
    _, figures = full
    assert list(figures) == [
        "speedup",
        "efficiency",
        "times",
        "trial_parts",
        "breakdown",
        "pareto",
        "learning",
        "heat_map",
        "metric_heat_map",
        "drift",
    ]
    for figure in figures.values():
        assert figure.title and len(figure.alternative) > 80
        json.dumps(for_page(figure), allow_nan=False)


def test_every_figure_can_be_drawn_in_the_colour_of_the_page(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    for figure in full[1].values():
        svg = static_svg(figure)
        assert svg.startswith("<svg") and "currentColor" in svg and "NaN" not in svg, figure.key


def test_a_study_without_a_result_has_no_figure_and_says_why_of_each() -> None:
    left_out = figures_of(analyse(question(), []), [])
    assert len(left_out) == 11
    for figure in left_out:
        assert isinstance(figure, OmittedFigure) and figure.reason and not figure.reason.endswith(".")


def test_colour_never_stands_alone(full: tuple[StudyAnalysis, dict[str, Figure]]) -> None:
    for key in ("speedup", "efficiency", "pareto", "learning"):
        marks = [layer for layer in full[1][key].spec["layer"] if "tooltip" in layer["encoding"]]
        assert marks, key
        for layer in marks:
            scales = [layer["encoding"][channel]["scale"] for channel in ("color", "shape")]
            assert scales[0]["domain"] == scales[1]["domain"]
            assert all(len(set(scale["range"])) == len(scale["domain"]) for scale in scales)


@given(st.integers(0, 50), st.integers(1, 20))
def test_thinned_rows_are_few_enough_and_end_with_the_last(num_rows: int, most: int) -> None:
    rows = [{"i": i} for i in range(num_rows)]
    kept = thinned(rows, most)
    assert len(kept) <= most or num_rows <= most
    assert kept == sorted(kept, key=lambda row: int(row["i"])) and kept[-1:] == rows[-1:]
    assert num_rows > most or kept == rows


def test_names_of_a_study_are_values_and_titles_only() -> None:
    trials = [
        replace(r, spec=replace(r.spec, point={HOSTILE: HOSTILE, "num_workers": r.spec.point["num_workers"]}))
        for r in results(metric=HOSTILE)
        if r.spec.point["lr"] == 0.1
    ]
    _, figures = made(trials, question(metric=HOSTILE, keys=(HOSTILE, "num_workers")))
    assert {"speedup", "pareto", "learning", "times", "drift"} <= figures.keys()
    for figure in figures.values():
        for part in walk(figure.spec):
            assert HOSTILE not in json.dumps({k: part[k] for k in ("field", "test", "expr", "signal") if k in part})
            assert all(re.fullmatch(r"[\w$]+", key) for key in part)
        svg = static_svg(figure)
        assert "<script" not in svg and "alert(1)<" not in svg


@pytest.mark.parametrize(("kind", "magic"), [("svg", b"<svg"), ("png", b"\x89PNG")])
def test_each_figure_is_written_into_a_file_of_its_own(
    full: tuple[StudyAnalysis, dict[str, Figure]], tmp_path: Path, kind: Any, magic: bytes
) -> None:
    some = [full[1]["speedup"], OmittedFigure("Heat map", "none"), full[1]["drift"]]
    written = write_figures(some, tmp_path / "new" / "folder", [kind])
    assert [path.name for path in written] == [f"speedup.{kind}", f"drift.{kind}"]
    for path in written:
        content = path.read_bytes()
        assert content.startswith(magic) and b"currentColor" not in content


def test_a_folder_that_can_not_be_written_is_told(
    full: tuple[StudyAnalysis, dict[str, Figure]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RayparError, match="can't be written"):
        write_figures([full[1]["times"]], tmp_path / "file")
