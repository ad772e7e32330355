"""The tables of the HTML report: what they leave out, tell once and cut short, so that a page stays small."""

from __future__ import annotations

import re

import pytest
from html_studies import question, results
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.report import html as html_tables
from raypar.study.trial import TrialState


def test_a_table_that_would_be_too_long_says_how_many_trials_it_lacks() -> None:
    trials = results()
    analysis = analyse(question(), trials)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html_tables, "MAX_TABLE_BYTES", 1000)
        table = html_tables.trials_table(analysis, trials)
    num_rows = table.markup.count("\n<tr>")
    assert 0 < num_rows < len(trials)
    assert f"{len(trials) - num_rows} later trials left out: `raypar show` and `raypar export` have all." in table.notes


def test_a_table_keeps_to_what_is_left_of_its_page() -> None:
    trials = results()
    analysis = analyse(question(), trials)
    every, few, none = (html_tables.trials_table(analysis, trials, max_bytes=n) for n in (None, 1000, -1))
    assert every.markup.count("\n<tr>") == len(trials) > few.markup.count("\n<tr>") > 0
    assert none.markup.count("<tr>") == 1, "its head"


def test_what_all_trials_have_in_common_is_told_once() -> None:
    trials = results()[:-1]
    table = html_tables.trials_table(analyse(question(), trials), trials)
    assert "The same for all: state finished, attempts 1, node node-1." in table.notes
    assert "finished" not in table.markup and "node" not in table.markup


def test_many_long_failures_are_cut_shorter_than_one() -> None:
    one = make_result({"lr": 0.1}, state=TrialState.FAILED, failure="x" * 1000)
    many = [make_result({"lr": i / 7}, state=TrialState.FAILED, failure=f"{i} {'x' * 1000}") for i in range(2000)]
    for trials, longest in (([one, results()[0]], 300), (many, 50)):
        markup = html_tables.trials_table(analyse(question(), trials), trials).markup
        assert max(map(len, re.findall("x+", markup))) in range(longest // 2, longest)
