"""Energy by point: what is compared, what limits a recommendation, and what the reports show of it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
from results import make_result
from rich.console import Console

from raypar.analysis.analyse import Question, analyse
from raypar.analysis.candidates import Constraints
from raypar.analysis.points import energy_source
from raypar.analysis.question import collect
from raypar.analysis.recommend import Recommendation, recommend
from raypar.analysis.time_to_target import Start, Target
from raypar.errors import RayparError
from raypar.report.console import print_report
from raypar.report.export import markdown_of
from raypar.report.html import Origin, html_report
from raypar.report.recommend import print_recommendation
from raypar.study.trial import TrialResult

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))
EXACTLY = r"5\.01 kJ \[5\.00, 5\.0[23]\]"
PACKAGES = {"energy_of": "CPU packages"}


def trials(
    joules: Mapping[int, float | None], environment: Mapping[str, object] = PACKAGES, num_repeats: int = 6
) -> list[TrialResult]:
    """Twice the workers train in half the time."""
    return [
        replace(
            make_result({"num_workers": w}, r, 40.0 / w * (1 + 0.002 * r), environment={"cores": [[0]], **environment}),
            energy_j=j and j * (1 + 0.001 * r),
        )
        for w, j in joules.items()
        for r in range(num_repeats)
    ]


def printed(results: list[TrialResult]) -> str:
    """The report and the recommendation."""
    console = Console(file=io.StringIO(), width=160, record=True)
    print_report(analyse(QUESTION, results), console)
    print_recommendation(console, recommend(QUESTION, results, Constraints()))
    return console.export_text()


def on_front(found: Recommendation) -> list[object]:
    return [c.point["num_workers"] for c in found.candidates if c.is_on_front]


def test_a_points_energy_is_the_median_of_its_trials_with_an_interval() -> None:
    analysis = analyse(QUESTION, trials({1: 4000.0, 2: 5000.0}))
    energies = [p.energy_j for p in analysis.points]
    assert [e and round(e.value) for e in energies] == [4010, 5012]
    assert energies[0] and energies[0].low == pytest.approx(4000) and energies[0].high == pytest.approx(4020)
    assert analysis.energy_source == "CPU packages"


@pytest.mark.parametrize(
    ("first", "second", "source"),
    [
        ("CPU packages", "CPU packages and GPUs", "CPU packages and GPUs"),  # a CPU's trials have no GPUs to count
        ("GPUs", "GPUs", "GPUs"),
        ("CPU packages", "GPUs", ""),
        ("CPU packages and GPUs", "GPUs", ""),
    ],
)
def test_energies_are_compared_where_they_are_of_the_same_parts(first: str, second: str, source: str) -> None:
    results = [*trials({1: 4000.0}, {"energy_of": first}), *trials({2: 5000.0}, {"energy_of": second})]
    analysis = analyse(QUESTION, results)
    assert analysis.energy_source == energy_source(collect(QUESTION, results, "train_time_s")) == source
    assert [p.energy_j is not None for p in analysis.points] == [bool(source)] * 2


def test_results_without_an_energy_show_none_anywhere() -> None:
    results = trials({1: None, 2: None}, {})
    analysis = analyse(QUESTION, results)
    assert analysis.energy_source == ""
    assert "nergy" not in printed(results) + markdown_of(analysis, {})


def test_every_report_shows_what_energies_there_are_and_of_what() -> None:
    results = trials({1: 4000.0, 2: 5000.0, 4: None})
    analysis = analyse(QUESTION, results)
    report, _, recommendation = printed(results).partition("Study mnist")
    assert re.search(r"^ +1 .* 4\.01 kJ", report, re.MULTILINE)
    assert "energy: of CPU packages in that time." in report
    assert re.search(r"num_workers=2 .* 5\.01 kJ", recommendation)
    assert "Pareto front of time and accuracy:" in recommendation
    assert "Energy: of CPU packages in the time shown; a package's is that of all that runs on it" in recommendation
    assert "energy: of CPU packages" in markdown_of(analysis, {}) and re.search(EXACTLY, markdown_of(analysis, {}))
    page = html_report(analysis, results, Origin({}, "", ""))
    assert re.search(EXACTLY, page) and "energy: of CPU packages in that time." in page


def test_energy_is_an_axis_where_all_points_have_one() -> None:
    assert "Pareto front of time, accuracy and energy:" in printed(trials({1: 4000.0, 2: 5000.0}))


def test_more_energy_for_less_time_is_on_the_front_and_more_of_both_is_not() -> None:
    assert on_front(recommend(QUESTION, trials({1: 4000.0, 2: 5000.0, 4: 6000.0}), Constraints())) == [1, 2, 4]
    assert on_front(recommend(QUESTION, trials({1: 4000.0, 2: 3000.0, 4: 3500.0}), Constraints())) == [2, 4]
    # Where one point's is unknown, energy is no axis.
    assert on_front(recommend(QUESTION, trials({1: 4000.0, 2: 5000.0, 4: None}), Constraints())) == [4]


def test_a_limit_on_energy_leaves_points_out() -> None:
    found = recommend(QUESTION, trials({1: 4000.0, 2: 5000.0, 4: 6000.0}), Constraints(max_energy_j=5500.0))
    assert found.chosen is not None and found.chosen.point == {"num_workers": 2}
    assert [c.exclusion for c in found.candidates] == ["", "", "energy above 5.50 kJ"]


def test_the_energy_to_a_target_is_that_share_of_the_trainings() -> None:
    results = [
        replace(
            r,
            reports=tuple(
                {"epoch": e, "accuracy": 0.9 + 0.02 * e, "train_time_s": 10.0, "eval_time_s": 1.0} for e in range(1, 5)
            ),
        )
        for r in trials({1: 4000.0}, num_repeats=1)
    ]
    asked = Constraints(target=Target("accuracy", 0.95), max_energy_j=3500.0)
    (candidate,) = recommend(QUESTION, results, asked).candidates
    assert candidate.energy_j is not None and candidate.energy_j.value == pytest.approx(3000.0)  # three of four epochs
    with pytest.raises(RayparError, match=r"--max-energy 3.50 kJ: energy is known from the first timed step on"):
        recommend(QUESTION, results, replace(asked, start=Start.LAUNCH))


@pytest.mark.parametrize(
    ("results", "told"),
    [
        (trials({1: None}, {}), "no trial says what energy it used"),
        (trials({1: None}, {"no_energy": "no CPU package has a counter"}), "no CPU package has a counter"),
        (
            trials({1: 1.0}) + trials({2: 1.0}, {"energy_of": "GPUs"}),
            "the energies of some trials hold",
        ),
    ],
)
def test_a_limit_on_energy_that_nothing_tells_is_refused_with_the_reason(results: list[TrialResult], told: str) -> None:
    with pytest.raises(RayparError, match=rf"--max-energy 50.0 J: {told}") as error:
        recommend(QUESTION, results, Constraints(max_energy_j=50.0))
    assert error.value.hint == "leave it out, or run the study where it can be read"
