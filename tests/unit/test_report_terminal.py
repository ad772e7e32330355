"""Reports fit any console without truncation or broken values, and names in a store can't control the terminal."""

import io
import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raypar.analysis.analyse import analyse
from raypar.analysis.checks import Finding
from raypar.analysis.question import Question
from raypar.analysis.recommend import Decision
from raypar.reporting.console import print_report
from raypar.reporting.listings import TrialsView, print_trials
from raypar.reporting.text import Column, TerminalConsole, strip_control, terminal_table, wrap, wrap_hanging
from raypar.reporting.view import StudyView
from raypar.run.runner import SKIPPED
from raypar.study.metric import Metric
from raypar.study.trial import Failure, FailureKind, TrialState

EVIL = "a\x1b[2J\x1b]0;owned\x07b\x9b31mc\r\x08"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_escape_sequences_of_a_store_do_not_reach_the_terminal():
    results = [
        make_result({"optimizer": f"{EVIL}{w}"}, r, 4.0 + w, environment={"node": [EVIL], "cores": [[0]]})
        for w in (1, 2)
        for r in (0, 1)
    ]
    results.append(make_result({"optimizer": "sgd"}, 0, state=TrialState.FAILED, failure=EVIL))
    terminal = TerminalConsole(file=(file := io.StringIO()), width=80)
    print_report(StudyView(analyse(Question("mnist", {}, ("optimizer",)), results)), terminal)
    print_trials(terminal, TrialsView.of("mnist", results, Metric("accuracy")))
    terminal.print(EVIL, highlight=False, markup=False, soft_wrap=True)
    assert "a?[2J?]0;owned" in file.getvalue()
    assert not STEERING.search(file.getvalue())


def test_a_trial_that_did_not_run_has_not_failed():
    failed = make_result({"num_workers": 2}, 0, state=TrialState.FAILED, failure="boom")
    skipped = replace(failed, failure=Failure(FailureKind.SKIPPED, SKIPPED.format(2, "boom")))
    terminal = TerminalConsole(file=(file := io.StringIO()), width=100)
    print_trials(terminal, TrialsView.of("mnist", [failed, skipped], Metric("accuracy")))
    assert "failed: boom" in file.getvalue()
    assert " 1  not run: the first 2 attempts" in file.getvalue()


def test_a_consoles_own_colours_and_moves_still_work():
    terminal = TerminalConsole(file=(file := io.StringIO()), force_terminal=True, color_system="standard")
    terminal.print(Text(EVIL, style="red"))
    with Live(Table(title="live"), console=terminal, refresh_per_second=1):
        pass
    text = file.getvalue()
    assert "\x1b[31ma?[2J" in text and "\x1b[?25l" in text and "\x1b[2J" not in text


@given(st.text())
def test_stripped_text_keeps_all_other_characters(text):
    shown = strip_control(text)
    assert len(shown) == len(text) and not STEERING.search(shown)
    assert all(a in (b, "?") for a, b in zip(shown, text, strict=True))
    assert strip_control("a\tb\nc é × 漢") == "a\tb\nc é × 漢"


VALUES = ("1.87× [1.80, 1.95]", "93 %", "12.3 s [11.0, 14.5]", "97.8 % [97.6, 97.9]", "1,000 samples/s")
SENTENCE = "2 workers train {} as fast as 1 (efficiency {}) in {}; {} of {} were reached by 4 workers.".format(*VALUES)


@pytest.mark.parametrize("width", [30, 40, 57, 79, 80, 81, 200])
def test_no_value_is_separated_from_its_unit_or_interval(width):
    lines = wrap_hanging(SENTENCE, width)
    assert max(map(cell_len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == SENTENCE
    assert all(any(value in line for line in lines) for value in VALUES), lines
    assert all(line.startswith("  ") for line in lines[1:])
    assert wrap("see /a/path/that/is/long now", 10) == ["see", "/a/path/that/is/long", "now"]  # not broken


@pytest.fixture(scope="module")
def analysis():
    results = [
        make_result({"batch_size": b, "num_workers": w}, r, 200 / b**0.5 / w**0.8 * (1 + 0.01 * ((r * 3 + w) % 4)))
        for b, w, r in product((32, 64, 128, 256, 512), (1, 2), range(3))
    ]
    return analyse(Question("mnist", {"num_workers": 1}, ("batch_size", "num_workers"), num_repeats=3), results)


def shown(analysis, width=80, encoding="utf-8", **more):
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding)  # raises where a character can't be encoded
    print_report(StudyView(analysis), Console(file=file, width=width, **more))
    file.flush()
    return buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [130, 100, 80, 70, 60, 50, 40, 30])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_width_cuts_a_number_or_overflows(analysis, width, encoding):
    text = shown(analysis, width, encoding)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert not {"…", "...", "\x1b", "\N{NO-BREAK SPACE}"} & set(text)
    if width >= 40:
        assert all(line.count("[") == line.count("]") for line in text.splitlines())
    for point in analysis.points:
        assert point.speedup is not None and point.time_s is not None
        assert point.is_baseline or f"{point.speedup.value:.2f}" in text
        assert f"{point.time_s.value:.1f} s" in text or f"{point.time_s.value:.2f} s" in text


