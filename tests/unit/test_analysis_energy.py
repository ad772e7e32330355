"""Energy by point: its estimate, what is compared, and what limits a recommendation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from results import make_result

from raypar.analysis.analyse import Question, analyse
from raypar.analysis.candidates import Constraints
from raypar.analysis.recommend import recommend
from raypar.analysis.time_to_target import Start, Target
from raypar.errors import RayparError
from raypar.study.trial import TrialResult

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))
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


def test_a_points_energy_is_the_median_of_its_trials_with_an_interval() -> None:
    one, two = (p.energy_j for p in analyse(QUESTION, trials({1: 4000.0, 2: 5000.0})).points)
    assert (one.value, one.low, one.high) == pytest.approx((4010, 4000, 4020))
    assert two.value == pytest.approx(5012.5)


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
    assert analysis.energy_source == source
    assert [p.energy_j is not None for p in analysis.points] == [bool(source)] * 2


@pytest.mark.parametrize(
    ("joules", "front"),
    [
        ({1: 4000.0, 2: 5000.0, 4: 6000.0}, [1, 2, 4]),
        ({1: 4000.0, 2: 3000.0, 4: 3500.0}, [2, 4]),
        ({1: 4000.0, 2: 5000.0, 4: None}, [4]),  # where one point's is unknown, energy is no axis
    ],
)
def test_more_energy_for_less_time_is_on_the_front_and_more_of_both_is_not(
    joules: dict[int, float | None], front: list[int]
) -> None:
    candidates = recommend(QUESTION, trials(joules), Constraints()).candidates
    assert [c.point["num_workers"] for c in candidates if c.is_on_front] == front


def test_a_limit_on_energy_excludes_points() -> None:
    advice = recommend(QUESTION, trials({1: 4000.0, 2: 5000.0, 4: 6000.0}), Constraints(max_energy_j=5500.0))
    assert advice.chosen is not None and advice.chosen.point == {"num_workers": 2}
    assert [c.exclusion for c in advice.candidates] == ["", "", "energy above 5.50 kJ"]


def test_the_energy_to_a_target_is_that_share_of_the_trainings() -> None:
    epochs = [{"accuracy": 0.9 + 0.02 * e, "train_time_s": 10.0, "eval_time_s": 1.0} for e in range(1, 5)]
    results = [replace(r, reports=tuple(epochs)) for r in trials({1: 4000.0}, num_repeats=1)]
    limits = Constraints(target=Target("accuracy", 0.95), max_energy_j=3500.0)
    (candidate,) = recommend(QUESTION, results, limits).candidates
    assert candidate.energy_j is not None and candidate.energy_j.value == pytest.approx(3000.0)  # three of four epochs
    with pytest.raises(RayparError, match=r"--max-energy 3.50 kJ: energy is known from the first timed step on"):
        recommend(QUESTION, results, replace(limits, start=Start.LAUNCH))


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        (trials({1: None}, {}), "no trial says what energy it used"),
        (trials({1: None}, {"no_energy": "no CPU package has a counter"}), "no CPU package has a counter"),
        (trials({1: 1.0}) + trials({2: 1.0}, {"energy_of": "GPUs"}), "the energies of some trials hold"),
    ],
)
def test_a_limit_on_an_unknown_energy_is_refused_with_the_reason(results: list[TrialResult], reason: str) -> None:
    assert analyse(QUESTION, results).energy_source == ""
    with pytest.raises(RayparError, match=rf"--max-energy 50.0 J: {reason}") as error:
        recommend(QUESTION, results, Constraints(max_energy_j=50.0))
    assert error.value.hint == "leave it out, or run the study where it can be read"
