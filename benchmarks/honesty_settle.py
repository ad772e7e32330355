"""Cost and false claims of `--until settled`: simulated studies whose truth is known.

Each study goes through `what_is_open`, as a user's does: block after block, until nothing is open or the maximum of
repeats is reached. The cost is the number of its trials, over that of a study whose points all have the fixed number of
repeats that shows as many of the true differences of 5 %. In an A/A study all points are the same: a claim at any look,
be it of a speedup or of a fastest point, is false. Times scatter log-normally. A bar is reached within two standard
errors of the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from common import begin, parser_for
from honesty_compare import (
    ACCURACY,
    CONFIG,
    FALSE_CLAIMS,
    NO_BAR,
    NUM_SAMPLES,
    TRIAL_S,
    Row,
    row_of,
    run,
)

from raypar.analysis.pairwise import family_of
from raypar.analysis.question import TRAIN_TIME, Question, collect
from raypar.analysis.recommend import Constraints, Decision, recommend
from raypar.analysis.settle import what_is_open
from raypar.analysis.stats import Floats
from raypar.study.trial import TrialResult, TrialSpec, TrialState

NUM_SIMULATIONS = 2000
NUM_QUICK = 60
MARGIN, FEWEST, MOST = 0.05, 3, 30
SMALL = 1.05  # the speedup that is to be shown
SEED = 16
MIXED = (1.0, 0.7, 0.85, SMALL, 1.2, 1.45, 1.7, 2.0)


@dataclass(frozen=True)
class Truth:
    """Points of a simulated study.

    Attributes:
        speedups: the baseline's, which is 1, and those of the other points.
        cvs: of each point's times.
    """

    speedups: Sequence[float]
    cvs: Sequence[float]
    points: tuple[dict[str, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple({"kind": f"p{i}"} for i in range(len(self.speedups))))

    def question(self, max_repeats: int | None) -> Question:
        return Question(
            "simulated",
            self.points[0],
            ("kind",),
            points=self.points,
            num_repeats=FEWEST,
            max_repeats=max_repeats,
            margin=MARGIN,
        )

    def log_times(self, rng: np.random.Generator) -> Floats:
        """Return ``[point, block]``."""
        noise = rng.standard_normal((len(self.points), MOST)) * np.array(self.cvs)[:, None]
        return noise - np.log(self.speedups)[:, None]

    def trial(self, logs: Floats, place: int, repeat: int) -> TrialResult:
        time_s, point = TRIAL_S * math.exp(logs[place, repeat]), self.points[place]
        return TrialResult(
            TrialSpec("simulated", "mnist_mlp", point, {**CONFIG, "num_workers": 1, **point}, repeat, seed=repeat),
            TrialState.FINISHED,
            wall_s=time_s + 1,
            train_time_s=time_s,
            throughput_samples_per_s=NUM_SAMPLES / time_s,
            reports=({"epoch": 3, "accuracy": ACCURACY},),
        )


@dataclass(frozen=True)
class Ending:
    """End of a simulated study.

    Attributes:
        num_trials: until it stopped.
        shown: share of the differences of 5 % that its report shows.
        has_claimed: whether it showed any difference, at any look.
    """

    num_trials: int
    shown: float
    has_claimed: bool


def run_until_settled(truth: Truth, rng: np.random.Generator, *, looks_for_claims: bool) -> Ending:
    """Simulate a study until it stops."""
    question, logs = truth.question(MOST), truth.log_times(rng)
    place = {point["kind"]: i for i, point in enumerate(truth.points)}
    results = [truth.trial(logs, i, repeat) for repeat in range(FEWEST) for i in range(len(truth.points))]
    has_claimed = False
    while True:
        if looks_for_claims:
            report = recommend(question, results, Constraints())
            speedups = [c.speedup for c in report.candidates if not c.is_baseline]
            has_claimed |= any(s is not None and s.excludes(1.0) for s in speedups)
            has_claimed |= report.decision is Decision.CLEAR
        of = what_is_open(question, results)
        if of.stopped:
            return Ending(len(results), share_shown(truth, question, results), has_claimed)
        results += [truth.trial(logs, place[str(point["kind"])], of.repeat) for point in of.needed]


def share_shown(truth: Truth, question: Question, results: Sequence[TrialResult]) -> float:
    """Return the share of the points that are 5 % faster whose speedup is shown to be above 1."""
    gathered = collect(question, results, TRAIN_TIME)
    family = family_of(question, gathered)
    estimates = [family.speedup(gathered[0], p) for p, s in zip(gathered, truth.speedups, strict=True) if s == SMALL]
    return float(np.mean([e is not None and e.low is not None and e.low > 1 for e in estimates])) if estimates else 0.0


def repeats_of_equal_power(truth: Truth, power: float, num_simulations: int, rng: np.random.Generator) -> float:
    """Return how many repeats of every point show as many differences, between two whole numbers by the power."""
    question, before = truth.question(None), 0.0
    tables = [truth.log_times(rng) for _ in range(num_simulations)]
    for size in range(FEWEST, MOST + 1):
        studies = (
            [truth.trial(logs, i, repeat) for repeat in range(size) for i in range(len(truth.points))]
            for logs in tables
        )
        shown = float(np.mean([share_shown(truth, question, results) for results in studies]))
        if shown >= power:
            return size if size == FEWEST else size - (shown - power) / (shown - before)
        before = shown
    return MOST


def cost_rows(title: str, truth: Truth, most: float, num_simulations: int) -> list[Row]:
    """Return the trials until settled over those of a fixed number of repeats, and the power of both."""
    rng = np.random.default_rng(SEED)
    endings = [run_until_settled(truth, rng, looks_for_claims=False) for _ in range(num_simulations)]
    shown, trials = np.array([e.shown for e in endings]), np.array([e.num_trials for e in endings])
    fixed = len(truth.points) * repeats_of_equal_power(truth, float(shown.mean()), num_simulations, rng)
    error = float(trials.std(ddof=1)) / math.sqrt(num_simulations) / fixed
    return [
        Row(f"{title}: trials over {fixed:.0f} of fixed repeats", float(trials.mean()) / fixed, error, (0.0, most)),
        Row(
            f"{title}: 5 % shown, by either",
            float(shown.mean()),
            float(shown.std(ddof=1)) / math.sqrt(num_simulations),
            NO_BAR,
        ),
    ]


def claim_rows(title: str, truth: Truth, num_simulations: int) -> list[Row]:
    """Return how often a study claims a difference, at any look."""
    rng = np.random.default_rng(SEED)
    hits = [run_until_settled(truth, rng, looks_for_claims=True).has_claimed for _ in range(num_simulations)]
    return [row_of(f"{title}: any claim at any look", hits, FALSE_CLAIMS)]


def parts() -> list[Callable[[int], list[Row]]]:
    """Return the simulations of each kind of study; each takes their number and gives the rows."""
    mixed, small = Truth(MIXED, [0.02] * 8), Truth([1.0] + [SMALL] * 7, [0.02] * 8)
    same, noisy = Truth([1.0] * 8, [0.02] * 8), Truth([1.0] * 8, [0.01] * 7 + [0.1])
    return [
        partial(cost_rows, "speedups of 0.7-2.0 and one of 1.05", mixed, 0.5),
        partial(cost_rows, "all speedups 1.05", small, 1.0),
        partial(claim_rows, "A/A, 8 points, CV 2 %", same),
        partial(claim_rows, "A/A, 8 points, CV 1 %, one 10 %", noisy),
    ]


if __name__ == "__main__":
    run(parts(), begin(parser_for(__doc__, rounds=NUM_SIMULATIONS, quick_rounds=NUM_QUICK)).rounds)
