"""Reports on small invented studies: `texts` yields each file of ``cases/``.

The stored studies show whole reports. These cases show all other sentences. A new sentence in a report needs a case
here, and ``python -m tests.golden``.
"""

import contextlib
import io
import math
import sys
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
from rich.console import Console

from raypar import Study, choice, grid, loguniform
from raypar.analysis.analyse import analyse
from raypar.analysis.compare import Side, compare
from raypar.analysis.comparison import Gate
from raypar.analysis.laws import AMDAHL, GUSTAFSON, USL, Scaling
from raypar.analysis.question import TRAIN_TIME, Question, current_results
from raypar.analysis.recommend import Constraints, recommend
from raypar.analysis.scaling import worker_groups
from raypar.analysis.table import read_table
from raypar.analysis.time_to_target import Start, Target
from raypar.analysis.verdict import break_even_lines
from raypar.errors import RayparError
from raypar.execution.results import describe
from raypar.predict.calibration import ObservedPoint, calibrate
from raypar.predict.network import Network, Topology
from raypar.predict.outlook import MeasuredRates, look_ahead, rates_by_model
from raypar.predict.overhead import Facts
from raypar.predict.predict import JobSpec, predict
from raypar.predict.step_model import Communication, LayerCost
from raypar.reporting import figures as report_figures
from raypar.reporting.compare import CompareView, print_comparison
from raypar.reporting.console import print_report
from raypar.reporting.export import markdown_of
from raypar.reporting.figures import figures_of
from raypar.reporting.fit import scaling_lines
from raypar.reporting.live import STARTING_RAY, LiveView
from raypar.reporting.predict import CandidateView, PredictView, StepModel, plot_of, print_prediction
from raypar.reporting.profile import print_profile
from raypar.reporting.recommend import RecommendView, print_recommendation
from raypar.reporting.sentences import effect_lines
from raypar.reporting.vega import OmittedFigure
from raypar.reporting.view import StudyView
from raypar.run import runner
from raypar.study.options import OPTIONS
from raypar.study.profile import PARTS, Breakdown, Profile
from raypar.study.trial import Failure, FailureKind, Placement, TrialResult, TrialSpec, TrialState
from raypar.track.runs import SECTIONS, child_run
from raypar.track.view import ViewContent, saved_views
from raypar.workloads import digits

sys.path.append(str(Path(__file__).parents[1] / "unit"))

import html_studies
from recording import DATA, unpacked
from results import curve_of, make_result, make_spec, stored_conditions, tied

from .page import brief, data_of, pretty

Results = list[TrialResult]
WORKERS = Question("s", {"num_workers": 1}, ("num_workers",))
NEARLY = (1.0, 1.004, 0.996)
NOISE = (1.0, 1.01, 0.99, 1.005, 0.995, 1.002)
ANY = Constraints()
COMMAND = "raypar study studies/a_study_with_a_rather_long_name.py --set 'batch_size=grid(64)' --repeats 12"


def texts():
    """Yield the name of each file of cases, and its current content."""
    for name, cases in FILES.items():
        parts = [f"==== {title}\n{text.strip(chr(10))}\n" for title, text in cases().items()]
        yield f"cases/{name}.txt", "\n".join(parts)


def printed(show, *args, width=80, **more):
    console = Console(file=io.StringIO(), width=width)
    show(console, *args, **more)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def diverged(*args):
    """Return a trial that diverged after its first epoch."""
    reports = ({"epoch": 1, "train_loss": math.nan, "val_loss": math.nan, "accuracy": 0.098},)
    return replace(make_result(*args), reports=reports, state=TrialState.DIVERGED)


def some_diverged():
    """Return a question and its trials: all trials of one point diverged, and the last one of another point."""
    points = [{"batch_size": b, "num_workers": w} for b in (32, 64) for w in (1, 2)]
    trials = [
        make_result(p, r, t + r / 10) for p, t in zip(points, (4.0, 0, 1.0, 2.0), strict=True) if t for r in (0, 1)
    ]
    trials += [diverged(points[1], r, 0.5) for r in range(3)]
    trials += [make_result(points[0], 2, 4.2), diverged(points[2], 2, 0.3), make_result(points[3], 2, 2.2)]
    return Question("s", {"num_workers": 1}, ("batch_size", "num_workers"), points=tuple(points), num_repeats=3), trials


def some_do_not_fit():
    """Return a question with two strategies, and its trials: those of one point do not fit, the others do."""
    points = [{"strategy": s, "batch_size": b} for s in ("ddp", "fsdp") for b in (64, 128, 256)]
    needs = {("ddp", 64): 1.1e9, ("ddp", 128): 1.9e9, ("fsdp", 64): 0.7e9, ("fsdp", 128): 1.0e9, ("fsdp", 256): 1.7e9}
    trials = []
    for (i, point), r in product(enumerate(points), range(3)):
        needed = needs.get((point["strategy"], point["batch_size"]))
        if needed is None:
            reason = "needs 3.40 GB of memory on a worker, more than max_memory=2GB"
            failure = Failure(FailureKind.DOES_NOT_FIT, reason if r == 0 else runner.NOT_RUN.format(reason))
            spec = make_spec(point, r, num_workers=2, max_memory="2GB")
            trials.append(TrialResult(spec, TrialState.DOES_NOT_FIT, failure=failure))
            continue
        time_s = 640 / point["batch_size"] * (1.3 if point["strategy"] == "fsdp" else 1.0) * NOISE[(i + r) % 6]
        trials.append(
            make_result(
                point,
                r,
                time_s,
                config={"num_workers": 2, "max_memory": "2GB"},
                environment={"peak_memory_bytes": [needed, needed]},
                step_times_s=((time_s / 100,) * 100,) * 2,
            )
        )
    baseline = {"strategy": "ddp", "batch_size": 64}
    return Question("s", baseline, ("strategy", "batch_size"), points=tuple(points), num_repeats=3), trials


