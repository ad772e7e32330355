"""What a report warns of, and what it doesn't."""

from __future__ import annotations

from dataclasses import replace

import pytest
from results import make_result

from raypar.analysis.analyse import Question, analyse
from raypar.analysis.checks import CHECKS, Check, Finding
from raypar.study.trial import TrialResult, TrialState

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))


def sound(num_repeats: int = 6, **more) -> list[TrialResult]:
    """Results that there is nothing to say against."""
    return [
        make_result({"num_workers": w}, r, 8.0 / w + 0.01 * ((r * 7 + w) % 5), accuracy=0.97 + 0.001 * r, **more)
        for w in (1, 2)
        for r in range(num_repeats)
    ]


def findings(results: list[TrialResult], question: Question = QUESTION) -> dict[Check, Finding]:
    return {f.check: f for f in analyse(question, results).warnings}


def test_sound_results_raise_no_warning() -> None:
    assert findings(sound()) == {}


def test_every_check_has_advice_of_its_own() -> None:
    # An enum turns members of equal value into one.
    assert len({c.value for c in Check}) == len(Check.__members__)
    assert all(c.value.endswith(".") for c in Check)
    assert len(CHECKS) == len(Check)


@pytest.mark.parametrize(("repeats", "text"), [(1, "no interval"), (2, "log-normal"), (4, "4 repeats a point: ")])
def test_few_repeats_are_told_with_what_they_give(repeats: int, text: str) -> None:
    assert text in findings(sound(repeats))[Check.FEW_REPEATS].detail


def test_five_repeats_are_enough() -> None:
    assert Check.FEW_REPEATS not in findings(sound(5))


def test_the_point_with_the_fewest_repeats_counts() -> None:
    assert "2 repeats a point at the least" in findings(sound()[:-4])[Check.FEW_REPEATS].detail


def test_trials_that_ran_other_code_than_the_latest_are_told_with_what_changed() -> None:
    def ran(model: str, started_at: float, workers: int) -> list[TrialResult]:
        code = {"model.py": model, "s.py": "py3.11:1"}
        made = [r for r in sound(started_at=started_at) if r.spec.point["num_workers"] == workers]
        return [replace(result, code=code) for result in made]

    mixed = findings([*ran("py3.11:1", 1.0, 1), *ran("py3.11:2", 2.0, 2)])[Check.OTHER_CODE]
    assert mixed.detail == "6 of 12 trials ran other code than the latest one: model.py changed in between."
    assert "--fresh" in mixed.advice
    assert findings([*ran("py3.11:2", 1.0, 1), *ran("py3.11:2", 2.0, 2)]) == {}
    assert findings([*ran("an unknown digest", 1.0, 1), *ran("py3.11:2", 2.0, 2)]) == {}


def test_trials_that_went_on_from_a_checkpoint_are_named() -> None:
    results = sound()
    results[3] = replace(results[3], environment={**results[3].environment, "resumed_at_epoch": [2.0]})
    assert findings(results)[Check.RESUMED].detail == (
        "1 of 12 trials went on from a checkpoint after a failure: num_workers=1 #4."
    )


def test_trials_that_shared_a_machine_or_the_network_with_others_are_told() -> None:
    alone = {"node": ["a"], "num_beside": 3, "num_sharing": 0}  # others ran elsewhere: nothing that it needs
    assert findings(sound(environment=alone)) == {}
    shared = findings(sound(environment={**alone, "num_sharing": 2}))[Check.SIDE_BY_SIDE].detail
    assert shared.startswith("12 of 12 trials shared a machine") and "up to 2 at a time" in shared
    spread = [
        replace(result, environment={**alone, "node": ["a", "b"]}) if result.spec.point["num_workers"] == 2 else result
        for result in sound(environment=alone)
    ]
    assert findings(spread)[Check.SIDE_BY_SIDE].detail.startswith("6 of 6 trials over several machines shared the netw")


