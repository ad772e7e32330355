"""Checks: findings for given evidence, and few false warnings for sound studies."""

import math
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result, make_spec, stored_conditions
from scipy.stats import kendalltau

from raypar.analysis.analyse import Question, analyse
from raypar.analysis.checks import CHECKS, trend_of
from raypar.analysis.evidence import Evidence
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import collect
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialState

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))
NO_BASELINE = replace(QUESTION, baseline={})
Results = list[TrialResult]


def sound(num_repeats=6, time_s=8.0, **more):
    """Results without a fault: `num_repeats` of one worker, then of two."""
    return [
        make_result({"num_workers": w}, r, time_s / w * (1 + 0.002 * ((r * 7 + w) % 5)), 0.97 + 0.001 * r, **more)
        for w in (1, 2)
        for r in range(num_repeats)
    ]


def on(one, two=None, time_s=8.0):
    """Sound results with these conditions; `two` for the trials of two workers."""
    environments = {1: one, 2: one if two is None else two}
    quiet = {"cores": [[0]], "foreign_cpu_share": [0.0]}
    return [
        replace(r, conditions=stored_conditions({**quiet, **environments[r.spec.placement.num_workers]}))
        for r in sound(time_s=time_s)
    ]


def scored(*by_workers, key="num_workers"):
    """Accuracies by repeat for 1, 2 … workers."""
    values = [(w, r, value) for w, values in enumerate(by_workers, 1) for r, value in enumerate(values)]
    return [make_result({"num_workers": 1, key: w}, r, 8.0 / w, accuracy=value) for w, r, value in values]


def scaled(key, speedup, wavering=0.004):
    """Speedups of 4 over 1."""
    times = [(value, r, time_s) for value, time_s in ((1, 40.0), (4, 40.0 / speedup)) for r in range(6)]
    return [make_result({key: v}, r, time_s * (1 + wavering * ((r * 7 + v) % 5) / 4)) for v, r, time_s in times]


def uneven(key, base, other, there=57_344):
    pairs = ((base, 60_000), (other, there))
    return [make_result({key: v}, r, 8.0 + 0.1 * r, num_samples=n) for v, n in pairs for r in range(6)]


def of_code(first, second):
    """Trials of one worker with a version of model.py, and later ones of two workers with another."""
    digests = {1: (first, 1.0), 2: (second, 2.0)}
    return [
        replace(r, code={"model.py": digest, "s.py": "py3.11:1"}, started_at=started_at)
        for r in sound()
        for digest, started_at in (digests[r.spec.placement.num_workers],)
    ]


def changed(index, **changes):
    results = sound()
    if (environment := changes.pop("environment", None)) is not None:
        changes["conditions"] = stored_conditions(environment)
    results[index] = replace(results[index], **changes)
    return results


def unpinned_by_request():
    return [
        replace(r, spec=replace(r.spec, config={**r.spec.config, "cpu_affinity": "off"})) for r in on({"cores": [[]]})
    ]


def nodes(*names, model="EPYC 1", cores=8):
    return {"node": names, "cpu_model": [model] * len(names), "num_node_cores": [cores] * len(names)}


