"""Studies made by hand whose results give every figure of a report something to show."""

import math
from dataclasses import replace
from itertools import product

from results import make_result

from raypar.analysis.question import Question
from raypar.study.profile import PARTS, Breakdown, Profile
from raypar.study.trial import TrialState, point_label

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


REVISIONS = "main@1a2b3c4", "HEAD@5d6e7f8"


def revision_results(factors=((1, 1.05), (2, 0.98), (4, 1.0)), *, num_repeats=8, note=""):
    """Trials under two revisions: the second takes `factors` as long at each number of workers."""
    made = []
    for repeat, (workers, factor), revision in product(range(num_repeats), factors, REVISIONS):
        noise = 1 + 0.002 * ((7 * repeat + workers + len(revision)) % 5 - 2)
        time_s = 8.0 / workers * noise * (factor if revision == REVISIONS[1] else 1.0)
        point = {"num_workers": workers, **({"note": note} if note else {}), "revision": revision}
        trial = make_result(point, repeat, time_s, 0.9 - 0.001 * (factor > 1), started_at=1.7e9 + 10 * len(made))
        made.append(replace(trial, spec=replace(trial.spec, study=f"scaling {' '.join(REVISIONS)}")))
    return made


def ab_html(results, *, allowed=None, source="study = 1"):
    """Return the page of ``raypar ab`` for trials under `REVISIONS`."""
    from raypar.analysis.ab import compare_revisions
    from raypar.analysis.analyse import analyse
    from raypar.reporting.ab import AbView
    from raypar.reporting.comparison_page import ab_page
    from raypar.reporting.html import Origin

    keys = tuple(results[0].spec.point)
    points = tuple({point_label(r.spec.point): r.spec.point for r in results}.values())
    asked = Question("s", {"revision": REVISIONS[0]}, keys, num_repeats=8, max_repeats=60, margin=0.02, points=points)
    analysis = analyse(asked, results)
    view = AbView(compare_revisions(analysis.evidence), "s", allowed, 0 if allowed is None else 1)
    return ab_page(view, analysis, results, Origin({"command": "raypar ab main HEAD"}, study_source=source))


def compare_html(a, b, *, names=("base", "changed"), allowed=None, stores=("", "")):
    """Return the page of ``raypar store compare`` for the trials of two studies."""
    from raypar.analysis.compare import Side, compare
    from raypar.reporting.compare import CompareView
    from raypar.reporting.comparison_page import compare_page

    a_side, b_side = (Side(question(name), trials, {}) for name, trials in zip(names, (a, b), strict=True))
    return compare_page(CompareView(compare(a_side, b_side, allowed), stores, None if allowed is None else 1))
