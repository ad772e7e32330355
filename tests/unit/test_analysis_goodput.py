"""Effect of the batch size: samples per second, and progress per sample."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result

from raypar.analysis.goodput import batch_groups, common_target
from raypar.analysis.pairwise import Family
from raypar.analysis.question import Question, collect
from raypar.analysis.time_to_target import Target

TARGET = Target("accuracy", 0.9)


def trial(batch_size, rate, epochs, repeat=0, **more):
    """A trial with 1,000 samples per epoch that reaches the target in the last one."""
    made = make_result({"batch_size": batch_size, **more}, repeat, 1000 * epochs / rate, num_samples=1000 * epochs)
    reports = tuple(
        {"accuracy": 0.95 if i == epochs - 1 else 0.5, "train_time_s": 1000 / rate, "throughput_samples_per_s": rate}
        for i in range(epochs)
    )
    return replace(made, reports=reports)


def groups(*results):
    keys = tuple(dict.fromkeys(k for r in results for k in r.spec.point))
    return batch_groups(collect(Question("s", {}, keys), results, "train_time_s"), TARGET, Family())


@given(st.lists(st.tuples(st.floats(10, 1e5), st.integers(1, 9)), min_size=2, max_size=2), st.integers(1, 3))
def test_the_goodput_is_throughput_times_progress(sides, num_repeats):
    repeats = range(num_repeats)
    (group,) = groups(*(trial(b, *side, r) for b, side in zip((32, 64), sides, strict=True) for r in repeats))
    small, large = group.batches
    assert (small.batch_size, small.goodput.value) == (32, 1.0)
    assert large.throughput.value == pytest.approx(sides[1][0] / sides[0][0])
    assert large.progress.value == pytest.approx(sides[0][1] / sides[1][1])
    assert large.goodput.value == pytest.approx(large.throughput.value * large.progress.value)


def test_batch_sizes_are_compared_with_the_baselines():
    results = [trial(b, rate, 2) for b, rate in ((32, 100.0), (64, 200.0), (128, 400.0))]
    gathered = collect(Question("s", {}, ("batch_size",)), results, "train_time_s")
    (group,) = batch_groups(gathered, TARGET, Family(), {"batch_size": 64})
    assert group.base == 64
    assert [b.goodput.value for b in group.batches] == pytest.approx([0.5, 1.0, 2.0])
    (other,) = batch_groups(gathered, TARGET, Family(), {"batch_size": 7, "num_workers": 1})
    assert other.base == 32


def test_the_common_target_is_the_best_value_that_all_reached():
    results = [trial(b, rate, n) for b, rate, n in ((32, 500.0, 2), (256, 2000.0, 4))]
    question = Question("s", {}, ("batch_size",))
    assert common_target(question, collect(question, results, "train_time_s")) == Target("accuracy", 0.95)
    flat = [replace(r, reports=r.reports[-1:]) for r in results]
    assert common_target(question, collect(question, flat, "train_time_s")) is None


def test_one_shared_block_is_a_pair_only_if_there_are_no_other_trials():
    results = [trial(32, 100.0, 2, 0), trial(32, 100.0, 2, 1), trial(64, 200.0, 2, 1), trial(64, 400.0, 2, 2)]
    (group,) = groups(*results)
    assert group.batches[1].goodput.num_samples == 2
    (group,) = groups(*results[:2], results[2])
    assert group.batches[1].goodput.num_samples == 1
    assert group.batches[1].goodput.value == pytest.approx(2.0)


def test_groups_differ_only_in_their_batch():
    of_study = groups(*(trial(b, 100.0 * n, 1, num_workers=n) for b in (64, 32) for n in (1, 2)))
    assert [dict(g.rest) for g in of_study] == [{"num_workers": 1}, {"num_workers": 2}]
    assert [b.batch_size for b in of_study[0].batches] == [32, 64]
    missed = trial(64, 100.0, 1)
    missed = replace(missed, reports=({**missed.reports[0], "accuracy": 0.2},))
    assert groups(trial(32, 100.0, 1)) == groups(trial(32, 100.0, 1), missed) == ()
