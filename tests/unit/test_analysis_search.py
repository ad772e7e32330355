"""Standing of a search: leader, how sure it is, what to try next, time to a target, and confirmation by repeats."""

from dataclasses import replace

import pytest
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.effects import Importances
from raypar.analysis.question import Question, question_from_dict, question_to_dict
from raypar.analysis.search import search_lines
from raypar.reporting.points import point_columns
from raypar.reporting.view import StudyView
from raypar.study.trial import TrialState

SEARCH = Question("s", {}, ("lr", "hidden_size"), num_repeats=1, is_search=True)


def a_trial(lr, accuracy, *, order=0, hidden_size=64, epochs=1, train_time_s=2.0, **fields):
    point = {"lr": lr, "hidden_size": hidden_size}
    fields = {"accuracy": accuracy, "train_time_s": epochs * train_time_s, **fields}
    result = make_result(point, 0, **fields)
    reports = [{"accuracy": accuracy * (n + 1) / epochs, "train_time_s": train_time_s} for n in range(epochs)]
    return replace(result, started_at=1e9 + order, reports=tuple(reports))


def told(results, question=SEARCH, importances=None):
    analysis = analyse(question, results)
    return [*search_lines(analysis.question, analysis.points, importances)]


def test_trials_that_a_scheduler_stopped_show_their_last_metric():
    trials = [
        a_trial(0.1, 0.9),
        a_trial(0.2, 0.95, state=TrialState.STOPPED),
        a_trial(0.3, 0.1, state=TrialState.STOPPED),
        a_trial(0.4, 0.99, state=TrialState.DIVERGED),
    ]
    analysis = analyse(SEARCH, trials)
    assert [p.point["lr"] for p in analysis.points] == [0.2, 0.1, 0.3, 0.4]
    answer = "Leading: accuracy 95.0 % with lr=0.2 hidden_size=64 (best of 3, 2 stopped early, one trial each, unconf"
    assert analysis.verdict.answer.startswith(answer)
    columns = {column.head: column.cells for column in point_columns(analysis)}
    assert columns["time"] == ["stopped", "2.00 s", "stopped", "diverged"]
    assert columns["accuracy"] == ["95.0 %", "90.0 %", "10.0 %", "–"]
    only_stopped = analyse(SEARCH, [a_trial(lr, lr, state=TrialState.STOPPED) for lr in (0.1, 0.2)])
    assert only_stopped.verdict.answer.startswith("Leading: accuracy 20.0 % with lr=0.2")


def test_stopped_trials_of_a_grid_are_shown_and_do_not_count():
    points = [(lr, repeat) for lr in (0.1, 0.2) for repeat in (0, 1)]
    stopped = [make_result({"lr": lr}, n, accuracy=lr, state=TrialState.STOPPED) for lr, n in points]
    finished = [make_result({"lr": 0.3}, repeat, accuracy=0.15) for repeat in (0, 1)]
    analysis = analyse(Question("s", {}, ("lr",)), [*stopped, *finished])
    assert [p.metric and p.metric.value for p in analysis.points] == [None, None, 0.15]
    columns = {column.head: column.cells for column in point_columns(analysis)}
    assert columns["time"][:2] == ["stopped"] * 2 and columns["accuracy"][:2] == ["10.0 %", "20.0 %"]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0.9, 0.95, 0.5, 0.948], "1 other is within 0.5 points of it. Trial 2 of 4 found it."),
        ([0.9, 0.95, 0.947, 0.948], "2 others are within 0.5 points of it. Trial 2 of 4 found it."),
        (
            [0.9, 0.91, 0.95],
            "No other is within 0.5 points of it. Trial 3 of 3 found it: more trials may find a better one.",
        ),
    ],
)
def test_the_report_says_how_sure_the_leader_is(values, line):
    first, *_, last = told([a_trial(i / 10, value, order=i) for i, value in enumerate(values, 1)])
    assert first == line
    assert last == "To confirm the best 3: `raypar study FILE --repeat-best 3`."


def test_a_range_whose_end_is_best_should_be_widened():
    lrs = [10 ** (-n / 8) for n in range(24)]
    rising = [a_trial(lr, 0.9 - n / 100, hidden_size=n % 5) for n, lr in enumerate(lrs)]
    lines = told(rising)
    assert "The best 3 have lr from 0.56 to 1, the upper end of what was tried: widen it." in lines
    assert not any("hidden_size" in line for line in lines)
    falling = [a_trial(lr, 0.9 + n / 100, hidden_size=n % 5) for n, lr in enumerate(lrs)]
    assert "The best 3 have lr from 0.0013 to 0.0024, the lower end of what was tried: widen it." in told(falling)
    middle = [a_trial(lr, 0.9 - abs(n - 12) / 100, hidden_size=n % 5) for n, lr in enumerate(lrs)]
    assert not any("widen" in line for line in told(middle))
    assert not any("widen" in line for line in told(rising[:9]))


