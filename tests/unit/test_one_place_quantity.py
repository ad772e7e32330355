"""A quantity that an installed package registers in one place is in every view of trials and points."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from results import make_result
from rich.console import Console

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.analysis.recommend import Constraints, front_of, recommend
from raypar.errors import RayparError
from raypar.execution.results import point_runs
from raypar.measure.telemetry import Telemetry
from raypar.reporting.console import print_report
from raypar.reporting.documents import schema, to_json
from raypar.reporting.export import frame_of, markdown_of, rows_of
from raypar.reporting.html import Origin, html_report
from raypar.reporting.listings import TrialsView, print_trials
from raypar.reporting.recommend import RecommendView, print_recommendation
from raypar.reporting.view import StudyView
from raypar.study.conditions import Conditions
from raypar.study.quantity import GROUP, quantities
from raypar.study.trial import result_from_json
from raypar.track.runs import child_run, parse_result

MODULE = """
from raypar.study.quantity import Quantity, UpperLimit, View


class Sent:
    total = 0.0

    def start(self):
        self.total += 1.0

    def stop(self):
        self.total += 2.0

    def value(self):
        return self.total


SENT = Quantity(
    key="sent_bytes",
    about="that the ranks sent to each other.",
    head="sent",
    show="{:.0f} octets".format,
    views=~View(0),
    monitor=Sent,
    of_ranks=sum,
    accrues=True,
    limit=UpperLimit(
        flag="--max-sent", metavar="SIZE", help="Send no more.", scales={"": 1.0}, phrase="sending {} at most"
    ),
    legend="by all ranks",
)
NORM = Quantity(key="norm", head="norm", of_trial=lambda result: result.final.get("norm"))
"""
POINTS = [{"num_workers": n} for n in (1, 2)]
QUESTION = Question("s", {"num_workers": 1}, ("num_workers",), points=tuple(POINTS), num_repeats=3, metric="accuracy")


def install(folder, monkeypatch, entries):
    info = folder / "raypar_sent-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raypar-sent\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
    (folder / "raypar_sent.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    quantities.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with two quantities: its folder."""
    install(tmp_path, monkeypatch, "sent = raypar_sent:SENT\nnorm = raypar_sent:NORM")
    yield tmp_path
    quantities.cache_clear()
    sys.modules.pop("raypar_sent", None)


def trial(num_workers, repeat):
    """A trial each of whose ranks sent 100 bytes and a few, read back from its JSON."""
    result = make_result({"num_workers": num_workers}, repeat, 4.0 / num_workers * (1 + repeat / 100))
    ranks = [{"sent_bytes": 100.0 + repeat}] * num_workers
    result = replace(result, conditions=Conditions.from_stored({"quantities": ranks}))
    result = replace(result, reports=({**result.final, "norm": 7.0},))
    return result_from_json(result.to_json())


def printed(show, *args, width=200):
    console = Console(file=io.StringIO(), width=width)
    show(*(console if arg is Console else arg for arg in args))
    return console.file.getvalue()


@pytest.fixture
def results(package):
    return [trial(n, repeat) for n in (1, 2) for repeat in range(3)]


def test_a_rank_measures_it_over_its_timed_regions(package):
    telemetry = Telemetry((), torch.device("cpu"))
    for _ in range(2):
        telemetry.start()
        telemetry.stop()
    assert telemetry.summary()["quantities"] == {"sent_bytes": 6.0}


def test_a_trial_has_it_from_the_store_in_its_table_json_export_and_metrics(results):
    question = replace(QUESTION, unit="share")
    assert [q.of(results[-1]) for q in quantities() if q.key in ("sent_bytes", "norm")] == [7.0, 204.0]
    view = TrialsView.of("s", results, question.judged_by)
    assert "204 octets" in printed(print_trials, Console, view)
    document = json.loads(to_json(view))
    assert (document["trials"][-1]["sent_bytes"], document["trials"][-1]["norm"]) == (204.0, 7.0)
    assert (rows_of(question, results)[-1]["sent_bytes"], rows_of(question, results)[-1]["norm"]) == (204.0, 7.0)
    assert list(frame_of(question, results)["sent_bytes"])[:3] == [100.0, 101.0, 102.0]
    run = child_run(results[-1], result_json=results[-1].to_json(), recorded_at=0.0)
    assert {(p.key, p.value) for p in run.points} > {("sent_bytes", 204.0), ("norm", 7.0), ("epoch/norm", 7.0)}