def at_workers(times, noise=NOISE[:3], accuracy=0.97):
    return [
        make_result({"num_workers": n}, r, time_s * noise[(r + i) % len(noise)], accuracy)
        for i, (n, time_s) in enumerate(times.items())
        for r in range(len(noise))
    ]


def reports():
    points = [{"batch_size": b, "num_workers": w} for b in (32, 64) for w in (1, 2)]
    both = Question("s", {"num_workers": 1}, ("batch_size", "num_workers"), points=tuple(points), num_repeats=3)
    unfinished = [
        *(make_result(points[0], r, 4.0 + r) for r in range(3)),
        make_result(points[1], 0, 2.0),
        make_result(points[1], 1, state=TrialState.FAILED, failure="rank 1 was killed"),
        make_result(points[2], 0, state=TrialState.STOPPED),
    ]
    on_nodes = [
        make_result({"num_workers": w}, r, 3600.0 / w * (1 + r / 100), environment={"node": ["a", "b"][:w]})
        for w in (1, 2)
        for r in range(3)
    ]
    profiled = at_workers({1: 4.0, 2: 2.0})
    profiled[4] = replace(profiled[4], profile=TWO_RANKS)
    stalled = at_workers({1: 4.0, 2: 2.0})
    stalled[4] = replace(
        stalled[4],
        train_time_s=12.4,
        conditions=stored_conditions({**stalled[4].conditions.to_stored(), "stalls_s": [10.4]}),
    )
    hours = replace(WORKERS, price_per_node_hour=2.5)
    cases = {
        "no results": (both, []),
        "failed, stopped and missing points": (both, unfinished),
        "diverged trials, of one point all": some_diverged(),
        "nothing but diverged trials": (WORKERS, [diverged({"num_workers": w}) for w in (1, 2)]),
        "points of which one does not fit": some_do_not_fit(),
        "nothing is swept": (Question("s", {}, ()), [make_result({}, r, 4.0 + 0.1 * r) for r in range(3)]),
        "no baseline, a name like markup": (Question("s", {}, ("note",)), [make_result({"note": "[red]hot[/red]"})]),
        "one repeat": (WORKERS, at_workers({1: 4.0, 2: 2.0}, (1.0,))),
        "six repeats": (WORKERS, at_workers({1: 4.0, 2: 2.0}, NOISE)),
        "a price of a node-hour": (hours, on_nodes),
        "whole trials": (WORKERS, [replace(r, train_time_s=None) for r in at_workers({1: 4.0, 2: 2.0})]),
        "a stalled trial": (WORKERS, stalled),
        "a profile": (WORKERS, profiled),
        "batch sizes": (Question("s", {}, ("batch_size",)), batch_sizes()),
    }

    def shown(title, width=80, **how):
        return printed(lambda console: print_report(StudyView(analyse(*cases[title])), console, **how), width=width)

    at_widths = {f"{width} columns": shown("six repeats", width) for width in (100, 50, 30)}
    verbose = {f"{title}, verbose": shown(title, verbose=True) for title in cases}
    narrow = {"a profile, 60 columns": shown("a profile", 60, verbose=True)}
    return {title: shown(title) for title in cases} | at_widths | verbose | narrow


def verdict_cases():
    """Return the sentences on small studies, then those on curves of speedups."""
    sizes = Question("mnist", {"num_workers": 1}, ("batch_size", "num_workers"), num_repeats=3)
    optimizers = Question("s", {"optimizer": "sgd"}, ("optimizer", "lr"))
    best, least = (Question("s", {}, ("x",), mode=mode) for mode in ("max", "min"))
    scores = [
        make_result({"x": x}, r, accuracy=value + (r - 1) * 0.001)
        for x, value in ((1, 0.90), (2, 0.95), (3, 0.95))
        for r in range(3)
    ]

    def trials(key, times, accuracy=None, **point):
        every = [({**point, key: value}, r, time_s) for value, of in times.items() for r, time_s in enumerate(of)]
        return [make_result(*case, accuracy) for case in every]

    def scaling_to(most):
        counts = {b: (*range(1, most + 1), *(10,) * (b == 32)) for b in (32, 64, 128, 256, 512)}
        points = [{"batch_size": b, "num_workers": w} for b, of_size in counts.items() for w in of_size]
        times = (8 / p["num_workers"] ** 0.8 * (1 + i / 1e3) for i, p in enumerate(points))
        return [make_result(p, r, t * NEARLY[r]) for p, t in zip(points, times, strict=True) for r in range(3)]

    noise = [[[960.0 + 9 * (i % 3 - 1), 2.0, 6.0] for i in range(10)], None]
    workers = Question("s", {"num_workers": 1}, ("num_workers",))
    studies = {
        "a noise scale": (
            workers,
            [
                *(make_result({"num_workers": 1}, r, 4.0) for r in range(3)),
                *(make_result({"num_workers": 2}, r, 2.0, environment={"gradient_noise": noise}) for r in range(3)),
            ],
        ),
        "a clear speedup": (
            sizes,
            trials("num_workers", {1: (4.0, 4.04, 4.0), 2: (2.0, 2.0, 2.04)}, 0.95, batch_size=64),
        ),
        "no clear speedup": (sizes, trials("num_workers", {1: (4.0, 4.4, 3.9), 2: (4.1, 4.0, 4.2)}, batch_size=64)),
        "one trial each": (sizes, trials("num_workers", {1: (4.0,), 2: (2.0,)}, batch_size=64)),
        "another baseline": (optimizers, trials("optimizer", {"sgd": (4.0, 4.1), "adam": (8.0, 8.2)}, lr=0.1)),
        "a tied best metric": (best, scores),
        "less is better": (least, scores),
        **{f"to {most} workers": (sizes, scaling_to(most)) for most in (2, 3, 9)},
    }
    up, down = {64: 0.5, 256: 2.0}, {64: 0.5, 256: 0.9}
    samples = {100: up, 200: down, 300: {64: 0.5, 256: 0.7}, 400: {64: 0.5, 256: tied(1.1)}}
    curves = {
        "starts to pay": [curve_of({256: 0.6, 512: 0.85, 1024: 1.5})],
        "between close values": [curve_of({1000: 0.9, 1004: 1.1})],
        "never paid": [curve_of({64: 0.5, 1024: 0.9}, num_samples=20)],
        "always paid": [curve_of({64: 1.2, 1024: 1.9})],
        "stops paying": [curve_of({64: 1.9, 1024: 0.5})],
        "unclear": [curve_of({64: tied(0.9), 1024: 1.5})],
        "zero has no logarithm, but neighbours": [curve_of({0: 0.5, 1: 2.0}, key="num_samples")],
        "curves of one comparison": [curve_of(of, num_samples=n) for n, of in samples.items()],
        "curves that are alike": [curve_of(down, num_samples=n) for n in range(1, 6)],
        "many crossings": [curve_of(up, num_samples=n) for n in range(1, 6)],
        "crossings come first": [curve_of(up if w == 8 else down, workers=w) for w in range(2, 9)],
        "few lines": [curve_of({64: 0.5, 256: 1.0 + w}, workers=w) for w in range(2, 9)],
    }
    swept = Question("s", {"num_workers": 1}, ("hidden_size", "num_samples", "num_workers"))
    analyses = {title: analyse(*study) for title, study in studies.items()}
    sentences = {title: (f"= {of.verdict.answer}", *of.statements) for title, of in analyses.items()}
    sentences |= {title: tuple(break_even_lines(swept, [*chain(*several)])) for title, several in curves.items()}
    return {title: "\n".join(lines) for title, lines in sentences.items()}


