"""A trial as Tune sees it: a thin trainable that asks the broker, and a callback that takes its result.

All of Tune's trials are alike, so that its actor cache always hits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import tune

from raypar.run.events import TrialEnded
from raypar.run.listening import Ears
from raypar.signals import uninterrupted
from raypar.study.trial import TrialSpec, TrialState

# A sliver of the head node and no CPU: trainables wait, they don't work. (An empty request is refused.)
ON_HEAD = {"cpu": 0, "node:__internal_head__": 0.001}


class TrialFailed(RuntimeError):
    """Tells Tune (and a searcher) that a trial gave no result; the broker's result says why."""


class BrokeredTrial(tune.Trainable):  # type: ignore[misc]
    """What Tune runs: asks the broker, waits, and hands the reports on."""

    def setup(self, config: dict[str, Any]) -> None:
        # By name: a handle in the config would make Tune treat every restart as a new study.
        self._broker = ray.get_actor(config["broker"])
        self._seen = 0

    def step(self) -> dict[str, Any]:
        while True:
            reports, state = ray.get(self._broker.follow.remote(self.trial_id, self._seen))
            if reports and self.config["in_lockstep"]:
                self._seen += 1
                return {**reports[0], "done": False}
            self._seen += len(reports)
            self._last = reports[-1] if reports else getattr(self, "_last", {})
            if state == TrialState.FAILED:
                raise TrialFailed(self.trial_id)
            if state is not None:
                return {**self._last, "done": True}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._seen, self._last = 0, {}
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        return {}

    def load_checkpoint(self, checkpoint: Any) -> None:
        pass


class Driver(tune.Callback):  # type: ignore[misc]
    """On the driver: says what each Tune trial is to do, and takes its result at once when it ends.

    Args:
        spec_of: makes a trial of what a search drew; None where the broker knows the trials.
    """

    def __init__(self, broker: Any, spec_of: Callable[[Mapping[str, Any]], TrialSpec] | None, ears: Ears) -> None:
        self._broker, self._spec_of, self._ears = broker, spec_of, ears
        self._running: set[str] = set()
        self.num_ended = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks for a restore that is not used here

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if trial.trial_id not in self._running:
            self._running.add(trial.trial_id)
            spec = self._spec_of(trial.config) if self._spec_of else None
            ray.get(self._broker.define.remote(trial.trial_id, spec))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if trial.trial_id in self._running:
            # Where it is only the trainable that was lost, its trial still runs, and has a result in the end.
            ray.get(self._broker.run_on.remote(trial.trial_id))
        self._end(trial.trial_id)

    def _end(self, trial_id: str) -> None:
        if trial_id not in self._running:
            return
        self._running.discard(trial_id)
        with uninterrupted():  # a trial that has ended is told
            self._tell_end(trial_id)

    def _tell_end(self, trial_id: str) -> None:
        # Tune doesn't tell a trainable in its cache that a scheduler stopped its trial.
        self._broker.stop.remote(trial_id)
        result, artifacts, num_news = ray.get(self._broker.take.remote(trial_id))
        self._ears.catch_up(num_news)
        self.num_ended += 1
        # Before Tune starts the next trial: writing the result takes no time from a trial that is being timed.
        self._ears.tell(TrialEnded(result, artifacts))
