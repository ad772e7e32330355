"""Figures: safe names, drawings and files. Their words and data stand in ``tests/golden``."""

import json
import re
from dataclasses import replace

import pytest
from html_studies import HOSTILE, question, results
from hypothesis import given
from hypothesis import strategies as st

from raypar.analysis.analyse import analyse
from raypar.errors import RayparError
from raypar.report.figures import figures_of, write_figures
from raypar.report.vega import Figure, OmittedFigure, static_svg, thinned


def drawn(trials, asked):
    return {f.key: f for f in figures_of(analyse(asked, trials), trials) if isinstance(f, Figure)}


@pytest.fixture(scope="module")
def full():
    return drawn(results(), question())


def walk(node):
    """Every object of a spec, the rows of its data left out."""
    if isinstance(node, dict):
        yield node
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key != "values":
            yield from walk(value)


def test_every_figure_can_be_drawn_in_the_colour_of_the_page(full):
    assert len(full) == 10
    for figure in full.values():
        svg = static_svg(figure)
        assert svg.startswith("<svg") and "currentColor" in svg and "NaN" not in svg, figure.key
        assert figure.title and len(figure.alternative) > 80


def test_names_of_a_study_are_values_and_titles_only():
    trials = [
        replace(r, spec=replace(r.spec, point={HOSTILE: HOSTILE, "num_workers": r.spec.point["num_workers"]}))
        for r in results(metric=HOSTILE)
        if r.spec.point["lr"] == 0.1
    ]
    figures = drawn(trials, question(metric=HOSTILE, keys=(HOSTILE, "num_workers")))
    assert {"speedup", "pareto", "learning", "times", "drift"} <= figures.keys()
    for figure in figures.values():
        for part in walk(figure.spec):
            assert HOSTILE not in json.dumps({k: part[k] for k in ("field", "test", "expr", "signal") if k in part})
            assert all(re.fullmatch(r"[\w$]+", key) for key in part)
        svg = static_svg(figure)
        assert "<script" not in svg and "alert(1)<" not in svg


@given(st.integers(0, 50), st.integers(1, 20))
def test_thinned_rows_are_few_enough_and_end_with_the_last(num_rows, most):
    rows = [{"i": i} for i in range(num_rows)]
    kept = thinned(rows, most)
    assert len(kept) <= most or num_rows <= most
    assert kept == sorted(kept, key=lambda row: int(row["i"])) and kept[-1:] == rows[-1:]
    assert num_rows > most or kept == rows


@pytest.mark.parametrize(("kind", "magic"), [("svg", b"<svg"), ("png", b"\x89PNG")])
def test_each_figure_is_written_into_a_file(full, tmp_path, kind, magic):
    some = [full["speedup"], OmittedFigure("Heat map", "none"), full["drift"]]
    written = write_figures(some, tmp_path / "new" / "folder", [kind])
    assert [path.name for path in written] == [f"speedup.{kind}", f"drift.{kind}"]
    for path in written:
        content = path.read_bytes()
        assert content.startswith(magic) and b"currentColor" not in content
    with pytest.raises(RayparError, match="can't be written"):
        write_figures(some, written[0])
