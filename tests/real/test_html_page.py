"""The HTML report in a real browser: its scripts, its requests, its layout on phones and paper.

axe-core (https://github.com/dequelabs/axe-core), from a package of the extra `dev`, checks the golden studies' pages.
"""

import base64
import contextlib
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import golden
import pytest
from browser import browser
from html_studies import ab_html, compare_html, question, results, revision_results

from raypar.analysis.analyse import analyse
from raypar.execution.stored import read_study
from raypar.reporting.html import Origin, html_report
from raypar.reporting.view import StudyView

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
STUDIES = "quickstart", "scaling", "search"
COMPARISONS = "ab", "ab with a limit", "compare", "compare with a limit"
UNFOLD = "document.querySelectorAll('details').forEach(d => d.open = true)"
DRAWN = (
    "[...document.querySelectorAll('figure[data-figure]')]"
    ".filter(f => !f.closest('details:not([open])')).every(f => f.querySelector('.vega-embed svg'))"
)
COLUMN = "[...document.querySelectorAll('#all-trials tbody tr')].map(r => r.cells[{}].textContent)"


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return written(tmp_path_factory.mktemp("page") / "report.html", "scaling", "out of memory")


@pytest.fixture
def page(chromium, path):
    opened = chromium(path)
    opened.run(UNFOLD)
    opened.until(DRAWN)
    return opened


@pytest.fixture(scope="module")
def golden_pages(tmp_path_factory):
    """Pages of the golden studies by name."""
    pages, made = {}, tmp_path_factory.mktemp("golden")
    with golden.studies() as folder, contextlib.chdir(folder):
        for name in ("quickstart", "scaling", "search"):
            study = read_study(name, f"sqlite:///{folder}/mlflow.db", folder)
            origin = Origin(study.tags, study.description, study.source)
            pages[name] = made / f"{name}.html"
            pages[name].write_text(
                html_report(StudyView(study.analysis), study.analysis.evidence.results, origin), "utf-8"
            )
    a, b = results(name="base"), slower(results(name="changed"))
    of_comparisons = {
        "ab": ab_html(revision_results()),
        "ab with a limit": ab_html(revision_results(note="x" * 20), allowed=0.02),
        "compare": compare_html(a, b, stores=("sqlite:////home/user/project/mlflow.db", "http://10.0.0.1:5000")),
        "compare with a limit": compare_html(a, b, allowed=0.05),
    }
    for name, text in of_comparisons.items():
        pages[name] = made / f"{name}.html"
        pages[name].write_text(text, "utf-8")
    return pages


def slower(trials, factor=2.0):
    """Return the trials with longer training times on four workers."""

    def changed(r):
        return replace(
            r, train_time_s=factor * r.train_time_s, throughput_samples_per_s=r.throughput_samples_per_s / factor
        )

    return [changed(r) if r.train_time_s and r.spec.point["num_workers"] == 4 else r for r in trials]


def written(path, name, text):
    """Write the page of a study with this name, and with this text as file, description, failures and values."""
    trials = [
        replace(r, spec=replace(r.spec, point={**r.spec.point, "note": text})) for r in results(name=name, failure=text)
    ]
    asked = replace(question(name, keys=("lr", "num_workers", "note")), text=text)
    path.write_text(
        html_report(StudyView(analyse(asked, trials)), trials, Origin({"command": text}, text, text)), encoding="utf-8"
    )
    return path


@pytest.mark.core
def test_every_figure_is_drawn_with_a_description_and_without_requests(page, path):
    num = page.run("document.querySelectorAll('figure[data-figure]').length")
    assert num >= 8
    named = (
        "[...document.querySelectorAll('.chart[role=img]')].filter(c => c.getAttribute('aria-labelledby').split(' ')"
        ".every(id => document.getElementById(id).textContent.length > 8)).length"
    )
    assert page.run(named) == num
    assert page.errors() == []
    assert page.requests() == [path.as_uri()]


