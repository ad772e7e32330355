"""Where a number came from: code, versions, machine, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from raypar.masking import masked

PACKAGES = ("raypar", "ray", "torch", "torchvision", "mlflow", "numpy")


def provenance(study_file: Path, command: Sequence[str]) -> dict[str, str]:
    """Tags for the store: ``git.commit``, ``git.dirty``, ``version.*``, ``host``, ``cpu``, ``gpu``, ``cores``, …"""
    return {
        **git_state(study_file.parent),
        **{f"version.{name}": version for name, version in versions().items()},
        **machine(),
        "command": masked(shlex.join(command)),
    }


def versions() -> dict[str, str]:
    """Installed versions, read without importing anything."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """What the driver's machine is, and how busy."""
    load = os.getloadavg()[0]
    return {
        "host": platform.node(),
        "os": platform.platform(),
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        "gpu": gpu_model() or "none",
        "load": f"{load:.2f}",
    }


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.processor()
    return platform.processor() or platform.machine()


def gpu_model() -> str:
    """The model of the first NVIDIA GPU; empty where there is none."""
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            for line in info.read_text().splitlines():
                if line.startswith("Model:"):
                    return line.split(":", 1)[1].strip()
        except OSError:
            continue
    return ""


def git_state(folder: Path) -> dict[str, str]:
    """The commit that the folder is at and whether anything differs from it; empty outside of git."""
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not commit:
        return {}
    dirty = _output(["git", "-C", str(folder), "status", "--porcelain"])
    return {"git.commit": commit, "git.dirty": "yes" if dirty else "no"}


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
