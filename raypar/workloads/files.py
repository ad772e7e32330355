"""Where data comes from: a folder that the user named, or a cache that is filled on first use.

Nothing falls back to other data: what is asked for is there and whole, or a DataError says how to get it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from raypar.errors import DataError

DATA_DIR_VARIABLE = "RAYPAR_DATA_DIR"


@dataclass(frozen=True)
class DataFile:
    """One file that is the same for everyone.

    Attributes:
        sha256: hexadecimal; a download of other contents is refused.
    """

    name: str
    num_bytes: int
    url: str
    sha256: str


@dataclass(frozen=True)
class FileSet:
    """A data set that is a few files; `folder` is where they are below the data folder."""

    name: str
    folder: str
    files: tuple[DataFile, ...]


def cache_dir() -> Path:
    """Where raypar keeps what it downloads and prepares: ``~/.cache/raypar``, or below XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "raypar"


def named_dir() -> Path | None:
    """The folder that ``--data-dir`` or RAYPAR_DATA_DIR names, or None."""
    named = os.environ.get(DATA_DIR_VARIABLE)
    return Path(named).expanduser() if named else None


def data_dir() -> Path:
    """The folder that holds the data sets."""
    return named_dir() or cache_dir()


def ensure_files(files: FileSet) -> Path:
    """Make sure that a set of files is there and whole; returns their folder.

    Lengths are looked at every time, contents once, after a download.

    Raises:
        DataError: naming the file, what is wrong with it, and the way out.
    """

    def check(root: Path, absent: str, broken: str) -> None:
        for file in files.files:
            path = root / files.folder / file.name
            check_length(path, length_of(path, absent, broken), file.num_bytes, broken)

    def fetch(root: Path) -> None:
        for file in files.files:
            download(file, root / files.folder / file.name)

    return ensure(files.name, files.folder, check, fetch) / files.folder


def ensure(name: str, folder: str, check: Callable[[Path, str, str], None], fetch: Callable[[Path], None]) -> Path:
    """Make sure that a data set is there and whole; returns the data folder that it is in.

    Only the user's cache is ever written to: into it, an absent set is downloaded.

    Args:
        folder: what the set has to itself, below the data folder.
        check: ``check(root, absent, broken)`` raises DataError for what is wrong below a data folder, with the way out
            for a file that is absent or broken.
        fetch: ``fetch(root)`` downloads the set below a data folder.

    Raises:
        DataError: naming the file, what is wrong with it, and the way out.
    """
    named = named_dir()
    if named is not None:
        if not named.is_dir():
            raise DataError(
                f"data folder {named}: no such folder",
                hint=f"give the folder that holds {folder} with --data-dir or {DATA_DIR_VARIABLE}",
            )
        check(
            named,
            f"put {name} there, point --data-dir or {DATA_DIR_VARIABLE} at the folder that holds {folder}, "
            "or leave both out and it is downloaded to the cache",
            "copy the file again, or name another folder with --data-dir",
        )
        return named
    root = cache_dir()
    if not (root / folder).exists():
        _fill_cache(name, folder, root, fetch)
    again = f"remove {root / folder}: the next run downloads {name} anew"
    check(root, again, again)
    return root


def length_of(path: Path, absent: str, broken: str) -> int:
    """A file's length in bytes; a DataError with the way out where it is not there or is no file."""
    try:
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_size
    except FileNotFoundError:
        packed = path.with_name(path.name + ".gz")
        if packed.exists():
            raise DataError(f"{packed}: is still packed", hint=f"unpack it: gunzip -k {packed}") from None
        raise DataError(f"{path}: no such file", hint=absent) from None
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}", hint=broken) from None


def check_length(path: Path, num_bytes: int, wanted: int, broken: str) -> None:
    if num_bytes != wanted:
        what = "half-downloaded" if num_bytes < wanted else "corrupt"
        raise DataError(f"{path}: is {what}: {num_bytes:,} bytes instead of {wanted:,}", hint=broken)


def download(file: DataFile, path: Path) -> None:
    """Fetch one file and compare its checksum, with progress on stderr."""
    from torch.hub import download_url_to_file

    path.parent.mkdir(parents=True, exist_ok=True)
    download_url_to_file(file.url, str(path), hash_prefix=file.sha256)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time in."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _fill_cache(name: str, folder: str, root: Path, fetch: Callable[[Path], None]) -> None:
    """Fetch a set into the cache: once, however many processes ask, and all of it or nothing."""
    target, short = root / folder, name.replace(" ", "-")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f".{short}.lock"):
            if target.exists():  # another process was quicker
                return
            with tempfile.TemporaryDirectory(dir=root, prefix=f".{short}-") as part:
                print(f"Downloading {name} to {root} …", file=sys.stderr)
                fetch(Path(part))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(Path(part) / folder, target)  # a rename: both are in the cache
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{name} is not in the cache {root}, and can't be downloaded: {str(error).splitlines()[0]}",
            hint=f"name a folder that holds {folder} with --data-dir DIR; or set {DATA_DIR_VARIABLE}=DIR; "
            f"or put its files into {target} (or connect once: it is downloaded to there)",
        ) from None