def test_the_browser_sees_errors_and_requests(chromium, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<img src=a.png><script>console.error('logged'); throw new Error('thrown')</script>")
    page = chromium(path)
    assert all(word in str(page.errors()) for word in ("logged", "thrown"))
    assert page.requests() == [path.as_uri(), (tmp_path / "a.png").as_uri()]


def test_a_table_sorts_by_keyboard_and_filters_by_typed_words(page):
    heads = page.run("[...document.querySelectorAll('#all-trials th')].map(h => h.textContent)")
    column = heads.index("trained, s")
    button = f"document.querySelectorAll('#all-trials th button')[{column}]"
    page.run(f"{button}.focus()")
    orders = []
    for direction in ("ascending", "descending"):
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "text": "\r", "windowsVirtualKeyCode": 13}
            page.call("Input.dispatchKeyEvent", type=kind, **key)
        page.until(f"{button}.parentElement.getAttribute('aria-sort') === '{direction}'")
        cells = page.run(COLUMN.format(column))
        numbers = [float(cell) for cell in cells if cell.strip() != "–"]
        assert cells[len(numbers) :] == ["–"]  # the failed trial is last in both orders
        orders.append(numbers)
    assert len(orders[0]) == 18 and orders[0] == sorted(orders[0]) and orders[1] == orders[0][::-1]
    assert page.run("document.querySelectorAll('#all-trials [aria-sort]').length") == 1
    page.run(
        "(() => { const i = document.querySelector('[data-filter]'); i.value = 'memory failed';"
        " i.dispatchEvent(new Event('input')); })()"
    )
    assert page.run("[...document.querySelectorAll('#all-trials tbody tr')].filter(r => !r.hidden).length") == 1
    assert page.run("document.querySelector('[data-count]').textContent") == "1 of 19"


def test_it_is_readable_in_light_and_dark_on_a_phone_and_printed(page):
    brightness = "getComputedStyle(document.{}).{}.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 765"
    for scheme in ("light", "dark"):
        page.emulate(prefers_color_scheme=scheme)
        paper = page.run(brightness.format("body", "backgroundColor"))
        ink = page.run(brightness.format("querySelector('.vega-embed svg text')", "fill"))
        assert abs(paper - ink) > 0.7 and (paper > 0.5) == (scheme == "light")
    page.emulate(media="print")
    assert page.run("getComputedStyle(document.querySelector('.filter')).display") == "none"
    assert page.run("(t => t.scrollHeight <= t.clientHeight + 1)(document.querySelector('#all-trials').parentElement)")
    page.emulate()
    page.resize(390, 800, is_phone=True)
    page.until("document.documentElement.clientWidth === 390")
    assert page.run("document.documentElement.scrollWidth") == 390
    fits = "[...document.querySelectorAll('.chart svg')].every(s => s.getBoundingClientRect().right <= 390.5)"
    page.until(fits, timeout_s=30)


def test_tables_and_figures_show_without_scripts(chromium, path):
    page = chromium("about:blank")
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.go(path)
    assert page.run("document.querySelectorAll('.chart > div > svg').length") >= 8
    assert page.run("document.querySelectorAll('#all-trials tbody tr').length") == 19
    assert page.run("getComputedStyle(document.querySelector('.filter')).display") == "none"


def test_hostile_names_and_texts_are_inert(chromium, tmp_path):
    page = chromium(written(tmp_path / "hostile.html", HOSTILE, HOSTILE))
    page.run(UNFOLD)
    page.until(DRAWN)
    assert HOSTILE in page.run("document.title")
    assert page.run("document.querySelectorAll('img').length") == 0
    assert HOSTILE in page.run("document.querySelector('pre').textContent")
    assert page.errors() == [] and len(page.requests()) == 1


@pytest.mark.core
@pytest.mark.parametrize("study", [*STUDIES, *COMPARISONS])
def test_axe_finds_no_violations(chromium, golden_pages, study):
    package = find_spec("axe_playwright_python")
    assert package is not None, "axe-core is a part of axe-playwright-python: pip install -e '.[dev]'"
    page = chromium(golden_pages[study])
    page.run(f"{Path(package.submodule_search_locations[0], 'axe.min.js').read_text('utf-8')};0")
    findings = "axe.run().then(all => all.violations.map(v => `${v.id}: ${v.nodes.length} of ${v.nodes[0].html}`))"
    for scheme, unfold in (("light", "0"), ("dark", UNFOLD)):
        page.emulate(prefers_color_scheme=scheme)
        page.run(unfold)
        page.until(DRAWN)
        assert page.run(findings) == []