def batch_sizes():
    results = []
    for size, rate, epochs in ((32, 500.0, 2), (256, 2000.0, 4)):
        for repeat in range(3):
            made = make_result({"batch_size": size}, repeat, 1000 * epochs / rate, num_samples=1000 * epochs)
            parts = {"train_time_s": 1000 / rate, "throughput_samples_per_s": rate}
            reports = tuple({"accuracy": 0.95 if i == epochs - 1 else 0.5, **parts} for i in range(epochs))
            results.append(replace(made, reports=reports))
    return results


def markdown():
    every = {"version.torch": ("2.15", "2.16"), "host": ("n1",), "cpu": ("Xeon",), "cores": ("2",), "gpu": ("H200",)}
    origin = {**every, "git.commit": ("abc",), "git.dirty": ("yes",)}
    view = StudyView(analyse(WORKERS, at_workers({1: 4.0, 2: 2.0})))
    few = StudyView(analyse(Question("mnist", {}, ("x",), num_repeats=2), [make_result({"x": 1})]))
    return {
        "with an origin": markdown_of(view, origin, "Does it *scale*?"),
        "one of two repeats, no baseline, no origin": markdown_of(few, {}),
    }


def effects():
    def grid(key, *values, num_repeats=3, metric="accuracy", noise=0.005, **more):
        """Return the effects; from level to level, time, accuracy and the speedup of two workers (`gain`) change."""
        per_level, accuracy, gain = (more.get(k, v) for k, v in (("per_level", 0.5), ("accuracy", 0.0), ("gain", 1.0)))
        rng = np.random.default_rng(1)
        points = tuple({key: value, "num_workers": w} for value, w in product(values, (1, 2)))
        baseline = more.get("baseline", {"num_workers": 1})
        asked = Question("s", baseline, (key, "num_workers"), metric, points=points, num_repeats=num_repeats)
        results = [
            make_result(
                point,
                repeat,
                20 * per_level**at / (1.8 * gain**at) ** (w - 1) * math.exp(rng.normal(0, noise)),
                accuracy=0.9 + accuracy * at + rng.normal(0, 1e-4),
            )
            for repeat in range(num_repeats)
            for point, (at, w) in zip(points, product(range(len(values)), (1, 2)), strict=True)
        ]
        results = [replace(r, reports=({metric: r.reports[0]["accuracy"]},)) for r in results]
        return _indented(effect_lines(analyse(asked, results)))

    search = Question("s", {}, ("lr", "batch_size"), num_repeats=1, is_search=True)
    drawn = [make_result({"lr": 0.1 * i, "batch_size": 2**i}, 0, 4.0) for i in range(1, 5)]
    return {
        "numbers: both ends": grid("batch_size", 32, 64, 128, 256, accuracy=-0.01),
        "a baseline in the middle": grid("batch_size", 32, 64, 128, baseline={"batch_size": 64}),
        "words that are tied": grid("optimizer", "sgd", "adam", "lion", per_level=1.0, noise=0.02),
        "a speedup that depends on the level": grid("batch_size", 32, 512, gain=1.5),
        "one block": grid("batch_size", 32, 64, num_repeats=1, gain=3.0),
        "a loss": grid("lr", 0.1, 0.2, accuracy=0.1, metric="val_loss"),
        "a search": _indented(effect_lines(analyse(search, drawn))),
        "one hyperparameter": _indented(effect_lines(analyse(WORKERS, at_workers({1: 4.0, 2: 2.0})))),
    }


