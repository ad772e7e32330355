"""A study's summary as Markdown: complete, and hostile names stay text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.question import Question
from raypar.analysis.speedup import analyse
from raypar.report.markdown import markdown_of, markdown_text, provenance_line
from raypar.study.trial import TrialResult, TrialState

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))
HOSTILE = ('=HYPERLINK("http://x")', "a|b", "<script>alert(1)</script>", "two\nlines", 'quo"te, comma', "-1+2", "@x")


def summary(question: Question, results: Sequence[TrialResult], **origin: str) -> str:
    known = {key.replace("_", "."): (value,) for key, value in origin.items()}
    return markdown_of(analyse(question, results), known, "Does it *scale*?")


def test_a_summary_has_the_question_a_table_what_it_says_and_where_it_comes_from() -> None:
    results = [make_result({"num_workers": n}, r, 4.0 / n + r / 100) for n in (1, 2) for r in range(3)]
    text = summary(
        QUESTION, results, version_torch="2.15", host="n1", cpu="Xeon", cores="2", git_commit="abc", git_dirty="yes"
    )
    lines = text.splitlines()
    assert lines[0] == "# mnist"
    assert "Does it \\*scale\\*?" in lines
    assert "Swept: num_workers. Compared with: num_workers=1. 2 points, 6 trials." in lines
    head = lines.index("| num_workers | time | speedup | efficiency | accuracy | n |")
    assert lines[head + 1] == "| --- | ---: | ---: | ---: | ---: | ---: |"
    assert (
        lines[head + 2].startswith("| 1 | 4.01 s [") and "| baseline | – | 97.0 % [97.0, 97.0] | 3 |" in lines[head + 2]
    )
    assert "× [" in lines[head + 3] and lines[head + 4] == ""
    assert any(line.startswith("- 2 workers train ") for line in lines)
    assert any(line.startswith("- **Warning:** ") for line in lines)
    assert lines[-1] == "Provenance: torch 2.15; on n1 (Xeon; 2 cores); commit abc with changes that no commit has."


def test_a_summary_without_a_baseline_has_no_speedups() -> None:
    text = summary(Question("mnist", {}, ("x",), num_repeats=2), [make_result({"x": 1})])
    assert "| x | time | accuracy | n |" in text and "| 1 of 2 |" in text
    assert text.endswith("Provenance: not in the store.\n")


@pytest.mark.parametrize("name", [*HOSTILE, "[x](http://e)", "# heading", "`code`", "__init__", "a\\|b"])
def test_hostile_names_stay_text_in_a_summary(name: str) -> None:
    results = [make_result({name: name}), make_result({name: "b"}, state=TrialState.FAILED, failure=name)]
    text = summary(Question(name, {}, (name,), metric=name), results)
    assert "<script" not in text and "](" not in text.replace("]\\(", "")
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert len({len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table}) == 1
    assert sum(line.startswith("#") for line in text.splitlines()) == 1
    assert text.splitlines()[0].removeprefix("# ") == markdown_text(name)


@given(st.text())
def test_any_text_is_one_line_of_markdown_that_opens_nothing(text: str) -> None:
    safe = markdown_text(text)
    assert len(safe.splitlines()) <= 1
    bare = re.sub(r"\\.", "x", safe)
    assert not re.search(r"[<>|`*~\\]", bare) and "](" not in bare and not bare.startswith(("#", "+", "-", "="))


@pytest.mark.parametrize(
    ("text", "shown"), [("num_workers=2", "num_workers=2"), ("a|b", "a\\|b"), ("a & b", "a &amp; b")]
)
def test_names_that_do_no_harm_stay_as_they_are(text: str, shown: str) -> None:
    assert markdown_text(text) == shown


def test_values_of_several_executions_stand_side_by_side() -> None:
    told = provenance_line({"version.ray": ("2.60", "2.61"), "gpu": ("H200",), "cpu": ("x",)})
    assert told == "ray 2.60 or 2.61; x; GPU H200."
