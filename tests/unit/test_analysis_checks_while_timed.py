"""What a report says of other load, heat and clocks that were measured while trials were timed."""

from __future__ import annotations

import pytest
from results import make_result

from raypar.analysis.analyse import Question, analyse
from raypar.analysis.checks import Check, Finding
from raypar.study.trial import TrialResult

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))


def trials(time_s: float = 8.0, **environment: object) -> list[TrialResult]:
    """Sound but for what was measured on their machines."""
    return [
        make_result(
            {"num_workers": w},
            r,
            time_s / w * (1 + 0.001 * ((r * 7 + w) % 5)),
            environment={"cores": [[c] for c in range(w)], **environment},
        )
        for w in (1, 2)
        for r in range(6)
    ]


def findings(results: list[TrialResult], question: Question = QUESTION) -> dict[Check, Finding]:
    return {f.check: f for f in analyse(question, results).warnings}


@pytest.mark.parametrize(
    "environment",
    [
        {},  # results of before it was measured
        {"foreign_cpu_share": None, "other_load_cores": None, "num_node_cores": None, "throttles": None},
        {"foreign_cpu_share": [None], "other_load_cores": [None], "num_node_cores": [64], "cpu_mhz_mean": [None]},
        {"foreign_cpu_share": [0.01, 0.04], "other_load_cores": [0.15, 0.15], "num_node_cores": [2, 2]},
        # 4 of 64 cores, and none of them the trial's.
        {"foreign_cpu_share": [0.02], "other_load_cores": [4.0], "num_node_cores": [64], "throttles": [0]},
        {"cpu_mhz_first": [3000.0], "cpu_mhz_mean": [2950.0], "cpu_mhz_last": [2900.0], "throttles": [0, None]},
        {"cpu_mhz_first": None, "cpu_mhz_mean": 2000.0, "cpu_mhz_last": [2000.0]},
        {"foreign_cpu_share": "?", "other_load_cores": ["?"], "num_node_cores": [0], "throttles": "?"},
    ],
)
def test_quiet_machines_and_unknown_ones_raise_no_warning(environment: dict[str, object]) -> None:
    assert findings(trials(**environment)) == {}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"foreign_cpu_share": [0.01, 0.2], "other_load_cores": [1.26, 1.26], "num_node_cores": [2, 2]},
            "it took 20 % of the time of a worker's own cores and it kept 1.3 of a machine's 2 cores busy.",
        ),
        ({"foreign_cpu_share": [0.06]}, "it took 6 % of the time of a worker's own cores."),  # an old result
        (
            {"foreign_cpu_share": [0.0], "other_load_cores": [9.0, 30.0], "num_node_cores": [16, 128]},
            "it kept 9.0 of a machine's 16 cores busy.",
        ),
        # Where processes can't be bound to cores, others' work may be on any of them.
        ({"other_load_cores": [0.6], "num_node_cores": [8]}, "it kept 0.6 of a machine's 8 cores busy."),
    ],
)
def test_work_of_others_is_told_by_its_worst_case(environment: dict[str, object], told: str) -> None:
    assert findings(trials(**environment))[Check.OTHER_LOAD].detail == (
        f"Other work ran while 12 of 12 trials were timed; at worst {told}"
    )


def test_only_the_trials_that_were_disturbed_are_counted() -> None:
    results = [*trials(foreign_cpu_share=[0.0])[:-1], trials(foreign_cpu_share=[0.5])[-1]]
    assert findings(results)[Check.OTHER_LOAD].detail.startswith("Other work ran while 1 of 12 trials were timed")


def test_a_share_of_a_trial_so_short_that_it_is_a_few_ticks_is_not_told() -> None:
    assert Check.OTHER_LOAD not in findings(trials(0.5, foreign_cpu_share=[0.08]))
    assert Check.OTHER_LOAD in findings(trials(50.0, foreign_cpu_share=[0.08]))


def test_the_worst_of_several_ranks_throttles_is_told() -> None:
    results = [*trials(throttles=[0, 0])[:-2], *trials(throttles=[3, 4])[-2:]]
    assert findings(results)[Check.THROTTLED].detail == (
        "Cores became too hot and slowed down while 2 of 12 trials were timed (up to 7 times in one)."
    )


def test_a_clock_that_falls_within_trials_is_told() -> None:
    results = trials(cpu_mhz_first=[3000.0, 3000.0], cpu_mhz_mean=[2900.0, 2900.0], cpu_mhz_last=[2950.0, 2700.0])
    assert findings(results)[Check.CLOCK_CHANGES].detail == (
        "The cores' clock was another at the end than at the beginning of 12 of 12 trials: by up to 10 % slower "
        "(num_workers=1 #1)."
    )


def test_a_clock_that_more_workers_slow_down_is_told() -> None:
    results = [*trials(cpu_mhz_mean=[3600.0])[:6], *trials(cpu_mhz_mean=[3000.0, 3100.0])[6:]]
    assert findings(results)[Check.CLOCK_CHANGES].detail == (
        "The cores' clock was another in some trials than in others: 3.05 GHz in num_workers=2 #1, 3.60 GHz in "
        "num_workers=1 #1."
    )


def scaled(key: str, speedup: float) -> list[TrialResult]:
    return [
        make_result({key: value}, r, time_s * (1 + 0.001 * ((r * 7 + value) % 5)))
        for value, time_s in ((1, 40.0), (4, 40.0 / speedup))
        for r in range(6)
    ]


def test_a_speedup_beyond_the_number_of_workers_is_told() -> None:
    detail = findings(scaled("num_workers", 4.4))[Check.MORE_THAN_LINEAR].detail
    assert detail.startswith("1 speedup larger than the number of workers accounts for, by more than chance: 4.")
    assert detail.endswith("at num_workers=4.")


@pytest.mark.parametrize("speedup", [3.2, 4.0, 4.01])
def test_a_speedup_up_to_the_number_of_workers_is_not_told(speedup: float) -> None:
    assert Check.MORE_THAN_LINEAR not in findings(scaled("num_workers", speedup))


def test_a_speedup_beyond_the_number_of_workers_by_chance_is_not_told() -> None:
    wavering = [
        make_result({"num_workers": w}, r, time_s * (1.5 if (r + w) % 2 else 1.0))
        for w, time_s in ((1, 40.0), (4, 9.0))
        for r in range(6)
    ]
    assert Check.MORE_THAN_LINEAR not in findings(wavering)


def test_a_speedup_by_anything_else_has_no_line_to_be_above() -> None:
    question = Question("s", {"batch_size": 1}, ("batch_size",))
    assert Check.MORE_THAN_LINEAR not in findings(scaled("batch_size", 9.0), question)
    both = Question("s", {"num_workers": 1, "batch_size": 64}, ("num_workers", "batch_size"))
    results = [
        make_result({"num_workers": w, "batch_size": b}, r, 40.0 / (9 if w * b > 64 else 1))
        for w, b in ((1, 64), (4, 256))
        for r in range(6)
    ]
    assert Check.MORE_THAN_LINEAR not in findings(results, both)