def test_a_speedup_that_may_be_one_is_told() -> None:
    level = [make_result({"num_workers": w}, r, 4.0 + 0.3 * ((r + w) % 3)) for w in (1, 2) for r in range(6)]
    assert "1 of 1 speedup can't be told from 1: num_workers=2." in findings(level)[Check.NOT_SEPARATED].detail


def test_times_below_a_second_are_too_short() -> None:
    short = [make_result({"num_workers": w}, r, 0.5 / w) for w in (1, 2) for r in range(6)]
    assert "num_workers=2: 0.25 s" in findings(short)[Check.SHORT_TIMES].detail


@pytest.mark.parametrize("cores", [[], [[0], []]])
def test_trials_without_cores_of_their_own_are_told(cores: list[object]) -> None:
    detail = findings(sound(environment={"cores": cores}))[Check.SHARED_CORES].detail
    assert detail == "12 of 12 trials had no cores of their own."


@pytest.mark.parametrize("environment", [{}, {"cores": None}])
def test_an_unknown_environment_is_not_held_against_a_trial(environment: dict[str, object]) -> None:
    assert Check.SHARED_CORES not in findings(sound(environment=environment))


def test_accuracy_that_depends_on_the_workers_is_told() -> None:
    apart = [
        make_result({"num_workers": w}, r, 8.0 / w, accuracy=0.97 - 0.02 * w + 0.001 * r)
        for w in (1, 2)
        for r in range(3)
    ]
    detail = findings(apart)[Check.METRIC_DIFFERS].detail
    assert "95.1 % at num_workers=1, 93.1 % at num_workers=2" in detail


def test_accuracy_that_differs_no_more_than_between_repeats_is_not_told() -> None:
    noisy = [
        make_result({"num_workers": w}, r, 8.0 / w, accuracy=0.95 + 0.01 * r - 0.005 * w)
        for w in (1, 2)
        for r in range(3)
    ]
    assert Check.METRIC_DIFFERS not in findings(noisy)


def test_accuracy_of_two_wavering_repeats_proves_nothing() -> None:
    scores = {1: (0.95, 0.96), 2: (0.935, 0.93)}  # further apart than either spreads, but by 1.5 and by 3 points
    results = [
        make_result({"num_workers": w}, r, 8.0 / w, accuracy=score)
        for w, repeats in scores.items()
        for r, score in enumerate(repeats)
    ]
    assert Check.METRIC_DIFFERS not in findings(results)


def test_accuracy_that_differs_by_rounding_alone_is_not_told() -> None:
    same = [make_result({"num_workers": w}, r, 8.0 / w, accuracy=0.95 + 1e-5 * w) for w in (1, 2) for r in range(3)]
    assert Check.METRIC_DIFFERS not in findings(same)


def test_accuracy_between_batch_sizes_is_not_what_the_workers_do() -> None:
    question = Question("s", {}, ("batch_size", "num_workers"))
    results = [
        make_result({"batch_size": b, "num_workers": 1}, r, accuracy=0.97 - b / 1000)
        for b in (32, 512)
        for r in range(3)
    ]
    assert Check.METRIC_DIFFERS not in findings(results, question)


def test_failed_trials_are_told_with_the_first_cause() -> None:
    failed = make_result({"num_workers": 2}, 9, state=TrialState.FAILED, failure="CUDA out of memory\nmore\nlines")
    detail = findings([*sound(), failed])[Check.FAILED_TRIALS].detail
    assert detail == "1 trial failed; num_workers=2 #10: CUDA out of memory"


def test_a_baseline_that_never_finished_is_told() -> None:
    lonely = [r for r in sound() if r.spec.point["num_workers"] == 2]
    assert "num_workers=1" in findings(lonely)[Check.BASELINE_MISSING].detail
    assert Check.BASELINE_MISSING not in findings(lonely, Question("s", {}, ("num_workers",)))


def test_times_of_whole_trials_are_told_to_hold_the_start() -> None:
    loop = [make_result({"num_workers": w}, r, None, wall_s=9.0 / w + 0.01 * r) for w in (1, 2) for r in range(6)]
    assert "process start" in findings(loop)[Check.INCLUDES_START_UP].detail