def test_a_hyperparameter_that_does_not_matter_should_be_fixed():
    trials = [a_trial(n / 10, 0.9 - abs(n - 5) / 100, hidden_size=n % 5) for n in range(12)]
    shares = Importances(12, {"lr": 0.97, "hidden_size": 0.03})
    assert "hidden_size hardly changes accuracy here: fix it." in told(trials, importances=shares)
    assert not any("hardly" in line for line in told(trials, importances=Importances(12, {})))


def test_a_single_trial_has_no_standing():
    assert told([a_trial(0.1, 0.9)]) == []


TARGET = replace(SEARCH, target=0.95)


def test_a_search_with_a_target_names_the_first_to_reach_it():
    trials = [
        a_trial(0.1, 0.96, epochs=3, state=TrialState.STOPPED),
        a_trial(0.2, 0.99, epochs=4),  # reaches it in the last epoch
        a_trial(0.3, 0.94, epochs=4, train_time_s=0.1),
        a_trial(0.4, 0.5, state=TrialState.STOPPED),
    ]
    analysis = analyse(TARGET, trials)
    assert [p.point["lr"] for p in analysis.points] == [0.1, 0.2, 0.3, 0.4]
    leader = "accuracy 95.0 % after 6.00 s of training with lr=0.1 hidden_size=64"
    assert analysis.verdict.answer == f"Leading: {leader} (first of 2 that reached it, 4 trials, unconfirmed)."
    assert {c.head: c.cells for c in point_columns(analysis)}["time"] == ["6.00 s", "8.00 s", "–", "stopped"]
    assert {c.head: c.cells for c in point_columns(analysis)}["n"] == ["1", "1", "1", "0 of 1"]
    first, last = told(trials, TARGET)
    assert first == "The next took 1.33× as long."
    assert last.endswith("then `raypar recommend s-best --target accuracy=0.95`.")
    assert StudyView(analysis).outlook == [first, last]
    missed = analyse(TARGET, trials[2:]).verdict.answer
    assert missed == "None of 2 trials reached accuracy 95.0 %; the closest: 94.0 % with lr=0.3 hidden_size=64."


REPEATS = Question(
    "s-best",
    {},
    ("lr",),
    points=({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}),
    num_repeats=3,
    leader={"lr": 0.1},
)
CASES = {
    "better than all": ((0.95, 0.90, 0.80), "Confirmed: lr=0.1 with accuracy 95.0 %", "better than all 2 others"),
    "equivalent to one": ((0.95, 0.949, 0.80), "Confirmed: lr=0.1", "lr=0.2 is equivalent within 0.5 points"),
    "another is better": (
        (0.95, 0.98, 0.80),
        "Refuted: lr=0.2 beats the leader of the search by +3.0 points",
        "lr=0.1",
    ),
}


@pytest.mark.parametrize(("means", "begins", "has"), CASES.values(), ids=CASES)
def test_repeats_confirm_or_refute_the_leader(means, begins, has):
    jitter = (0.0001, 0.0, -0.0001)
    trials = [
        make_result({"lr": (i + 1) / 10}, r + 1, accuracy=mean + jitter[(r + i) % 3])
        for i, mean in enumerate(means)
        for r in range(3)
    ]
    answer = analyse(question_from_dict(question_to_dict(REPEATS)), trials).verdict.answer
    assert answer.startswith(begins) and has in answer


def test_repeats_that_scatter_are_inconclusive():
    places = [(lr, r) for lr in (0.1, 0.2, 0.3) for r in (1, 2, 3)]
    trials = [make_result({"lr": lr}, r, accuracy=0.9 + (r * 7 + int(lr * 30)) % 5 / 40) for lr, r in places]
    assert analyse(REPEATS, trials).verdict.answer.startswith("Inconclusive: lr=0.1 with accuracy")
    one = [make_result({"lr": lr}, 1, accuracy=lr) for lr in (0.1, 0.2, 0.3)]
    assert analyse(REPEATS, one).verdict.answer.startswith("Not confirmed yet: lr=0.1")
    diverged = [make_result({"lr": 0.1}, r, state=TrialState.DIVERGED) for r in (1, 2, 3)] + trials[3:]
    assert analyse(REPEATS, diverged).verdict.answer.startswith(
        "Refuted: lr=0.1, the leader of the search, is diverged"
    )