NOISE = [[[80.0 + 8 * (i % 3 - 1), 2.0, 3.0] for i in range(10)], None]  # of two ranks, by block: tr(Σ), |G|², |g|²
ALONE = {"node": ["a"], "num_beside": 3, "num_sharing": 0}  # other trials ran on other machines
SPREAD = {**ALONE, "node": ["a", "b"], "num_sharing_network": 0}
NOT_RUN = Failure(FailureKind.SKIPPED, "not run")
FAILED = make_result({"num_workers": 2}, 9, state=TrialState.FAILED, failure="CUDA out of memory\nmore\nlines")
SKIPPED = [replace(FAILED, spec=make_spec({"num_workers": 2}, repeat), failure=NOT_RUN) for repeat in (10, 11)]
NAN_REPORT = {"epoch": 1, "train_loss": float("nan"), "accuracy": 0.1}
TOO_LARGE = make_result({"num_workers": 4}, 0, state=TrialState.DOES_NOT_FIT)
TOO_LARGE = replace(TOO_LARGE, failure=Failure(FailureKind.DOES_NOT_FIT, "needs 3.00 GB"))
DIVERGED = replace(make_result({"num_workers": 2}, 9, state=TrialState.DIVERGED), reports=(NAN_REPORT,))
BUSY = {"foreign_cpu_share": [0.01, 0.2], "other_load_cores": [1.26, 1.26], "num_node_cores": [2, 2]}
NEIGHBOUR = {"other_load_cores": [9.0, 30.0], "num_node_cores": [16, 128]}
UNPINNED = {"foreign_cpu_share": None, "other_load_cores": [0.6], "num_node_cores": [8]}
HOT_GPU = {"gpu_slowdowns": [3, 0], "gpu_celsius": [88, 60]}
GPU_CLOCKS = {"gpu_mhz_first": [1900.0], "gpu_mhz_mean": [1800.0], "gpu_mhz_last": [1710.0]}
CLOCKS = {"cpu_mhz_first": [3000.0] * 2, "cpu_mhz_mean": [2900.0] * 2, "cpu_mhz_last": [2950.0, 2700.0]}
TIED = [make_result({"num_workers": w}, r, 4.0 + 0.3 * ((r + w) % 3)) for w in (1, 2) for r in range(6)]
EPYC_1, EPYC_2 = {"cpu_model": ["EPYC 1"]}, {"cpu_model": ["EPYC 2"]}
A_OR_B, EPYCS = "Trials ran on different nodes: a, b.", "Trials ran on different CPU models: EPYC 1, EPYC 2."
LOAD = "Other work ran while 12 of 12 trials were timed; at worst "


def with_data(*digests):
    """Trials whose training samples have these digests in turn."""
    every = sound()
    return [
        replace(r, data={"splits": {"train": {"num_samples": 9, "digest": digests[i % len(digests)]}}})
        for i, r in enumerate(every)
    ]