def test_a_point_has_it_in_the_report_page_json_markdown_and_metrics(results):
    view = StudyView(analyse(QUESTION, results))
    report = printed(print_report, view, Console)
    assert "202 octets" in report and "sent" in report
    assert "sent" not in printed(print_report, view, Console, width=60).partition("Median")[0]
    html = html_report(view, results, Origin({}))
    assert "sent: by all ranks" in html and "202 octets" in html.replace("\N{NO-BREAK SPACE}", " ")
    document = to_json(view)
    two = json.loads(document)["points"][1]
    assert two["sent_bytes"]["value"] == 202.0 and two["norm"]["value"] == 7.0
    Draft202012Validator(schema()).validate(json.loads(document))
    assert schema()["$defs"]["PointAnalysis"]["properties"]["sent_bytes"]["description"].startswith("that the ranks")
    assert "202 octets" in markdown_of(view, {})
    assert point_runs(view.analysis)[1].metrics["median_sent_bytes"] == 202.0


def test_recommend_shows_and_limits_it_and_it_is_on_the_front(results):
    advice = recommend(QUESTION, results, Constraints(limits={"sent_bytes": 150.0}))
    assert [c.exclusion for c in advice.candidates] == ["", "sent above 150 octets"]
    text = printed(print_recommendation, Console, RecommendView(advice))
    assert "sending 150 octets at most" in text and "202 octets" in text and "accuracy and sent" in text
    document = json.loads(to_json(RecommendView(advice)))
    assert document["constraints"]["limits"]["sent_bytes"] == 150.0
    assert document["candidates"][0]["sent_bytes"]["value"] == 101.0
    analysis = analyse(QUESTION, results)
    assert front_of(analysis.points, "max", analysis.family) == {0, 1}  # the slower one sends less
    unknown = [replace(result, conditions=Conditions()) for result in results]
    with pytest.raises(RayparError, match="--max-sent 150 octets: no result has its sent recorded"):
        recommend(QUESTION, unknown, Constraints(limits={"sent_bytes": 150.0}))


def raypar(package, *words):
    path = os.pathsep.join([str(package), str(Path(__file__).parents[2])])
    command = [sys.executable, "-c", "from raypar.cli.app import main; main()", *words]
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_the_limit_is_an_option_of_the_command_unless_its_package_is_at_fault(package):
    shown = raypar(package, "recommend", "--help")
    assert "Send no more." in shown
    assert shown.index("--max-memory") < shown.index("--max-sent") < shown.index("--min-efficiency")
    (package / "raypar_sent.py").write_text("raise ImportError")
    shown = raypar(package, "recommend", "--help")
    assert "--max-memory" in shown and "--max-sent" not in shown


def test_results_of_installations_without_the_package_are_read_and_kept(results):
    quantities.cache_clear()
    damaged = json.loads(results[0].to_json())
    damaged["environment"]["quantities"] = [{"sent_bytes": "many", "norm": 1.0}]
    assert parse_result(damaged).conditions.of_ranks("quantities") == [{"norm": 1.0}]
    assert make_result({}).to_json().count("quantities") == 0


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ("a = raypar_sent:MISSING", "AttributeError"),
        ("a = raypar_sent:Sent", "is a type, not a Quantity"),
        ("a = raypar_sent:SENT\nb = raypar_sent:TWIN", "several quantities have the key sent_bytes"),
    ],
)
def test_a_wrong_entry_point_is_named(tmp_path, monkeypatch, entries, problem):
    install(tmp_path, monkeypatch, entries)
    with (tmp_path / "raypar_sent.py").open("a") as module:
        module.write("TWIN = Quantity(key='sent_bytes')\n")
    try:
        with pytest.raises(RayparError, match=problem):
            quantities()
    finally:
        quantities.cache_clear()
        sys.modules.pop("raypar_sent", None)
