"""Command that explains why a training takes as long as it does."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.cli import common
from raypar.cli.flags import takes
from raypar.cli.study import executed, load, options_here
from raypar.cli.target import Grids, Save, Target, is_file, study_file
from raypar.errors import RayparError
from raypar.execution.flags import NUM_PROFILED_STEPS, RunFlags, all_flags
from raypar.masking import masked
from raypar.signals import handle_signals
from raypar.study.script_settings import UNCHANGED, WHAT_IF
from raypar.study.space import Grid

if TYPE_CHECKING:
    from raypar.analysis.analyse import StudyAnalysis
    from raypar.execution.results import ExecutionOutcome
    from raypar.study.loader import LoadedStudy
    from raypar.study.trial import TrialResult

SUFFIX = "_why"
# Run flags of verbs that ask about a script: all but those that need a model, or ask something else.
FLAGS = tuple(
    flag.name
    for flag in all_flags()
    if flag.name not in ("num_profiled_steps", "log_model", "log_all_models", "dry_run")
)


@takes(*FLAGS)
def why(
    target: Target,
    flags: RunFlags,
    grid: Grids = None,
    save: Save = None,
    as_json: common.AsJson = False,
) -> None:
    """Explain why a training takes as long as it does.

    Runs a script unchanged to measure the parts of its steps. Then runs it without loading, communication, evaluation
    or checkpoints, if they take time, in alternation with the complete training. For a study of a model, profiles its
    steps. For a stored study, nothing is run.

    Examples:  raypar why train.py    raypar why train.py --grid num_workers=1,2    raypar why train_why
    """
    from raypar.analysis.why import worth_leaving_out
    from raypar.reporting.why import WhyView, print_why
    from raypar.study.workload import Workload

    def show(view: WhyView) -> None:
        if as_json:
            common.print_json(view)
        else:
            print_why(common.stdout(), view)

    with handle_signals():
        if is_stored(target, flags):
            from raypar.execution.stored import read_study

            show(WhyView.of(read_study(target, common.uri_of(flags.tracking_uri), Path.cwd()).analysis))
            return
        loaded = load_target(target, flags, grid, save)
        is_model = isinstance(loaded.study.workload, Workload)
        if is_model:
            flags = replace(flags, num_profiled_steps=NUM_PROFILED_STEPS)
        asking = Asking(loaded, flags, SUFFIX, "" if is_model else WHAT_IF)
        last = asking.execute(num_repeats=None if is_model else 1)
        if not is_model and not last.was_interrupted:
            # In blocks of their own, so that they are compared with complete trials of the same minutes.
            last = asking.execute(worth_leaving_out(WhyView.of(last.analysis).points), first_repeat=1)
        show(WhyView.of(asking.analysis_of_all(last)))
        say_how_to_continue(last, as_json=as_json)
        exit_as(last, asking.key)


def is_stored(target: str, flags: RunFlags) -> bool:
    """Return whether a target is the name of a stored study, and no file."""
    if len(target.split()) != 1 or target.endswith(".py") or is_file(target):
        return False
    return any(study.name == target for study in common.store_of(flags.tracking_uri).studies())


def load_target(target: str, flags: RunFlags, grid: Sequence[str] | None, save: Path | None) -> LoadedStudy:
    """Load a study file, or the study of a script as it is, on all cores. Raises RayparError if it is a search."""
    from raypar.train.affinity import host_cores

    num_cores = 0 if flags.address else len(host_cores())  # those of a cluster are unknown here
    loaded = load(study_file(target, grid, None, save, as_it_is=True, num_cores=num_cores), flags)
    if loaded.study.is_search:
        problem = f"{target}: is a search, which chooses its points as it goes"
        raise RayparError(problem, hint="ask about a study with listed points")
    return loaded


@dataclass
class Asking:
    """Executions of a study that sweeps a setting of its script as well, in comparison with the unchanged script.

    Attributes:
        suffix: of the name of the study.
        key: the setting; empty: none.
    """

    loaded: LoadedStudy
    flags: RunFlags
    suffix: str
    key: str
    _not_before: float = 0.0
    _results: dict[str, TrialResult] = field(default_factory=dict)

    def execute(
        self,
        values: Sequence[str] = (),
        num_repeats: int | None = None,
        first_repeat: int = 0,
        max_repeats: int | None = None,
        budget: float | str | None = None,
    ) -> ExecutionOutcome:
        """Execute the study without printing its report. Trials of earlier executions are not run again.

        Args:
            values: of the setting, besides that of the unchanged script.
            num_repeats: without more of them for what is open, and without a budget; None: as in the study.
            first_repeat: number of the first block.
            max_repeats: at most that many of a point, if the study does not say less.
            budget: None: as in the study.
        """
        from raypar.execution.source import source_of

        study = self.loaded.study
        asked = replace(
            study,
            name=study.name.removesuffix(self.suffix) + self.suffix,
            space={**study.space, **({self.key: Grid((UNCHANGED, *values))} if self.key else {})},
            baseline={self.key: UNCHANGED} if self.key else study.baseline,
            num_repeats=num_repeats or study.num_repeats,
            until="" if num_repeats else study.until,
            budget=None if num_repeats else budget or study.budget,
            max_repeats=max(study.num_repeats, min(study.max_repeats, max_repeats or study.max_repeats)),
        )
        # With a source, the store names this command as the one that continues the study.
        options = options_here(self.flags, source=source_of(asked, first_repeat), not_before=self._not_before)
        if self.flags.fresh:
            self.flags, self._not_before = replace(self.flags, fresh=False), time.time()
        with executed(replace(self.loaded, study=asked), options, shows_trials=True) as (_, outcome):
            self._results |= outcome.results
            return outcome

    def analysis_of_all(self, last: ExecutionOutcome) -> StudyAnalysis:
        """Return the analysis of the trials of all executions; that of an execution has only its own points."""
        from raypar.analysis.analyse import analyse

        return analyse(last.plan.question, tuple(self._results.values()), last.stopped)


def say_how_to_continue(outcome: ExecutionOutcome, *, as_json: bool) -> None:
    """Print how to continue after an interruption."""
    if outcome.was_interrupted and not as_json:
        command = masked(shlex.join(common.own_command()))
        common.say(common.stdout(), f"interrupted; run `{command}` to continue; finished trials are kept")


def exit_as(outcome: ExecutionOutcome, key: str) -> None:
    """Exit as an execution did. Failures count only at points that leave a setting as it is.

    Not every script can take every setting, and such a failure is part of the answer.

    Args:
        key: the setting; empty: none, so that all failures count.
    """
    is_complete = not outcome.was_interrupted and outcome.broke_off is None
    if is_complete and all(r.spec.point.get(key, UNCHANGED) != UNCHANGED for r in outcome.failures):
        return
    common.exit_as(outcome)
