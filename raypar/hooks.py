"""Hooks for training code that raypar didn't write: `raypar.report` and `raypar.step`.

They need only Python's standard library, and do nothing outside of a study, so that the code still runs anywhere.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

REPORT_FILE = "RAYPAR_REPORT_FILE"  # where a command's process writes its reports


class HookReceiver(Protocol):
    """Receiver of the hooks' calls, one per process."""

    def report(self, metrics: Mapping[str, Any]) -> None: ...

    def step(self) -> None: ...


class ReportFile:
    """Receiver in a command's process: a JSON line for each call, with the time on the machine's monotonic clock."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def report(self, metrics: Mapping[str, Any]) -> None:
        self._write({"report": numbers_of(metrics)})

    def step(self) -> None:
        self._write({})

    def _write(self, line: Mapping[str, Any]) -> None:
        # A single short write: lines of several processes don't mix.
        os.write(self._descriptor, json.dumps({"at_s": time.monotonic(), **line}).encode() + b"\n")


_receivers: list[HookReceiver | None] = []  # at most one, set on first use


def receive_with(receiver: HookReceiver | None) -> None:
    """Send this process's calls to a receiver; None: ignore them."""
    _receivers[:] = [receiver]


def report(metrics: Mapping[str, Any]) -> None:
    """Report metrics of the training so far, for example once per epoch.

    Does nothing outside of a study, or on ranks of a command other than the first. In a train loop it acts like
    ``ray.train.report``: every rank has to call it at the same points.

    Args:
        metrics: numbers by name; other values are ignored. A non-finite loss ends the trial (``stop_on_nan``).
    """
    if (receiver := _receiver()) is not None:
        receiver.report(metrics)


def step() -> None:
    """Mark the end of a training step. Call it after every step.

    A step is timed from the end of the previous one or from the last report; the first counts as an average step.
    Does nothing outside of a study.
    """
    if (receiver := _receiver()) is not None:
        receiver.step()


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers or convert to one (a tensor of one element), as floats."""
    numbers = {}
    for key, value in metrics.items():
        if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
            continue
        try:
            numbers[str(key)] = float(value)
        except (TypeError, ValueError, RuntimeError):  # an array or tensor of several elements
            continue
    return numbers


def _receiver() -> HookReceiver | None:
    if not _receivers:
        path = os.environ.get(REPORT_FILE)
        is_first = os.environ.get("RANK", "0") == "0"
        _receivers.append(ReportFile(path) if path and is_first else None)
    return _receivers[0]