# By check: evidence and the finding's detail (* for anything), or None for no finding.
CASES = {
    "different_data": [
        (with_data("a"), None),
        (
            with_data("a", "b", "c", "d", "e"),
            "* of 12 trials had other samples than a trial with the same seed*: their metrics can't be compared.",
        ),
        ([replace(r, data={"splits": ["x", {"train": 3}]}) for r in sound()], None),
    ],
    "few_repeats": [
        (sound(1), "1 repeat a point: no intervals, and nothing is confirmed."),
        (sound(2), "2 repeats a point: * log-normal times."),
        (sound(5), None),
        (sound()[:-4], "Only 2 repeats for some points: *"),
    ],
    "short_times": [(sound(time_s=0.5), "2 of 2 points took less than 1 s (num_workers=2: 0.25 s): *")],
    "not_separated": [(TIED, "1 of 1 speedup inconclusive: num_workers=2.")],
    "imported": [
        (
            sound(environment={"steps_from": ["import"], "laps_cover": ["`time`"]}),
            "12 of 12 trials were imported, not run by raypar, with times of `time`: isolation *",
        ),
        (sound(environment={"steps_from": ["reports"], "laps_cover": ["epochs 1 to 4"]}), None),
    ],
    "batch_norm_in_parts": [
        (
            on({"batch_norm_parts": [1]}, {"batch_norm_parts": [2, 2]}),
            "Batch norm * separately, * differ: 1 part at num_workers=1, 2 parts at num_workers=2.",
        ),
        (on({"batch_norm_parts": [2]}), None),
        (on({"batch_norm_parts": "?"}), None),
    ],
    "beyond_noise_scale": [
        (
            on({"gradient_noise": NOISE}),
            "2 of 2 points had a batch beyond the gradient noise scale: num_workers=1 (64 samples, noise scale 40 "
            "*), num_workers=2 (*).",
        ),
        (on({"gradient_noise": [[[8 * trace, 2.0, 3.0] for trace, _, _ in NOISE[0]], None]}), None),
        (on({"gradient_noise": [[[80.0, 2.0, 3.0]], None]}), None),
    ],
    "without_gradient": [
        (
            on({}, {"without_gradient": [["head.weight"], ["head.weight"]], "finds_unused": [True, True]}),
            "6 of 12 trials traversed the graph again in each step, * without a gradient: head.weight.",
        ),
        (on({"without_gradient": [["head.weight"]], "finds_unused": [None]}), None),
        (on({"without_gradient": "?", "finds_unused": "?"}), None),
    ],
    "diverged_trials": [
        ([*sound(), DIVERGED], "1 of 13 trials diverged: num_workers=2 #10 (train_loss=nan at epoch 1)."),
        ([*sound(), replace(DIVERGED, reports=())], "1 of 13 trials diverged: num_workers=2 #10."),
    ],
    "too_large_trials": [
        ([*sound(), TOO_LARGE], "1 of 3 points does not fit: num_workers=4 (needs 3.00 GB)."),
        (sound(), None),
    ],
    "failed_trials": [
        ([*sound(), FAILED], "1 trial failed; num_workers=2 #10: CUDA out of memory"),
        ([*sound(), FAILED, *SKIPPED], "1 trial failed, 2 not run; num_workers=2 #10: CUDA out of memory"),
    ],
    "baseline_missing": [(sound()[6:], "1 point without a speedup: no timed * the baseline num_workers=1.")],
    "includes_start_up": [([replace(r, train_time_s=None) for r in sound()], "Times are of whole trials, *")],
    "reported_steps": [
        (
            sound(environment={"steps_from": ["raypar.step", ""]}),
            "Times are those between two calls of raypar.step *;*",
        ),
        (
            sound(environment={"steps_from": ["reports"], "laps_cover": ["epochs 1 to 4"]}),
            "Times are those between two reports *, epochs 1 to 4 in every trial; *",
        ),
        (sound(environment={"steps_from": "?"}), None),
        (sound(), None),
    ],
    "unproven_work": [
        (sound(environment={"steps_from": [""]}), "Equal work of the points is not proven: *"),
        (sound(environment={"steps_from": ["import"]}), "Equal work *: the runs were imported. Their last *"),
        (sound(environment={"steps_from": "?"}), None),
        (sound(), None),
    ],
    "other_code": [
        (of_code("py3.11:1", "py3.11:2"), "6 of 12 trials ran other code than the latest one: model.py changed *"),
        (of_code("py3.11:2", "py3.11:2"), None),
        (of_code("an unknown digest", "py3.11:2"), None),
    ],
    "retried": [
        (changed(3, attempts=2), "1 of 12 trials * num_workers=1 #4 (attempt 2)."),
        (
            changed(3, attempts=2, environment={"cores": [[0]], "preempted": ["node s3 was preempted"]}),
            "1 of 12 trials began again after their nodes had left: num_workers=1 #4 (node s3 was preempted).",
        ),
    ],
    "stalled": [
        (
            changed(7, environment={"cores": [[0]], "stalls_s": [10.4, 4.0]}),
            "1 of 12 trials stalled within a step, num_workers=2 #2 (10.4 s + 4.00 s): excluded from times and *",
        ),
        (changed(7, environment={"cores": [[0]], "stalls_s": "?"}), None),
    ],
    "resumed": [
        (changed(3, environment={"cores": [[0]], "resumed_at_epoch": [2.0]}), "1 of 12 trials * num_workers=1 #4.")
    ],
    "side_by_side": [
        (on(ALONE), None),
        (on({**ALONE, "num_sharing": 2}), "12 of 12 trials shared a machine, * (up to 2 at a time)."),
    ],
    "shared_network": [
        (
            on(ALONE, {**SPREAD, "num_sharing_network": 1}),
            "6 of 6 * shared the network with other trials * (up to 1 at a time).",
        ),
        (on(ALONE, SPREAD), None),  # other trials ran on one machine each
    ],
    "shared_with_studies": [
        (
            changed(3, environment={"shared_with": "b, c"}),
            "1 of 12 trials shared their machine with other studies: b, c.",
        ),
        (changed(3, environment={"shared_with": ["b"]}), None),
    ],
    "shared_cores": [
        (on({"cores": [[]]}), "12 of 12 trials had no cores of their own."),
        (on({"cores": [[0], []]}), "12 of 12 trials had no cores of their own."),
        (on({"cores": None}), None),
        (unpinned_by_request(), None),
    ],
    "too_many_threads": [
        (on({"num_threads": [1, 4], "cores": [[0], [1, 2]]}), "A worker had 4 torch threads on 2 cores*"),
        (on({"num_threads": [2], "cores": [[0, 1]]}), None),
        (on({"num_threads": [2], "cores": [[]]}), None),  # not pinned: maybe on cores of their own
        (on({"num_threads": None, "cores": None}), None),
    ],
    # Machines of the trials of one worker, and of two.
    "mixed_hardware": [
        (on(EPYC_1, EPYC_2), EPYCS),
        (on({"device_name": ["A100"]}, {"device_name": ["A100", "H100"]}), "Trials ran on * devices: A100, H100."),
        (on({"node": ["a"]}, {"node": ["b", "b"]}), A_OR_B),
        (on({"node": ["a"]}, {"node": ["a", "b"]}), None),  # more workers than a node holds
        (on(nodes("a"), nodes("b", "b")), None),
        (on(nodes("a"), nodes("b", cores=64)), "Trials ran on nodes of different sizes: a (8 cores), b (64 cores)."),
        (on(nodes("a"), nodes("b", model="EPYC 2")), EPYCS),
        (on(nodes("a"), {"node": ["b"], **EPYC_1}), A_OR_B),  # of what size is node b?
        (on(EPYC_1, {"cpu_model": None}), None),
        (on(EPYC_1, {}), None),
    ],
    "other_load": [
        (on(BUSY), LOAD + "it took 20 % of * a worker's own cores and it kept 1.3 of a machine's 2 cores busy."),
        (on({"foreign_cpu_share": [0.06]}), LOAD + "it took 6 % of the time of a worker's own cores."),
        (on(NEIGHBOUR), LOAD + "it kept 9.0 of a machine's 16 cores busy."),
        # If processes can't be bound to cores, other work may run on any of them.
        (on(UNPINNED), LOAD + "it kept 0.6 of a machine's 8 cores busy."),
        ([*sound()[:-1], on({"foreign_cpu_share": [0.5]})[-1]], "Other work ran while 1 of 12 trials was *"),
        (on({"foreign_cpu_share": [0.08]}, time_s=0.5), None),  # a few ticks of the clock
        (on({"foreign_cpu_share": [0.08]}, time_s=50.0), LOAD + "*"),
    ],
    "raypar_load": [
        (
            on({"raypar_load_cores": [0.1, 0.3], "num_node_cores": [2, 2]}),
            "Up to 15 % * raypar and Ray * 12 of 12 *",
        ),
        (on({"raypar_load_cores": [0.3], "num_node_cores": [16]}), None),
        ([*sound()[:-1], on({"raypar_load_cores": [0.3], "num_node_cores": [2]})[-1]], None),
        (on({"raypar_load_cores": ["?", None], "num_node_cores": [16]}), None),
    ],
    "throttled": [
        ([*sound()[:-2], *on({"throttles": [3, 4]})[-2:]], "Cores became too hot * 2 of 12 trials * (up to 7 times *")
    ],
    "clock_changes": [
        (on(CLOCKS), "* from the beginning to the end of 12 of 12 trials: by up to 10 % slower (num_workers=1 #1)."),
        (
            on({"cpu_mhz_mean": [3600.0]}, {"cpu_mhz_mean": [3000.0, 3100.0]}),
            "*: 3.05 GHz in num_workers=2 #1, 3.60 GHz in num_workers=1 #1.",
        ),
    ],
    "gpu_throttled": [
        (
            [*sound()[:-2], *on(HOT_GPU)[-2:]],
            "GPUs slowed down for heat or a power brake while 2 of 12 trials were timed (up to 88 °C).",
        ),
        (on({"gpu_slowdowns": [1], "gpu_celsius": None}), "* while 12 of 12 trials were timed."),
        (on({"gpu_slowdowns": [0], "gpu_celsius": [90]}), None),
    ],
    "gpu_clock_changes": [
        (
            on(GPU_CLOCKS),
            "The GPU's clock changed * of 12 of 12 trials: by up to 10 % slower (num_workers=1 #1).",
        ),
        # Two workers load a GPU less than one does.
        (on({"gpu_mhz_mean": [1400.0]}, {"gpu_mhz_mean": [1900.0]}), None),
        (
            [*on({"gpu_mhz_mean": [1900.0]})[:-1], *on({"gpu_mhz_mean": [1700.0]})[-1:]],
            "* between trials of a point: 1.70 GHz in num_workers=2 #6, 1.90 GHz in num_workers=2 #1.",
        ),
    ],
    "gpu_shared": [
        (
            [*sound()[:-3], *on({"gpu_other_processes": [0, 2]})[-3:]],
            "Other processes were on the GPU while 3 of 12 trials were timed (up to 2 at a time).",
        ),
        (on({"gpu_other_processes": [0, None]}), None),
    ],
    "metric_differs": [
        (
            scored((0.95, 0.951, 0.952), (0.93, 0.931, 0.932)),
            "accuracy differs between numbers of workers: -2.0 points [[]-2.0, -2.0] at num_workers=2.",
        ),
        (scored((0.945, 0.955, 0.965), (0.942, 0.952, 0.962)), None),  # within the margin
        (scored((0.95, 0.96), (0.935, 0.93)), None),  # two repeats, by 1.5 and by 3 points
        (scored((0.95, 0.96, 0.97), (0.93, 0.96, 0.94)), None),  # three, by 0 to 3 points
        (scored((0.95,) * 3, (0.95002,) * 3), None),  # rounding
        (scored((0.97,) * 3, (0.5,) * 3, key="lr"), None),  # not what the workers do
    ],
    "more_than_linear": [
        (
            scaled("num_workers", 4.4),
            "1 speedup significantly larger than the increase in workers: 4.* at *=4.",
        ),
        (scaled("num_workers", 4.01), None),
        (scaled("num_workers", 4.4, wavering=1.0), None),
    ],
}