def scaling():
    asked = Question("study", {"num_workers": 1}, ("batch_size", "num_workers"))

    def lines(law, *parameters, counts=(1, 2, 4, 8), noise=NEARLY, **more):
        """Return the lines; the law's first parameter grows by `per_batch` with each of the `batch_sizes`."""
        first, *others = parameters
        per_batch, failed = more.pop("per_batch", 0), more.pop("failed", ())
        sizes = more.pop("batch_sizes", [64])
        results = [
            make_result(
                {"batch_size": b, "num_workers": n},
                r,
                60 / float(law.speedup(n, first + i * per_batch, *others)) * noise[(r + n) % len(noise)],
                **more,
            )
            for (i, b), n, r in product(enumerate(sizes), counts, range(len(noise)))
        ]
        results += [make_result({"batch_size": 64, "num_workers": n}, state=TrialState.FAILED) for n in failed]
        return _indented(scaling_lines("study", worker_groups(asked, current_results(asked, results).points)))

    weak = {"per_worker_batch_size": 32, "batch_size": None}
    six = {"batch_sizes": [2**i for i in range(6)], "noise": (1.0,)}
    return {
        "Amdahl": lines(AMDAHL, 0.06),
        "Amdahl, all parallel": lines(AMDAHL, 0.0),
        "Gunther, with a peak": lines(USL, 0.02, 0.02),
        "Gunther, with a peak beyond": lines(USL, 0.02, 0.002),
        "Gunther, never faster": lines(USL, 0.5, 0.6),
        "Gustafson, weak scaling": lines(GUSTAFSON, 0.2, config=weak),
        "three worker counts": lines(AMDAHL, 0.1, counts=(1, 2, 4)),
        "one repeat": lines(AMDAHL, 0.1, noise=(1.0,)),
        "two repeats": lines(AMDAHL, 0.1, noise=(1.0, 1.004)),
        "a failed worker count": lines(AMDAHL, 0.1, failed=[16]),
        "two worker counts, one failed": lines(AMDAHL, 0.1, counts=(1, 2), failed=[16]),
        "many groups of two worker counts": lines(AMDAHL, 0.1, counts=(1, 2), per_batch=0.08, **six),
        "many groups": lines(AMDAHL, 0.1, counts=(1, 2, 4), **six),
        "one worker count": lines(AMDAHL, 0.1, counts=(2,)),
    }


def _indented(lines):
    return "\n".join(" " * indent + text for indent, text in lines)


def tables():
    """Return the messages of `raypar model fit` about files that are not tables, or have mistakes."""

    def refused(content):
        with TemporaryDirectory() as folder:
            path = Path(folder, "times.csv")
            if content is not None:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
            try:
                read_table(path)
            except RayparError as error:
                return str(error).replace(str(path), "FILE")
        raise AssertionError(content)

    return {
        "mistakes": refused("workers,time_s\n1,10\n# a remark\ntwo,5.5s\n2.5,0\n\n-4,nan\n8\n0,1e99\n1,1_000\n"),
        "many mistakes": refused("workers,time\n" + "1,x\n" * 25),
        "no column": refused("n,elapsed\n1,2\n"),
        "two columns": refused("workers,time,duration\n1,2,3\n"),
        "empty": refused(""),
        "a remark alone": refused("\n# nothing\n"),
        "no runs": refused("workers,time\n"),
        "no text": refused(b"workers,time\n1,\xff\n"),
        "no CSV": refused("workers,time\n1," + "1" * 200_000),
        "no file": refused(None),
    }


def recommendations():
    def advice(results, limits=ANY, question=WORKERS, width=80):
        return printed(print_recommendation, RecommendView(recommend(question, results, limits), COMMAND), width=width)

    three = at_workers({1: 40.0, 2: 22.0, 4: 12.0})
    two = at_workers({1: 40.0, 2: 22.0})
    reached = Constraints(target=Target("accuracy", 0.9))
    missed = [*two[:-1], replace(two[-1], reports=({"accuracy": 0.2},))]
    lr = Question("s", {}, ("lr",))
    alike = [
        make_result({"lr": x}, r, time_s * NOISE[(r + i) % 6])
        for i, (x, time_s) in enumerate(((0.1, 12.05), (0.2, 12.0)))
        for r in range(6)
    ]
    instead = "The store has no record of the study's file: increase num_repeats in it and run it again."
    once = recommend(WORKERS, at_workers({1: 40.0, 2: 22.0}, (1.0,)), ANY)
    launched = [replace(r, startup_s=1.0, warmup_s=0.5, eval_time_s=0.5) for r in two]
    priced = replace(WORKERS, price_per_node_hour=36.0)
    worse = [
        replace(
            r,
            conditions=stored_conditions({"node": ["n1"], "energy_of": "CPU packages"}),
            energy_j=100.0 * (r.train_time_s or 0.0),
        )
        for r in (*two, *at_workers({4: 12.0}, accuracy=0.9))
    ]
    return {
        "clear": advice(three),
        "a limit on efficiency": advice(three, Constraints(min_efficiency=0.88)),
        "a tie, fewer workers": advice(at_workers({1: 40.0, 2: 12.05, 4: 12.0}, NOISE)),
        "a tie, as many workers": advice(alike, question=lr),
        "unclear": advice(at_workers({1: 90.0, 2: 13.0, 4: 12.0}, (1.0, 1.12, 0.93))),
        "too noisy": advice(at_workers({1: 900.0, 2: 13.0, 4: 12.0}, (1.0, 1.5, 0.7))),
        "one trial each, no command": printed(print_recommendation, RecommendView(once, instead, is_command=False)),
        "no point reaches the target": advice(two, Constraints(target=Target("accuracy", 0.999))),
        "no point is fast enough": advice(two, Constraints(max_time_s=1.0)),
        "a train loop's target": advice([replace(r, train_time_s=None) for r in two], reached),
        "a target missed once": advice(missed, reached),
        "a target from the launch on": advice(launched, replace(reached, start=Start.LAUNCH)),
        "batch sizes": advice(batch_sizes(), reached, Question("s", {}, ("batch_size",))),
        "a price": advice(worse, Constraints(max_time_s=30.0), priced),
        "a price, 40 columns": advice(worse, Constraints(max_time_s=30.0), priced, width=40),
        "diverged trials": advice(some_diverged()[1], question=some_diverged()[0]),
        "diverged trials and a target": advice(some_diverged()[1], reached, some_diverged()[0]),
        "points of which one does not fit": advice(some_do_not_fit()[1], question=some_do_not_fit()[0]),
        "points of which one does not fit, and a limit": advice(
            some_do_not_fit()[1], Constraints(limits={"memory_bytes": 1.5e9}), some_do_not_fit()[0]
        ),
        "many points": advice([make_result({"lr": i / 100}, 0, 4.0 + i) for i in range(20)], question=lr),
    }


