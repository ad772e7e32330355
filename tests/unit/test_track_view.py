"""The saved view of a study in MLflow, and the links to it."""

from __future__ import annotations

from typing import Any

from store_parts import unpacked

from raypar.track.view import ViewContent, experiment_url, saved_view


def test_links_open_the_page_for_runs():
    assert experiment_url("http://h:5000/", "3") == "http://h:5000/#/experiments/3/runs?workflowType=machine_learning"
    charts = experiment_url("http://h:5000", "3", charts=True)
    assert charts.endswith("runs?workflowType=machine_learning&viewStateShareKey=raypar-v2&compareRunsMode=CHART")


def test_a_saved_view_is_the_same_each_time_and_absent_where_it_is_too_long():
    lr = ViewContent({"lr": True}, "accuracy", ["accuracy"])
    assert saved_view(lr, at_ms=1) == saved_view(lr, at_ms=1)
    assert saved_view(ViewContent({}), at_ms=1)
    noise = [f"{i * 7919 % 1_000_003:x}{i * 104729 % 999_983:x}" for i in range(5000)]
    assert saved_view(ViewContent(dict.fromkeys(noise, True)), at_ms=1) is None


def titles(state: dict[str, Any]) -> dict[str, list[str]]:
    """Title of each section to its charts': axes of scatters, curves of lines."""

    def title(chart: dict[str, Any]) -> str:
        if chart["type"] == "SCATTER":
            return f"{chart['yaxis']['key']} by {chart['xaxis']['key']}"
        return ", ".join(chart.get("selectedMetricKeys", [chart["type"]]))

    return {
        section["name"]: [title(c) for c in state["compareRunCharts"] if c["metricSectionId"] == section["uuid"]]
        for section in state["compareRunSections"]
    }


def test_a_saved_view_shows_what_there_is_and_draws_the_telling_curves_first():
    dull = ["train/epoch", "train/runtime_s", "train/samples_per_second", "eval/runtime_s", "eval/steps_per_second"]
    search = ViewContent({"lr": True}, "macro_f1", [*dull, "train/loss", "eval/loss", "macro_f1"])
    state: dict[str, Any] = unpacked(saved_view(search, at_ms=1))
    columns = set(state["selectedColumns"])
    assert {"params.`lr`", "metrics.`eval/loss`", "metrics.`macro_f1`", "metrics.`train_time_s`"} <= columns
    assert not {"metrics.`accuracy`", "metrics.`val_loss`", "metrics.`speedup`"} & columns
    assert titles(state) == {
        "Training time": ["train_time_s by lr"],
        "macro_f1: what it costs, what it depends on": ["macro_f1 by train_time_s", "macro_f1 by lr"],
        "While training": ["train/loss", "eval/loss", "macro_f1", *dull[:3]],
    }


def test_a_timed_study_s_view_begins_with_its_speedups_beside_the_ideal_one():
    of = [f"scaling/{name} batch_size 64{side}" for name in ("speedup", "efficiency") for side in ("", " low", " high")]
    curves = [*of, "scaling/karp_flatt", "scaling/ideal"]
    swept = {"strategy": False, "num_workers": True}
    timed = ViewContent(swept, "accuracy", ["accuracy"], compares=True, curves=curves)
    state: dict[str, Any] = unpacked(saved_view(timed, at_ms=1))
    assert next(iter(titles(state).items())) == (
        "Speedup",
        [f"{of[0]}, scaling/ideal", of[3], "speedup by strategy", "speedup by num_workers"],
    )
    axes = {c["xaxis"]["key"]: c["xaxis"]["type"] for c in state["compareRunCharts"] if c["type"] == "SCATTER"}
    assert axes == {"strategy": "PARAM", "num_workers": "METRIC", "train_time_s": "METRIC"}
