"""Study files written for a test, and loaded, or refused in one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypar import RayparError
from raypar.study.loader import LoadedStudy, load_study

GOOD = """
'''What does a second worker bring?

More about it.
'''
from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"num_workers": grid(1, 2), "batch_size": grid(64, 128)},
    baseline={"num_workers": 1},
    config={"lr": 0.2},
)
"""


def written(folder: Path, text: str, name: str = "asked.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, text: str = GOOD, **flags: object) -> LoadedStudy:
    return load_study(written(folder, text), **flags)  # type: ignore[arg-type]


def told(path: Path, settings: tuple[str, ...] = (), **flags: int) -> str:
    with pytest.raises(RayparError) as caught:
        load_study(path, settings, **flags)
    message = str(caught.value)
    assert "Traceback" not in message and "→" in message and str(path) in message
    return message
