"""A study's summary as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.report.export import markdown_of, provenance_line
from raypar.study.trial import TrialResult

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))


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
    assert "Does it *scale*?" in lines
    assert "Swept: num_workers. Compared with: num_workers=1. 2 points, 6 trials." in lines
    head = lines.index("| num_workers | time | speedup | efficiency | accuracy | n |")
    assert lines[head + 1] == "| ---: | ---: | ---: | ---: | ---: | ---: |"
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


def test_values_of_several_executions_stand_side_by_side() -> None:
    told = provenance_line({"version.ray": ("2.60", "2.61"), "gpu": ("H200",), "cpu": ("x",)})
    assert told == "ray 2.60 or 2.61; x; GPU H200."
