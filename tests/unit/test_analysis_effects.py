"""Effects of hyperparameters: simulated ones are recovered, and those that a grid can't show are named."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result
from scipy.stats import t as student

from raypar.analysis.analyse import analyse
from raypar.analysis.effects import effects_of, importances_of
from raypar.analysis.pairwise import family_of
from raypar.analysis.question import Question, collect
from raypar.analysis.stats import HODGES_LEHMANN_ERROR
from raypar.study.trial import TrialState

QUESTION = Question("mnist", {"num_workers": 1}, ("batch_size", "num_workers"), num_repeats=3)
SIZES, WORKERS = (32, 64, 512), (1, 2, 4)
FACTORS = st.floats(0.1, 10.0)
THREE = st.lists(FACTORS, min_size=3, max_size=3)


def made(by_size, by_workers, *, by_both=None, blocks=(1.0, 1.3, 0.8), scores=None, noise=0.0, seed=0):
    """Trials whose times are a product of factors, including one of the block."""
    rng = np.random.default_rng(seed)
    return [
        make_result(
            {"batch_size": b, "num_workers": w},
            repeat,
            10 * by_size[b] * by_workers[w] * (by_both or {}).get((b, w), 1.0) * block * math.exp(rng.normal(0, noise)),
            accuracy=(scores or {}).get(b, 0.9) + 0.001 * repeat,
        )
        for repeat, block in enumerate(blocks)
        for b in by_size
        for w in by_workers
    ]


def plain(**more):
    return made({32: 4.0, 64: 2.0, 512: 1.0}, {1: 1.0, 2: 0.5, 4: 0.3}, **more)


def failed(result):
    return make_result(result.spec.point, result.spec.repeat, state=TrialState.FAILED)


def effects(results, question=QUESTION):
    gathered = collect(question, results, "train_time_s")
    return effects_of(question, gathered, family_of(question, gathered))


def level(estimate, key, value):
    return next(of for effect in estimate.main if effect.key == key for of in effect.levels if of.level == value)


def interaction(estimate, value):
    return next(i for i in estimate.interactions if i.level == value)


@given(THREE, THREE, st.lists(FACTORS, min_size=2, max_size=5))
def test_factors_of_time_are_recovered_despite_disturbed_blocks(sizes, workers, blocks):
    by_size, by_workers = dict(zip(SIZES, sizes, strict=True)), dict(zip(WORKERS, workers, strict=True))
    estimate = effects(made(by_size, by_workers, blocks=tuple(blocks)))
    assert estimate.num_blocks == len(blocks) and not estimate.omitted
    for key, factors in (("batch_size", by_size), ("num_workers", by_workers)):
        first, *others = factors
        for value in others:
            of = level(estimate, key, value)
            expected = pytest.approx(factors[first] / factors[value], rel=1e-9)
            assert (of.speedup.low, of.speedup.value, of.speedup.high) == (expected, expected, expected)
            assert of.num_points == 3
    for i in estimate.interactions:
        assert i.change.value == pytest.approx(1.0, rel=1e-9)
        assert i.speedup.value == pytest.approx(by_workers[1] / by_workers[4], rel=1e-9)


@given(FACTORS)
def test_a_simulated_interaction_is_recovered(factor):
    estimate = effects(plain(by_both={(512, 4): factor}))
    changed = interaction(estimate, 512)
    assert (changed.num_workers, changed.base_workers, changed.reference) == (4, 1, 32)
    assert changed.change.value == pytest.approx(1 / factor)
    assert changed.reference_speedup.value == pytest.approx(1 / 0.3)
    assert changed.speedup.value == pytest.approx(1 / 0.3 / factor)
    assert interaction(estimate, 64).change.value == pytest.approx(1.0)
    # One of the three points of a level: its factor counts by a third of its logarithm.
    assert level(estimate, "batch_size", 512).speedup.value == pytest.approx(4.0 / factor ** (1 / 3))


def test_changes_of_the_metric_are_differences_at_equal_values_of_the_others():
    estimate = effects(plain(scores={32: 0.97, 64: 0.96, 512: 0.93}))
    change = level(estimate, "batch_size", 512).metric_change
    assert change.value == pytest.approx(-0.04) and change.excludes(0.0)
    assert level(estimate, "num_workers", 4).metric_change.value == pytest.approx(0.0, abs=1e-12)


def test_levels_are_compared_with_the_baselines():
    estimate = effects(plain(), replace(QUESTION, baseline={"batch_size": 64, "num_workers": 2}))
    assert [(effect.key, effect.reference) for effect in estimate.main] == [("batch_size", 64), ("num_workers", 2)]
    assert [of.level for of in estimate.main[0].levels] == [32, 512]
    assert (estimate.interactions[0].base_workers, estimate.interactions[0].num_workers) == (2, 4)


def test_intervals_of_effects_have_the_level_of_the_family():
    results = plain(noise=0.05, blocks=(1.0, 1.3, 0.8) * 4)
    speedup = level(effects(results), "batch_size", 64).speedup
    family = family_of(QUESTION, collect(QUESTION, results, "train_time_s"))
    assert family.num_comparisons == 6 + 4 + 2 * 4 / 4 and speedup.level == family.secondary.time_level(12)
    logs = np.log([r.train_time_s for r in results]).reshape(12, 3, 3).mean(axis=2)  # block, batch size
    half = student.ppf((1 + speedup.level) / 2, 11) * HODGES_LEHMANN_ERROR * np.std(logs[:, 0] - logs[:, 1], ddof=1)
    assert math.log(speedup.high / speedup.value) == pytest.approx(half / math.sqrt(12))
    # With few blocks, the points' variance helps.
    assert level(effects(plain(noise=0.05)), "batch_size", 64).speedup.high / speedup.value < 20


def test_one_block_gives_no_intervals_and_a_partial_one_is_excluded():
    begun = [r for i, r in enumerate(plain(blocks=(1.0, 1.0, 50.0))) if i < 2 * 9 + 4]
    for results, num_blocks in ((plain(blocks=(1.0,)), 1), (begun, 2)):
        estimate = effects(results)
        speedup = level(estimate, "batch_size", 512).speedup
        assert (estimate.num_blocks, speedup.value, speedup.low is None) == (num_blocks, 4.0, num_blocks == 1)


TOO_FEW = "Too few points have all their trials for"


def test_incomplete_points_are_left_out():
    results = made(dict.fromkeys((32, 64, 128, 256), 4.0), {1: 1.0, 2: 0.5, 4: 0.3, 8: 0.2})
    estimate = effects([r for r in results if r.spec.point != {"batch_size": 32, "num_workers": 8}])
    of_workers = level(estimate, "num_workers", 8)
    assert level(estimate, "batch_size", 64).num_points == of_workers.num_points == 3
    assert of_workers.speedup.value == pytest.approx(5.0)
    assert not estimate.interactions  # all of them need the lost point
    levels = "batch_size=64, batch_size=128, batch_size=256"
    assert estimate.omitted == (f"{TOO_FEW} the dependence of the speedup on {levels}",)


def test_an_omitted_level_is_named():
    lost = [{"batch_size": 512, "num_workers": w} for w in (2, 4)]
    estimate = effects([failed(r) if r.spec.point in lost else r for r in plain()])
    what = ("the effect of", "the dependence of the speedup on")
    assert estimate.omitted == tuple(f"{TOO_FEW} {each} batch_size=512" for each in what)
    assert [of.level for of in estimate.main[0].levels] == [64]
    assert [level(estimate, "num_workers", w).num_points for w in (2, 4)] == [2, 2]


POINTS = tuple({"batch_size": b, "num_workers": w} for b, w in product(SIZES, WORKERS))
HALF = [r for r in plain() if r.spec.point in POINTS[::2]]
ONE = plain(blocks=(1.0,))


@pytest.mark.parametrize(
    ("results", "changes", "reason"),
    [
        (HALF, {"points": POINTS[::2]}, "5 points are too few of a grid of 9"),
        (ONE, {"num_repeats": 1, "is_search": True}, "the points are drawn, not a grid"),
        (ONE[:3], {"points": POINTS}, "no block has finished trials of 67 % of the points"),
    ],
)
def test_a_search_or_a_small_part_of_a_grid_has_no_effects(results, changes, reason):
    estimate = effects(results, replace(QUESTION, **changes))
    assert estimate.omitted == (f"No effects of the hyperparameters are estimated: {reason}",) and not estimate.main


def test_matched_pairs_of_revisions_need_no_complete_first_block():
    question = Question("s", {"revision": "a"}, ("revision", "lr"))
    points = collect(
        question, [make_result({"revision": v, "lr": lr}, r) for v in "ab" for lr in (1, 2) for r in (1, 2)], "wall_s"
    )
    matched = [
        replace(p, matched_times={0: 2.0, 1: 2.0} if p.point["revision"] == "b" else {0: 4.0, 1: 4.0}) for p in points
    ]
    estimate = effects_of(question, matched, family_of(question, matched))
    assert level(estimate, "revision", "b").speedup.value == pytest.approx(2.0)


def test_one_swept_hyperparameter_or_no_time_has_no_effects():
    one = [r for r in plain() if r.spec.point["batch_size"] == 64]
    for results in (one, [failed(r) for r in plain()], []):
        assert effects(results) is None


# ---- importances


def search(num_trials, metric, seed=0):
    """Importances in a random search of three hyperparameters."""
    rng = np.random.default_rng(seed)
    points = [
        {
            "lr": float(rng.uniform(0, 1)),
            "width": int(rng.choice([64, 256])),
            "optimizer": str(rng.choice(["adam", "sgd"])),
        }
        for _ in range(num_trials)
    ]
    question = Question("s", {}, ("lr", "width", "optimizer"), num_repeats=1, is_search=True)
    return importances_of(
        question, collect(question, [make_result(p, 0, accuracy=metric(p, rng)) for p in points], "wall_s")
    )


def test_only_hyperparameters_that_matter_are_important():
    found = search(40, lambda p, rng: 0.5 + 0.3 * p["lr"] + 0.1 * (p["optimizer"] == "adam"))
    assert list(found.shares)[:2] == ["lr", "optimizer"] and found.num_points == 40
    assert sum(found.shares.values()) == pytest.approx(1) and found.shares["width"] < 0.05 < found.shares["optimizer"]


def test_a_random_metric_has_no_important_hyperparameter():
    for seed in range(3):
        assert search(20, lambda p, rng: float(rng.uniform()), seed).shares == {}


def test_few_trials_and_a_single_hyperparameter_have_no_importances():
    assert search(9, lambda p, rng: p["lr"]) is None
    results = [make_result({"lr": i / 20}, 0, accuracy=i / 20) for i in range(20)]
    assert analyse(Question("s", {}, ("lr",), num_repeats=1, is_search=True), results).importances is None
    assert analyse(replace(QUESTION, points=POINTS), plain()).importances is None  # a grid has effects instead