def test_four_points_fit_on_about_three_screens_and_two_sheets(chromium, golden_pages):
    page = chromium(golden_pages["quickstart"])
    page.resize(1400, 1000)
    page.until(DRAWN)
    assert page.run("document.querySelectorAll('section figure').length") == 6
    assert page.run("document.documentElement.scrollHeight") <= 3500
    for paper in ({}, {"paperWidth": 8.27, "paperHeight": 11.69}):  # letter, A4
        pdf = base64.b64decode(page.call("Page.printToPDF", **paper)["data"])
        assert len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf)) == 2


@pytest.mark.parametrize("study", [*STUDIES, *COMPARISONS])
def test_no_table_is_clipped_and_the_answer_is_on_the_first_screen(chromium, golden_pages, study):
    page = chromium(golden_pages[study])
    page.resize(1400, 1000)
    assert page.run("document.querySelector('.answer').getBoundingClientRect().bottom") < 700
    page.run(UNFOLD)
    page.until(DRAWN)
    clipped = "[...document.querySelectorAll('[role=region]')].filter(t => t.scrollWidth > t.clientWidth)"
    assert page.run(f"{clipped}.map(t => t.ariaLabel)") == []
    hints = "[...document.querySelectorAll('[data-hint]')]"
    assert page.run(f"{hints}.every(h => h.hidden)")
    for width in (400, 360):
        page.resize(width, 800, is_phone=True)
        page.until(f"document.documentElement.clientWidth === {width}")
        assert page.run("document.documentElement.scrollWidth") == width
    # A table that scrolls says so, until its last column is in view.
    page.until(
        f"{hints}.every(h => h.hidden === (h.nextElementSibling.scrollWidth <= h.nextElementSibling.clientWidth))"
    )
    page.run("document.querySelectorAll('[role=region]').forEach(t => t.scrollLeft = t.scrollWidth)")
    page.until("!document.querySelector('.more')", timeout_s=30)


def test_the_page_of_a_comparison_starts_with_the_verdict_and_has_its_figures_and_trials(chromium, golden_pages):
    page = chromium(golden_pages["compare with a limit"])
    heading = page.run("document.querySelector('h1').textContent").replace("\N{NO-BREAK SPACE}", " ")
    assert heading == "A: base, the reference. B: changed. B fails: it may be at most 5 % slower."
    page.until(DRAWN)
    assert page.run("document.querySelector('.failed').textContent").strip().startswith("--fail-if-slower: failed")
    page = chromium(golden_pages["ab"])
    page.run(UNFOLD)
    page.until(DRAWN)
    assert "slower at 1, faster at 1, equivalent at 1" in page.run("document.querySelector('h1').textContent")
    assert page.run("document.querySelectorAll('#all-points tbody tr').length") == 3
    assert page.run("document.querySelectorAll('#all-trials tbody tr').length") == 48
    assert page.errors() == [] and len(page.requests()) == 1


def test_hostile_names_in_a_comparison_are_inert(chromium, tmp_path):
    (tmp_path / "ab.html").write_text(ab_html(revision_results(note=HOSTILE), source=HOSTILE), "utf-8")
    names = HOSTILE, f"{HOSTILE}2"
    trials = [results(name=name) for name in names]
    (tmp_path / "compare.html").write_text(compare_html(*trials, names=names, stores=(HOSTILE, "x")), "utf-8")
    for path in tmp_path.glob("*.html"):
        page = chromium(path)
        page.run(UNFOLD)
        page.until(DRAWN)
        assert page.run("document.title") != "taken" and page.run("document.querySelectorAll('img').length") == 0
        assert page.errors() == [] and len(page.requests()) == 1
