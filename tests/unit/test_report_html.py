"""The HTML report is safe and small, and loads nothing over the network. Its content is in ``tests/golden``."""

import base64
import hashlib
import json
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import pytest
from html_studies import HOSTILE, question, results
from results import make_result, stored_conditions

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.analysis.stats import Estimate, Method
from raypar.reporting import html as html_tables
from raypar.reporting.figures import figures_of
from raypar.reporting.html import Origin, brief, bundled, html_report
from raypar.reporting.text import as_utf8, no_break_values
from raypar.reporting.vega import Figure, for_page, static_svg
from raypar.reporting.view import StudyView
from raypar.study.trial import TrialState


class Page(HTMLParser):
    """Elements, scripts (those that run, and the figures' specs) and texts of a page, as in a browser."""

    def __init__(self, html):
        super().__init__()
        self.html, self.elements, self.scripts, self.texts_by_id = html, [], ([], []), defaultdict(str)
        self._inside = self._id = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside, self._id = tag, dict(attrs).get("id") or self._id
        if tag == "script":
            self._script = self.scripts[("type", "application/json") in attrs]
            self._script.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self._script[-1] += data
        elif self._inside != "style":
            self.texts_by_id[self._id] += data

    def all_of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def report(trials, asked=None, origin=None):
    return html_report(StudyView(analyse(asked or question(), trials)), trials, origin or Origin({}))


@pytest.fixture(scope="module")
def plain():
    return Page(report(results()))


@pytest.fixture(scope="module")
def hostile():
    trials = results(name=HOSTILE, metric=HOSTILE, failure=HOSTILE)
    more = {HOSTILE: HOSTILE}
    specs = [replace(r.spec, point={**r.spec.point, **more}, config={**r.spec.config, **more}) for r in trials]
    trials = [
        replace(r, spec=s, conditions=stored_conditions({"node": [HOSTILE]}))
        for r, s in zip(trials, specs, strict=True)
    ]
    asked = question(HOSTILE, HOSTILE, ("lr", "num_workers", HOSTILE))
    return Page(report(trials, asked, Origin({"command": HOSTILE, f"version.{HOSTILE}": HOSTILE}, HOSTILE, HOSTILE)))


def test_every_figure_is_drawn_in_the_page_and_named_by_its_title_and_caption(hostile):
    charts = [a for a in hostile.all_of("div") if a.get("class") == "chart"]
    assert len(charts) == len(hostile.all_of("figure")) == len(hostile.all_of("svg")) == len(hostile.scripts[1]) >= 7
    for chart in charts:
        title, caption = (hostile.texts_by_id[name] for name in str(chart["aria-labelledby"]).split())
        assert chart["role"] == "img" and title and len(caption) > 20


def test_the_answer_comes_first_then_comparisons_the_recommended_point_and_caveats():
    trials, asked = results(), replace(question(), text="Does it scale?")
    text = report(trials, asked, Origin({}, "Does it scale? On one machine."))
    page, verdict = Page(text), analyse(asked, trials).verdict
    assert page.texts_by_id["answer"].startswith(f"Does it scale? {no_break_values(verdict.answer)}")
    assert f"<title>Does it scale? {verdict.answer}</title>" in text
    shown = ("<h1", ">On one machine.", 'id="comparisons"', "Leading: ", "2 caveats", 'id="all-points"')
    places = [text.index(part) for part in shown]
    assert places == sorted(places)
    assert text.index('<div class="answer">') < places[0] and text[: places[-1]].count("</main>") == 0


def test_six_figures_are_unfolded_and_the_others_in_the_fold(plain):
    figures = [m.start() for m in re.finditer("<figure ", plain.html)]
    fold = plain.html.index('id="more-figures"')
    assert len(figures) == 10 and sum(place < fold for place in figures) == 6


