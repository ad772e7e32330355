"""Looks at what raypar needs on this machine, and says how to mend what is amiss."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raypar import units
from raypar.errors import ClusterError, DataError, StoreError
from raypar.provenance import cpu_model, gpu_model, versions
from raypar.run.cluster import private_ray, this_machine
from raypar.track.client import shown_uri
from raypar.track.store import Store
from raypar.train.affinity import CAN_PIN, allowed_cores
from raypar.workloads.datasets import data_dir, ensure_image_set, named_dir

MIN_FREE_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `mend` says what to do where it is amiss."""

    what: str
    found: str
    is_well: bool = True
    mend: str = ""


def examine(project_dir: Path, tracking_uri: str) -> Iterator[Finding]:
    """Look at one thing after the other; starts and stops a private Ray."""
    yield Finding("versions", ", ".join(f"{name} {version}" for name, version in versions().items()))
    yield _torch()
    cores = allowed_cores()
    yield Finding("cores", f"{len(cores)} ({cpu_model()})")
    yield Finding("GPU", gpu_model() or "none")
    if not CAN_PIN:
        yield Finding("pinning", "this system can't bind processes to cores: trials may disturb each other")
    free = shutil.disk_usage(project_dir).free
    yield Finding(
        "disk",
        f"{units.size(free)} free in {project_dir}",
        free > MIN_FREE_BYTES,
        "" if free > MIN_FREE_BYTES else "free some",
    )
    yield _data()
    try:
        Store(tracking_uri, project_dir).check_writable()
        yield Finding("store", shown_uri(tracking_uri))
    except StoreError as error:
        yield Finding("store", error.message, False, error.hint or "")
    yield _ray()


def _torch() -> Finding:
    # In a process of its own: a broken torch may end the interpreter.
    code = "import torch, torchvision; print(torch.__version__, torchvision.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Finding("torch and torchvision", f"import ({done.stdout.strip()})")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding("torch and torchvision", last, False, "install both from the same index, in one command")


def _data() -> Finding:
    folder = data_dir()
    if named_dir() is None and not (folder / "MNIST").is_dir():
        return Finding("data", f"{folder}: MNIST is not there yet; a study that needs it downloads it")
    try:
        ensure_image_set("MNIST")
        return Finding("data", f"{folder}: MNIST is there")
    except DataError as error:
        return Finding("data", error.message, False, error.hint or "")


def _ray() -> Finding:
    started_s = time.monotonic()
    try:
        with private_ray(this_machine(), ()):
            took_s = time.monotonic() - started_s
        return Finding("Ray", f"starts in {units.seconds(took_s)}")
    except ClusterError as error:
        return Finding("Ray", error.message, False, "look into /tmp/ray/session_latest/logs; is /dev/shm large enough?")
