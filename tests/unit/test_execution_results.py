"""Curves over the number of workers and the final test, as an execution stores them."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.execution.best_model import FinalTest, chosen_point, last_final_test, with_final_test
from raypar.execution.results import scaling_metrics

QUESTION = Question("s", {"num_workers": 1}, ("batch_size", "num_workers"))


def test_speedup_efficiency_and_serial_fraction_are_metrics_over_the_number_of_workers():
    times = {1: 8.0, 2: 5.0, 4: 3.5}
    results = [
        make_result({"batch_size": b, "num_workers": n}, r, t * (1 + 0.01 * ((r + n) % 3)))
        for b in (32, 64)
        for n, t in times.items()
        for r in range(2)
    ]
    metrics = {(name, num_workers): value for name, value, num_workers in scaling_metrics(analyse(QUESTION, results))}
    for b in (32, 64):
        speedup, low, high = (metrics[f"scaling/speedup batch_size {b}{side}", 4] for side in ("", " low", " high"))
        assert metrics[f"scaling/efficiency batch_size {b}", 4] == pytest.approx(speedup / 4)
        for side, of in (("", speedup), (" low", high), (" high", low)):
            fraction = metrics[f"scaling/karp_flatt batch_size {b}{side}", 4]
            assert fraction == pytest.approx((1 / of - 1 / 4) / (3 / 4))
        assert metrics[f"scaling/speedup batch_size {b}", 1] == 1
        assert (f"scaling/karp_flatt batch_size {b}", 1) not in metrics
    assert {n: metrics["scaling/ideal", n] for n in times} == {1: 1.0, 2: 2.0, 4: 4.0}


def test_without_points_that_differ_in_their_workers_alone_there_is_no_serial_fraction():
    results = [make_result({"batch_size": b}, 0) for b in (32, 64)]
    question = Question("s", {"batch_size": 32}, ("batch_size",))
    names = {name for name, _, _ in scaling_metrics(analyse(question, results))}
    assert "scaling/speedup batch_size 64" in names
    assert not any("karp_flatt" in name or "ideal" in name for name in names)


# ---- the point that the validation set chooses, and the test set's word on it

FINAL = FinalTest({"lr": 2.0}, "accuracy", ({"loss": 0.5, "accuracy": 0.8}, {"loss": 0.4, "accuracy": 0.9}))


def analysis_of(mode, **accuracies):
    results = [
        make_result({"lr": float(name[1:])}, repeat, accuracy=value)
        for name, values in accuracies.items()
        for repeat, value in enumerate(values)
    ]
    return analyse(Question("s", {}, ("lr",), mode=mode), results)


def read(stored):
    return last_final_test(SimpleNamespace(artifact=lambda *_: stored), "s")


CHOICES = [("max", (0.5, 0.6, 0.7), 2.0), ("min", (0.5,), 1.0), ("max", (0.2,), 1.0), ("max", (), 0)]


@pytest.mark.parametrize(("mode", "second", "lr"), CHOICES)
def test_the_point_with_the_best_median_is_chosen_the_first_of_equals(mode, second, lr):
    point = chosen_point(analysis_of(mode, x1=(0.1, 0.2, 0.99), x2=second) if second else analysis_of(mode))
    assert (point and point.point) == ({"lr": lr} if lr else None)


def test_a_final_test_is_reported_from_what_was_stored_of_it():
    analysis = with_final_test(analysis_of("max", x1=(0.5,)), read(json.dumps(asdict(FINAL))))
    sentence = analysis.statements[-1]
    assert "seen once, by the 2 models" in sentence and "lr=2" in sentence and "85.0 %" in sentence
    again = replace(FINAL, look=2, metric="val_loss").sentence()
    assert "seen once" not in again and "looked at 2 times" in again and "loss 0.45" in again


UNSCORED = '{"point": {}, "metric": "f1", "scores": [{"loss": 1}], "look": 1}'


@pytest.mark.parametrize("stored", [None, "", "{", "{}", UNSCORED])
def test_where_no_final_test_is_stored_none_is_reported(stored):
    analysis = analysis_of("max", x1=(0.5,))
    assert with_final_test(analysis, read(stored)) == analysis
