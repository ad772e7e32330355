"""What an execution hands to the store for curves over the number of workers."""

from __future__ import annotations

import pytest
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.execution.results import scaling_metrics

QUESTION = Question("s", {"num_workers": 1}, ("batch_size", "num_workers"))


def test_speedup_efficiency_and_serial_fraction_are_metrics_over_the_number_of_workers() -> None:
    times = {1: 8.0, 2: 5.0, 4: 3.5}
    results = [
        make_result({"batch_size": b, "num_workers": n}, r, t * (1 + 0.01 * ((r + n) % 3)))
        for b in (32, 64)
        for n, t in times.items()
        for r in range(2)
    ]
    found = {(name, num_workers): value for name, value, num_workers in scaling_metrics(analyse(QUESTION, results))}
    for b in (32, 64):
        speedup, low, high = (found[f"scaling/speedup batch_size {b}{side}", 4] for side in ("", " low", " high"))
        assert found[f"scaling/efficiency batch_size {b}", 4] == pytest.approx(speedup / 4)
        assert found[f"scaling/karp_flatt batch_size {b}", 4] == pytest.approx((1 / speedup - 1 / 4) / (3 / 4))
        assert found[f"scaling/karp_flatt batch_size {b} low", 4] == pytest.approx((1 / high - 1 / 4) / (3 / 4))
        assert found[f"scaling/karp_flatt batch_size {b} high", 4] == pytest.approx((1 / low - 1 / 4) / (3 / 4))
        assert found[f"scaling/speedup batch_size {b}", 1] == 1
        assert (f"scaling/karp_flatt batch_size {b}", 1) not in found
    assert {n: found["scaling/ideal", n] for n in times} == {1: 1.0, 2: 2.0, 4: 4.0}


def test_without_points_that_differ_in_their_workers_alone_there_is_no_serial_fraction() -> None:
    results = [make_result({"batch_size": b}, 0) for b in (32, 64)]
    question = Question("s", {"batch_size": 32}, ("batch_size",))
    names = {name for name, _, _ in scaling_metrics(analyse(question, results))}
    assert "scaling/speedup batch_size 64" in names
    assert not any("karp_flatt" in name or "ideal" in name for name in names)
