"""A study driven from outside the cluster (``ray://``): Tune runs on the head node, and the events travel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from queue import Empty, Queue

import cloudpickle
import ray

from raypar.errors import ClusterError
from raypar.run.cluster import without_frames
from raypar.run.events import Event, Listener
from raypar.run.head import CLUSTER_HINT
from raypar.run.interruption import uninterrupted
from raypar.run.runner import RunSettings
from raypar.run.tuner import TuneRunner
from raypar.study.study import Study
from raypar.study.trial import TrialSpec

POLL_S = 5.0


class RemoteRunner:
    """Runs a study through a `TuneRunner` on the head node of the cluster that this process is a client of."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings

    def run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener) -> None:
        head = (
            ray.remote(num_cpus=0)(_Head)
            .options(resources={"node:__internal_head__": 0.001}, max_concurrency=4)
            .remote(self._settings)
        )
        # By value: the head has neither the study file nor (always) the same working folder.
        running = head.run.remote(cloudpickle.dumps((study, tuple(specs))))
        try:
            is_over = False
            while not is_over:
                events, is_over = ray.get(head.events.remote())
                with uninterrupted():
                    for event in events:
                        listener(event)
            ray.get(running)
        except ConnectionError as error:
            raise ClusterError(f"Ray was lost: {without_frames(error)}", hint=CLUSTER_HINT) from error
        except KeyboardInterrupt:
            with contextlib.suppress(Exception):  # what has ended since
                for event in ray.get(head.events.remote(), timeout=POLL_S)[0]:
                    listener(event)
            raise
        finally:
            with contextlib.suppress(ConnectionError):
                ray.kill(head)


class _Head:
    """The actor on the head node."""

    def __init__(self, settings: RunSettings) -> None:
        self._runner = TuneRunner(settings, owns_cluster=False)
        self._events: Queue[Event] = Queue()
        self._is_over = threading.Event()

    def run(self, blob: bytes) -> None:
        study, specs = cloudpickle.loads(blob)
        try:
            self._runner.run(study, specs, self._events.put)
        finally:
            self._is_over.set()

    def events(self) -> tuple[list[Event], bool]:
        """What has happened since the last call, and whether nothing more will."""
        was_over = self._is_over.is_set()
        told: list[Event] = []
        try:
            told.append(self._events.get(block=not was_over, timeout=POLL_S))
            while True:
                told.append(self._events.get_nowait())
        except Empty:
            return told, was_over
