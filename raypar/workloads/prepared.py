"""Tensors made of data files once, and read by every trial after that."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.workloads.files import cache_dir, locked

if TYPE_CHECKING:
    from torch import Tensor


def prepared(
    name: str, sources: Iterable[Path], options: Mapping[str, object], make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """What `make` returns: made once for the same contents of the `sources` and the same options, then read from the
    cache; never written to a folder that the user named.

    Args:
        name: what the file in the cache starts with.
        options: all that `make` depends on besides the sources, a number for the way it is done included.
    """
    path = cache_dir() / "prepared" / f"{name}-{_digest(sources, options)}.pt"
    if (found := _read(path)) is not None:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):  # the ranks of a trial all come at once
            if (found := _read(path)) is None:
                found = make()
                _write(found, path)
            return found
    except OSError:  # a cache that can't be written is no reason not to train
        return make()


def _digest(sources: Iterable[Path], options: Mapping[str, object]) -> str:
    digest = hashlib.sha256(repr(sorted(options.items())).encode())
    for source in sources:
        with source.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _read(path: Path) -> dict[str, Tensor] | None:
    import torch

    try:
        found: dict[str, Tensor] = torch.load(path, weights_only=True)
    except Exception:  # absent, or from a disk that was full: torch raises many kinds; then it is made anew
        return None
    return found


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    import torch

    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(handle, "wb") as stream:
            torch.save(tensors, stream)
        Path(part).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(part).unlink()
        raise