@pytest.mark.parametrize(
    ("threads", "cores", "told"),
    [
        ([2], [[0]], "2 torch threads on 1 core"),
        ([1, 4], [[0], [1, 2]], "4 torch threads on 2 cores"),
        ([2], [[0, 1]], None),
        ([2], [[]], None),  # not pinned: they may be on cores of their own
        (None, None, None),
    ],
)
def test_more_threads_than_cores_are_told(threads: object, cores: object, told: str | None) -> None:
    environment = {"num_threads": threads, "cores": cores, "foreign_cpu_share": [0.0]}
    found = findings(sound(environment=environment)).get(Check.TOO_MANY_THREADS)
    assert (found.detail if found else None) is None if told is None else found is not None and told in found.detail


def on(**lists: object) -> dict[str, object]:
    return {"cores": [[0]], "foreign_cpu_share": [0.0], **lists}


def alike(*nodes: str, model: str = "EPYC 1", cores: int = 8) -> dict[str, object]:
    return {"node": nodes, "cpu_model": [model] * len(nodes), "num_node_cores": [cores] * len(nodes)}


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"cpu_model": ["EPYC 1"]}, {"cpu_model": ["EPYC 2"]}, "different CPU models: EPYC 1, EPYC 2."),
        ({"device_name": ["A100"]}, {"device_name": ["A100", "H100"]}, "different devices: A100, H100."),
        ({"node": ["a"]}, {"node": ["b", "b"]}, "different nodes: a, b."),
        ({"node": ["a"]}, {"node": ["a", "b"]}, None),  # more workers than a node holds
        (alike("a"), alike("b", "b"), None),
        (alike("a"), alike("b", cores=64), "nodes of different sizes: a (8 cores), b (64 cores)."),
        (alike("a"), alike("b", model="EPYC 2"), "different CPU models: EPYC 1, EPYC 2."),
        (alike("a"), {"node": ["b"], "cpu_model": ["EPYC 1"]}, "different nodes: a, b."),  # of what size?
        ({"cpu_model": ["EPYC 1"]}, {"cpu_model": None}, None),
        ({"cpu_model": ["EPYC 1"]}, {}, None),
    ],
)
def test_trials_on_different_hardware_are_told(
    first: dict[str, object], second: dict[str, object], told: str | None
) -> None:
    results = [
        make_result(r.spec.point, r.spec.repeat, r.train_time_s, environment=on(**(first if i < 6 else second)))
        for i, r in enumerate(sound())
    ]
    found = findings(results).get(Check.MIXED_HARDWARE)
    assert (found.detail if found else None) == (f"Trials ran on {told}" if told else None)


def test_devices_that_were_swept_may_have_names_of_their_own() -> None:
    results = [
        make_result({"device": device}, r, 8.0, environment=on(device_name=[name]))
        for device, name in (("cpu", "cpu"), ("cuda", "H100"))
        for r in range(6)
    ]
    assert Check.MIXED_HARDWARE not in findings(results, Question("s", {"device": "cpu"}, ("device",)))


def uneven(key: str, base: int, other: int) -> list[TrialResult]:
    return [
        make_result({key: value}, r, 8.0 + 0.1 * r, num_samples=samples)
        for value, samples in ((base, 60_000), (other, 57_344))
        for r in range(6)
    ]


def test_points_that_trained_on_fewer_samples_than_their_baseline_are_told() -> None:
    question = Question("s", {"batch_size": 32}, ("batch_size",))
    detail = findings(uneven("batch_size", 32, 8192), question)[Check.UNEQUAL_WORK].detail
    assert detail.startswith("1 point trained on other numbers of samples than the baseline: ")
    assert "batch_size=8192 (57,344 against 60,000)" in detail


def test_work_that_the_study_varies_is_not_called_unequal() -> None:
    question = Question("s", {"epochs": 1}, ("epochs",))
    assert Check.UNEQUAL_WORK not in findings(uneven("epochs", 1, 2), question)
