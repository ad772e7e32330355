"""A case of bad input: what is given, and which words the one message about it has to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HEAD = """
from raypar import Option, Study, Workload, choice, grid, loguniform, randint, uniform
from raypar.workloads import digits, mnist_mlp
"""
GOOD = HEAD + 'study = Study(workload=digits, space={"lr": grid(0.1, 0.2)}, num_repeats=1)\n'


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        arguments: of `raypar`.
        words: what the message has to hold.
        files: what is in the folder, beside a fine ``good.py``.
        environment: variables, beside those that there are.
        setup: makes in the folder what a text can't.
        out: how standard output begins; nothing but the study file itself may write there.
    """

    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: Callable[[Path], object] | None = None
    out: str = ""


def flags(name: str, command: str, *words: str, **variables: str) -> Case:
    return Case(name, tuple(command.split()), words, environment=variables)


def source(name: str, text: str | bytes, *words: str, out: str = "") -> Case:
    """A bad study file."""
    return Case(name, ("plan", "bad.py"), ("bad.py", *words), {"bad.py": text}, out=out)


def study(name: str, fields: str, *words: str, before: str = "") -> Case:
    """A bad study in a file that is fine otherwise."""
    given = fields if "workload=" in fields else f"workload=digits, {fields}"
    return source(name, f"{HEAD}{before}\nstudy = Study({given})\n", *words)


def at(name: str, make: Callable[[Path], object], *words: str, path: str = "bad.py") -> Case:
    """A path that is no file."""
    return Case(name, ("plan", path), (path, *words), setup=make)
