"""Largest batch that fits: the order of the sizes that are run, against exhaustive search."""

import pytest

from raypar.execution.fit_batch import TOLERANCE, Attempted, next_batch

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
