"""Trials of an execution, from the start of the runner to its end; what is left of the study's budget."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from raypar.analysis.settle import Stopped
from raypar.errors import BrokeOff, NotForTraining, RayparError, WorkloadError
from raypar.execution.results import ResultHandler
from raypar.execution.source import TrialSource
from raypar.run.cluster import on_every_node
from raypar.run.runner import Event, Notice, Runner, TrialEnded, TrialsAdded, TrialStarted
from raypar.scratch import LOGS_PREFIX, remove_logs
from raypar.signals import raise_again, uninterrupted
from raypar.study.trial import TrialResult, TrialSpec

LOGS_TIMEOUT_S = 10.0
STOPPING = "stopping: finished trials are kept (a second Ctrl-C exits at once)"


def run_trials(
    starting: AbstractContextManager[Runner], handler: ResultHandler, clock_s: Callable[[], float] = time.monotonic
) -> None:
    """Run the missing trials of a plan, and those that its source adds meanwhile.

    Args:
        starting: starts the runner, and stops it after.
        handler: of the plan's outcome.
        clock_s: seconds since whenever, for the study's budget.

    Raises:
        BrokeOff: the runner can't go on.
        RayparError: it did not start, or no trial can be trained with the workload.
    """
    plan, log_dir = handler.outcome.plan, handler.outcome.log_dir
    log_dir.mkdir(parents=True, exist_ok=True)
    if plan.source is not None and plan.done:
        coming = plan.source.next(plan, plan.done)
        handler(TrialsAdded((), coming.reason, coming.later_s))
    has_begun = False
    try:
        with starting as runner:
            has_begun = True
            try:
                specs = plan.missing or tuple(result.spec for result in plan.done)
                clock = _BudgetClock(plan.study.budget_s, handler, clock_s)
                more = None if plan.source is None else partial(_more, plan.source, clock)
                raise_again()
                runner.run(plan.study, specs, clock, more)
            except KeyboardInterrupt:
                handler(Notice(STOPPING))  # before all that was started is ended, which takes seconds
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


def _remove_logs_of_nodes(log_dir: Path, failures: Sequence[TrialResult]) -> None:
    """Remove the logs that an execution has left on the nodes of a cluster, but for those of failed trials."""
    name, failed = f"{LOGS_PREFIX}{log_dir.name}", [failure.spec.identity for failure in failures]
    remove_logs(name, failed)
    with uninterrupted(), contextlib.suppress(Exception):  # a node that is lost removes them when they are old
        on_every_node(remove_logs, name, failed, timeout_s=LOGS_TIMEOUT_S)


@dataclass
class _BudgetClock:
    """Listener that passes all events on, and measures what is left of a study's budget.

    The budget is for trials: its clock starts with the first one. Waiting for cores and starting Ray don't count.
    """

    budget_s: float | None
    handler: ResultHandler
    clock_s: Callable[[], float]
    _begun_s: float | None = None

    def __call__(self, event: Event) -> None:
        if self._begun_s is None and isinstance(event, (TrialStarted, TrialEnded)):
            self._begun_s = self.clock_s()
        self.handler(event)

    @property
    def left_s(self) -> float:
        """Seconds; infinite without a budget."""
        if self.budget_s is None:
            return math.inf
        return self.budget_s - (0.0 if self._begun_s is None else self.clock_s() - self._begun_s)


def _more(source: TrialSource, clock: _BudgetClock) -> tuple[TrialSpec, ...]:
    """Return the trials that the results so far ask for; nothing where the study, or its budget, is over."""
    outcome = clock.handler.outcome
    coming = source.next(outcome.plan, tuple(outcome.results.values()))
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
