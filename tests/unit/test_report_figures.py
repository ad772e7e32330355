"""Figures: safe names, drawings and files. Their texts and data are in ``tests/golden``."""

import json
import re
from dataclasses import replace

import pytest
from html_studies import HOSTILE, question, results
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.errors import RayparError
from raypar.reporting.figures import figures_of, write_figures
from raypar.reporting.vega import Figure, OmittedFigure, static_svg, thinned, within
from raypar.study.conditions import RankConditions
from raypar.study.trial import point_label


def drawn(trials, asked):
    return {f.key: f for f in figures_of(analyse(asked, trials), trials) if isinstance(f, Figure)}


@pytest.fixture(scope="module")
def full():
    return drawn(results(), question())


def walk(node):
    """Yield every object of a spec, except the rows of its data."""
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
        assert figure.title and figure.caption.endswith(".") and len(figure.caption) < 200


def test_values_in_per_cent_have_axes_in_per_cent():
    def in_per_cent(result):
        reports = tuple({**report, "acc": 100 * report["acc"]} for report in result.reports)
        return replace(result, reports=reports)

    shares = results(metric="acc")
    for trials, is_share in (shares, True), ([in_per_cent(r) for r in shares], False):
        figures = drawn(trials, question(metric="acc"))
        for key in ("pareto", "learning"):
            nodes, svg = list(walk(figures[key].spec)), static_svg(figures[key])
            assert any(node.get("format") == ".3~%" for node in nodes) == is_share
            assert any("labelExpr" in node for node in nodes) != is_share
            assert re.search(r">[\d.]+%<", svg) and not re.search(r">\d{4,}%<", svg)


def test_each_trial_is_a_dot_and_each_interval_is_drawn(full):
    finished = [r for r in results() if r.is_measured]
    for key, num_trials in {"speedup": 12, "efficiency": 12, "times": 18, "pareto": 18}.items():
        marks = [(layer, layer.get("data", full[key].spec["data"])["values"]) for layer in full[key].spec["layer"]]
        (trials,) = (rows for _, rows in marks if rows and rows[0].keys() >= {"trial", "shown"})
        assert len({row["trial"] for row in trials}) == num_trials, key
        assert {row["trial"] for row in trials} <= {r.spec.label for r in finished}
        assert any("x2" in layer["encoding"] or "y2" in layer["encoding"] for layer, _ in marks)


def test_the_comparisons_of_two_worker_counts_are_drawn_one_below_the_other():
    figures = drawn([r for r in results() if r.spec.point["num_workers"] <= 2], question())
    assert "efficiency" not in figures
    spec = figures["speedup"].spec
    assert [row["point"] for row in spec["data"]["values"]] == ["lr=0.1", "lr=0.2"]
    assert [row["outcome"] for row in spec["data"]["values"]] == ["faster", "faster"]
    assert figures["speedup"].caption == "2 workers are faster than 1 at every lr."


def test_a_search_first_shows_the_most_important_hyperparameter_and_its_learning_curves():
    asked = Question("s", {}, ("lr", "num_workers"), num_repeats=1, is_search=True)
    trials = [r for r in results() if r.spec.repeat == 0]
    first, *others = (f for f in figures_of(analyse(asked, trials), trials) if isinstance(f, Figure))
    assert [first.key, *(f.key for f in others[:2])] == ["main_effect", "learning", "pareto"]
    assert first.title == "Accuracy over num_workers"
    assert first.caption == "The best 3 of 6 trials have num_workers from 1 to 4."
    assert sorted({row["x"] for row in first.spec["data"]["values"]}) == [1, 2, 4]


def reporting(point, repeat, *values):
    reports = tuple({"accuracy": value, "train_time_s": 2.0 + repeat} for value in values)
    return replace(make_result(point, repeat), reports=reports)


def test_a_point_has_one_learning_curve_the_median_of_its_trials_in_a_band_that_spans_them():
    trials = [reporting({"lr": lr}, r, 0.5 + lr, 0.6 + r / 100) for lr in (0.1, 0.2) for r in range(5)]
    trials.append(reporting({"lr": 0.1}, 5, 0.6))  # a trial with one report has no curve
    figure = drawn(trials, Question("s", {}, ("lr",), num_repeats=6))["learning"]
    rows = figure.spec["data"]["values"]
    assert [(row["series"], row["time"], row["value"]) for row in rows] == [
        *(("lr=0.1", 4.0, 0.6), ("lr=0.1", 8.0, 0.62)),
        *(("lr=0.2", 4.0, 0.7), ("lr=0.2", 8.0, 0.62)),
    ]
    assert (rows[1]["value_low"], rows[1]["value_high"], rows[1]["trials"]) == (0.6, 0.64, 5)
    assert figure.spec["layer"][0]["mark"] == "area"
    assert "its band spans them" in figure.caption


