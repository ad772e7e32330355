"""Events of a script's training, recorded in its own processes: rows of six numbers, and facts by name.

A process appends rows to a buffer and writes them to its own file about once a second. This module uses only Python's
standard library, since it runs inside other people's scripts.

What runs in every step finds cold caches, and each line takes up to ten times as long there as in a loop of its own. So
it takes the usual case first, and leaves to `EventRecorder.write` what can wait.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Any

clock = time.monotonic  # one clock for all processes of a machine
ROW = 6  # numbers per event: kind, start and end in seconds, key, value, second value
WRITE_EVERY_S = 1.0
FACTS_EVERY_S = 10.0  # replacing a file takes most of a millisecond
LOADED, HAS_TORCH = "loaded", "torch"  # files of `EventRecorder.mark`
STOPPED = "stopped"  # file: why a process stopped recording
MAX_ROWS = 1_000_000  # per process, 48 MB; later steps and backward passes are only counted
UNRECORDED = "num_unrecorded"  # fact: these counts, by `count_name`


class EventKind(IntEnum):
    """Kind of an event, with the meaning of its key and its values."""

    STEP = 1  # key: optimizer; value: 1, or 0 if gradients overflowed and the step was skipped
    BACKWARD = 2  # outermost backward pass; value: loss; NaN: none, or a LOSS has it
    CLOSURE = 3  # computation of the loss within an optimizer's step
    BATCH = 4  # wait for a batch; key: iterator; value: samples; second: tokens
    ITERATOR = 5  # start of an iterator; key: iterator; value: loader
    END = 6  # wait for the end of an iterator; key: iterator
    EVAL = 7  # call of `Module.eval`
    SAVE = 8  # write of a checkpoint
    WAIT = 9  # communication, or the wait for it
    DEVICE = 10  # start: the host's time at which another event starts or ends; end: the time at which a GPU gets there
    FORWARD = 11  # call of an outermost module; value: 1 if gradients are recorded
    LOSS = 12  # loss of the backward pass with the same start; value: loss
    PARAMETERS = 13  # state after the step with the same end; key: optimizer; value: digest of some parameters
    COPY = 15  # copy of a tensor to a GPU
    COUNTS = 14  # since the previous step, at the end of a step; value: reads from a GPU; second: blocking copies to it


Event = tuple[float, float, float, float, float, float]


def _do_nothing(_: float) -> None:
    pass


def count_name(kind: float, key: float) -> str:
    """Return the name of a count of events in the fact `UNRECORDED`."""
    return f"{int(kind)}:{int(key)}"


class EventRecorder:
    """Buffer of one process's events and facts.

    Attributes:
        facts: JSON values that describe the process, its optimizers and its loaders.
        is_on: events are recorded.
        num_steps: steps of all optimizers together.
        last_step_s: end of the last step.
        num_reads: values read from a GPU since the last step.
        counts_reads: reads count at this moment.
        thread: the thread that trains; 0: none has trained yet.
        mapped_bytes: of files, in the process that this one is a fork of; see `modules`.
        next_write_s: time from which a write is due; who records an event looks at it.
        at_optimizer: called after the first backward pass, and after the first step of some of the optimizers.
        at_step: called after each step; a function removes itself once it has no more to do.
        at_moment: called at the start and end of events that a GPU times as well.
        at_write: called before each write, to add events.
        at_facts: called before facts are written, to add some.
        at_close: called before the last write.
    """

    def __init__(self, folder: Path) -> None:
        self.facts: dict[str, Any] = {"pid": os.getpid(), "problems": []}
        self.at_optimizer: list[Callable[[], None]] = []
        self.at_step: list[Callable[[], None]] = []
        self.at_moment: Callable[[float], None] = _do_nothing
        self.at_write: list[Callable[[], None]] = []
        self.at_facts: list[Callable[[], None]] = []
        self.at_close: list[Callable[[], None]] = []
        self.rows: list[Event] = []
        self.append = self.rows.append
        self.is_on = True
        self.num_steps = 0
        self.last_step_s = 0.0
        self.num_reads = 0
        self.counts_reads = True
        self.thread = 0
        self.mapped_bytes = 0
        self._folder, self._pid = folder, os.getpid()
        self._num_written = 0
        self._num_facts = 0  # entries in lists and mappings that have been written
        self.next_write_s = self._next_facts_s = 0.0
        self._is_closing = False
        self._why_stopped = ""
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # A forked child has its own file, and its parent's events are not its own.
        self.rows.clear()
        self.facts["pid"] = self._pid = os.getpid()
        self._num_written = self._num_facts = 0
        self._next_facts_s = 0.0

    def write_in_forks(self) -> None:
        """Write at the end of processes that `multiprocessing` forks as well, which skip `atexit`."""
        from multiprocessing import process, util

        def write_at_end(recorder: EventRecorder) -> None:
            util.Finalize(None, recorder.close, exitpriority=-100)

        if process.parent_process() is not None:
            write_at_end(self)
        util.register_after_fork(self, write_at_end)

    def problem(self, where: str, error: BaseException) -> None:
        """Note that something could not be observed."""
        text = f"{where}: {type(error).__name__}: {error}"
        if text not in self.facts["problems"] and len(self.facts["problems"]) < 20:
            self.facts["problems"].append(text)

    def call(self, functions: Iterable[Callable[[], None]]) -> None:
        """Call the functions; the error of one of them is a `problem`."""
        for function in functions:
            try:
                function()
            except Exception as error:
                name = getattr(function, "__qualname__", repr(function))
                self.problem(name.partition(".")[0].removeprefix("_hook_"), error)

    def write(self) -> None:
        """Write all events, and now and then the facts; a failure ends the recording, never the script."""
        self.next_write_s = clock() + WRITE_EVERY_S
        if not self.is_on:
            self.rows.clear()
            return
        if not self.rows and not (self._is_closing and self._num_written):
            return
        self.call(self.at_write)
        rows = self.rows[:]
        del self.rows[: len(rows)]  # another thread may have added some meanwhile
        is_full = self._num_written >= MAX_ROWS
        if is_full:
            self._count(rows)
            rows = []
        self._num_written += len(rows)
        try:
            path = self._folder / f"{self._pid}.events"
            with path.open("ab") as file:
                array("d", chain.from_iterable(rows)).tofile(file)
            # Events refer to entries of the facts.
            num_facts = sum(len(each) for each in self.facts.values() if isinstance(each, (list, dict)))
            if is_full or self._is_closing or num_facts > self._num_facts or clock() >= self._next_facts_s:
                self._write_facts(path.with_suffix(".json"))
                self._num_facts, self._next_facts_s = num_facts, clock() + FACTS_EVERY_S
        except Exception as error:
            self._stop(error)

    def _write_facts(self, path: Path) -> None:
        self.call(self.at_facts)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(self.facts, default=str), encoding="utf-8")
        new.replace(path)

    def _count(self, rows: Iterable[Event]) -> None:
        counts = self.facts.setdefault(UNRECORDED, {})
        for kind, _, _, key, *_ in rows:
            if kind in (EventKind.STEP, EventKind.BACKWARD):
                name = count_name(kind, key)
                counts[name] = counts.get(name, 0) + 1

    def _stop(self, error: Exception) -> None:
        self.is_on = False
        self._why_stopped = f"{type(error).__name__}: {error}"
        with suppress(Exception):
            print(f"raypar: process {self._pid} is no longer observed: {self._why_stopped}", file=sys.stderr)
        self._leave_reason()

    def _leave_reason(self) -> None:
        with suppress(OSError):
            (self._folder / STOPPED).write_text(self._why_stopped, encoding="utf-8")

    def close(self) -> None:
        """Write the last events, and stop recording."""
        if self._why_stopped:
            self._leave_reason()  # it may have failed for the same reason
        if self.is_on:
            self.call(self.at_close)
        self._is_closing = True  # the facts may have changed
        self.write()
        self.is_on = False

    def mark(self, name: str) -> None:
        """Leave an empty file, which says that a process has reached this point."""
        with suppress(OSError):
            (self._folder / name).touch()


def read_events(path: Path) -> tuple[list[Event], Mapping[str, Any]]:
    """Return the events of one process, sorted by end, and its facts.

    Args:
        path: the process's ``.events`` file.
    """
    numbers = array("d")
    size = path.stat().st_size // (ROW * numbers.itemsize)
    with path.open("rb") as file:
        numbers.fromfile(file, size * ROW)
    rows: list[Event] = list(zip(*[iter(numbers)] * ROW, strict=True))
    return sorted(rows, key=lambda row: row[2]), json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