def details(results, question=QUESTION):
    return {finding.check: finding.detail for finding in analyse(question, results).warnings}


def fits(detail, pattern):
    return detail is pattern if detail is None or pattern is None else fnmatchcase(detail, pattern)


@pytest.mark.parametrize(
    ("check", "results", "detail"),
    [pytest.param(check, *case, id=f"{check}-{i}") for check, cases in CASES.items() for i, case in enumerate(cases)],
)
def test_evidence_gives_its_finding(check, results, detail):
    assert fits(details(results).get(check), detail), details(results).get(check)


def against(key, value):
    return Question("s", {key: value}, (key,))


WORKERS_AND_BATCH = Question("s", {"num_workers": 1, "batch_size": 64}, ("num_workers", "batch_size"))
BOTH = [
    make_result({"num_workers": w, "batch_size": b}, r, time_s)
    for w, b, time_s in ((1, 64, 40.0), (4, 256, 40.0 / 9))
    for r in range(6)
]
ON_DEVICES = [
    make_result({"device": device}, r, 8.0, environment={"device_name": [name]})
    for device, name in (("cpu", "cpu"), ("cuda", "H100"))
    for r in range(6)
]
NOW = Question("s", {"num_workers": 1}, ("num_workers",), code={"": {"model.py": "py3.11:2", "s.py": "py3.11:1"}})
OF_ANOTHER_PYTHON = replace(NOW, code={"": {"model.py": "py3.10:1", "s.py": "py3.10:1"}})
UNEQUAL = "1 point trained on other numbers of samples than the baseline: batch_size=8192 (57,344 against 60,000). *"


