"""Data sets: where their files are, whether these are complete, and the tensors made of them.

There is no fallback to other data: a data set is complete, or a DataError says how to get it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import DataError
from raypar.study.workload import Config, Data, Split

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset

DATA_DIR_VARIABLE = "RAYPAR_DATA_DIR"


@dataclass(frozen=True)
class DataFile:
    """A published file.

    Attributes:
        sha256: hexadecimal; downloads with another digest are refused.
    """

    name: str
    num_bytes: int
    url: str
    sha256: str


@dataclass(frozen=True)
class FileSet:
    """A data set of a few files in `folder`, relative to the data folder."""

    name: str
    folder: str
    files: tuple[DataFile, ...]


def cache_dir() -> Path:
    """Return the folder for downloads and prepared tensors: ``~/.cache/raypar``, or below XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "raypar"


def named_dir() -> Path | None:
    """Return the folder named by ``--data-dir`` or RAYPAR_DATA_DIR, or None."""
    named = os.environ.get(DATA_DIR_VARIABLE)
    return Path(named).expanduser() if named else None


def data_dir() -> Path:
    """Return the folder with the data sets."""
    return named_dir() or cache_dir()


def ensure_files(files: FileSet) -> Path:
    """Return the folder of a set of files, downloading it if absent.

    Lengths are checked every time, contents once, after the download.

    Raises:
        DataError: a file is missing, incomplete or corrupt.
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
    """Return the data folder that contains a complete data set, downloading it to the cache if absent.

    A folder named by the user is never written to.

    Args:
        folder: the set's own folder, relative to the data folder.
        check: ``check(root, absent_hint, broken_hint)`` raises DataError for a missing or broken file below `root`.
        fetch: ``fetch(root)`` downloads the set below `root`.

    Raises:
        DataError: a file is missing, incomplete or corrupt.
    """
    named = named_dir()
    if named is not None:
        if not named.is_dir():
            raise DataError(
                f"data folder {named}: no such folder",
                hint=f"name a folder that contains {folder} with --data-dir or {DATA_DIR_VARIABLE}",
            )
        check(
            named,
            f"put {name} there, point --data-dir or {DATA_DIR_VARIABLE} at a folder that contains {folder}, "
            "or omit both to download it to the cache",
            "copy the file again, or name another folder with --data-dir",
        )
        return named
    root = cache_dir()
    if not (root / folder).exists():
        _fill_cache(name, folder, root, fetch)
    hint = f"remove {root / folder}: the next run downloads {name} again"
    check(root, hint, hint)
    return root


def length_of(path: Path, absent: str, broken: str) -> int:
    """Return a file's length in bytes; raise DataError if it is missing or not a file."""
    try:
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_size
    except FileNotFoundError:
        packed = path.with_name(path.name + ".gz")
        if packed.exists():
            raise DataError(f"{packed}: is compressed", hint=f"decompress it: gunzip -k {packed}") from None
        raise DataError(f"{path}: no such file", hint=absent) from None
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}", hint=broken) from None


def check_length(path: Path, num_bytes: int, expected: int, broken: str) -> None:
    if num_bytes != expected:
        problem = "incomplete" if num_bytes < expected else "corrupt"
        raise DataError(f"{path}: is {problem}: {num_bytes:,} bytes instead of {expected:,}", hint=broken)


