"""What a study recommends, as it is told: which point, why, the runner-up, how sure, and what would settle it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from results import make_result
from rich.console import Console
from test_analysis_recommend import NOISE, QUESTION, WILD, trials

from raypar.analysis.candidates import Constraints
from raypar.analysis.question import Question
from raypar.analysis.recommend import recommend
from raypar.analysis.time_to_target import Start, Target
from raypar.report.recommend import MAX_ROWS, print_recommendation
from raypar.study.trial import TrialResult

COMMAND = "raypar study studies/a_study_with_a_rather_long_name.py --set 'batch_size=grid(64)' --repeats 12"


def lines(
    results: Sequence[TrialResult],
    ask: Constraints | None = None,
    *,
    to_settle: str = COMMAND,
    is_command: bool = True,
    width: int = 80,
    question: Question = QUESTION,
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_recommendation(console, recommend(question, results, ask or Constraints()), to_settle, is_command=is_command)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def text(results: Sequence[TrialResult], ask: Constraints | None = None, **more: Any) -> str:
    return " ".join(" ".join(lines(results, ask, **more)).split())


def table(shown: Sequence[str]) -> list[str]:
    """The lines between the first two empty ones."""
    first, second, *_ = [i for i, line in enumerate(shown) if not line.strip()]
    return list(shown[first + 1 : second])


def test_the_choice_its_reason_the_runner_up_and_how_sure_it_is() -> None:
    told = text(trials({1: 40.0, 2: 22.0, 4: 12.0}))
    assert told.startswith("Study s: the fastest whose accuracy can't be told from the best.")
    assert "Take num_workers=4: 12.0 s [" in told
    assert "faster than the 2 others by more than chance." in told
    assert "Runner-up: num_workers=2, which takes 1.8" in told
    assert "How sure: more than 99 % that it is the fastest (Student t on logarithms" in told
    assert "3 trials each, paired by block" in told
    assert "What would settle it" not in told and "raypar study" not in told


def test_the_chosen_point_comes_first_and_is_marked() -> None:
    rows = table(lines(trials({1: 40.0, 2: 22.0, 4: 12.0}), Constraints(min_efficiency=0.88)))
    assert rows[0].split() == ["point", "n", "time", "accuracy", "eff.", "left", "out", "because"]
    assert rows[1].startswith(">   num_workers=2 ")
    assert rows[2].startswith("    num_workers=1 ")
    assert rows[3].startswith(" *  num_workers=4 ") and "efficiency below 88" in rows[3]


def test_a_tie_is_called_one_and_the_fewer_workers_are_the_reason() -> None:
    told = text(trials({1: 40.0, 2: 12.05, 4: 12.0}, NOISE))
    assert "Take num_workers=2: " in told
    assert "it is tied with num_workers=4, and it has the fewest workers of them." in told
    assert "that it takes at most 10 % longer than the fastest (bootstrap" in told


def test_a_tie_of_as_many_workers_goes_to_the_smaller_median() -> None:
    results = [
        make_result({"lr": lr}, r, time_s * NOISE[(r + i) % 6])
        for i, (lr, time_s) in enumerate(((0.1, 12.05), (0.2, 12.0)))
        for r in range(6)
    ]
    told = text(results, question=Question("s", {}, ("lr",)))
    assert "it is tied with lr=" in told and "the least time of those with as few" in told


def test_what_can_not_be_told_is_said_with_the_trials_that_would_settle_it() -> None:
    shown = lines(trials({1: 90.0, 2: 13.0, 4: 12.0}, (1.0, 1.12, 0.93)))
    told = " ".join(" ".join(shown).split())
    assert "The study can't tell which is the fastest. Best guess: num_workers=2" in told
    assert "it can't be told from num_workers=4, and it has the fewest workers of them." in told
    assert "What would settle it: about " in told and "repeats each of num_workers=2 and num_workers=4" in told
    assert "80 % power" in told
    assert "  " + COMMAND in shown  # in one line, to be copied


def test_what_to_do_instead_of_a_command_is_a_sentence() -> None:
    told = "The store does not know the study's file: raise num_repeats in it, and run it again, or something like it."
    shown = lines(trials({1: 40.0, 2: 22.0}, (1.0,)), to_settle=told, is_command=False)
    assert told in " ".join(" ".join(shown).split())
    assert max(map(len, shown)) <= 80


def test_one_trial_each_is_no_ground_to_be_sure() -> None:
    told = text(trials({1: 40.0, 2: 22.0}, (1.0,)))
    assert "How sure: not at all, by one trial each there is no telling." in told
    assert "6 repeats each, to begin with, of num_workers=2 and num_workers=1." in told


def test_more_than_a_hundred_repeats_are_not_asked_for() -> None:
    told = text(trials({1: 900.0, 2: 13.0, 4: 12.0}, WILD), to_settle="")
    assert "nothing short of more than a hundred repeats" in told


def test_where_nothing_reaches_the_target_the_best_value_is_told() -> None:
    told = text(trials({1: 40.0, 2: 22.0}), Constraints(target=Target("accuracy", 0.999)))
    assert "No point does what is asked for. The best accuracy of any evaluation was 97.0 %, at num_workers=1" in told
    assert "target not reached" in told and "0/3" in told


def test_limits_that_no_point_meets_are_not_blamed_on_the_target() -> None:
    told = text(trials({1: 40.0, 2: 22.0}), Constraints(max_time_s=1.0))
    assert "Ask for less: the table says which limit each point misses." in told
    assert told.count("longer than 1.00 s") == 2


def test_a_train_loops_target_has_no_time() -> None:
    loops = [replace(r, train_time_s=None) for r in trials({1: 40.0, 2: 22.0})]
    told = text(loops, Constraints(target=Target("accuracy", 0.9)))
    assert "Some reached the target, but their reports don't say when" in told


def test_trials_that_missed_the_target_are_not_passed_over() -> None:
    results = trials({1: 40.0, 2: 22.0})
    results[-1] = replace(results[-1], reports=({"accuracy": 0.2},))
    told = text(results, Constraints(target=Target("accuracy", 0.9)))
    assert "reached by 2 of 3" in told
    assert "Not every trial reached the target at num_workers=2: the others count as longer" in told
    assert "start-up, warm-up and evaluation are not in them" in told


def test_from_the_launch_on_is_said() -> None:
    results = [replace(r, startup_s=1.0, warmup_s=0.5, eval_time_s=0.5) for r in trials({1: 40.0, 2: 22.0})]
    told = text(results, Constraints(target=Target("accuracy", 0.9), start=Start.LAUNCH))
    assert "Take num_workers=2: 24.0 s" in told and "start-up, warm-up and evaluations are in them" in told


def test_a_batch_size_is_split_into_hardware_and_statistics() -> None:
    results = []
    for size, rate, epochs in ((32, 500.0, 2), (256, 2000.0, 4)):
        for repeat in range(3):
            made = make_result({"batch_size": size}, repeat, 1000 * epochs / rate, num_samples=1000 * epochs)
            parts = {"train_time_s": 1000 / rate, "throughput_samples_per_s": rate}
            reports = tuple({"accuracy": 0.95 if i == epochs - 1 else 0.5, **parts} for i in range(epochs))
            results.append(replace(made, reports=reports))
    told = text(results, Constraints(target=Target("accuracy", 0.9)), question=Question("s", {}, ("batch_size",)))
    assert "Against batch_size=32: samples/s × progress per sample = speed towards the target." in told
    assert "- batch_size=256: 4.00× [4.00, 4.00] × 0.50× [0.50, 0.50] = 2.00× [2.00, 2.00]" in told


def test_a_price_makes_a_cost() -> None:
    told = text(trials({1: 40.0, 2: 22.0}), question=replace(QUESTION, price_per_node_hour=36.0))
    assert ", cost 0.22" in told and "nodes × hours × price of a node-hour" in told
    assert "Pareto front of time, accuracy and cost" in told


@pytest.mark.parametrize("width", [80, 120, 40])
def test_it_fits_the_console_and_loses_no_number(width: int) -> None:
    results = trials({1: 40.0, 2: 22.0, 4: 12.0}, accuracies={1: 0.97, 2: 0.97, 4: 0.9})
    priced = replace(QUESTION, price_per_node_hour=36.0)
    shown = lines(results, Constraints(max_time_s=30.0), width=width, question=priced)
    assert max(map(len, shown)) <= width
    assert "\x1b" not in "".join(shown) and "…" not in "".join(shown)
    if width >= 80:
        assert all(line.count("[") == line.count("]") for line in table(shown))


def test_many_points_are_cut_short_and_counted() -> None:
    told = text([make_result({"lr": i / 100}, 0, 4.0 + i) for i in range(20)], question=Question("s", {}, ("lr",)))
    assert f"{20 - MAX_ROWS} more points not shown" in told


def test_it_reads_the_same_where_a_console_has_no_signs() -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)
    print_recommendation(console, recommend(QUESTION, trials({1: 40.0, 2: 22.0}), Constraints()))
    console.file.flush()
    assert isinstance(console.file, io.TextIOWrapper) and isinstance(console.file.buffer, io.BytesIO)
    assert b"which takes 1.8" in console.file.buffer.getvalue()