def test_learning_curves_end_where_most_trials_of_the_point_end_and_single_trials_have_no_band():
    longer = [reporting({"lr": 0.1}, r, *(0.5, 0.6, 0.7)[: 2 + (r == 0)]) for r in range(3)]
    figure = drawn(longer, Question("s", {}, ("lr",), num_repeats=3))["learning"]
    assert [row["value"] for row in figure.spec["data"]["values"]] == [0.5, 0.6]
    single = [reporting({"lr": lr}, 0, 0.5, 0.6 + lr) for lr in (0.1, 0.2)]
    figure = drawn(single, Question("s", {}, ("lr",), num_repeats=1, is_search=True))["learning"]
    assert "area" not in [layer["mark"] for layer in figure.spec["layer"]]
    assert figure.caption == "The trials end at 70.0 % to 80.0 %."


def parts_of(*trials):
    figure = drawn(trials, Question("s", {}, ("lr",), num_repeats=2))["trial_parts"]
    return {row["part"]: pytest.approx(row["value"]) for row in figure.spec["data"]["values"]}


def test_the_time_of_a_trial_is_divided_into_named_parts():
    timed = {"wall_s": 10.0, "startup_s": 1.0, "data_time_s": 0.25, "warmup_s": 0.5, "eval_time_s": 0.5}
    trial = replace(make_result({"lr": 0.1}, 0, 4.0), **timed)
    assert parts_of(trial)["rest"] == 4.0
    ranks = (RankConditions(report_s=0.5, saving_s=0.25, profile_s=3.0), RankConditions(report_s=0.25))
    parts = parts_of(replace(trial, conditions=replace(trial.conditions, ranks=ranks)))
    assert (parts["reports"], parts["saving"], parts["profiling"], parts["rest"]) == (0.5, 0.25, 3.0, 0.25)
    of_profile = next(r.profile for r in results() if r.profile)
    profiled = replace(trial, profile=of_profile, wall_s=100.0)  # of an earlier version: unknown how long it took
    assert parts_of(profiled, replace(make_result({"lr": 0.1}, 1, 4.0), **timed))["rest"] == 4.0
    assert parts_of(profiled)["rest"] == 94.0


def test_a_study_of_many_points_shows_its_heat_maps_before_its_bars():
    def keys(num_rates):
        points = [{"lr": i / 10, "num_workers": n} for i in range(num_rates) for n in (1, 2)]
        trials = [make_result(p, r, 4.0 / p["num_workers"] + r / 100) for p in points for r in range(2)]
        return list(drawn(trials, question()))

    assert keys(7)[:4] == ["speedup", "heat_map", "metric_heat_map", "times"]
    assert keys(6)[:3] == ["speedup", "times", "pareto"]


def test_of_too_many_points_the_fastest_are_drawn():
    trials = [make_result({"lr": i / 10}, r, 10.0 - i / 10 + r / 100) for i in range(1, 26) for r in range(2)]
    figure = drawn(trials, Question("s", {}, ("lr",), num_repeats=2))["times"]
    rows = figure.spec["data"]["values"]
    assert {row["point"] for row in rows} == {f"{i / 10:g}" for i in range(6, 26)}
    assert figure.caption.endswith(" 20 of 25 points are drawn.")


def test_a_point_that_the_recommendation_excludes_is_not_on_the_front():
    trials = [r if r.spec.point["lr"] == 0.1 else with_accuracy(r, 0.5) for r in results()]
    analysis = analyse(question(), trials)
    excluded = {point_label(c.point) for c in analysis.verdict.recommendation.candidates if c.exclusion}
    assert {"lr=0.2 num_workers=1", "lr=0.2 num_workers=4"} <= excluded
    rows = drawn(trials, question())["pareto"].spec["data"]["values"]
    assert {row["point"] for row in rows if row["series"] == "excluded"} == excluded - {"lr=0.2 num_workers=8"}
    assert [row["point"] for row in rows if row["series"] == "recommended"] == ["lr=0.1 num_workers=4"]


def with_accuracy(result, accuracy):
    return replace(result, reports=tuple({**report, "accuracy": accuracy} for report in result.reports))


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 1), st.floats(1, 1e6)), min_size=1, max_size=6),
    st.booleans(),
)
def test_an_interval_is_drawn_completely_or_marked_as_cut_at_the_end_of_the_axis(intervals, log):
    rows = [{"value": v, "value_low": v * low, "value_high": v * high} for v, low, high in intervals]
    kept, scale = within(rows, log=log)
    for before, after in zip(rows, kept, strict=True):
        for side in ("value_low", "value_high"):
            assert after.get(f"{side}_is_cut", False) == (after[side] != before[side])
        assert (
            before["value_low"] <= after["value_low"] <= after["value"] <= after["value_high"] <= before["value_high"]
        )
    is_cut = kept != rows and any(row[f"{side}_is_cut"] for row in kept for side in ("value_low", "value_high"))
    assert bool(scale) == is_cut
    if scale:
        low, high = scale["domain"]
        assert all(low <= row["value_low"] and row["value_high"] <= high for row in kept)
        assert all(row["value_high"] == high for row in kept if row["value_high_is_cut"])


def test_names_of_a_study_appear_only_in_values_and_titles():
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
