"""Command that looks for settings that make a script faster."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.cli import common
from raypar.cli.flags import takes
from raypar.cli.target import Grids, Save, Target
from raypar.cli.why import FLAGS, Asking, exit_as, load_target, say_how_to_continue
from raypar.errors import RayparError
from raypar.execution.flags import RunFlags
from raypar.signals import handle_signals
from raypar.study.script_settings import CHANGE

if TYPE_CHECKING:
    from raypar.study.loader import LoadedStudy

SUFFIX = "_improve"
NUM_TRIED = 2  # trials of each change, after which only the promising ones are repeated
BUDGET_S = 540.0  # of all, so that the last block ends within ten minutes


@takes(*FLAGS)
def improve(
    target: Target,
    flags: RunFlags,
    grid: Grids = None,
    save: Save = None,
    as_json: common.AsJson = False,
) -> None:
    """Find settings that make a script faster.

    Measures the parts of its steps, tries the settings that these leave room for, one at a time and in alternation with
    the unchanged script, and repeats the most promising ones, alone and together, until they are settled or about ten
    minutes are over. The script itself is not changed.

    Examples:  raypar improve train.py    raypar improve train.py --grid epochs=1 --budget 20m
    """
    from raypar.analysis.improve import affordable_repeats, promising, remedies, worth_repeating
    from raypar.reporting.improve import ImproveView, print_improve
    from raypar.study.workload import Workload

    began_s = time.monotonic()
    with handle_signals():
        if not flags.repeats:
            flags = replace(flags, until="settled")
        loaded = load_target(target, flags, grid, save)
        if isinstance(loaded.study.workload, Workload):
            hint = "sweep the hyperparameters of the model: raypar study FILE --set KEY=A,B"
            raise RayparError(f"{target}: is not a study of a script or train loop", hint=hint)
        asking = Asking(loaded, flags, SUFFIX, CHANGE)
        last = asking.execute(num_repeats=1)
        changes = remedies(last.analysis.evidence)
        if not last.was_interrupted and changes:
            last = asking.execute(changes, num_repeats=NUM_TRIED)
        chosen = promising(last.analysis.evidence, changes, NUM_TRIED)
        if not last.was_interrupted and chosen:
            # In blocks of their own, so that all of them are compared with trials of the same minutes.
            budget, most = loaded.study.budget, None
            if budget is None and not flags.repeats:
                took_s = time.monotonic() - began_s
                budget = max(BUDGET_S - took_s, took_s / 2)  # a slow script's repeats get less than its first trials
            limit_s = budget if isinstance(budget, (int, float)) else math.inf
            again = worth_repeating(last.analysis.evidence, chosen, NUM_TRIED, limit_s)
            if math.isfinite(limit_s):
                most = affordable_repeats(last.analysis.evidence, again, NUM_TRIED, limit_s)
            last = asking.execute(again, first_repeat=NUM_TRIED, max_repeats=most, budget=budget)
        repeated = last.analysis if chosen and not flags.repeats and not last.was_interrupted else None
        view = ImproveView.of(asking.analysis_of_all(last), partial(calls_in, loaded), repeated)
        if as_json:
            common.print_json(view)
        else:
            print_improve(common.stdout(), view)
        say_how_to_continue(last, as_json=as_json)
        exit_as(last, CHANGE)


def calls_in(loaded: LoadedStudy, names: Collection[str]) -> Iterator[str]:
    """Yield file and line of the calls of one of some classes in the script, or in the train loop's file."""
    from raypar.init.calls import lines_of_calls
    from raypar.study.workload import TrainLoopWorkload

    workload = loaded.study.workload
    if isinstance(workload, TrainLoopWorkload):
        files = [inspect.getsourcefile(inspect.unwrap(workload.train_loop)) or ""]
    else:
        files = [str((loaded.path.parent / file).resolve()) for file in workload.files]
    yield from (f"{file}:{line}" for file in files for line in lines_of_calls(Path(file), names))
