"""Studies made by hand whose results give every figure of a report something to show."""

import math
from dataclasses import replace
from itertools import product

from results import make_result

from raypar.analysis.question import Question
from raypar.study.profile import PARTS, Breakdown, Profile
from raypar.study.trial import TrialState

HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(1)> a.b['c'] "' onload="1 --> <!-- {{7*7}}"""


def question(name="scaling", metric="accuracy", keys=("lr", "num_workers")):
    return Question(name, {"num_workers": 1}, keys, metric=metric, num_repeats=3)


def results(num_repeats=3, *, name="scaling", metric="accuracy", failure="out of memory"):
    """Two learning rates on 1, 2 and 4 workers, with learning curves and profiles; one trial has failed."""
    every = product(range(num_repeats), (0.1, 0.2), (1, 2, 4))
    made = [_result(order, *each, metric) for order, each in enumerate(every)]
    made.append(make_result({"lr": 0.2, "num_workers": 8}, state=TrialState.FAILED, failure=failure))
    return [replace(r, spec=replace(r.spec, study=name)) for r in made]


def _result(order, repeat, lr, workers, metric):
    time_s = 8.0 * (0.1 + 0.9 / workers + 0.01 * workers) * (1 + 0.01 * ((order * 7) % 5))
    curve = [1 - 0.4 * math.exp(-epoch * (1 + lr)) - 0.001 * repeat for epoch in range(1, 5)]
    parts = dict(zip(PARTS, (0.0005, 0.0, 0.004, 0.006, 0.001, 0.001 * workers, 0.0002, 0.0, 0.0003), strict=True))
    mean = Breakdown(sum(parts.values()), parts, 0.0002)
    node = {"node": ["node-1"], "cores": [[0]]}
    return replace(
        make_result(
            {"lr": lr, "num_workers": workers}, repeat, time_s, started_at=1.7e9 + 12 * order, environment=node
        ),
        reports=tuple({"epoch": i, metric: value, "train_time_s": time_s / 4} for i, value in enumerate(curve, 1)),
        profile=Profile((mean,) * workers, 10, mean.step_s, 0.05) if repeat == 0 else None,
    )