def test_colour_does_not_change_the_text(analysis):
    coloured = shown(analysis, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == shown(analysis)


TEXTS = st.text(st.sampled_from("abc 1.×[]漢±"), max_size=30)


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=4), st.integers(12, 90), st.booleans())
def test_a_table_fits_and_loses_no_character(rows, width, rule):
    first, second, third = zip(*rows, strict=True)
    columns = [Column("a\nb", first), Column("numbers", second, True), Column("prose", third, is_prose=True)]
    out = Console(file=io.StringIO(), width=width)
    out.print(terminal_table(columns, width, "utf-8", rule=rule))
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert all(cell_len(line) <= width for line in text.splitlines())
    before = "".join([*map("".join, rows), *(column.head for column in columns)])
    assert {c: text.count(c) for c in "abc1.×[]漢±"} == {c: before.count(c) for c in "abc1.×[]漢±"}


def test_trials_that_do_not_fit_are_counted_in_plain_english():
    results = [make_result({"batch_size": 64}, 0, 1.0)]
    results += [make_result({"batch_size": b}, 0, state=TrialState.DOES_NOT_FIT) for b in (512, 1024)]
    question = Question("mnist", {}, ("batch_size",))
    assert "3 trials, 2 do not fit" in StudyView(analyse(question, results)).header
    assert "2 trials, 1 does not fit" in StudyView(analyse(question, results[:2])).header


def test_caveats_after_the_first_begin_in_lower_case_unless_they_begin_with_a_name(analysis):
    subjects = ("Times are between reports", "A worker had 4 torch threads", "GPUs slowed down", "F1 differs")
    view = StudyView(replace(analysis, warnings=tuple(map(Finding, subjects))))
    shown = "Times are between reports; a worker had 4 torch threads; GPUs slowed down; F1 differs"
    assert view.caveats == f"! 4 caveats: {shown}."


def tied_study(num_points):
    """Return an analysis of points that are equally fast, except for noise that blocks don't share."""
    results = [
        make_result({"lr": 10.0**-i}, r, 4.0 * (1 + 0.002 * ((r * 7 + i * 3) % 5 - 2)))
        for i in range(num_points)
        for r in range(8)
    ]
    return analyse(Question("s", {}, ("lr",)), results)


@pytest.mark.parametrize(("num_points", "expected"), [(2, "tied with lr="), (3, " and lr="), (8, "tied with 7 others")])
def test_a_recommendation_among_tied_points_says_so(num_points, expected):
    analysis = tied_study(num_points)
    assert analysis.verdict.recommendation.decision is Decision.TIED
    (line,) = [line for line in shown(analysis, width=200).splitlines() if line.startswith("Recommended: ")]
    assert "tied with " in line and expected in line
    clear = [make_result({"lr": lr}, r, t + r / 99) for lr, t in ((0.1, 4.0), (0.2, 9.0)) for r in range(6)]
    assert "tied" not in shown(analyse(Question("s", {}, ("lr",)), clear), width=200)


def test_a_speedup_that_differs_from_the_ratio_of_the_times_beside_it_is_explained():
    def study(two):
        times = {1: (1.5, 1.95, 3.0), 2: two}
        results = [make_result({"num_workers": n}, r, t) for n, of in times.items() for r, t in enumerate(of)]
        return shown(analyse(Question("s", {"num_workers": 1}, ("num_workers",)), results))

    explained = "speedups: medians of ratios within blocks"
    text = study((1.9, 2.66, 3.75))
    assert "1.95 s" in text and "2.66 s" in text and "0.78×" in text and explained in " ".join(text.split())
    assert explained not in " ".join(study((3.0, 3.9, 6.0)).split())
