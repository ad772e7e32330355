"""Studies made by hand whose results give every figure of a report something to show."""

from __future__ import annotations

import math
from dataclasses import replace

from results import make_result

from raypar.analysis.breakdown import PARTS, Breakdown, Profile
from raypar.analysis.question import Question
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialState


def question(
    name: str = "scaling", metric: str = "accuracy", keys: tuple[str, ...] = ("lr", "num_workers")
) -> Question:
    return Question(name, {"num_workers": 1}, keys, metric=metric, num_repeats=3)


def results(
    num_repeats: int = 3, *, name: str = "scaling", metric: str = "accuracy", failure: str = "out of memory"
) -> list[TrialResult]:
    """Two learning rates on 1, 2 and 4 workers, with learning curves and profiles; one trial has failed."""
    found = []
    for repeat in range(num_repeats):
        for lr in (0.1, 0.2):
            for workers in (1, 2, 4):
                found.append(_result({"lr": lr, "num_workers": workers}, repeat, len(found), name, metric))
    failed = make_result({"lr": 0.2, "num_workers": 8}, state=TrialState.FAILED, failure=failure)
    return [*found, replace(failed, spec=replace(failed.spec, study=name))]


def _result(point: dict[str, Value], repeat: int, order: int, name: str, metric: str) -> TrialResult:
    workers, lr = point["num_workers"], point["lr"]
    assert isinstance(workers, int) and isinstance(lr, float)
    time_s = 8.0 * (0.1 + 0.9 / workers + 0.01 * workers) * (1 + 0.01 * ((order * 7) % 5))
    curve = [1 - 0.4 * math.exp(-epoch * (1 + lr)) - 0.001 * repeat for epoch in range(1, 5)]
    parts = dict(zip(PARTS, (0.0005, 0.004, 0.006, 0.001, 0.001 * workers, 0.0002, 0.0, 0.0003), strict=True))
    mean = Breakdown(sum(parts.values()), parts, 0.0002)
    made = make_result(
        point, repeat, time_s, started_at=1.7e9 + 12 * order, environment={"node": ["node-1"], "cores": [[0]]}
    )
    return replace(
        made,
        spec=replace(made.spec, study=name),
        reports=tuple(
            {"epoch": epoch, metric: value, "train_time_s": time_s / 4} for epoch, value in enumerate(curve, 1)
        ),
        profile=Profile((mean,) * workers, 10, mean.step_s, 0.05).to_dict() if repeat == 0 else {},
    )
