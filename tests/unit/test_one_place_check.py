"""One registration is enough: what an installed package adds to checks and figures is found in every view."""

import io
import json

import pytest
from results import make_result
from rich.console import Console

from raypar.analysis import checks
from raypar.analysis.analyse import Question, analyse
from raypar.analysis.checks import Check
from raypar.plugins import registered
from raypar.reporting import figures
from raypar.reporting.console import print_report
from raypar.reporting.documents import to_json
from raypar.reporting.export import markdown_of
from raypar.reporting.figures import FigureMaker, figures_of, write_figures
from raypar.reporting.html import Origin, html_report
from raypar.reporting.view import StudyView

MODULE = """
from raypar.analysis.checks import Finding, check
from raypar.reporting.figures import Figure, figure
from raypar.reporting.vega import layer, layers, nominal, quantity


@check("Choose another day.")
def full_moon(evidence):
    nights = [result.spec.label for result in evidence.finished]
    yield Finding(f"{len(nights)} trials ran at full moon", nights, ": {}; it was bright.")


@figure(25)
def moonlight(analysis, results):
    rows = [{"trial": result.spec.label, "lux": 0.3} for result in results]
    spec = layers(rows, layer("bar", x=nominal("trial"), y=quantity("lux", "moonlight, lux")))
    return Figure("moonlight", "Moonlight of each trial", "It was bright.", spec)
"""
ENTRY_POINTS = """
[raypar.checks]
full_moon = moonlit:full_moon

[raypar.figures]
moonlight = moonlit:moonlight
"""
QUESTION = Question("s", {"num_workers": 1}, ("num_workers",))
RESULTS = [make_result({"num_workers": w}, r, 8.0 / w + r / 99) for w in (1, 2) for r in range(6)]
SUBJECT = "12 trials ran at full moon"
SENTENCE = f"{SUBJECT}: num_workers=1 #1, num_workers=1 #2, num_workers=1 #3 and 9 more; it was bright."


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """Install a package with a check and a figure."""
    (tmp_path / "moonlit.py").write_text(MODULE)
    folder = tmp_path / "moonlit-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: moonlit\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(checks, "INSTALLED", registered(checks.GROUP, Check, {}))
    monkeypatch.setattr(figures, "INSTALLED", registered(figures.GROUP, FigureMaker, {}))


def printed(*, verbose):
    console = Console(file=io.StringIO(), width=200)
    print_report(StudyView(analyse(QUESTION, RESULTS)), console, verbose=verbose)
    return console.file.getvalue()


def test_a_check_of_a_package_is_in_every_view():
    analysis = analyse(QUESTION, RESULTS)
    assert analysis.warnings[-1].values[-1] == "num_workers=2 #6"
    caveat = {"check": "full_moon", "summary": SUBJECT, "detail": SENTENCE, "advice": "Choose another day."}
    assert json.loads(to_json(StudyView(analysis)))["caveats"][-1].items() >= caveat.items()
    assert SUBJECT in printed(verbose=False) and SENTENCE in printed(verbose=True)
    assert f"{SENTENCE} Choose another day." in markdown_of(StudyView(analysis), {})


def test_a_figure_of_a_package_is_among_the_others_on_the_page_and_in_files(tmp_path):
    analysis = analyse(QUESTION, RESULTS)
    drawn = figures_of(analysis, RESULTS)
    assert [each.title for each in drawn[:3]][2] == "Moonlight of each trial"
    page = html_report(StudyView(analysis), RESULTS, Origin({}))
    assert SENTENCE in page and "Moonlight of each trial" in page and "It was bright." in page
    paths = write_figures([drawn[2]], tmp_path / "figures", kinds=["svg"])
    assert [path.name for path in paths] == ["moonlight.svg"] and "moonlight, lux" in paths[0].read_text("utf-8")
