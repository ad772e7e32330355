"""A data set is complete, or a DataError names the file, the problem and the fix."""

import hashlib
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from workload_parts import write_image_set

from raypar.errors import DataError
from raypar.workloads import datasets
from raypar.workloads.datasets import DataFile, FileSet, cache_dir, data_dir, ensure_files, ensure_image_set, image_set

TINY = image_set("MNIST", num_train=20, num_test=10)
FILES = [file.name for file in TINY.files]
CONTENTS = {"one.txt": b"one\n", "two.txt": b"two and more\n"}


@pytest.fixture(autouse=True)
def _tiny_sets(monkeypatch, tmp_path):
    def offline(name, root):
        raise OSError("Name or service not known")

    monkeypatch.setattr(datasets, "IMAGE_SETS", {"MNIST": TINY})
    monkeypatch.setattr(datasets, "_download_with_torchvision", offline)
    monkeypatch.delenv("RAYPAR_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A folder that the user named, with a complete set."""
    write_image_set(TINY, tmp_path / "named")
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path / "named"))
    return tmp_path / "named"


def error_of(ensure):
    with pytest.raises(DataError) as caught:
        ensure()
    assert caught.value.hint
    return str(caught.value)


def mnist():
    return ensure_image_set("MNIST")


# Folders.


def test_the_cache_is_below_xdg_cache_home_or_home(tmp_path, monkeypatch):
    assert cache_dir() == data_dir() == tmp_path / "cache" / "raypar"
    monkeypatch.setenv("RAYPAR_DATA_DIR", "")
    assert data_dir() == cache_dir()
    monkeypatch.setenv("RAYPAR_DATA_DIR", "~/data")
    assert data_dir() == Path.home() / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "raypar"


def test_a_named_folder_without_the_set_is_an_error_and_is_not_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path / "nowhere"))
    message = error_of(mnist)
    assert "nowhere: no such folder" in message and "--data-dir" in message and "MNIST/raw" in message
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    message = error_of(mnist)
    assert f"{tmp_path / 'MNIST/raw/train-images-idx3-ubyte'}: no such file" in message
    assert "--data-dir" in message and "RAYPAR_DATA_DIR" in message
    assert list(tmp_path.iterdir()) == []


# Damage to one file of an image set.


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda raw: raw[:-7], "is incomplete: "),
        (lambda raw: raw + b"x", "is corrupt"),
        (lambda raw: b"", "its header differs"),
        (lambda raw: raw[:4] + struct.pack(">I", 999) + raw[8:], "its header differs"),
        (None, "no such file"),
    ],
    ids=["cut", "longer", "empty", "other count", "missing"],
)
def test_a_damaged_file_is_named_with_its_problem(named, file, damage, problem):
    path = named / TINY.folder / file
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    message = error_of(mnist)
    assert str(path) in message and problem in message and ("--data-dir" in message or "copy the file again" in message)


def test_a_complete_set_is_used_and_a_compressed_file_or_a_folder_in_its_place_is_an_error(named):
    assert mnist() == named == data_dir()
    path = named / TINY.folder / FILES[3]
    packed = path.rename(path.with_name(path.name + ".gz"))
    assert "is compressed" in error_of(mnist) and f"gunzip -k {packed}" in error_of(mnist)
    path.mkdir()
    assert f"{path}: can't be read" in error_of(mnist)


# The cache and downloads.


def test_offline_the_three_alternatives_are_named_and_nothing_is_left_behind():
    message = error_of(mnist)
    assert "MNIST is not in the cache" in message and "Name or service not known" in message
    for alternative in ("--data-dir", "RAYPAR_DATA_DIR", str(cache_dir() / "MNIST" / "raw")):
        assert alternative in message
    assert [p.name for p in cache_dir().iterdir()] == [".MNIST.lock"]


def test_an_absent_set_is_downloaded_to_the_cache_once(monkeypatch):
    downloads = []

    def download(name, root):
        downloads.append(name)
        write_image_set(TINY, Path(root))
        (Path(root) / TINY.folder / "train-images-idx3-ubyte.gz").write_bytes(b"packed")

    monkeypatch.setattr(datasets, "_download_with_torchvision", download)
    assert mnist() == mnist() == cache_dir()
    assert downloads == ["MNIST"]
    assert sorted(p.name for p in (cache_dir() / TINY.folder).iterdir()) == sorted(FILES)
    assert sorted(p.name for p in cache_dir().iterdir()) == [".MNIST.lock", "MNIST"]


@pytest.mark.parametrize(
    ("error", "shown"),
    [(RuntimeError("connection lost\nfor ever"), "connection lost\n"), (TimeoutError(), "TimeoutError")],
)
def test_an_interrupted_download_is_not_taken_for_the_set(error, shown, monkeypatch):
    def download(name, root):
        folder = Path(root) / TINY.folder
        folder.mkdir(parents=True)
        (folder / FILES[0]).write_bytes(b"half")
        raise error

    monkeypatch.setattr(datasets, "_download_with_torchvision", download)
    assert shown in error_of(mnist) and "for ever" not in error_of(mnist)
    assert not (cache_dir() / "MNIST").exists()


def test_a_damaged_cache_names_the_folder_to_remove():
    write_image_set(TINY, cache_dir())
    (cache_dir() / TINY.folder / FILES[1]).write_bytes(TINY.files[1].header)
    message = error_of(mnist)
    assert "incomplete" in message and f"remove {cache_dir() / TINY.folder}" in message


def test_an_unwritable_cache_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "download failed" in error_of(mnist) and "--data-dir" in error_of(mnist)


def few_files(origin):
    """Two files whose URLs point to a folder of this machine."""
    files = (
        DataFile(name, len(body), (origin / name).as_uri(), hashlib.sha256(body).hexdigest())
        for name, body in CONTENTS.items()
    )
    return FileSet("few files", "few/raw", tuple(files))


def write_files(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in CONTENTS.items():
        (folder / name).write_bytes(body)
    return folder


def test_published_files_are_downloaded_once_or_taken_from_a_named_folder(tmp_path, monkeypatch):
    online = few_files(write_files(tmp_path / "origin"))
    folder = ensure_files(online)
    assert folder == cache_dir() / "few" / "raw"
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == CONTENTS
    for path in (tmp_path / "origin").iterdir():
        path.unlink()
    assert ensure_files(online) == folder
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path / "named"))
    write_files(tmp_path / "named" / "few" / "raw")
    assert ensure_files(online) == tmp_path / "named" / "few" / "raw"


def test_a_download_with_another_digest_is_refused_and_removed(tmp_path):
    online = few_files(write_files(tmp_path / "origin"))
    (tmp_path / "origin" / "two.txt").write_bytes(b"two and less\n")
    message = error_of(lambda: ensure_files(online))
    assert "download failed" in message and "hash" in message
    assert [p.name for p in cache_dir().iterdir()] == [".few-files.lock"]


def test_concurrent_callers_download_once(tmp_path, monkeypatch):
    online, downloads, download = few_files(write_files(tmp_path / "origin")), [], datasets.download
    monkeypatch.setattr(datasets, "download", lambda file, path: downloads.append(file.name) or download(file, path))
    with ThreadPoolExecutor(3) as pool:  # a lock is an open file's, in one process as in several
        assert len(set(pool.map(lambda _: ensure_files(online), range(3)))) == 1
    assert downloads == ["one.txt", "two.txt"]
