"""The HTML report: complete, safe, small, and with nothing in it that is loaded over the network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from html_pages import page_of
from html_studies import question, results
from results import make_result

from raypar import units
from raypar.analysis.analyse import analyse
from raypar.analysis.candidates import Constraints
from raypar.analysis.question import Question
from raypar.analysis.recommend import recommend
from raypar.analysis.stats import Estimate, Method
from raypar.errors import RayparError
from raypar.report import html as html_tables
from raypar.report.figures import figures_of
from raypar.report.html import Origin, brief, html_report
from raypar.report.recommend import answer_lines
from raypar.report.text import write_text
from raypar.report.vega import Figure, for_page, static_svg
from raypar.study.trial import TrialResult

HOSTILE = '</script><script>alert(1)</script><img src=x onerror=alert(1)>"\' onload="alert(1) --> <!-- {{7*7}}'
SECTIONS = ("summary", "details", "figures", "trials", "threats", "provenance")
TAGS = {
    "git.commit": "0123abcd",
    "git.dirty": "yes",
    "version.torch": "2.13.0",
    "host": "node-7",
    "cpu": "EPYC 7B13",
    "command": "raypar study s.py --set lr=0.1",
    "raypar.question": "{}",
    "mlflow.user": "somebody",
}
SOURCE = "from raypar import Study\n\nstudy = Study(name='a < b')\n"


def report(trials: list[TrialResult], asked: Question | None = None, origin: Origin | None = None) -> str:
    return html_report(analyse(asked or question(), trials), trials, origin or Origin(TAGS, "How far?", SOURCE))


@pytest.fixture(scope="module")
def plain() -> str:
    return report(results())


@pytest.fixture(scope="module")
def hostile() -> str:
    trials = [
        replace(
            r,
            spec=replace(r.spec, point={**r.spec.point, HOSTILE: HOSTILE}, config={**r.spec.config, HOSTILE: HOSTILE}),
            environment={"node": [HOSTILE]},
        )
        for r in results(name=HOSTILE, metric=HOSTILE, failure=HOSTILE)
    ]
    asked = question(HOSTILE, HOSTILE, ("lr", "num_workers", HOSTILE))
    return report(trials, asked, Origin({"command": HOSTILE, f"version.{HOSTILE}": HOSTILE}, HOSTILE, HOSTILE))


@pytest.fixture(params=["plain", "hostile"])
def either(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def test_every_section_is_there_and_can_be_gone_to(plain: str) -> None:
    page = page_of(plain)
    assert [a["id"] for a in page.all_of("section")] == list(SECTIONS)
    links = [a["href"] for a in page.all_of("a")]
    assert links == [*(f"#{name}" for name in SECTIONS), "#threats"]
    assert "width=device-width" in plain and "prefers-color-scheme: dark" in plain and "@media print" in plain


def test_every_figure_is_drawn_in_the_page_and_has_a_text_alternative(either: str) -> None:
    page = page_of(either)
    charts = [a for a in page.all_of("div") if a.get("class") == "chart"]
    assert len(charts) == len(page.all_of("figure")) == len(page.all_of("svg")) == len(page.specs) >= 7
    ids = {a["id"] for _, a in page.elements if "id" in a}
    for chart in charts:
        assert chart["role"] == "img"
        assert {chart["aria-labelledby"], chart["aria-describedby"]} <= ids
        assert len(page.texts_by_id[str(chart["aria-describedby"])]) > 80
    for spec in page.specs:
        assert {"data", "layer", "width", "config"} <= json.loads(spec).keys()


def test_nothing_is_loaded_over_the_network(either: str) -> None:
    page = page_of(either)
    assert page.policy.startswith("default-src 'none';") and "http" not in page.policy
    loading = {"src", "href", "srcset", "data", "action", "formaction", "poster", "xlink:href", "background"}
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "image", "use", "foreignobject")
        for name in loading & attributes.keys():
            assert (attributes[name] or "").startswith("#"), (tag, attributes)
    style = either[either.index("<style>") : either.index("</style>")]
    assert "url(" not in style and "@import" not in style


def test_the_policy_lets_the_two_scripts_run_and_no_other(either: str) -> None:
    page = page_of(either)
    hashes = re.findall(r"'sha256-([^']+)'", page.policy)
    assert hashes == [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.running]
    assert len(hashes) == 2
    (scripts,) = re.findall(r"script-src ([^;]*);", page.policy)
    assert "unsafe" not in scripts


def test_names_and_texts_of_a_study_are_inert(plain: str, hostile: str) -> None:
    page = page_of(hostile)
    assert page.running == page_of(plain).running
    assert not page.all_of("img")
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert "alert(1)" in "".join(page.text)
    assert HOSTILE in (page.texts_by_id["provenance"]) and "49" not in page.texts_by_id["provenance"]
    assert any(HOSTILE in json.dumps(json.loads(spec), ensure_ascii=False).replace('\\"', '"') for spec in page.specs)


def test_every_trial_stands_in_a_table_that_is_complete_without_scripts(plain: str) -> None:
    table = plain[plain.index('<table id="all-trials"') :]
    table = table[: table.index("</table>")]
    page = page_of(table)
    assert len(page.all_of("tr")) == 1 + len(results())
    words = " ".join(page.text)
    for word in ("num_workers", "accuracy", "finished", "failed", "out of memory", "node-1"):
        assert word in words
    cells = {text.strip() for text in page.text}
    assert {units.number(r.train_time_s) for r in results() if r.train_time_s} <= cells


def test_the_provenance_and_the_study_file_are_there(plain: str) -> None:
    page = page_of(plain)
    told = " ".join("".join(page.text).split())
    for word in (
        "0123abcd",
        "changes that no commit has yes",
        "2.13.0",
        "node-7",
        "EPYC 7B13",
        "raypar study s.py --set lr=0.1",
    ):
        assert word in told
    assert "seeds 0, 1, 2" in told and "epochs=3" in told and "How far?" in told
    assert "study = Study(name='a < b')" in told
    assert "raypar.question" not in plain and "somebody" not in plain


def test_threats_to_validity_are_told_with_what_to_do(plain: str) -> None:
    analysis = analyse(question(), results())
    page = page_of(plain)
    told = "".join(page.text).replace("\N{NO-BREAK SPACE}", " ")
    assert analysis.warnings
    for finding in analysis.warnings:
        assert finding.detail in told and finding.advice in told
    for verdict in analysis.verdicts:
        assert verdict in told


def numbered(num_trials: int) -> Iterator[TrialResult]:
    for repeat in range(-(-num_trials // 6)):
        yield from results(1 + repeat)[6 * repeat : 6 * repeat + 6]


def test_a_study_of_200_trials_stays_below_2_megabytes_with_all_its_rows() -> None:
    trials = list(numbered(204))
    text = report(trials)
    assert len({r.spec.identity for r in trials}) == 204 == rows_in(text, "all-trials")
    assert len(text.encode()) < 2e6


def single(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value, None, None, 1, None, Method.SINGLE)


def test_the_tables_and_figures_of_5000_trials_leave_a_page_below_2_megabytes(plain: str) -> None:
    trials = [
        make_result({"lr": 0.1 + i / 7e5, "batch_size": 2 ** (i % 9)}, 0, 1 + i % 977 / 100, 0.9 + i % 89 / 1000)
        for i in range(5000)
    ]
    # To analyse so many takes half a minute; the page needs of them what stands here.
    (point,) = analyse(Question("search", {}, ("lr",), num_repeats=1), [make_result({"lr": 0.1})]).points
    points = [
        replace(
            point,
            samples=replace(point.samples, point=r.spec.point),
            time_s=single(r.train_time_s),
            metric=single(r.final["accuracy"]),
        )
        for r in trials
    ]
    asked = Question("search", {}, ("lr", "batch_size"), num_repeats=1)
    analysis = replace(analyse(asked, trials[:2]), points=tuple(points))
    tables = (html_tables.points_table(analysis), html_tables.trials_table(analysis, trials))
    assert tables[0] is not None and tables[1].markup.count("\n<tr>") == 5000
    figures = [f for f in figures_of(analysis, trials) if isinstance(f, Figure)]
    drawn = sum(len(static_svg(f)) + len(json.dumps(for_page(f))) + len(f.alternative) for f in figures)
    runtime = sum(map(len, page_of(plain).running))
    assert len(figures) >= 2
    assert runtime + drawn + sum(len(table.markup) for table in tables if table) < 1.9e6


def rows_in(text: str, table: str) -> int:
    found = text[text.index(f'<table id="{table}"') :]
    return found[: found.index("</table>")].count("\n<tr>")


def test_drawings_are_brief_in_their_geometry_and_not_in_their_words() -> None:
    drawn = '<path d="M1.23456,2L3.0051,4.5" stroke-width="1.2345"/><text font-family="x" x="0.12345">lr=0.00102</text>'
    assert brief(drawn) == '<path d="M1.23,2L3.01,4.5" stroke-width="1.2345"/><text x="0.12">lr=0.00102</text>'


def test_the_summary_recommends_a_point_or_says_that_it_can_not_tell(plain: str) -> None:
    page = page_of(plain)
    told = page.texts_by_id["summary"].replace("\N{NO-BREAK SPACE}", " ")
    found = recommend(question(), results(), Constraints())
    assert found.chosen is not None
    for line in answer_lines(found):
        assert line in told
    assert f"{len(analyse(question(), results()).warnings)} things to mind before these numbers" in told


def test_a_study_of_batch_sizes_tells_throughput_and_progress() -> None:
    trials = []
    for repeat in range(3):
        for batch_size, rate, needed in ((32, 1000.0, 2), (128, 3000.0, 4)):
            made = make_result({"batch_size": batch_size}, repeat, 10.0, num_samples=int(10 * rate))
            reports = tuple(
                {
                    "epoch": epoch,
                    "accuracy": 0.9 if epoch >= needed else 0.5,
                    "train_time_s": 2.0 + repeat / 100,
                    "throughput_samples_per_s": rate,
                }
                for epoch in range(1, 6)
            )
            trials.append(replace(made, reports=reports))
    page = page_of(report(trials, Question("batches", {}, ("batch_size",), num_repeats=3)))
    told = "".join(page.text).replace("\N{NO-BREAK SPACE}", " ")
    assert "on the way to accuracy 90.0 %, the best that every trial reached" in told
    assert re.search(r"batch_size=128: 3\.00× .* = 0\.50×", told)
    assert any(a.get("id") == "figure-goodput" for a in page.all_of("figure"))


def test_a_study_without_a_finished_trial_has_a_report_that_says_so() -> None:
    text = report([results()[-1]], origin=Origin({}))
    told = "".join(page_of(text).text)
    assert "No trial finished" in told and "Left out, for lack of data:" in told and "It is not in the store." in told
    assert "<figure" not in text


def test_a_lone_surrogate_in_a_name_is_no_obstacle(tmp_path: Path) -> None:
    text = report([results()[-1]], origin=Origin({"host": "a\ud800b"}))
    write_text(tmp_path / "r.html", text)
    assert "a?b" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_file_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(RayparError, match=r"no/such/folder\.html: can't be written"):
        write_text(tmp_path / "no" / "such" / "folder.html", "text")