def comparisons():
    def trials(n, factor=1.0, accuracy=0.97, num=5, **config):
        steady = enumerate((4.00, 4.01, 3.99, 4.02, 3.98)[:num])
        return [make_result({"num_workers": n}, r, t * factor, accuracy + r / 1000, config=config) for r, t in steady]

    def shown(a, b, origins=({}, {}), *, allowed=None, width=80, names=("old", "new"), keys=("num_workers",)):
        sides = [Side(Question(n, {}, keys), tuple(r), o) for n, r, o in zip(names, (a, b), origins, strict=True)]
        comparison = compare(*sides, allowed)
        codes = {Gate.PASSED: 0, Gate.FAILED: 1, Gate.INCONCLUSIVE: 3}
        code = None if allowed is None else codes[comparison.gate]
        return printed(print_comparison, CompareView(comparison, exit_code=code), width=width)

    five = [r for n in (1, 2, 4, 8, 16) for r in trials(n)]
    changed = [*trials(1, 1.2), *trials(2, 1.4), *trials(4, 0.5), *trials(8), *trials(16, num=1)]
    here = {"version.torch": ("2.13",), "cpu": ("x",)}
    there = {"version.torch": ("2.14", "2.15"), "cpu": ("x",), "git.dirty": ("yes",)}
    failed = [make_result({"num_workers": 1}, state=TrialState.FAILED)]
    gone = [diverged({"num_workers": 1}, r) for r in range(3)]
    same = [make_result({"num_workers": 1}, r) for r in range(3)]
    other = [*trials(1), *trials(8), *trials(4, epochs=2)]
    only = [replace(r, spec=replace(r.spec, point={})) for r in trials(1)]
    hostile = trials("[bold]two\nlines[/bold]")
    return {
        "slower, faster, inconclusive, no interval": shown(five, changed),
        "worse, 100 columns": shown(trials(1), trials(1, accuracy=0.9), width=100),
        "no finished trial": shown(trials(1), failed),
        "diverged trials": shown(trials(1), gone),
        "one trial each": shown(trials(1, num=1), trials(1, num=1)),
        "the same": shown(same, same),
        "excluded": shown([*trials(1), *trials(2), *trials(4, epochs=1)], other),
        "nothing in common": shown(trials(1), trials(2)),
        "other device, versions and commit": shown(trials(1, device="cpu"), trials(1, device="cuda"), (here, there)),
        "the same origin": shown(trials(1), trials(1), (here, here)),
        "an unknown origin": shown(trials(1), trials(1), (here, {})),
        "nothing swept": shown(only, only, keys=()),
        "hostile names": shown(hostile, hostile, names=("a|b", "[bold]x\ny[/bold]")),
        "gate: failed": shown(five[:15], [*trials(1, 1.3), *trials(2), *trials(4, 1.05)], allowed=0.05),
        "gate: diverged in B": shown(five[:10], [*gone, *trials(2), diverged({"num_workers": 2}, 9)], allowed=0.05),
        "gate: passed": shown(trials(1), trials(1), allowed=0.025),
        "gate: inconclusive": shown(five, [*trials(1, num=1), *trials(2), *trials(4, epochs=9)], allowed=0.05),
    }


JOB = JobSpec(Scaling.STRONG, 256, num_samples=25_600)


def prediction(job=JOB, asked=16, variation=0.0, **how):
    layer_costs = (LayerCost("a", 4_000_000, 0.3, 0.2), LayerCost("b", 8_000_000, 0.3, 0.2))
    points = [ObservedPoint(1, b, (0.002 + b * 1e-4, 0.00205 + b * 1.01e-4)) for b in (64, 256)]
    calibration = calibrate(points, layer_costs, variation)
    communication = replace(Communication(Network(1e-5, 1e10)), **how)
    sweep = predict(calibration, job, communication, [2**i for i in range(asked.bit_length())])
    rates = rates_by_model(job, sweep, {})
    facts = Facts(scaling=job.scaling, step_time_s=job.batch_of(1) / rates.rates[1][0], num_parameters=3e6)
    outlook = look_ahead(rates, facts, [p.num_workers for p in sweep.predictions], nodes_of=8, sweep=sweep)
    model = StepModel(calibration, job, communication, sweep, "as given")
    return CandidateView("wide", "Study wide", outlook, model)


def table_prediction(asked=16):
    rates = MeasuredRates({1: (100.0,), 2: (190.0, 188.0), 4: (350.0,)}, "images/s")
    outlook = look_ahead(rates, Facts(), [1, 2, 4, 8, asked])
    return CandidateView("times.csv", "times.csv", outlook, why_no_bound="a table does not show the layers")


def predict_view(*candidates):
    return PredictView((candidates[0].outlook.expected[-1].num_workers,), candidates)


