"""What a report says of scaling: a section where there are laws to fit, a line where there are two worker counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from results import make_result

from raypar.analysis.laws import AMDAHL, GUSTAFSON, USL, Law
from raypar.analysis.question import Question
from raypar.analysis.scaling import WorkerGroup, groups_in
from raypar.report.sentences import MAX_SCALING_GROUPS, scaling_lines
from raypar.study.trial import TrialResult, TrialState

QUESTION = Question("study", {"num_workers": 1}, ("batch_size", "num_workers"))
NOISE = (1.0, 1.004, 0.996)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGroup.analyse, "__defaults__", (60,))


def trials(
    law: Law,
    *parameters: float,
    counts: Iterable[int] = (1, 2, 4, 8),
    batch_sizes: Iterable[int] = (64,),
    noise: tuple[float, ...] = NOISE,
    **more: Any,
) -> list[TrialResult]:
    return [
        make_result(
            {"batch_size": b, "num_workers": n},
            r,
            60 / float(law.speedup(n, *parameters)) * noise[(r + n) % len(noise)],
            **more,
        )
        for b in batch_sizes
        for n in counts
        for r in range(len(noise))
    ]


def lines_of(results: list[TrialResult]) -> list[str]:
    return [text for _, text in scaling_lines("study", groups_in(QUESTION, results))]


def line(results: list[TrialResult], start: str) -> str:
    (found,) = [text for text in lines_of(results) if text.startswith(start)]
    return found


def test_a_group_has_its_serial_fractions_and_a_sentence_for_each_law() -> None:
    lines = scaling_lines("study", groups_in(QUESTION, trials(AMDAHL, 0.06)))
    assert lines[0] == (0, "Scaling at batch_size=64 (strong: the batch is fixed), over 1 worker:")
    assert {indent for indent, _ in lines[1:]} == {2}
    starts = ["Karp–Flatt", "Amdahl's law", "Gunther's Universal Scalability Law", "Which law"]
    assert [text.startswith(start) for (_, text), start in zip(lines[1:], starts, strict=True)] == [True] * 4
    number = r"-?\d+\.\d %"
    assert re.fullmatch(
        f"Karp–Flatt serial fraction: {number} with 2 workers, {number} with 4, {number} with 8.", lines[1][1]
    )


def test_amdahls_law_says_how_much_is_serial_and_what_no_worker_count_exceeds() -> None:
    found = re.fullmatch(
        r"Amdahl's law: (\S+) % \[\S+, \S+\] serial, no more than (\S+)× \[\S+, \S+\] as fast as 1 worker "
        r"with however many\.",
        line(trials(AMDAHL, 0.06), "Amdahl"),
    )
    assert found
    assert float(found[1]) == pytest.approx(6, abs=0.3)
    assert float(found[2]) == pytest.approx(100 / float(found[1]), rel=0.02)


def test_perfect_scaling_has_no_limit_and_no_peak_that_can_be_told() -> None:
    results = trials(AMDAHL, 0.0)
    assert line(results, "Amdahl").endswith(" serial, which can't be told from none: no limit is known.")
    assert line(results, "Gunther's Universal Scalability Law: ").endswith("; no peak can be told.")


def test_the_peak_is_named_and_whether_it_was_measured() -> None:
    measured = line(trials(USL, 0.02, 0.04), "Gunther's Universal Scalability Law: ")
    assert re.search(r"; fastest with about 5 \[\d, \d\] workers \(\S+× \[\S+, \S+\]\)\.$", measured)
    beyond = line(trials(USL, 0.02, 0.002), "Gunther's Universal Scalability Law: ")
    assert re.search(r"; fastest with about 2\d \[\d\d, \d\d\] workers \(\S+× \[\S+, \S+\], extrapolated\)\.$", beyond)
    never = line(trials(USL, 0.9, 0.9), "Gunther's Universal Scalability Law: ")
    assert never.endswith("; one worker is the fastest.")


def test_the_law_that_made_the_times_predicts_left_out_counts_better() -> None:
    better = line(trials(USL, 0.02, 0.04), "Gunther's Universal Scalability Law predicts")
    assert re.search(r"better: off by \S+ % \(Amdahl\) and \S+ % \(Gunther\)\.$", better)


def test_weak_scaling_takes_gustafsons_law_and_says_what_a_worker_more_adds() -> None:
    results = trials(GUSTAFSON, 0.2, config={"per_worker_batch_size": 32, "batch_size": None})
    assert lines_of(results)[0].endswith("(weak: each worker's batch is fixed), over 1 worker:")
    found = re.fullmatch(
        r"Gustafson's law: (\S+) % \[\S+, \S+\] serial, so that each worker more adds (\d+) % of what one does alone\.",
        line(results, "Gustafson's law: "),
    )
    assert found
    assert float(found[1]) == pytest.approx(20, abs=2)
    assert float(found[2]) == pytest.approx(100 - float(found[1]), abs=0.5)


def test_three_worker_counts_are_too_few_for_two_parameters_and_that_is_said() -> None:
    lines = lines_of(trials(AMDAHL, 0.1, counts=(1, 2, 4)))
    assert lines[-1] == (
        "Gunther's Universal Scalability Law is not fitted: it takes 4 distinct worker counts or more, and there are 3."
    )
    assert len(lines) == 4


def test_few_repeats_are_said_to_give_no_interval_or_a_narrow_one() -> None:
    one, two = (lines_of(trials(AMDAHL, 0.1, noise=NOISE[:n]))[-1] for n in (1, 2))
    assert one == "The laws' parameters have no intervals: 1, 2, 4, 8 workers ran only once."
    assert "too narrow with two repeats" in two


def test_what_failed_is_left_out_and_named() -> None:
    failed = [make_result({"batch_size": 64, "num_workers": 16}, 0, state=TrialState.FAILED)]
    assert lines_of([*trials(AMDAHL, 0.1), *failed])[-1] == "Left out: 16 workers (failed)."
    assert lines_of([*trials(AMDAHL, 0.1, counts=(1, 2)), *failed])[0].endswith("Left out: 16 workers (failed).")


def test_two_worker_counts_have_their_serial_fraction_in_one_line() -> None:
    (text,) = lines_of(trials(AMDAHL, 0.1, counts=(1, 2)))
    found = re.fullmatch(r"Karp–Flatt serial fraction of 2 workers at batch_size=64: (\S+) % \[(\S+), (\S+)\]\.", text)
    assert found
    low, value, high = (float(found[i]) for i in (2, 1, 3))
    assert low < value < high
    assert value == pytest.approx(10, abs=2)


def test_many_groups_of_two_worker_counts_have_their_range_in_one_line() -> None:
    results = [
        result
        for i in range(1, MAX_SCALING_GROUPS + 2)
        for result in trials(AMDAHL, 0.1 * i, counts=(1, 2), batch_sizes=(2**i,), noise=(1.0,))
    ]
    assert lines_of(results) == [
        "Karp–Flatt serial fraction: 10.0 % (2 workers, batch_size=2) to 50.0 % (2 workers, batch_size=32)."
    ]


def test_of_many_groups_the_first_are_told_and_the_rest_counted() -> None:
    sizes = [2**i for i in range(MAX_SCALING_GROUPS + 2)]
    lines = lines_of(trials(AMDAHL, 0.1, counts=(1, 2, 4), batch_sizes=sizes, noise=(1.0,)))
    assert sum(text.startswith("Scaling at") for text in lines) == MAX_SCALING_GROUPS
    assert lines[-1] == "2 more groups of points that differ only in num_workers: `raypar fit study` shows all."


def test_a_study_of_one_worker_count_says_nothing() -> None:
    assert lines_of(trials(AMDAHL, 0.1, counts=(2,))) == []
