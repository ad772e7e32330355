"""Saved views of a study in MLflow and their links; their content is in tests/golden."""

from recording import unpacked

from raypar.track.view import (
    SPEEDUP_KEY,
    TRIALS_KEY,
    VIEW_KEY,
    VIEW_TAG,
    ViewContent,
    experiment_url,
    links,
    saved_views,
)

POINTS, TRIALS = VIEW_TAG + VIEW_KEY, VIEW_TAG + TRIALS_KEY


def test_links_open_the_views():
    runs = "#/experiments/3/runs?workflowType=machine_learning&viewStateShareKey="
    assert experiment_url("http://h:5000/", "3") == f"http://h:5000/{runs}raypar-v2"
    charts = f"{runs}raypar-v2&compareRunsMode=CHART"
    assert links("3") == f"[Table]({runs}raypar-v2) · [Charts]({charts}) · [All trials]({runs}raypar-trials)"


def test_saved_views_are_reproducible_and_omitted_if_too_long():
    lr = ViewContent({"lr": True}, "accuracy", ["accuracy"])
    assert saved_views(lr, at_ms=1) == saved_views(lr, at_ms=1)
    assert saved_views(ViewContent({}), at_ms=1).keys() == {POINTS, TRIALS}
    noise = [f"{i * 7919 % 1_000_003:x}{i * 104729 % 999_983:x}" for i in range(5000)]
    assert saved_views(ViewContent(dict.fromkeys(noise, True)), at_ms=1) == {}


def test_speedups_of_all_settings_are_in_one_chart():
    curves = ["scaling/speedup bs 96", "scaling/speedup bs 768"]
    state = unpacked(saved_views(ViewContent({}, curves=curves), at_ms=1)[VIEW_TAG + SPEEDUP_KEY])
    (chart,) = state["compareRunCharts"]
    assert (chart["selectedMetricKeys"], state["searchFilter"]) == (curves, "tags.`raypar.kind` = 'execution'")


def test_views_in_journals_of_other_versions_are_read():
    record = {"swept": {"lr": True}, "score": "accuracy", "series": ["accuracy"], "compares": True, "curves": ["x"]}
    expected = ViewContent({"lr": True}, "accuracy", ["accuracy"], compares=True, curves=["x"])
    assert ViewContent.from_record({**record, "of the future": 1}) == expected
