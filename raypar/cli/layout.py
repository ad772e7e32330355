"""Command that looks for the fastest way to divide a training step among workers."""

from __future__ import annotations

import logging
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from raypar.cli import common
from raypar.cli.flags import takes
from raypar.cli.study import check_is_model, executed, load, options_here
from raypar.errors import RayparError, check_for_training, shortened
from raypar.execution.flags import RunFlags
from raypar.signals import handle_signals
from raypar.study.space import Grid
from raypar.units import SIZES_BYTES, counted

if TYPE_CHECKING:
    from raypar.analysis.points import PointAnalysis
    from raypar.execution.results import ExecutionOutcome
    from raypar.predict.layout import StepLayout
    from raypar.predict.network import Network
    from raypar.reporting.layout import RankedLayout
    from raypar.study.loader import LoadedStudy
    from raypar.study.space import Value
    from raypar.study.study import ListedStudy
    from raypar.study.workload import Workload

SUFFIX = "_layout"
NUM_STEPS = 30  # of a trial
MAX_REPEATED = 3  # layouts besides the baseline that are repeated until one is shown to be the fastest
BUDGET_S = 300.0


@takes(
    *("workers", "gpu_memory", "max_runs", "dry_run", "network", "set", "fresh", "no_ray", "address", "budget"),
    *("data_dir", "tracking_uri", "share_machine"),
)
def layout(
    file: common.StudyFile,
    flags: RunFlags,
    workers: Annotated[int, common.what(metavar="N", help="Number of workers.")] = 2,
    gpu_memory: Annotated[
        str | None,
        common.what(metavar="SIZE", help="Leave out layouts that need more than a GPU has: 80GB. (default: no limit)"),
    ] = None,
    max_runs: Annotated[
        int | None, common.what(metavar="N", help="Run at most this many layouts. (default: a third of the legal ones)")
    ] = None,
    network: Annotated[
        str | None,
        common.what(metavar="NETWORK", help="Link between workers: 100Gbit. (default: measured on this machine)"),
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Find the fastest way to divide a step among workers.

    Lists the legal combinations of data, fully sharded, tensor and pipeline parallelism with accumulation and
    activation checkpointing, and predicts the time of a step from the work of one rank at a time. Then runs the leading
    ones in short trials, and repeats the best until they are settled. The global batch and the precision stay the same.

    Example:  raypar model layout studies/strategies.py --workers 8 --gpu-memory 80GB
    """
    gpu_bytes = common.parse_quantity("--gpu-memory", gpu_memory, SIZES_BYTES, "size", "80GB or 24GiB")
    for word, number, least in (("--workers", workers, 2), ("--max-runs", max_runs, 1)):
        if number is not None and number < least:
            raise RayparError(f"{word} {number}: must be at least {least}", hint=f"write {word} {least}")
    check_for_training("without it raypar can't run the model's steps")
    from raypar.predict.layout import leading, legal_layouts, question_of_layout, ranked
    from raypar.predict.network import parse_network
    from raypar.reporting.layout import LayoutView, RankedLayout, print_layouts
    from raypar.run.cluster import this_machine
    from raypar.study.trial import Placement

    given = parse_network(network) if network else None
    with handle_signals():
        loaded = load(file, replace(flags, budget=None))
        study = loaded.study if flags.budget is None else replace(loaded.study, until="settled", budget=flags.budget)
        loaded = replace(loaded, study=study)
        check_is_model(study, "raypar model layout")
        if study.is_search:
            raise RayparError(f"{file}: a search has no fixed points", hint="give its space values: --set lr=0.1")
        from raypar.parallel.strategy import check_compatible
        from raypar.study.workload import Workload

        assert isinstance(study.workload, Workload)
        machine = this_machine()
        device = "cuda" if machine.has_gpu and not machine.gpu_problem else "cpu"
        fixed, widened = question_of_layout(study, workers)
        legal = legal_layouts(study.workload, fixed, widened, machine, check_compatible, device)
        if not legal:
            problem = f"{file}: no layout on {workers} workers is legal"
            raise RayparError(
                problem, hint="try fewer workers; `raypar plan FILE --set num_workers=…` shows the reason"
            )
        notes: list[str] = []
        if gpu_bytes is not None:
            legal, notes = _with_memory(study.workload, legal, study.seed, gpu_bytes)
        fitting = ranked(legal)
        if fitting:
            link, note = (given, "") if given else _measured_network(workers, device, len(machine.cores or ()))
            notes += [note] if note else []
            num_cores = float("inf") if flags.address else machine.num_cpus
            fitting = ranked(_with_times(study.workload, fitting, study.seed, link, num_cores, device))
        measured: dict[int, RankedLayout] = {}
        outcome: ExecutionOutcome | None = None
        refusal = ""
        if flags.address is None and fitting:
            refusal = next(iter(machine.refusals([Placement.of(fitting[0].config)]).values()), "")
        if refusal:
            notes.append(f"Nothing ran: {workers} workers: {refusal}. All times are predictions.")
        elif fitting and not flags.dry_run:
            most = max_runs or max(1, len(legal) // 3)
            chosen = leading(fitting, most)
            measured, outcome = _run(loaded, flags, fixed, chosen)
        rows = [measured.get(id(each)) or RankedLayout(each) for each in fitting]
        # One trial may be fast by chance: the best is one of those with the most.
        most_trials = max((row.num_trials for row in rows), default=0)
        repeated = [row for row in rows if row.measured_s is not None and row.num_trials == most_trials]
        best = min(repeated, key=lambda row: row.measured_s or 0.0, default=None)
        rows.sort(key=lambda row: (row is not best, row.measured_s is None, row.measured_s or 0.0))
        view = LayoutView(study.name, workers, rows, len(legal) - len(fitting), gpu_bytes, notes)
        if as_json:
            common.print_json(view)
        else:
            print_layouts(common.stdout(), view)
        if outcome is not None:
            common.exit_as(outcome)


def _with_memory(
    workload: Workload, layouts: Sequence[StepLayout], seed: int, gpu_bytes: float
) -> tuple[tuple[StepLayout, ...], list[str]]:
    """Return the layouts with their predicted memory, and a note on those that have no prediction."""
    from raypar.predict.memory import problem_of
    from raypar.predict.shapes import predict_memory
    from raypar.study.memory_fit import fit_of

    predicted: list[StepLayout] = []
    problems: dict[str, int] = {}
    for each in layouts:
        try:
            peak = predict_memory(workload, each.config, seed)
        except Exception as error:  # from the user's data, model or loss
            problem = problem_of(error)
            problems[problem] = problems.get(problem, 0) + 1
            predicted.append(each)
        else:
            needed = peak.range_bytes(int(each.config["num_workers"]), on_gpu=True)
            predicted.append(replace(each, memory_bytes=needed, fit=fit_of(needed, gpu_bytes)))
    notes = [f"The memory of {counted(num, 'layout')} is unknown: {problem}." for problem, num in problems.items()]
    return tuple(predicted), notes


def _measured_network(num_workers: int, device: str, num_cores: int) -> tuple[Network, str]:
    """Measure the link between workers of this machine; return it and a note, if it is assumed."""
    from raypar.predict.network import Network, fit_network
    from raypar.predict.probe import probe_all_reduces

    num = min(num_workers, num_cores)
    if num < 2:
        return Network(50e-6, 2e9), "The link between workers is assumed: 50 µs and 2 GB/s. --network sets it."
    with tempfile.TemporaryDirectory() as folder:
        samples = probe_all_reduces(num, Path(folder), device, common.notices_on(common.stdout()))
    return fit_network(samples, num), ""


def _with_times(
    workload: Workload, layouts: Sequence[StepLayout], seed: int, link: Network, num_cores: float, device: str
) -> list[StepLayout]:
    """Return the layouts with their predicted step times."""
    from raypar.predict.layout import step_s, with_time
    from raypar.predict.rank_steps import rank_steps

    assert workload.data is not None  # a model has data, see check_is_model
    data = workload.data(layouts[0].config)
    timed: list[StepLayout] = []
    logging.disable(logging.ERROR)  # torch logs the schedule of a pipeline whose step failed
    try:
        with warnings.catch_warnings(action="ignore"):
            for each in layouts:
                try:
                    steps = rank_steps(workload, each.config, seed, data)
                except Exception as error:  # such as a model that can't take what nobody has sent
                    timed.append(with_time(each, None, shortened(f"{type(error).__name__}: {error}")))
                else:
                    seconds = step_s(each.config, steps, link, num_cores, on_gpu=device == "cuda")
                    timed.append(with_time(each, seconds))
    finally:
        logging.disable(logging.NOTSET)
    return timed


def _run(
    loaded: LoadedStudy, flags: RunFlags, fixed: Mapping[str, Value], chosen: Sequence[StepLayout]
) -> tuple[dict[int, RankedLayout], ExecutionOutcome]:
    """Run layouts once, and the fastest of them until they are settled; return what was measured of each."""
    from raypar.analysis.comparison import Comparison
    from raypar.analysis.question import point_key
    from raypar.execution.source import source_of
    from raypar.reporting.layout import RankedLayout

    keys = [key for key in chosen[0].settings if len({each.settings[key] for each in chosen}) > 1]
    points = {id(each): {key: each.settings[key] for key in keys} for each in chosen}

    def ask(layouts: Sequence[StepLayout], first_repeat: int = 0) -> ExecutionOutcome:
        study = _study(loaded, fixed, layouts, keys, chosen[0])
        if not first_repeat:
            study = replace(study, num_repeats=1, until="", budget=None)
        options = options_here(
            replace(flags, fresh=flags.fresh and not first_repeat), source=source_of(study, first_repeat)
        )
        with executed(replace(loaded, study=study), options, shows_trials=True) as (_, outcome):
            return outcome

    last = ask(chosen)
    by_key = _by_point(last)
    done = [each for each in chosen if (p := by_key.get(point_key(points[id(each)]))) and _time_s(p) is not None]
    fastest = sorted(done, key=lambda each: _time_s(by_key[point_key(points[id(each)])]) or 0.0)[:MAX_REPEATED]
    best = [*(each for each in done if each.is_baseline and each not in fastest), *fastest]
    again = by_key
    if len(best) > 1 and not last.was_interrupted:
        last = ask(best, first_repeat=1)
        again = _by_point(last)
    measured: dict[int, RankedLayout] = {}
    has_baseline = any(each.is_baseline for each in best)
    for each in chosen:
        key = point_key(points[id(each)])
        repeated = again.get(key) if each in best else None
        point = repeated or by_key.get(key)
        if point is None or _time_s(point) is None:
            continue
        compared = None
        if repeated is not None and again is not by_key and has_baseline and not each.is_baseline and repeated.speedup:
            compared = Comparison(repeated.speedup, doubt=last.analysis.evidence.doubt)
        measured[id(each)] = RankedLayout(each, _time_s(point), compared, len(point.results))
    return measured, last


def _by_point(outcome: ExecutionOutcome) -> dict[object, PointAnalysis]:
    from raypar.analysis.question import point_key

    return {point_key(each.point): each for each in outcome.analysis.evidence.points}


def _time_s(point: PointAnalysis) -> float | None:
    """Return the median over trials of the mean step time."""
    times = [r.train_time_s / len(r.step_times_s[0]) for r in point.measured if r.train_time_s and r.step_times_s]
    return statistics.median(times) if times else None


def _study(
    loaded: LoadedStudy,
    fixed: Mapping[str, Value],
    layouts: Sequence[StepLayout],
    keys: Sequence[str],
    first: StepLayout,
) -> ListedStudy:
    """Return the study that compares layouts in short trials."""
    from raypar.study.study import ListedStudy

    study = loaded.study
    listed = tuple({key: each.settings[key] for key in keys} for each in layouts)
    same = {key: value for key, value in first.settings.items() if key not in keys}
    batch_size = int(first.config["batch_size"])
    size = study.workload.train_size(first.config)
    num_samples = first.config["num_samples"] or NUM_STEPS * batch_size
    short = {"epochs": 1, "num_samples": min(num_samples, size) if size else num_samples}
    baseline = next((each for each in layouts if each.is_baseline), layouts[0])
    return ListedStudy(
        workload=study.workload,
        listed=listed,
        space={key: Grid(tuple(dict.fromkeys(point[key] for point in listed))) for key in keys},
        baseline={key: baseline.settings[key] for key in keys},
        config={**fixed, **same, **short},
        name=study.name.removesuffix(SUFFIX) + SUFFIX,
        seed=study.seed,
        num_repeats=3,
        max_repeats=max(4, min(study.max_repeats, 12)),
        until="settled",
        budget=study.budget or BUDGET_S,
        description=f"Which layout on {fixed['num_workers']} workers is fastest?",
    )