@pytest.mark.parametrize(
    ("check", "results", "question", "detail"),
    [
        ("baseline_missing", sound()[6:], NO_BASELINE, None),
        ("unequal_work", uneven("batch_size", 32, 8192), against("batch_size", 32), UNEQUAL),
        ("unequal_work", uneven("batch_size", 32, 64, 60_000.4), against("batch_size", 32), None),
        ("unequal_work", uneven("epochs", 1, 2), against("epochs", 1), None),  # as asked
        ("mixed_hardware", ON_DEVICES, against("device", "cpu"), None),
        ("more_than_linear", scaled("batch_size", 9.0), against("batch_size", 1), None),
        ("more_than_linear", BOTH, WORKERS_AND_BATCH, None),
        (
            "other_code",
            of_code("py3.11:1", "py3.11:1"),
            NOW,
            "12 of 12 * than the study has now: model.py *",
        ),
        (
            "other_code",
            of_code("py3.11:1", "py3.11:2"),
            NOW,
            "6 of 12 * than the study has now: model.py *",
        ),
        ("other_code", of_code("py3.11:2", "py3.11:2"), NOW, None),
        ("other_code", of_code("py3.11:1", "py3.11:2"), OF_ANOTHER_PYTHON, "6 of 12 * than the latest one: *"),
        ("other_code", sound(), NOW, None),
    ],
)
def test_findings_depend_on_the_question(check, results, question, detail):
    assert fits(details(results, question).get(check), detail)


