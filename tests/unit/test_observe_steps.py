"""Steps and phases from the events of a script."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from raypar.observe.events import Event, EventKind
from raypar.observe.ranks import rank_of
from raypar.observe.steps import BY_BACKWARD, BY_OPTIMIZER, Observed, observed
from raypar.study.profile import BACKWARD, COMMUNICATION, DATA_WAIT, FORWARD, OPTIMIZER, OTHER


def event(kind: EventKind, start: float, end: float, key: float = 0, value: float = 0, second: float = 0) -> Event:
    return (float(kind), start, end, key, value, second)


def training(num_steps: int = 5, *, at: float = 0.0, iterator: int = 0, loss: float = 1.0) -> Iterator[Event]:
    """Yield steps of 10 s: 2 s of data, 1 s of anything else, 3 s forward, 2 s backward, 1 s optimizer, 1 s else."""
    for i in range(num_steps):
        t = at + 10 * i
        yield event(EventKind.BATCH, t, t + 2, iterator, 32, 320)
        yield event(EventKind.FORWARD, t + 3, t + 5, 0, 1)
        yield event(EventKind.BACKWARD, t + 6, t + 8, 0, loss)
        yield event(EventKind.STEP, t + 8, t + 9, 0, 1)


def observe(*events: Event, facts: dict[str, object] | None = None) -> Observed:
    found = observed(sorted(events, key=lambda e: e[2]), facts or {})
    assert found is not None
    for step in found.steps:
        assert sum(step.parts.values()) == pytest.approx(step.step_s)
    return found


def test_a_step_lasts_from_the_optimizer_s_step_to_its_next_one_and_its_parts_add_up() -> None:
    found = observe(*training(3))
    assert found.counted_by == BY_OPTIMIZER and len(found.steps) == 2
    for step in found.steps:
        assert step.step_s == 10 and (step.samples, step.tokens, step.loss) == (32, 320, 1)
        expected = {DATA_WAIT: 2, FORWARD: 3, BACKWARD: 2, OPTIMIZER: 1, OTHER: 2, COMMUNICATION: 0}
        assert {part: step.parts[part] for part in expected} == expected


def test_gradient_accumulation_is_one_step_with_the_sum_of_its_losses() -> None:
    events = [e for i, e in enumerate(training(6, loss=0.5)) if e[0] != EventKind.STEP or i // 4 % 3 == 2]
    (step,) = observe(*events).steps
    assert step.step_s == 30 and step.samples == 96 and step.loss == 1.5
    assert step.parts[FORWARD] == 9 and step.parts[OPTIMIZER] == 1


def test_of_two_optimizers_that_take_turns_the_second_ends_a_step() -> None:
    events = []
    for t in (0, 10, 20):
        for key, at in ((0, t + 1), (1, t + 6)):
            events += [event(EventKind.BACKWARD, at, at + 1, 0, 2), event(EventKind.STEP, at + 1, at + 2, key, 1)]
    found = observe(*events)
    assert [(step.start_s, step.end_s) for step in found.steps] == [(8, 18), (18, 28)]
    assert found.steps[0].parts[OPTIMIZER] == 2 and found.steps[0].loss == 4


def test_a_closure_s_passes_are_not_the_optimizer_s_time() -> None:
    events = [event(EventKind.STEP, 0, 1, 0, 1), event(EventKind.STEP, 1, 11, 0, 1)]
    events += [event(EventKind.CLOSURE, 2, 8), event(EventKind.BACKWARD, 5, 7, 0, 1.0)]
    (step,) = observe(*events).steps
    assert (step.parts[FORWARD], step.parts[BACKWARD], step.parts[OPTIMIZER]) == (3, 2, 4)


def test_a_skipped_step_counts_and_says_so() -> None:
    events = [e if e[0] != EventKind.STEP or e[2] != 19 else event(EventKind.STEP, 18, 19, 0, 0) for e in training(3)]
    found = observe(*events)
    assert [step.step_s for step in found.steps] == [10, 10] and found.num_skipped == 1


@pytest.mark.parametrize("steps", ["none", "in backward"])
def test_without_steps_of_an_optimizer_backward_passes_count(steps: str) -> None:
    events = [e for e in training(3) if e[0] != EventKind.STEP]
    if steps == "in backward":  # one for each parameter
        events += [event(EventKind.STEP, e[1] + 0.5, e[1] + 0.6, 0, 1) for e in events if e[0] == EventKind.BACKWARD]
    found = observe(*events)
    assert found.counted_by == BY_BACKWARD and [step.step_s for step in found.steps] == [10, 10]


def evaluating(at: float, iterator: int) -> list[Event]:
    batches = [event(EventKind.BATCH, at + i, at + i + 0.5, iterator, 8) for i in range(4)]
    passes = [event(EventKind.FORWARD, at + i + 0.6, at + i + 0.9, 0, 0) for i in range(4)]
    return [
        event(EventKind.ITERATOR, at, at, iterator, 1, 4),
        *batches,
        *passes,
        event(EventKind.END, at + 4, at + 4, iterator),
    ]


def test_evaluation_and_checkpoints_between_steps_are_timed_apart() -> None:
    saves = [event(EventKind.SAVE, 26, 29)]
    later = [(e[0], e[1] + 30, e[2] + 30, *e[3:]) for e in training(2)]
    found = observe(*training(2), *evaluating(20, 1), *saves, *later)
    assert found.evaluations == ((20, 26), (29, 30)) and found.saves == ((26, 29),)
    assert [step.step_s for step in found.steps] == [10, 10, 10]
    assert found.steps[1].samples == 32


def test_an_evaluation_within_an_epoch_leaves_the_epoch_s_iterator_a_training_one() -> None:
    later = [(e[0], e[1] + 25, e[2] + 25, *e[3:]) for e in training(5)]
    found = observe(*training(2), *evaluating(20, 1), *later)
    assert sum(step.samples for step in found.steps) == 6 * 32 and found.evaluations == ((20, 25),)


def test_a_model_that_is_only_set_to_evaluation_evaluates_until_it_trains_again() -> None:
    later = [(e[0], e[1] + 30, e[2] + 30, *e[3:]) for e in training(2) if e[0] != EventKind.BATCH]
    signs = [event(EventKind.EVAL, 20, 20), event(EventKind.FORWARD, 20, 29, 0, 0)]
    found = observe(*(e for e in training(2) if e[0] != EventKind.BATCH), *signs, *later)
    assert found.evaluations == ((20, 33),)


def test_a_teacher_that_runs_without_gradients_in_each_step_is_no_evaluation() -> None:
    teacher = [event(EventKind.FORWARD, 10 * i + 2.2, 10 * i + 2.8, 0, 0) for i in range(4)]
    found = observe(*training(4), *teacher)
    assert found.evaluations == () and sum(step.samples for step in found.steps) == 3 * 32


def test_batches_that_are_fetched_two_at_a_time_are_trained_on() -> None:
    events = []
    for i in range(4):
        t = 10 * i
        events += [event(EventKind.BATCH, t, t + 1, 0, 8), event(EventKind.BATCH, t + 1, t + 2, 0, 8)]
        for at in (t + 2, t + 5):
            events += [event(EventKind.FORWARD, at, at + 1, 0, 1), event(EventKind.BACKWARD, at + 1, at + 2, 0, 1)]
        events.append(event(EventKind.STEP, t + 8, t + 9, 0, 1))
    found = observe(*events)
    assert [step.samples for step in found.steps] == [16, 16, 16] and not found.evaluations


def test_waiting_for_collectives_is_communication_wherever_it_happens() -> None:
    waits = [event(EventKind.WAIT, 10 * i + at, 10 * i + at + 0.5) for i in range(3) for at in (3.5, 7, 9.2)]
    step = observe(*training(3), *waits).steps[-1]
    assert step.parts[COMMUNICATION] == pytest.approx(1.5)
    assert (step.parts[FORWARD], step.parts[BACKWARD], step.parts[OTHER]) == pytest.approx((2.5, 1.5, 1.5))


def test_exposed_communication_of_ddp_is_taken_out_of_the_backward_pass() -> None:
    of_ddp = {
        "iteration": 2,
        "avg_backward_comm_time": 1_500_000_000,
        "avg_backward_compute_comm_overlap_time": 1_000_000_000,
    }
    step = observe(*training(3), facts={"ddp": [of_ddp]}).steps[-1]
    assert (step.parts[BACKWARD], step.parts[COMMUNICATION]) == pytest.approx((1.5, 0.5))


def test_a_loss_that_was_copied_later_belongs_to_its_pass() -> None:
    events = [(*e[:4], math.nan, 0.0) if e[0] == EventKind.BACKWARD else e for e in training(3)]
    losses = [event(EventKind.LOSS, 10 * i + 6, 10 * i + 6, 0, float(i)) for i in range(2)]
    assert [step.loss for step in observe(*events, *losses).steps] == [1.0, None]


def test_a_process_that_does_not_train_has_nothing_to_observe() -> None:
    assert observed(evaluating(0, 0), {}) is None


def test_on_a_gpu_its_own_times_count_and_waiting_for_data_behind_its_work_is_hidden() -> None:
    """The host launches a step in 1 s, and waits 3 s for each batch; the GPU needs 10 s for a step."""
    events, moments = [], {}
    for i in range(5):
        host, gpu = 4.0 * i, 10.0 * i + 5
        events += [
            event(EventKind.BATCH, host, host + 3, 0, 32),
            event(EventKind.FORWARD, host + 3.1, host + 3.2, 0, 1),
        ]
        events += [
            event(EventKind.BACKWARD, host + 3.3, host + 3.4, 0, 1.0),
            event(EventKind.STEP, host + 3.5, host + 3.6, 0, 1),
        ]
        moments |= {
            host + 3.1: gpu,
            host + 3.3: gpu + 4,
            host + 3.4: gpu + 8,
            host + 3.5: gpu + 8,
            host + 3.6: gpu + 10,
        }
    found = observe(*events, *(event(EventKind.DEVICE, at, moment) for at, moment in moments.items()))
    for step in found.steps:
        assert step.step_s == 10 and step.parts[DATA_WAIT] == 0
        assert (step.parts[FORWARD], step.parts[BACKWARD], step.parts[OPTIMIZER]) == (4, 4, 2)


def test_a_gpu_that_idles_waits_for_data() -> None:
    """The GPU needs 1 s for a step, and the host waits 3 s for each batch."""
    events, moments = [], {}
    for i in range(5):
        host = 4.0 * i
        events += [
            event(EventKind.BATCH, host, host + 3, 0, 32),
            event(EventKind.FORWARD, host + 3.1, host + 3.2, 0, 1),
        ]
        events += [
            event(EventKind.BACKWARD, host + 3.3, host + 3.4, 0, 1.0),
            event(EventKind.STEP, host + 3.5, host + 3.6, 0, 1),
        ]
        moments |= {host + at: host + at for at in (3.1, 3.3, 3.4, 3.5)} | {host + 3.6: host + 3.8}
    found = observe(*events, *(event(EventKind.DEVICE, at, moment) for at, moment in moments.items()))
    for step in found.steps:
        assert step.step_s == pytest.approx(4) and step.parts[DATA_WAIT] == pytest.approx(3)


def test_both_loaders_of_a_step_are_trained_on() -> None:
    events = []
    for i in range(4):
        t = 10 * i
        events += [event(EventKind.BATCH, t, t + 1, 0, 8), event(EventKind.BATCH, t + 1, t + 3, 1, 4)]
        events += [event(EventKind.FORWARD, t + 4, t + 5, 0, 1), event(EventKind.BACKWARD, t + 5, t + 7, 0, 1)]
        events.append(event(EventKind.STEP, t + 8, t + 9, 0, 1))
    found = observe(*events)
    assert found.trained_on == {0, 1} and not found.evaluations
    assert [(step.samples, step.parts[DATA_WAIT]) for step in found.steps] == [(12, 3)] * 3


def test_an_evaluation_that_records_gradients_is_one() -> None:
    evaluation = [(*e[:4], 1.0, 0.0) if e[0] == EventKind.FORWARD else e for e in evaluating(20, 1)]
    later = [(e[0], e[1] + 30, e[2] + 30, *e[3:]) for e in training(2)]
    found = observe(*training(2), *evaluation, *later)
    assert found.trained_on == {0} and found.evaluations == ((20, 30),)


def test_batches_before_the_training_whose_passes_are_unknown_are_evaluated() -> None:
    """Lightning checks two batches of the evaluation, and no module is called by itself."""
    first = [event(EventKind.EVAL, 0, 0), *(event(EventKind.BATCH, i, i + 0.5, 1, 8) for i in range(2))]
    later = [(e[0], e[1] + 10, e[2] + 10, *e[3:]) for e in training(3) if e[0] != EventKind.FORWARD]
    found = observe(*first, *later)
    assert found.trained_on == {0} and found.evaluations == ((0, 10),)


def test_a_loader_that_fetches_ahead_and_has_one_batch_is_trained_on() -> None:
    events = []
    for i in range(3):
        t = 10 * i
        events += [event(EventKind.BATCH, t, t + 1, i, 8), event(EventKind.END, t + 1, t + 1, i)]
        events += [event(EventKind.BACKWARD, t + 5, t + 7, 0, 1), event(EventKind.STEP, t + 8, t + 9, 0, 1)]
    assert observe(*events).trained_on == {0, 1, 2}


def test_steps_of_optimizers_that_follow_each_other_all_count() -> None:
    """Each fold of a cross-validation has its own optimizer, and one of the folds has two that take turns."""
    events: list[Event] = []
    for fold in range(3):
        for e in training(4, at=40 * fold):
            events.append((*e[:3], fold, *e[4:]) if e[0] == EventKind.STEP else e)
    events += [event(EventKind.STEP, t + 9.2, t + 9.5, 9, 1) for t in range(80, 120, 10)]
    digests = [
        event(EventKind.PARAMETERS, at, at, key, value) for at, key, value in ((9, 0, 1), (59, 1, 2), (59, 7, 3))
    ]
    found = observe(*events, *digests)
    assert len(found.steps) == 11 and found.steps[-1].end_s == 119.5
    assert found.parameters == ((1, 1), (6, 2))


def test_only_passes_that_synchronise_gradients_communicate() -> None:
    """Of four passes of a step, DDP synchronises the gradients of the last one; its first iterations were slow."""
    events = []
    for i in range(10):
        for k in range(4):
            t = 20 * i + 4 * k
            events += [event(EventKind.FORWARD, t, t + 1, 0, 1), event(EventKind.BACKWARD, t + 1, t + 3, 0, 1)]
        events.append(event(EventKind.STEP, 20 * i + 17, 20 * i + 18, 0, 1))
    before = {"iteration": 3, "avg_backward_comm_time": 9e9, "avg_backward_compute_comm_overlap_time": 0}
    mean_s = (9 * 3 + 1 * 6) / 9
    of_ddp = {"iteration": 9, "avg_backward_comm_time": mean_s * 1e9, "avg_backward_compute_comm_overlap_time": 2e9 / 9}
    before["avg_backward_compute_comm_overlap_time"] = 2e9 / 3
    for step in observe(*events, facts={"ddp": [{**of_ddp, "before": before}]}).steps:
        assert step.parts[COMMUNICATION] == pytest.approx(1) and step.parts[BACKWARD] == pytest.approx(7)


def test_work_that_the_gpu_has_not_reached_is_left_out() -> None:
    """The GPU is 100 s behind the host, and the recording ends before it gets to the last two steps."""
    moments = [at for e in training(3) if e[0] != EventKind.BATCH for at in e[1:3]]
    found = observe(*training(5), *(event(EventKind.DEVICE, at, at + 100) for at in moments))
    assert [(step.start_s, step.end_s) for step in found.steps] == [(109, 119), (119, 129)]


def test_reads_and_copies_belong_to_the_step_before_which_they_happen() -> None:
    counts = [event(EventKind.COUNTS, at, at, 0, reads, 2) for at, reads in ((19, 1), (29, 500))]
    found = observe(*training(3), *counts)
    assert [(step.num_reads, step.num_blocking_copies) for step in found.steps] == [(1, 2), (500, 2)]


@pytest.mark.parametrize("has_ended", [False, True])
def test_samples_that_a_loader_fetches_ahead_are_not_those_of_a_step(has_ended: bool) -> None:
    """The script stops in the middle of an epoch, or at its end."""
    events = [event(EventKind.BATCH, -5, -4, 0, 8, 80)]
    for t in range(0, 100, 10):
        is_end = has_ended and t == 90
        events.append(event(EventKind.END, t, t + 1) if is_end else event(EventKind.BATCH, t, t + 1, 0, 8, 80))
        events += [event(EventKind.BACKWARD, t + 4, t + 6, 0, 1), event(EventKind.STEP, t + 8, t + 9, 0, 1)]
    rank = rank_of(observe(*events), events, {}).rank
    assert (rank.num_steps, rank.samples_per_step, rank.tokens_per_step) == (10, 8, 80)


def test_reads_of_an_evaluation_are_not_those_of_a_step() -> None:
    events = [*training(20), *(event(EventKind.COUNTS, 10 * i + 9, 10 * i + 9, 0, 1) for i in range(20))]
    events.append(event(EventKind.COUNTS, 109, 109, 0, 500))
    assert rank_of(observe(*events), sorted(events, key=lambda e: e[2]), {}).rank.num_item_calls == 1


def test_profiled_steps_count_for_operations_and_not_for_times() -> None:
    """Each of the 20 steps ends at 9, 19, ...; the profiler runs from the end of the tenth on, for four steps."""
    slow = [(e[0], e[1] + 30 * (e[1] > 99), e[2] + 30 * (e[2] > 99), *e[3:]) for e in training(20)]
    facts = {"profiled": [99.0, 170.0], "operations": [["aten::mm", 12.0]]}
    rank = rank_of(observe(*slow), slow, facts).rank
    assert rank.breakdown.step_s == 10 and rank.num_steps == 20
    assert rank.operations == (("aten::mm", 3.0),)


def test_only_an_evaluation_has_a_loader() -> None:
    evaluation = [e for e in evaluating(20, 1) if e[0] != EventKind.BATCH or e[1] == 20]  # a single batch
    later = [(e[0], e[1] + 30, e[2] + 30, *e[3:]) for e in training(2)]
    events = [e for e in (*training(2), *later) if e[0] != EventKind.BATCH]
    found = observe(*events, *evaluation)
    assert not found.trained_on and found.evaluations == ((20, 33),)


def test_one_backward_pass_after_all_batches_trains_on_them() -> None:
    events = []
    for i in range(3):
        t = 20 * i
        for k in range(4):
            events += [event(EventKind.BATCH, t + 2 * k, t + 2 * k + 1, i, 8)]
            events += [event(EventKind.FORWARD, t + 2 * k + 1, t + 2 * k + 2, 0, 1)]
        events += [event(EventKind.END, t + 8, t + 9, i), event(EventKind.BACKWARD, t + 10, t + 14, 0, 1)]
        events.append(event(EventKind.STEP, t + 15, t + 16, 0, 1))
    found = observe(*events)
    assert found.trained_on == {0, 1, 2} and [step.samples for step in found.steps] == [32, 32]


def test_a_step_that_calls_its_base_class_is_one_step() -> None:
    inner = [event(EventKind.STEP, 10 * i + 8.2, 10 * i + 8.8, 0, 1) for i in range(4)]
    found = observe(*training(4), *inner)
    assert [step.step_s for step in found.steps] == [10, 10, 10]


def test_samples_are_unknown_if_those_of_some_batches_are() -> None:
    events = [(*e[:4], 0.0, 0.0) if e[0] == EventKind.BATCH and e[1] == 20 else e for e in training(4)]
    assert rank_of(observe(*events), sorted(events, key=lambda e: e[2]), {}).rank.samples_per_step == 0
