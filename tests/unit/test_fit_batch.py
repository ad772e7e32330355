"""Largest batch that fits: sizes that are run, compared with an exhaustive search."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from results import stored_conditions

from raypar import Study, Workload, grid
from raypar.execution.fit_batch import BATCH, TOLERANCE, Attempted, BatchSearch, largest_of, next_batch
from raypar.predict.memory import NotPredictable
from raypar.predict.shapes import predict_memory
from raypar.reporting.fit_batch import answer_line
from raypar.study.options import ON_CPU
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialState
from raypar.workloads import digits

WEIGHTS = 30e6


def search(peak_of, limit, start, knows_limit=True, **rules):
    tried = {}
    while (size := next_batch(tried, start, limit_bytes=limit if knows_limit else None, **rules)) is not None:
        assert size not in tried
        fits = peak_of(size) <= limit
        tried[size] = Attempted(fits, peak_of(size) if fits else None)
    return max((size for size, each in tried.items() if each.fits), default=None), tried


def line(size):
    return WEIGHTS + 4e4 * size


def with_floor(size):
    """The optimizer's own peak hides that of small batches."""
    return max(60e6, line(size))


@pytest.mark.parametrize("peak_of", [line, with_floor])
@pytest.mark.parametrize("knows_limit", [True, False])
@pytest.mark.parametrize("answer", [70, 384, 1000, 5003])
@pytest.mark.parametrize("factor", [1 / 8, 1 / 5, 1 / 2, 1, 3, 8])
def test_the_answer_is_close_to_the_largest_within_eight_trials(peak_of, knows_limit, answer, factor):
    limit = peak_of(answer)
    largest = max(size for size in range(1, 6000) if peak_of(size) <= limit)
    found, tried = search(peak_of, limit, round(largest * factor), knows_limit)
    assert (1 - TOLERANCE) * largest <= found <= largest
    assert len(tried) <= 8


def test_sizes_are_multiples_of_the_unit_and_within_the_training_set():
    found, tried = search(line, line(1000), 16, unit=4)
    assert 875 <= found <= 1000 and all(size % 4 == 0 for size in tried)
    assert search(line, line(1000), 16, most=300)[0] == 300


def test_nothing_fits():
    found, tried = search(line, WEIGHTS, 8)
    assert found is None and sorted(tried) == [1, 2, 4, 8]


@st.composite
def problems(draw):
    """Peaks by size, the largest size that fits, and settings of the search."""
    floor, slope = draw(st.floats(0, 1e8)), draw(st.floats(1e3, 1e6))
    largest = draw(st.integers(1, 5000))
    unit = draw(st.sampled_from([1, 1, 4]))

    def peak_of(size):
        return max(floor, WEIGHTS + slope * size)

    limit = max(floor, WEIGHTS + slope * (largest + 0.5))
    while peak_of(largest + 1) <= limit:  # all of these have the optimizer's peak
        largest += 1
    return peak_of, limit, largest, {"unit": unit, "knows_limit": draw(st.booleans())}


@given(problems(), st.integers(1, 8192), st.integers(1, 20_000))
def test_any_prediction_leads_to_a_measured_answer(problem, start, expected):
    peak_of, limit, largest, rules = problem
    found, tried = search(peak_of, limit, start, expected=expected, **rules)
    blind, tried_blindly = search(peak_of, limit, start, **rules)
    for size in (found, blind):
        if largest < rules["unit"]:
            assert size is None
        else:
            assert (1 - TOLERANCE) * largest - rules["unit"] <= size <= largest
    assert found is None or tried[found].fits
    # Two trials for the prediction; then its traces in the interval, or a bisection from it to the first size.
    num_sizes = 1 + abs(math.log(start / expected)) / -math.log(1 - TOLERANCE)
    assert len(tried) <= len(tried_blindly) + 2 + max(2, math.ceil(math.log2(num_sizes)))


@given(problems(), st.integers(1, 8192), st.floats(0.9, 1.1))
def test_two_trials_confirm_a_good_prediction(problem, start, error):
    peak_of, limit, largest, rules = problem
    assume(largest >= 32 * rules["unit"])
    expected = round(largest * error)
    found, tried = search(peak_of, limit, start, expected=expected, **rules)
    assert len(tried) <= 2 and (1 - TOLERANCE) * largest - rules["unit"] <= found <= largest


def test_a_good_prediction_saves_trials():
    cases = [(answer, start) for answer in (70, 1000, 5003) for start in (1, 8, 64, 512, 4096)]
    blind = sum(len(search(line, line(answer), start)[1]) for answer, start in cases)
    predicted = sum(len(search(line, line(answer), start, expected=answer)[1]) for answer, start in cases)
    assert predicted == 2 * len(cases) < blind / 2