@pytest.mark.parametrize(
    "environment",
    [
        {},  # results of before it was measured
        {"foreign_cpu_share": None, "other_load_cores": None, "num_node_cores": None, "throttles": None},
        {"foreign_cpu_share": [None], "other_load_cores": [None], "num_node_cores": [64], "cpu_mhz_mean": [None]},
        {"foreign_cpu_share": [0.01, 0.04], "other_load_cores": [0.15, 0.15], "num_node_cores": [2, 2]},
        # 4 of 64 cores, none of them the trial's.
        {"foreign_cpu_share": [0.02], "other_load_cores": [4.0], "num_node_cores": [64], "throttles": [0]},
        {"cpu_mhz_first": [3000.0], "cpu_mhz_mean": [2950.0], "cpu_mhz_last": [2900.0], "throttles": [0, None]},
        {"cpu_mhz_first": None, "cpu_mhz_mean": 2000.0, "cpu_mhz_last": [2000.0]},
        {"gpu_slowdowns": ["?"], "gpu_celsius": None, "gpu_other_processes": "?", "gpu_mhz_mean": [None]},
        {"gpu_slowdowns": [0], "gpu_other_processes": [0], "gpu_mhz_first": [1900], "gpu_mhz_last": [1850]},
        {"foreign_cpu_share": "?", "other_load_cores": ["?"], "num_node_cores": [0], "throttles": "?"},
    ],
)
def test_quiet_and_unknown_machines_raise_no_warning(environment):
    assert details(sound(environment={"cores": [[0]], **environment})) == {}


def test_every_check_has_its_own_advice_and_a_case_here():
    advice = [check.advice for check in CHECKS]
    assert len(set(advice)) == len(advice) and all(text.endswith(".") for text in advice)
    of_time = {"drift_over_study", "drift_in_trials", "slow_first_trial", "outliers"}
    assert {check.name for check in CHECKS} == {*CASES, *of_time, "unequal_work", "other_settings"}


# ---- steadiness over time, on made-up studies


def study(seed, *, num_repeats=6, workers=(1, 2, 4), drift=0.0, first=1.0, blocks=0.0):
    """Log-normal times in blocks that are disturbed by `blocks`, a standard deviation.

    `drift` is the relative change over the study, `first` what slows its first trial.
    """
    rng = np.random.default_rng(seed)
    order = [(r, int(w)) for r in range(num_repeats) for w in rng.permutation(workers)]
    # The first trial is one of the baseline.
    order[: len(workers)] = [(0, w) for w in workers]
    factors = np.exp(rng.normal(0, 0.03, len(order))) * (1 + drift) ** np.linspace(0, 1, len(order))
    factors *= np.exp(np.repeat(rng.normal(0, blocks, num_repeats), len(workers)))
    factors[0] *= first
    return [
        make_result({"num_workers": w}, r, 8.0 / w * float(factor), started_at=1000.0 + 10.0 * i)
        for i, ((r, w), factor) in enumerate(zip(order, factors, strict=True))
    ]


def over_time(results, name):
    """Return the check's name if it has findings."""
    points = tuple(PointAnalysis(**vars(p)) for p in collect(QUESTION, results, "train_time_s"))
    (check,) = (check for check in CHECKS if check.name == name)
    return {name for _ in check(Evidence(QUESTION, "train_time_s", points))}


# Check, simulated study, and bounds of the share of studies that it warns of; the level of the drift test is 0.3 %.
SHARES = [
    ("drift_over_study", {}, 0.0, 0.01),
    ("drift_over_study", {"num_repeats": 10, "blocks": 0.1}, 0.0, 0.015),
    ("slow_first_trial", {}, 0.0, 0.03),
    ("outliers", {"num_repeats": 10}, 0.0, 0.15),
    ("drift_over_study", {"num_repeats": 10, "drift": 0.2}, 0.95, 1.0),
    ("slow_first_trial", {"first": 1.5}, 0.95, 1.0),
]


@pytest.mark.parametrize(("check", "made", "least", "most"), SHARES)
def test_simulated_faults_are_noticed_and_steady_studies_rarely_raise_a_warning(check, made, least, most):
    num_studies = 50 if least else 300
    share = sum(check in over_time(study(seed, **made), check) for seed in range(num_studies)) / num_studies
    assert least <= share <= most


