"""Run a study and record its events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from raypar import Study
from raypar.run.runner import Event, Runner, TrialEnded
from raypar.study.trial import TrialResult, TrialSpec
from raypar.train.job import RunSettings

E = TypeVar("E")
HERE = Path(__file__).parent
PRELOAD = ("ray.train.torch", "torchvision")


@dataclass
class RunEvents:
    """The events of a run, in their order."""

    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def results(self) -> list[TrialResult]:
        return [event.result for event in self.of(TrialEnded)]

    def result(self, spec: TrialSpec) -> TrialResult:
        """What the trial came to; it ended once."""
        (result,) = [result for result in self.results if result.spec == spec]
        return result

    def about(self, spec: TrialSpec) -> list[Event]:
        return [
            e for e in self.events if getattr(e, "spec", e.result.spec if isinstance(e, TrialEnded) else None) == spec
        ]


def settings_at(folder: Path, **changes: Any) -> RunSettings:
    """Logs go below the folder; the ranks find the loops of these tests."""
    return RunSettings(**{"log_dir": folder / "logs", "sys_path": (str(HERE),), "preload": PRELOAD, **changes})


def run(runner: Runner, study: Study, specs: Sequence[TrialSpec]) -> RunEvents:
    told = RunEvents()
    runner.run(study, specs, told.events.append)
    return told


def losses(result: TrialResult) -> list[str]:
    """To the last bit."""
    return [float(report[key]).hex() for report in result.reports for key in ("train_loss", "val_loss")]


def until(condition: Callable[[], object], what: str | Callable[[], str], limit_s: float = 60.0) -> None:
    """Wait for something that is bound to happen."""
    give_up_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_s, f"waited in vain: {what() if callable(what) else what}"
        time.sleep(0.05)


class Meanwhile:
    """Does something in a thread while the block runs; what it raised comes out at the end."""

    def __init__(self, what: Callable[[], object]) -> None:
        self._error: BaseException | None = None
        self._what = what
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._what()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error