def predictions():
    nodes = Topology(8, Network(1e-5, 1e10), Network(2e-5, 1e9))
    on_nodes = {"network": nodes, "compression": 0.5, "bucket_bytes": 2**22, "algorithm": "hierarchical"}
    once = prediction()
    cases = {
        "fast network": once,
        "latency": prediction(network=Network(1e-2, 1e12)),
        "bandwidth, ring": prediction(network=Network(0.0, 1e7), algorithm="ring"),
        "input": prediction(replace(JOB, input_samples_per_s=1000.0), algorithm="gloo"),
        "small batch, tree": prediction(network=Network(0.0, 1e15), algorithm="tree", overlap=False),
        "one worker": prediction(asked=1),
        "stragglers, weak scaling": prediction(JobSpec(Scaling.WEAK, 256, 25_600), variation=0.2),
        "fewer samples than workers": prediction(replace(JOB, batch_size=4)),
        "nodes, accumulation, compression": prediction(replace(JOB, accumulation_steps=4), **on_nodes),
        "a table": table_prediction(),
    }
    shown = {title: printed(print_prediction, predict_view(case)) for title, case in cases.items()}
    shown["two candidates"] = printed(print_prediction, predict_view(once, table_prediction()))
    return {**shown, "a plot": in_words(plot_of(prediction(asked=64)))}


def _rank(hidden_s=0.0, waits_for=None, **parts):
    every = {part: parts.get(part, 0.0) for part in PARTS}
    return Breakdown(sum(every.values()), every, hidden_s, dict(waits_for or {}))


RANKS = (
    _rank(0.01, {1: 0.02}, forward=0.02, backward=0.04, stragglers=0.02, exposed_communication=0.01, other=0.01),
    _rank(0.01, {}, forward=0.03, backward=0.05, exposed_communication=0.01, other=0.01),
)
TWO_RANKS = Profile(RANKS, 10, step_s=0.09, overhead=0.11, utilisation=0.25, flop_per_sample=1e6, peak_flops=2e11)


def profiles():
    stage = _rank(forward=0.05, bubble=0.04, exposed_communication=0.01)
    unknown = replace(TWO_RANKS, utilisation=None, shares_clock=False, matches_collectives=False)
    cases = {
        "two ranks": TWO_RANKS,
        "eight ranks": replace(TWO_RANKS, ranks=tuple(_rank(forward=0.01 * (i + 1), other=0.01) for i in range(8))),
        "one rank": replace(TWO_RANKS, ranks=(_rank(forward=0.1, backward=0.2),)),
        "a pipeline": replace(TWO_RANKS, ranks=(stage, stage)),
        "unknown work, several machines": unknown,
        "a profiler that costs nothing": replace(TWO_RANKS, overhead=-0.05),
    }
    shown = {title: printed(print_profile, "tiny", case) for title, case in cases.items()}
    return {**shown, "with traces": printed(print_profile, "tiny", TWO_RANKS, traces="logs/profile")}