def test_a_drift_is_reported_with_its_size_from_six_blocks_on():
    detail = details(study(1, num_repeats=20, drift=0.2))["drift_over_study"]
    assert int(detail.split("became ")[1].split(" %")[0]) == pytest.approx(20, abs=5)
    assert fnmatchcase(detail, "Trials of the same point became * slower * over 20 blocks).")
    faster = details(study(1, num_repeats=6, drift=-0.5))["drift_over_study"]
    assert fnmatchcase(faster, "* faster * (Kendall's tau -1.00 over 6 blocks).")
    assert "drift_over_study" not in details(study(1, num_repeats=5, drift=-0.5))  # 2 of 5! orders


@given(
    st.floats(-0.5, 1.0),
    st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=4),
    st.permutations((0, 1, 2, 3, 4, 6, 10)),
)
def test_an_exponential_drift_is_recovered_for_any_order_of_trials(drift, levels, blocks):
    trend = trend_of({at: math.log(level) + at / 10 * math.log1p(drift) for at in blocks} for level in levels)
    assert trend.change == pytest.approx(drift, rel=1e-6, abs=1e-9) and trend.num_blocks == 7
    assert abs(drift) <= 1e-6 or (trend.tau, trend.p_value) == pytest.approx(
        (math.copysign(1, drift), 2 / math.factorial(7))
    )


def test_a_block_counts_once():
    logs = {0: 0.0, 1: 0.02, 2: 0.05, 3: 0.01}
    assert trend_of([logs] * 9) == trend_of([logs])
    # Its median withstands one disturbed trial.
    disturbed = trend_of([logs, logs, {**logs, 0: 9.0}])
    assert (disturbed.tau, disturbed.p_value) == (trend_of([logs]).tau, trend_of([logs]).p_value)


@pytest.mark.parametrize("blocks", [(), (4,), (0, 5)])
def test_fewer_than_three_blocks_have_no_trend(blocks):
    assert trend_of([dict.fromkeys(blocks, 1.0), {}]) is None


@given(st.integers(3, 12).flatmap(lambda size: st.permutations(range(size))))
def test_a_trends_p_value_is_the_exact_one_of_kendalls_tau(values):
    trend, expected = trend_of([dict(enumerate(values))]), kendalltau(range(len(values)), values, method="exact")
    assert (trend.tau, trend.p_value) == pytest.approx((expected.statistic, expected.pvalue))


@pytest.mark.parametrize("size", [49, 50, 51, 200])
def test_a_trends_p_value_is_nearly_that_of_kendalls_tau_with_many_blocks(size):
    rng = np.random.default_rng(size)
    for slope in (0.0, 0.005, 0.01):
        values = rng.normal(0, 1, size) + slope * np.arange(size)
        expected = kendalltau(np.arange(size), values, method="exact" if size <= 50 else "asymptotic").pvalue
        assert trend_of([dict(enumerate(values))]).p_value == pytest.approx(expected, rel=0.05, abs=1e-4)


def test_a_slow_first_trial_is_not_an_outlier():
    findings = details(study(3, first=1.5))
    assert "num_workers=1 #1" in findings["slow_first_trial"]
    assert "outliers" not in findings


def test_an_outlier_is_counted_and_named_and_stays_in_the_numbers():
    results = study(5)
    results[10] = replace(results[10], train_time_s=1.6 * (results[10].train_time_s or 0))
    assert fnmatchcase(details(results)["outliers"], f"1 of 18 trials is far *: {results[10].spec.label} *")
    assert sum(p.time_s.num_samples for p in analyse(QUESTION, results).points if p.time_s) == 18
    # Two trials have no outlier.
    pairs = [make_result({"num_workers": w}, r, 8.0 / w * (1 + (w == 2) * r)) for w in (1, 2, 4) for r in range(2)]
    assert "outliers" not in details(pairs)


def with_rates(factor, num_reports=9):
    """Trials whose rate changes over their reports, by `factor` in total."""
    rates = [1e4 * factor ** (i / 8) for i in range(num_reports)]
    return [
        replace(r, reports=tuple({**r.final, "throughput_samples_per_s": rate * (1 + n / 1e4)} for rate in rates))
        for n, r in enumerate(study(0))
    ]


@pytest.mark.parametrize(
    ("results", "detail"),
    [
        (with_rates(0.85), "Steps became * % slower from the first third * (median of 18 trials)."),
        (with_rates(1.2), "Steps became * % faster from the first third *"),
        (with_rates(1.0), None),
        (with_rates(0.5, num_reports=3), None),
    ],
)
def test_a_drift_within_trials_is_reported_with_its_direction(results, detail):
    assert fits(details(results).get("drift_in_trials"), detail)
