"""Image sets in the format of MNIST: which files they are, and that these are there and whole."""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raypar.errors import DataError
from raypar.workloads.files import DATA_DIR_VARIABLE, cache_dir, check_length, data_dir, ensure, length_of, named_dir

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


def ensure_image_set(name: str) -> Path:
    """Make sure that an image set is there and whole; returns the root folder that torchvision wants.

    Raises:
        DataError: naming the file, what is wrong with it, and the way out.
    """
    image_set = IMAGE_SETS[name]

    def check(root: Path, absent: str, broken: str) -> None:
        _check(image_set, root, absent, broken)

    def fetch(root: Path) -> None:
        _download_with_torchvision(name, str(root))
        for packed in raw_dir(root, image_set).glob("*.gz"):
            packed.unlink()

    return ensure(name, f"{name}/raw", check, fetch)


def raw_dir(root: Path, image_set: ImageSet) -> Path:
    """Where torchvision expects the four files."""
    return root / image_set.name / "raw"


def _check(image_set: ImageSet, root: Path, absent: str, broken: str) -> None:
    """Lengths and headers, not contents: it is done before every trial and takes well under a millisecond."""
    for file in image_set.files:
        path = raw_dir(root, image_set) / file.name
        num_bytes = length_of(path, absent, broken)
        with path.open("rb") as stream:
            header = stream.read(len(file.header))
        if header != file.header:
            raise DataError(f"{path}: is not the {image_set.name} file of that name: its header differs", hint=broken)
        check_length(path, num_bytes, file.num_bytes, broken)


def _download_with_torchvision(name: str, root: str) -> None:
    """torchvision knows the mirrors and the checksums, and shows its progress on stderr."""
    from torchvision import datasets

    with contextlib.redirect_stdout(sys.stderr):  # it prints which mirrors failed
        getattr(datasets, name)(root, download=True)


__all__ = [
    "DATA_DIR_VARIABLE",
    "IMAGE_SETS",
    "IMAGE_SIDE",
    "IdxFile",
    "ImageSet",
    "cache_dir",
    "data_dir",
    "ensure_image_set",
    "named_dir",
    "raw_dir",
]