def figures():
    def drawn(keys, results, asked=WORKERS):
        every = figures_of(analyse(asked, results), results)
        return "\n".join(in_words(f) for f in every if getattr(f, "key", "omitted") in keys.split())

    def reported(points, metric, *values, num_reports=1):
        return [
            replace(make_result({"lr": x}, 0, 100.0 - x), reports=({metric: value, TRAIN_TIME: 2.0},) * num_reports)
            for x, value in zip(points, values, strict=True)
        ]

    both, full = html_studies.question(), html_studies.results()
    lr, loss = (
        Question("s", {}, ("lr",), num_repeats=1, is_search=True),
        Question("s", {}, ("lr",), metric="loss", mode="min"),
    )
    eight = [r for i in range(8) for r in at_workers({1: 4.0 + i, 2: 2.0 + i, 4: 1.0 + i}, NOISE[:2])]
    groups = [replace(r, spec=replace(r.spec, point={"lr": i // 6, **r.spec.point})) for i, r in enumerate(eight)]
    wide = "speedup efficiency times pareto", at_workers({1: 1.0, 2: 2.0, 4: 3.0}, (1.0, 5.0))
    parts = {"startup_s": 1.0, "data_time_s": 0.25, "warmup_s": 0.5, "eval_time_s": 0.75, "wall_s": 10.0}
    broken = [replace(r, reports=(*r.reports, {"accuracy": math.nan, TRAIN_TIME: 1.0})) for r in full[:2]]
    losses = "pareto", reported((0.1, 0.2, 0.3), "loss", 0.1, 0.9, 0.5)
    loop = [replace(r, train_time_s=None, reports=({"accuracy": 0.5}, {"accuracy": 0.7})) for r in at_workers({1: 4.0})]
    drawn_lr = [make_result({"lr": i / 7, "momentum": i / 9}) for i in range(8)]
    shares = [make_result({"lr": lr}, r, 4.0 + r + lr, 0.5 + r / 2) for r in (0, 1) for lr in (0.1, 0.2)]
    best = "learning", reported(range(9), "accuracy", *(x / 9 for x in range(9)), num_reports=2)
    with patch.multiple(report_figures, MAX_REPORTS=24):
        thinned = drawn("learning", full, both)
    return {
        "no results": drawn("omitted", [], both),
        "diverged trials": drawn("times pareto heat_map metric_heat_map", some_diverged()[1], some_diverged()[0]),
        "points of which one does not fit": drawn("memory times heat_map", some_do_not_fit()[1], some_do_not_fit()[0]),
        "points that fill no grid": drawn(
            "omitted", drawn_lr, Question("s", {}, ("lr", "momentum"), num_repeats=1, is_search=True)
        ),
        "more groups than colours": drawn("speedup", groups, both),
        "too few worker counts for a curve": drawn("speedup efficiency", at_workers({1: 4.0, 2: 2.5}, NOISE)),
        "intervals far wider than the values": drawn(*wide),
        "parts of trials": drawn("trial_parts", [replace(r, **parts) for r in at_workers({1: 4.0, 2: 3.0})]),
        "a profile": drawn("breakdown", full, both),
        "many points: the fastest": drawn("times", reported(range(50), "accuracy", *[0.5] * 50), lr),
        "many points: the best": drawn(*best, lr),
        "many reports": thinned,
        "a number that can't be drawn": drawn("learning", broken),
        "a loop without times": drawn("learning", loop),
        "a front, the metric small": drawn(*losses, loss),
        "a front, the metric large": drawn(*losses, replace(loss, mode="max")),
        "a front, by intervals": drawn("pareto", at_workers({1: 40.0, 2: 22.0, 4: 13.0, 8: 13.2}, (1.0, 1.1, 0.9))),
        "an accuracy's interval": drawn("pareto", shares, lr),
    }


def in_words(figure):
    """Return a figure's title, caption and data."""
    if isinstance(figure, OmittedFigure):
        return f"(without {figure.title}: {figure.reason})"
    shown = [pretty(brief(rows)) for rows in data_of(figure.spec)]
    return "\n".join([f"{figure.key}: {figure.title}", figure.caption, *shown])


# ---- the view of a running study

POINT = {"batch_size": 64, "num_workers": 2}
ONE, TWO = {"num_workers": 1}, {"num_workers": 2}
PICTURE = "picture"


def live():
    def watched(num, *events, terminal=True, width=90, **more):
        """Return the output for events (seconds: time passes, PICTURE: the view is drawn)."""
        passed = [0.0]
        console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, _environ={})
        noon = datetime(2026, 3, 2, 12)
        view = LiveView(
            console, num, clock=lambda: sum(passed), now=lambda: noon + timedelta(seconds=sum(passed)), **more
        )
        with contextlib.nullcontext() if terminal else view:  # a terminal's view, once entered, draws at any time
            for event in events:
                if isinstance(event, float):
                    passed.append(event)
                elif isinstance(event, str):
                    console.print(view._render())
                else:
                    view(event)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def started(repeat, point=POINT):
        return runner.TrialStarted(make_spec(point, repeat), 1)

    def ended(repeat, point=POINT, time_s=4.0, **more):
        return runner.TrialEnded(make_result(point, repeat, time_s, **more))

    gang, one = Placement(2, 1, "cpu"), Placement(1, 1, "cpu")
    starting, ready = runner.GangStarting(gang), runner.GangReady(gang, 14.26)
    retried = runner.TrialRetried(make_spec(POINT, 2), "lost")
    failed = ended(1, state=TrialState.FAILED, failure="boom\nat 1")
    numbers = {"epoch": 2, "train_loss": 0.2134, "accuracy": 0.971, "throughput_samples_per_s": 114_321.0}
    report = runner.TrialReported(make_spec(POINT), numbers)
    words = runner.Notice("waiting for [2] nodes"), runner.ClusterChanged(3, 6)
    three = [ended(r, wall_s=wall_s) for r, wall_s in enumerate((10.0, 12.0, 100.0))]
    # Pauses of 30 s, which holds the first use of the store, and of 2 s; each end is reported 1 s late.
    runs = [e for r, rest_s in ((0, 29.0), (1, 1.0)) for e in (started(r, ONE), 10.0, ended(r, ONE, 8.0), rest_s)]
    queued = [make_spec(ONE, 1), make_spec(TWO, 1), make_spec(TWO, 2)]
    alike = {"queued": queued, "done": [make_result(ONE, 0, wall_s=40.0), make_result(TWO, 0, wall_s=10.0)]}
    first = runner.GangStarting(one), runner.GangReady(one, 20.0), *runs, started(2, ONE)
    queue = [*(make_spec(ONE, r) for r in range(4)), make_spec(TWO)]
    pairs = [ended(r, p, t + r * (t < 3) / 5) for r in (0, 1) for p, t in ((ONE, 4.0), (TWO, 2.0))]
    more = [ended(r, p, t) for r in (2, 3, 4) for p, t in ((ONE, 4.0), (TWO, 2.0))]
    best = {"question": WORKERS}
    settling = {"question": replace(WORKERS, max_repeats=30)}
    skipped = Failure(
        FailureKind.SKIPPED, "not run: the first 2 attempts at its point failed with the same error: boom"
    )
    not_run = runner.TrialEnded(replace(failed.result, spec=make_spec(POINT, 3), failure=skipped))
    reason = "2 points open: num_workers=2 1.04× [0.98, 1.10], num_workers=4 1.61× [0.95, 2.71]; about 5 min 10 s more"
    added = runner.TrialsAdded([make_spec(p, 2) for p in (ONE, TWO)], reason, 240.0)
    piped = starting, ready, started(0), report, ended(0, time_s=3.2), failed, retried, *words
    return {
        "a pipe": watched(12, *piped, terminal=False),
        "some are done": watched(5, ended(3), terminal=False, done=[make_result(POINT, r) for r in range(3)]),
        "a gang, a trial": watched(10, starting, 12.0, PICTURE, ready, PICTURE, ended(1), report, PICTURE),
        "diverged": watched(3, started(0), runner.TrialEnded(diverged(POINT, 0)), started(1), PICTURE),
        "diverged, a pipe": watched(3, ended(0), runner.TrialEnded(diverged(POINT, 1)), terminal=False),
        "failed and retried": watched(3, started(0), started(1), started(2), failed, retried, PICTURE),
        "many trials run": watched(50, *map(started, range(7)), PICTURE),
        "stopped": watched(4, started(0), failed, not_run, PICTURE),
        "40 columns": watched(10, ended(1), failed, report, PICTURE, width=40),
        "Ray starts": watched(4, 4.0, PICTURE, starting, 1.0, PICTURE, starting=STARTING_RAY),
        "Ray starts, a pipe": watched(4, starting, terminal=False, starting=STARTING_RAY),
        "until settled": watched(4, *pairs, PICTURE, added, 86400.0, PICTURE, **settling),
        "until settled, a pipe": watched(4, *pairs[2:], added, *more[:1], terminal=False, **settling),
        "time left: the median": watched(10, PICTURE, *three, PICTURE, started(3), 5.0, PICTURE, 495.0, PICTURE),
        "time left: two at once": watched(9, ended(0, wall_s=10.0), started(1), started(2), PICTURE),
        "time left: trials alike": watched(5, PICTURE, ended(1, ONE, wall_s=40.0), PICTURE, **alike),
        "time left: pauses and gangs": watched(5, *first, PICTURE, starting, PICTURE, queued=queue),
        "the leading point": watched(11, *pairs[:2], PICTURE, *pairs[2:], PICTURE, *more, PICTURE, **best),
        "the leading point, a pipe": watched(11, *pairs, *more, terminal=False, **best),
    }


def descriptions():
    """Return a study's note in MLflow."""
    timed = {
        "space": {"batch_size": grid(64, 256), "num_workers": grid(1, 2)},
        "baseline": {"num_workers": 1},
        "num_repeats": 2,
        "config": {"epochs": 4, "lr": 0.1},
        "description": "Does a second worker pay off?",
    }
    space = {"lr": loguniform(1e-3, 1), "optimizer": choice("sgd", "adam")}
    return {
        "a timed study": describe(Study(workload=digits, **timed), ("raypar", "study", "a.py")),
        "a search": describe(Study(workload=digits, space=space, num_trials=8)),
        "one point": describe(Study(workload=digits, num_repeats=1)),
    }


def runs():
    """Return a trial's result as the fields of an MLflow run."""
    point = {"batch_size": 64, "num_workers": 2}
    config = {**point, "lr": 0.1, "hidden": (128, 64), "device": "cpu", "schedule": None}
    spec = TrialSpec("mnist", "mlp", point, config, repeat=0, seed=7, order=3)
    result = TrialResult(
        spec=spec,
        state=TrialState.FINISHED,
        started_at=1000.0,
        wall_s=10.0,
        train_time_s=6.0,
        throughput_samples_per_s=100.0,
        reports=tuple({"epoch": n, "accuracy": score, "train_time_s": 3.0} for n, score in ((1, 0.5), (2, 0.9))),
        step_times_s=((0.1, 0.2, 0.3), (0.3, 0.1, 0.1)),
        conditions=stored_conditions({"node": "n1", "cores": [[0], [1]], "cpu_wait_share": [0.1, 0.2]}),
        data=DATA,
    )
    of_the_loop = {key: 0.5 + i for i, key in enumerate(SECTIONS)}
    reports = tuple({**of_the_loop, "step": step, "accuracy": 0.7} for step in (8, 16))
    defaults = {key: option.default for key, option in OPTIONS.items()}
    failure = Failure(FailureKind.CRASH, "rank 1 died", rank=1, traceback="Traceback …", log_path="/logs/1")
    two_steps = {"step_times_s": ((2.0, 1.0),)}
    odd = ("text", None, True, [1], 10**400, math.inf)
    epochs = {"repeat": (1, 1), "are fractions": (1.5, 2.5), "are NaN": (math.nan, 1), "are missing": (None, None)}
    changes = {
        "finished": {},
        "stopped, of one step": {"state": TrialState.STOPPED, "step_times_s": ((1.0,),)},
        "failed": {"state": TrialState.FAILED, "failure": failure, "started_at": 0.0, "wall_s": None, **two_steps},
        "reports of the training loop": {"reports": reports},
        "reports of a loop that failed": {
            "reports": reports,
            "train_time_s": None,
            "spec": replace(spec, config=defaults),
        },
        "a metric named as a section": {"reports": ({**reports[0], "eval/loss": 5.0},)},
        "reports of a user's loop": {
            "train_time_s": None,
            "reports": ({"epoch": 1, "step": 8, "train_loss": 0.9, "lr": 0.1, "wall_s": 3.0}, {"epoch": 2, "step": 16}),
        },
        "values that are no numbers": {"reports": tuple({"epoch": i, "odd": value} for i, value in enumerate(odd))},
        **{
            f"epochs that {title}": {"reports": tuple({"epoch": n, "loss": 1.0} for n in values)}
            for title, values in epochs.items()
        },
    }
    return {title: _run(replace(result, **each), title in ("finished", "failed")) for title, each in changes.items()}


def _run(result, in_full):
    run = child_run(result, result_json=result.to_json(), recorded_at=2000.0)
    lines = [f"{run.name}: {run.status}, from {run.start_ms} to {run.end_ms} ms"]
    for p in run.points:
        if p.key not in ("num_workers", "batch_size", "wall_s") or in_full or p.step:
            lines.append(f"metric {p.key} = {p.value:.6g} at step {p.step}, {p.time_ms} ms")
    if in_full:
        lines += [f"param {key} = {value}" for key, value in run.params.items()]
        lines += [f"tag {key} = {value}" for key, value in run.tags.items() if key != "raypar.result"]
        lines += [f"input {each}" for each in run.inputs]
        lines += [f"file {name}" for name in run.files]
    return "\n".join(lines)


def views():
    search = ViewContent({"lr": True}, "macro_f1", ["train/loss", "eval/loss", "macro_f1"])
    swept = {"strategy": False, "num_workers": True}
    timed = ViewContent(swept, "accuracy", ["accuracy"], compares=True, has_points=True)
    contents = {"a search": search, "a timed study": timed}
    return {
        f"{title}, {tag.rpartition('.')[2]}": pretty(unpacked(text))
        for title, content in contents.items()
        for tag, text in saved_views(content, at_ms=1).items()
        if content.has_points or tag.endswith("trials")
    }


FILES = {"report": reports, "verdicts": verdict_cases, "markdown": markdown, "effects": effects, "scaling": scaling}
FILES |= {"figures": figures, "tables": tables, "descriptions": descriptions, "runs": runs, "live": live}
FILES |= {"recommend": recommendations, "compare": comparisons, "predict": predictions, "profile": profiles}
FILES["views"] = views
