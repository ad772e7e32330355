"""With which file and flags a study goes on: what the store says is data, and runs nothing by itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from raypar.errors import RayparError
from raypar.run.cluster import check_address

# By what `raypar.record.execution_record` writes.
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "file": str,
    "set": list,
    "repeats": int,
    "seed": int,
    "data_dir": (str, type(None)),
    "address": (str, type(None)),
    "isolation": str,
    "no_ray": bool,
    "trial_timeout": (int, float, type(None)),
}


@dataclass(frozen=True)
class Flags:
    """As the options of `raypar study` of the same names."""

    file: Path
    settings: list[str]
    repeats: int
    seed: int
    data_dir: Path | None
    address: str | None
    isolation: str
    no_ray: bool
    trial_timeout_s: float | None
    is_profiled: bool
    exclusive: bool


def last_flags(
    name: str, stored: Mapping[str, Any], folder: Path, *, file: Path | None = None, address: str | None = None
) -> Flags:
    """The flags of a study's last execution, as its store has them.

    A study file is code, and a cluster gets the code and answers with objects that are unpickled. Whoever can write to
    the store could name others: the stored file is taken if it lies in `folder`, the stored address if it is this
    machine's.

    Args:
        file, address: what the user has named; goes before what the store says.

    Raises:
        RayparError: the store names a file or an address that the user has to name, or doesn't say what is needed.
    """
    wrong = [key for key, kind in _TYPES.items() if key not in stored or not isinstance(stored[key], kind)]
    if wrong or not all(isinstance(each, str) for each in stored["set"]):
        raise RayparError(
            f"the store does not say how study `{name}` was run: {', '.join(wrong or ['set'])}",
            hint="run it as the first time, `raypar study FILE …`: finished trials are kept",
        )
    if file is None:
        file = Path(stored["file"])
        if not is_taken(stored["file"], folder):
            command = shlex.join(["raypar", "resume", name, "--file", stored["file"]])
            raise RayparError(
                f"the store says that study `{name}` is {stored['file']}, which is not in this folder",
                hint=f"a study file is code; if this one is yours: `{command}`",
            )
    if address is None:
        address = stored["address"]
        if address is not None and not is_here(address):
            check_address(address)  # one that could not be joined at all needs another hint
            command = shlex.join(["raypar", "resume", name, "--address", address])
            raise RayparError(
                f"the store says that study `{name}` ran on the cluster at {address}",
                hint=f"a cluster gets your code and your token; if this one is yours: `{command}`",
            )
    return Flags(
        file=file,
        settings=list(stored["set"]),
        repeats=stored["repeats"],
        seed=stored["seed"],
        data_dir=Path(stored["data_dir"]) if stored["data_dir"] is not None else None,
        address=address,
        isolation=stored["isolation"],
        no_ray=stored["no_ray"],
        trial_timeout_s=stored["trial_timeout"],
        is_profiled=bool(stored.get("num_profiled_steps")),
        exclusive=bool(stored.get("exclusive")) and address == stored["address"],  # it was said of that cluster
    )


def is_taken(file: str, folder: Path) -> bool:
    """Whether a study goes on with this file without being told to."""
    return "\0" not in file and Path(file).resolve().is_relative_to(folder.resolve())


def is_here(address: str) -> bool:
    """Whether the address is this machine's own: Ray finds ``auto`` in files of this machine."""
    if address == "auto":
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