def test_the_largest_of_predicted_peaks():
    for peak_of in (line, with_floor):
        for answer in (1, 70, 384, 5003):
            limit = peak_of(answer)
            largest = max(size for size in range(1, 6000) if peak_of(size) <= limit)
            found = largest_of(peak_of, 16, limit)
            assert (1 - TOLERANCE) * largest <= found <= largest
            assert peak_of is with_floor or found >= largest - 1
    assert largest_of(line, 8, WEIGHTS) is None
    assert largest_of(line, 8, line(1000), most=300) == 300


WORKLOAD = Workload(name="w", model=lambda config: None, data=lambda config: None, num_train_samples=100)


def results_of(search, states, lr=0.1):
    """Trials at a learning rate with these batch sizes, in the states that they ended in."""
    kinds = {TrialState.DOES_NOT_FIT: FailureKind.DOES_NOT_FIT, TrialState.FAILED: FailureKind.ERROR}
    return [
        TrialResult(
            search.study.trial({"lr": lr, "per_worker_batch_size": size}, 0),
            state,
            conditions=stored_conditions({"peak_memory_bytes": [1e7 * size]}),
            failure=Failure(kinds[state], "needs 2.00 GB of memory on a worker") if state in kinds else None,
        )
        for size, state in states.items()
    ]


@pytest.mark.parametrize(
    ("states", "line"),
    [
        ({}, "Not finished for 1GB on 1 worker at lr=0.1: so far no tested batch fits (0 trials)"),
        ({16: TrialState.FINISHED}, "Not finished for 1GB on 1 worker at lr=0.1: so far 16 fits (1 trial)"),
        (
            {16: TrialState.FINISHED, 32: TrialState.FAILED},
            "No answer for 1GB on 1 worker at lr=0.1: a trial failed: needs 2.00 GB of memory on a worker",
        ),
        (
            {64: TrialState.FINISHED, 70: TrialState.DOES_NOT_FIT},
            "per_worker_batch_size 64 is the largest that fits in 1GB on 1 worker at lr=0.1: peak 640 MB; "
            "70 needs 2.00 GB of memory on a worker (2 trials)",
        ),
        (
            {16: TrialState.FINISHED, 100: TrialState.FINISHED},
            "per_worker_batch_size 100 is the largest that fits in 1GB on 1 worker at lr=0.1: peak 1.00 GB; "
            "the training set allows no larger one (2 trials)",
        ),
        (
            {1: TrialState.DOES_NOT_FIT},
            "No batch fits in 1GB on 1 worker at lr=0.1: 1 needs 2.00 GB of memory on a worker (1 trial)",
        ),
    ],
)
def test_only_a_finished_search_has_an_answer(states, line):
    study = Study(workload=WORKLOAD, name="s", space={"lr": grid(0.1, 0.2), "batch_size": grid(16, 32)})
    search = BatchSearch.of(study, "1GB", 16)
    one, other = search.answers(results_of(search, states))
    assert answer_line(one, "1GB") == line
    assert one.is_final is ("ot finished" not in line and "No answer" not in line)
    assert (other.num_trials, other.is_final) == (0, False)  # of another point


def first_trials(search):
    return [spec.config[BATCH] for spec in search.first(search.study, (), ON_CPU)]


def test_the_first_batch_is_the_predicted_one():
    study = Study(workload=digits, name="s", space={"hidden_size": grid(64, 512), "batch_size": grid(16, 32)})
    search = BatchSearch.of(study, "6MB", None)
    assert first_trials(search) == [16, 16]
    (small, large), limit = first_trials(search.expecting()), 6e6
    assert small > large > 16
    for size, fits in ((large, True), (round(large / (1 - TOLERANCE)) + 1, False)):
        config = search.study.trial({"hidden_size": 512, BATCH: size}, 0).config
        assert (predict_memory(digits, config).total <= limit) is fits


@pytest.mark.parametrize("problem", [NotPredictable("x"), ModuleNotFoundError("torch"), ValueError("of the user's")])
def test_without_a_prediction_the_first_batch_is_the_smallest(problem, monkeypatch):
    def fails(*args):
        raise problem

    monkeypatch.setattr("raypar.predict.shapes.predict_memory", fails)
    study = Study(workload=digits, name="s", space={"batch_size": grid(16, 32)})
    assert first_trials(BatchSearch.of(study, "6MB", None).expecting()) == [16]
