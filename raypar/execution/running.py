"""Trials of an execution, from the start of the runner to its end, within the study's budget."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from raypar import units
from raypar.analysis.settle import Stopped
from raypar.errors import BrokeOff, NotForTraining, RayparError, WorkloadError
from raypar.execution.plan import ExecutionPlan
from raypar.execution.results import ResultHandler
from raypar.run.cluster import on_every_node
from raypar.run.runner import Event, Notice, OutOfTime, Runner, TrialEnded, TrialsAdded, TrialStarted
from raypar.run.time_limit import NO_TIME
from raypar.scratch import LOGS_PREFIX, remove_logs
from raypar.signals import OUT_OF_TIME, Interrupted, raise_again, uninterrupted
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialSpec

LOGS_TIMEOUT_S = 10.0
STOPPING = "stopping: finished trials are kept"
AT_TERMINAL = " (a second Ctrl-C exits at once)"


def run_trials(
    starting: AbstractContextManager[Runner], handler: ResultHandler, clock_s: Callable[[], float] = time.monotonic
) -> None:
    """Run the missing trials of a plan, and those that its source adds.

    Args:
        starting: starts the runner, and stops it afterwards.
        handler: handler with the plan's outcome.
        clock_s: monotonic clock in seconds.

    Raises:
        BrokeOff: the runner can't continue.
        RayparError: the runner did not start, or the workload can't be trained.
    """
    plan, log_dir = handler.outcome.plan, handler.outcome.log_dir
    log_dir.mkdir(parents=True, exist_ok=True)
    if plan.done and (coming := plan.source.next(plan, plan.done)).reason:
        handler(TrialsAdded((), coming.reason, coming.later_s))
    has_begun = False
    try:
        with starting as runner:
            has_begun = True
            try:
                specs = plan.missing or tuple(result.spec for result in plan.done)
                clock = _BudgetClock(None if (budget := plan.study.budget) is None else float(budget), handler, clock_s)
                more = partial(_more, clock) if plan.source.adds_trials else None
                raise_again()
                runner.run(_with_searcher(plan), specs, clock, more)
            except KeyboardInterrupt as error:
                if not (isinstance(error, Interrupted) and error.signal_number == OUT_OF_TIME):
                    ways = AT_TERMINAL if sys.stdin is not None and sys.stdin.isatty() else ""
                    handler(Notice(f"{STOPPING}{ways}"))  # first, since ending all processes takes seconds
                raise
            finally:
                if not plan.cluster.is_own:
                    _remove_logs_of_nodes(log_dir, handler.outcome.failures)
    except RayparError as error:
        if has_begun and not isinstance(error, (NotForTraining, WorkloadError)):
            raise BrokeOff.by(error) from error
        raise
    finally:
        handler.close()


def _with_searcher(plan: ExecutionPlan) -> Study:
    """Return the plan's study, whose searcher knows the trials that are done."""
    if plan.study.searcher is None:
        return plan.study
    from raypar.run.search import informed  # imports Ray Tune

    return informed(plan.study, plan.done)


def _remove_logs_of_nodes(log_dir: Path, failures: Sequence[TrialResult]) -> None:
    """Remove an execution's logs from the nodes of a cluster, except those of failed trials."""
    name, failed = f"{LOGS_PREFIX}{log_dir.name}", [failure.spec.identity for failure in failures]
    remove_logs(name, failed)
    with uninterrupted(), contextlib.suppress(Exception):  # a lost node removes them later
        on_every_node(remove_logs, name, failed, timeout_s=LOGS_TIMEOUT_S)


@dataclass
class _BudgetClock:
    """Listener that passes all events on and measures a study's budget from the start of the first trial.

    Raises:
        Interrupted: the machines are needed back before any further trial could end.
    """

    budget_s: float | None
    handler: ResultHandler
    clock_s: Callable[[], float]
    _begun_s: float | None = None

    def __call__(self, event: Event) -> None:
        if self._begun_s is None and isinstance(event, (TrialStarted, TrialEnded)):
            self._begun_s = self.clock_s()
        self.handler(event)
        if isinstance(event, OutOfTime):
            self.handler(Notice(NO_TIME.format(units.seconds(max(0.0, event.left_s)))))
            raise Interrupted(OUT_OF_TIME)

    @property
    def left_s(self) -> float:
        """Seconds left; infinite without a budget."""
        if self.budget_s is None:
            return math.inf
        return self.budget_s - (0.0 if self._begun_s is None else self.clock_s() - self._begun_s)


def _more(clock: _BudgetClock) -> tuple[TrialSpec, ...]:
    """Return the next trials; none if the study is complete or its budget is used up."""
    outcome = clock.handler.outcome
    coming = outcome.plan.source.next(outcome.plan, tuple(outcome.results.values()))
    if not coming.specs:
        return ()
    left_s = clock.left_s - (coming.expected_s or 0.0)
    if left_s < 0:
        outcome.stopped = Stopped.BUDGET
        return ()
    outcome.plan = outcome.plan.with_more(coming.specs)
    later_s = None if coming.later_s is None else min(coming.later_s, left_s)
    clock.handler(TrialsAdded(coming.specs, coming.reason, later_s))
    return coming.specs
