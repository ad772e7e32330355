"""The HTML report in a real browser: what its scripts do, what it asks of the network, how it fits a phone."""

from dataclasses import replace

import pytest
from browser import browser
from html_studies import question, results

from raypar.analysis.analyse import analyse
from raypar.report.html import Origin, html_report

HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"
DRAWN = "[...document.querySelectorAll('figure[data-figure]')].every(f => f.querySelector('.vega-embed svg'))"
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
    opened.until(DRAWN)
    return opened


def written(path, name, text):
    """Write the page of a study by this name, whose file, description, failures and values are this text."""
    trials = [
        replace(r, spec=replace(r.spec, point={**r.spec.point, "note": text})) for r in results(name=name, failure=text)
    ]
    asked = question(name, keys=("lr", "num_workers", "note"))
    path.write_text(
        html_report(analyse(asked, trials), trials, Origin({"command": text}, text, text)), encoding="utf-8"
    )
    return path


@pytest.mark.core
def test_every_figure_is_drawn_with_words_for_those_who_do_not_see_it_and_nothing_is_asked_for(page, path):
    num = page.run("document.querySelectorAll('figure[data-figure]').length")
    assert num >= 8
    named = (
        "[...document.querySelectorAll('.chart[role=img]')].filter(c => ['labelledby', 'describedby'].every("
        "a => document.getElementById(c.getAttribute('aria-' + a)).textContent.length > 8)).length"
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


def test_a_table_sorts_by_keyboard_and_shows_the_rows_with_the_words_that_are_typed(page):
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
        assert cells[len(numbers) :] == ["–"]  # of the trial that failed: last, either way round
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
    assert page.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.run("(t => t.scrollHeight <= t.clientHeight + 1)(document.querySelector('#all-trials').parentElement)")
    page.emulate()
    page.resize(390, 800, is_phone=True)
    page.until("document.documentElement.clientWidth === 390")
    assert page.run("document.documentElement.scrollWidth") == 390
    fits = "[...document.querySelectorAll('.chart svg')].every(s => s.getBoundingClientRect().right <= 390.5)"
    page.until(fits, timeout_s=30)


def test_without_scripts_tables_and_figures_are_there(chromium, path):
    page = chromium("about:blank")
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.go(path)
    assert page.run("document.querySelectorAll('.chart > svg').length") >= 8
    assert page.run("document.querySelectorAll('#all-trials tbody tr').length") == 19
    assert page.run("getComputedStyle(document.querySelector('.filter')).display") == "none"


def test_names_and_texts_of_a_study_do_nothing(chromium, tmp_path):
    page = chromium(written(tmp_path / "hostile.html", HOSTILE, HOSTILE))
    page.until(DRAWN)
    assert page.run("document.title") == HOSTILE
    assert page.run("document.querySelectorAll('img').length") == 0
    assert HOSTILE in page.run("document.querySelector('pre').textContent")
    assert page.errors() == [] and len(page.requests()) == 1
