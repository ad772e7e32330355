"""All views of a study say the same, the answer first and in few words."""

import importlib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def contradictions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("contradictions")


def test_views_of_random_studies_do_not_contradict_each_other(contradictions):
    rng = np.random.default_rng(1)
    for _ in range(40):
        assert [*contradictions.contradictions(contradictions.random_study(rng))] == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Recommended: num_workers=2 (", "Recommended: num_workers=1 ("),
        ("2 workers are faster than 1:", "2 workers are slower than 1:"),
        ("num_workers=2 is the fastest:", "num_workers=1 is the fastest:"),
        ("Recommended: num_workers=2 (", "Leading: num_workers=2 ("),
    ],
)
def test_a_view_that_contradicts_the_others_is_noticed(contradictions, monkeypatch, before, after):
    from results import make_result

    results = [make_result({"num_workers": w}, r, 4.0 / w * (1 + r / 500)) for w in (1, 2) for r in range(6)]
    question = contradictions.Question(
        "random", {"num_workers": 1}, ("num_workers",), points=({"num_workers": 1}, {"num_workers": 2}), num_repeats=6
    )
    sample = contradictions.Sample(question, results)
    assert [*contradictions.contradictions(sample)] == []
    views_of = contradictions.views_of

    def one_is_wrong(*arguments):
        views = views_of(*arguments)
        assert before in views["verbose report"]
        return {**views, "verbose report": views["verbose report"].replace(before, after)}

    monkeypatch.setattr(contradictions, "views_of", one_is_wrong)
    assert [*contradictions.contradictions(sample)] != []


def test_the_quick_starts_report_answers_in_the_third_line_and_is_short():
    lines = (ROOT / "tests/golden/quickstart/report.txt").read_text(encoding="utf-8").splitlines()[2:]
    assert lines[2].startswith("Does a second worker pay off? ")
    assert len(lines) <= 25 and len(" ".join(lines).split()) <= 160 and max(map(len, lines)) <= 80