def test_nothing_is_loaded_over_the_network_and_only_two_scripts_may_run(hostile):
    loading = {"src", "href", "srcset", "data", "action", "formaction", "poster", "xlink:href", "background"}
    for tag, attributes in hostile.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "image", "use", "foreignobject")
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in loading & attributes.keys():
            assert (attributes[name] or "").startswith("#"), (tag, attributes)
    style = hostile.html[hostile.html.index("<style>") : hostile.html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    (policy,) = (str(a["content"]) for a in hostile.all_of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "http" not in policy
    hashes = re.findall(r"'sha256-([^']+)'", policy)
    assert hashes == [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in hostile.scripts[0]]
    (scripts,) = re.findall(r"script-src ([^;]*);", policy)
    assert "unsafe" not in scripts and len(hashes) == 2


def test_names_and_texts_of_a_study_are_inert(plain, hostile):
    assert hostile.scripts[0] == plain.scripts[0]
    assert HOSTILE in hostile.texts_by_id["provenance"] and "49" not in hostile.texts_by_id["provenance"]
    assert any(HOSTILE in json.dumps(json.loads(spec)).replace('\\"', '"') for spec in hostile.scripts[1])


def test_a_study_without_a_finished_trial_has_a_report_and_a_lone_surrogate_is_replaced():
    text = report([results()[-1]], origin=Origin({"host": "a\ud800b"}))
    assert "No trial finished" in text and "<figure" not in text and "a?b" in text == as_utf8(text)


def test_trials_of_an_execution_that_swept_fewer_hyperparameters_are_in_the_figures():
    asked = replace(question(keys=("lr", "num_workers", "epochs")), config={"batch_size": 64})
    text = report(results(), asked)
    assert all(f'id="figure-{key}"' in text for key in ("times", "learning", "trial_parts", "drift"))


def test_a_study_of_200_trials_stays_below_2_megabytes_with_all_its_rows():
    text = report(results(34))
    assert text[text.index('<table id="all-trials"') :].count("\n<tr>") == 205
    assert len(text.encode()) < 2e6


def test_the_tables_and_figures_of_5000_trials_leave_a_page_below_2_megabytes(plain):
    trials = [
        make_result({"lr": 0.1 + i / 7e5, "batch_size": 2 ** (i % 9)}, 0, 1 + i % 977 / 100, 0.9 + i % 89 / 1000)
        for i in range(5000)
    ]
    # An analysis of all trials takes half a minute, so only the parts that the page needs are made.
    analysis = analyse(Question("search", {}, ("lr", "batch_size"), num_repeats=1, is_search=True), trials[:2])
    first = analysis.points[0]
    single = partial(Estimate, low=None, high=None, num_samples=1, level=None, method=Method.SINGLE)
    values = [{"time_s": single(r.train_time_s), "metric": single(r.final["accuracy"])} for r in trials]
    points = [replace(first, point=r.spec.point, **v) for r, v in zip(trials, values, strict=True)]
    advice = analysis.verdict.recommendation
    advice = replace(advice, candidates=tuple(replace(advice.candidates[0], **vars(p)) for p in points))
    analysis = replace(analysis, points=tuple(points), verdict=replace(analysis.verdict, recommendation=advice))
    every, table = html_tables.trials_table(analysis, trials), html_tables.points_table(StudyView(analysis))
    assert table is not None and every.num_rows == html_tables.MAX_TRIALS
    figures = [f for f in figures_of(analysis, trials) if isinstance(f, Figure)]
    drawn = sum(len(static_svg(f)) + len(json.dumps(for_page(f))) + len(f.caption) for f in figures)
    assert len(figures) >= 2
    assert sum(map(len, plain.scripts[0])) + drawn + len(every.markup) + len(table.markup) < 1.9e6


def test_a_table_has_the_first_trials_and_the_number_of_omitted_ones():
    trials = results()
    analysis = analyse(question(), trials)
    every, few = (html_tables.trials_table(analysis, trials, most) for most in (len(trials), 3))
    assert (every.num_rows, few.num_rows) == (len(trials), 3)
    num_left_out = len(trials) - 3
    left_out = f"{num_left_out} later trials not shown: `raypar store show` and `raypar store export` include them."
    assert left_out in few.notes and not any("not shown" in note for note in every.notes)


def test_a_long_failure_is_cut():
    trials = [make_result({"lr": 0.1}, state=TrialState.FAILED, failure="x" * 1000), results()[0]]
    markup = html_tables.trials_table(analyse(question(), trials), trials).markup
    assert max(map(len, re.findall("x+", markup))) == 299


def test_drawings_have_rounded_coordinates_and_unchanged_texts():
    drawn = '<path d="M1.23456,2L3.0051,4.5" stroke-width="1.2345"/><text font-family="x" x="0.12345">lr=0.00102</text>'
    assert brief(drawn) == '<path d="M1.23,2L3.01,4.5" stroke-width="1.2345"/><text x="0.12">lr=0.00102</text>'


def test_the_script_of_the_figures_is_made_once_per_user_and_version(tmp_path, monkeypatch):
    made = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda script: made.append(script) or f"bundle of {script}é")
    assert bundled("one") == bundled("one") == "bundle of oneé" and bundled("two") == "bundle of twoé"
    monkeypatch.setattr("raypar.reporting.html.version", lambda _: "0")
    bundled("one")
    assert made == ["one", "two", "one"]
    for kept in (tmp_path / "raypar" / "scripts").iterdir():
        kept.write_bytes(b"\xff")
    assert bundled("one") == "bundle of oneé", "a damaged file is replaced"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert bundled("one") == "bundle of oneé", "a cache that can't be written is no error"
