"""Where data sets come from: a folder that the user named, or a cache that is filled on first use.

Nothing falls back to other data: what is asked for is there and whole, or a DataError says how to get it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from raypar.errors import DataError

DATA_DIR_VARIABLE = "RAYPAR_DATA_DIR"
IMAGE_SIDE = 28
_IMAGE_HEADER = struct.Struct(">IIII")  # magic, count, rows, columns
_LABEL_HEADER = struct.Struct(">II")  # magic, count
_IMAGE_MAGIC, _LABEL_MAGIC = 0x803, 0x801


@dataclass(frozen=True)
class ImageSet:
    """An image set in the format of MNIST; `name` is its folder, and torchvision's class."""

    name: str
    num_train: int = 60_000
    num_test: int = 10_000

    @property
    def files(self) -> tuple[IdxFile, ...]:
        return (
            IdxFile("train-images-idx3-ubyte", self.num_train, is_images=True),
            IdxFile("train-labels-idx1-ubyte", self.num_train, is_images=False),
            IdxFile("t10k-images-idx3-ubyte", self.num_test, is_images=True),
            IdxFile("t10k-labels-idx1-ubyte", self.num_test, is_images=False),
        )


@dataclass(frozen=True)
class IdxFile:
    """One file of an image set: a big-endian header, then one byte per pixel or label."""

    name: str
    count: int
    is_images: bool

    @property
    def header(self) -> bytes:
        if self.is_images:
            return _IMAGE_HEADER.pack(_IMAGE_MAGIC, self.count, IMAGE_SIDE, IMAGE_SIDE)
        return _LABEL_HEADER.pack(_LABEL_MAGIC, self.count)

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.count * (IMAGE_SIDE**2 if self.is_images else 1)


IMAGE_SETS: Mapping[str, ImageSet] = {s.name: s for s in (ImageSet("MNIST"), ImageSet("FashionMNIST"))}


def cache_dir() -> Path:
    """Where raypar keeps what it downloads: ``~/.cache/raypar``, or below XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "raypar"


def named_dir() -> Path | None:
    """The folder that ``--data-dir`` or RAYPAR_DATA_DIR names, or None."""
    named = os.environ.get(DATA_DIR_VARIABLE)
    return Path(named).expanduser() if named else None


def data_dir() -> Path:
    """The folder that holds the data sets."""
    return named_dir() or cache_dir()


def ensure_image_set(name: str) -> Path:
    """Make sure that an image set is there and whole; returns the root folder that torchvision wants.

    Only the user's cache is ever written to: into it, an absent set is downloaded.

    Raises:
        DataError: naming the file, what is wrong with it, and the way out.
    """
    image_set = IMAGE_SETS[name]
    named = named_dir()
    if named is not None:
        if not named.is_dir():
            raise DataError(
                f"data folder {named}: no such folder",
                hint=f"give the folder that holds {name}/raw with --data-dir or {DATA_DIR_VARIABLE}",
            )
        _check(
            image_set,
            named,
            absent=f"put {name} there, point --data-dir or {DATA_DIR_VARIABLE} at the folder that holds {name}/raw, "
            "or leave both out and it is downloaded to the cache",
            broken="copy the file again, or name another folder with --data-dir",
        )
        return named
    root = cache_dir()
    if not raw_dir(root, image_set).exists():
        _download(image_set, root)
    again = f"remove {raw_dir(root, image_set)}: the next run downloads {name} anew"
    _check(image_set, root, absent=again, broken=again)
    return root


def raw_dir(root: Path, image_set: ImageSet) -> Path:
    """Where torchvision expects the four files."""
    return root / image_set.name / "raw"


def _check(image_set: ImageSet, root: Path, *, absent: str, broken: str) -> None:
    """Lengths and headers, not contents: it is done before every trial and takes well under a millisecond."""
    folder = raw_dir(root, image_set)
    for file in image_set.files:
        path = folder / file.name
        try:
            num_bytes = path.stat().st_size
            with path.open("rb") as stream:
                header = stream.read(len(file.header))
        except FileNotFoundError:
            packed = path.with_name(path.name + ".gz")
            if packed.exists():
                raise DataError(f"{packed}: is still packed", hint=f"unpack it: gunzip -k {packed}") from None
            raise DataError(f"{path}: no such file", hint=absent) from None
        except OSError as error:
            raise DataError(f"{path}: can't be read: {error.strerror}", hint=broken) from None
        if header != file.header:
            raise DataError(f"{path}: is not the {image_set.name} file of that name: its header differs", hint=broken)
        if num_bytes != file.num_bytes:
            what = "half-downloaded" if num_bytes < file.num_bytes else "corrupt"
            raise DataError(f"{path}: is {what}: {num_bytes:,} bytes instead of {file.num_bytes:,}", hint=broken)


def _download(image_set: ImageSet, root: Path) -> None:
    """Fetch a set into the cache: once, however many processes ask, and all of it or nothing."""
    name = image_set.name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock"):
            target = raw_dir(root, image_set)
            if target.exists():  # another process was quicker
                return
            with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-") as part:
                print(f"Downloading {name} to {root} …", file=sys.stderr)
                _download_with_torchvision(name, part)
                source = raw_dir(Path(part), image_set)
                for packed in source.glob("*.gz"):
                    packed.unlink()
                target.parent.mkdir(exist_ok=True)
                shutil.move(source, target)  # a rename: both are in the cache
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{name} is not in the cache {root}, and can't be downloaded: {str(error).splitlines()[0]}",
            hint=f"name a folder that holds {name}/raw with --data-dir DIR; or set {DATA_DIR_VARIABLE}=DIR; "
            f"or put its four files into {raw_dir(root, image_set)} (or connect once: it is downloaded to there)",
        ) from None


def _download_with_torchvision(name: str, root: str) -> None:
    """torchvision knows the mirrors and the checksums, and shows its progress on stderr."""
    from torchvision import datasets

    with contextlib.redirect_stdout(sys.stderr):  # it prints which mirrors failed
        getattr(datasets, name)(root, download=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