def download(file: DataFile, path: Path) -> None:
    """Download a file and verify its checksum, with progress on stderr."""
    from torch.hub import download_url_to_file

    path.parent.mkdir(parents=True, exist_ok=True)
    download_url_to_file(file.url, str(path), hash_prefix=file.sha256)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file exclusively."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _fill_cache(name: str, folder: str, root: Path, fetch: Callable[[Path], None]) -> None:
    """Download a set to the cache atomically, and once for any number of processes."""
    target, short = root / folder, name.replace(" ", "-")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f".{short}.lock"):
            if target.exists():  # another process downloaded it
                return
            with tempfile.TemporaryDirectory(dir=root, prefix=f".{short}-") as part:
                print(f"Downloading {name} to {root} …", file=sys.stderr)
                fetch(Path(part))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(Path(part) / folder, target)  # a rename: both are in the cache
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{name} is not in the cache {root}, and the download failed: {str(error).splitlines()[0]}",
            hint=f"name a folder that contains {folder} with --data-dir DIR; or set {DATA_DIR_VARIABLE}=DIR; "
            f"or put its files into {target} (or connect once to download it)",
        ) from None


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
    """Return torchvision's root folder of an image set, downloading the set if absent.

    Raises:
        DataError: a file is missing, incomplete or corrupt.
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
    """Return the folder in which torchvision expects the four files."""
    return root / image_set.name / "raw"


def _check(image_set: ImageSet, root: Path, absent: str, broken: str) -> None:
    """Check lengths and headers, not contents: this runs before every trial, in under a millisecond."""
    for file in image_set.files:
        path = raw_dir(root, image_set) / file.name
        num_bytes = length_of(path, absent, broken)
        with path.open("rb") as stream:
            header = stream.read(len(file.header))
        if header != file.header:
            raise DataError(f"{path}: is not the file of {image_set.name}: its header differs", hint=broken)
        check_length(path, num_bytes, file.num_bytes, broken)


def _download_with_torchvision(name: str, root: str) -> None:
    """Download with torchvision, which knows mirrors and checksums, with progress on stderr."""
    from torchvision import datasets

    with contextlib.redirect_stdout(sys.stderr):  # it prints which mirrors failed
        getattr(datasets, name)(root, download=True)


def prepared(
    name: str, sources: Iterable[Path], options: Mapping[str, object], make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the tensors of `make`, cached by the contents of `sources` and by `options`.

    Args:
        name: prefix of the file in the cache.
        options: everything else that `make` depends on, including a version of its algorithm.
    """
    path = cache_dir() / "prepared" / f"{name}-{_digest(sources, options)}.pt"
    if (tensors := _read_tensors(path)) is not None:
        return tensors
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):  # all ranks of a trial arrive at once
            if (tensors := _read_tensors(path)) is None:
                tensors = make()
                _write(tensors, path)
            return tensors
    except OSError:  # an unwritable cache is no reason not to train
        return make()


def _digest(sources: Iterable[Path], options: Mapping[str, object]) -> str:
    digest = hashlib.sha256(repr(sorted(options.items())).encode())
    for source in sources:
        with source.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def _read_tensors(path: Path) -> dict[str, Tensor] | None:
    import torch

    try:
        tensors: dict[str, Tensor] = torch.load(path, weights_only=True)
    except Exception:  # absent or truncated, for which torch raises many kinds
        return None
    return tensors


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


def image_data(name: str, config: Config, *, mean: float, std: float, num_val: int = 0) -> Data:
    """Load an image set: inputs ``(num_samples, 1, 28, 28)``, uint8, targets ``(num_samples,)``, int64.

    Pixels stay bytes in memory and are normalised batch by batch.

    Args:
        num_val: last training images held out as ``val``, with the test images as ``test``; 0: the test images are
        ``val``.
    """
    root = ensure_image_set(name)
    image_set = IMAGE_SETS[name]
    folder = raw_dir(root, image_set)
    train_x, train_y, test_x, test_y = (_read_idx(folder / file.name, file) for file in image_set.files)
    num_train = len(train_y) - num_val
    held_out = Split(test_x, test_y)
    loads = config["loader"] == "dataloader"
    return Data(
        train=Split(train_x[:num_train], train_y[:num_train]),
        val=Split(train_x[num_train:], train_y[num_train:]) if num_val else held_out,
        test=held_out if num_val else None,
        transform=partial(normalised, mean=mean, std=std),
        train_dataset=_torchvision_dataset(name, root, mean, std, num_train) if loads else None,
    )


def normalised(pixels: Tensor, *, mean: float, std: float) -> Tensor:
    """Normalise bytes to float32 of zero mean and unit variance.

    Multiplies instead of dividing: 55 µs instead of 72 for a batch of 512 on one thread.
    """
    import torch

    return pixels.to(torch.float32).mul_(1 / (255 * std)).sub_(mean / std)


def _read_idx(path: Path, file: IdxFile) -> Tensor:
    # Not by torchvision: every trial would pay seconds for its import, and its reader takes four times as long.
    import numpy as np
    import torch

    raw = torch.from_numpy(np.fromfile(path, np.uint8, offset=len(file.header)))
    return raw.view(file.count, 1, IMAGE_SIDE, IMAGE_SIDE) if file.is_images else raw.long()


def _torchvision_dataset(name: str, root: Path, mean: float, std: float, num_train: int) -> Dataset[Any]:
    """Return the training images prepared one by one, as most scripts do."""
    from torch.utils.data import Subset
    from torchvision import datasets
    from torchvision.transforms import Compose, Normalize, ToTensor

    transform = Compose([ToTensor(), Normalize((mean,), (std,))])
    dataset: Dataset[Any] = getattr(datasets, name)(root, train=True, transform=transform)
    return dataset if num_train == len(dataset) else Subset(dataset, range(num_train))  # type: ignore[arg-type]
