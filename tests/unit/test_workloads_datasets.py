"""Data is there and whole, or a DataError names the file, what is wrong and the way out."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raypar.errors import DataError
from raypar.workloads import datasets
from raypar.workloads.datasets import IdxFile, ImageSet, cache_dir, data_dir, ensure_image_set, raw_dir

TINY = ImageSet("MNIST", num_train=20, num_test=10)


@pytest.fixture(autouse=True)
def _tiny_sets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "IMAGE_SETS", {"MNIST": TINY})
    monkeypatch.delenv("RAYPAR_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "_download_with_torchvision", offline)


def offline(name: str, root: str) -> None:
    raise OSError("Name or service not known")


def contents(file: IdxFile) -> bytes:
    return file.header + bytes(i % 10 for i in range(file.num_bytes - len(file.header)))


def filled(root: Path) -> Path:
    folder = raw_dir(root, TINY)
    folder.mkdir(parents=True)
    for file in TINY.files:
        (folder / file.name).write_bytes(contents(file))
    return root


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole set in a folder that the user named."""
    root = filled(tmp_path / "named")
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(root))
    return root


def told() -> str:
    with pytest.raises(DataError) as caught:
        ensure_image_set("MNIST")
    assert caught.value.hint
    return str(caught.value)


def test_a_whole_set_in_a_named_folder_is_taken(named: Path) -> None:
    assert ensure_image_set("MNIST") == named == data_dir()


def test_the_cache_is_below_xdg_cache_home_or_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_dir() == data_dir() == tmp_path / "cache" / "raypar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "raypar"


def test_an_empty_variable_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", "")
    assert data_dir() == cache_dir()


def test_a_tilde_in_the_named_folder_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", "~/data")
    assert data_dir() == Path.home() / "data"


def test_a_named_folder_that_does_not_exist_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path / "nowhere"))
    message = told()
    assert "nowhere: no such folder" in message and "--data-dir" in message and "MNIST/raw" in message


def test_a_named_folder_without_the_set_is_told_and_nothing_is_downloaded_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    message = told()
    assert f"{tmp_path / 'MNIST/raw/train-images-idx3-ubyte'}: no such file" in message
    assert "--data-dir" in message and "RAYPAR_DATA_DIR" in message
    assert list(tmp_path.iterdir()) == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def prolong(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_magic(path: Path) -> None:
    path.write_bytes(b"<html>" + path.read_bytes()[6:])


def other_count(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + struct.pack(">I", 999) + raw[8:])


def other_size(path: Path) -> None:
    path.write_bytes(struct.pack(">IIII", 0x803, 20, 32, 32) + path.read_bytes()[16:])


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (cut, "is half-downloaded"),
        (prolong, "is corrupt"),
        (empty, "its header differs"),
        (other_magic, "its header differs"),
        (other_count, "its header differs"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    named: Path, which: int, damage: Callable[[Path], None], what: str
) -> None:
    path = raw_dir(named, TINY) / TINY.files[which].name
    damage(path)
    message = told()
    assert str(path) in message and what in message and "copy the file again" in message


def test_a_half_downloaded_file_is_told_with_both_lengths(named: Path) -> None:
    cut(raw_dir(named, TINY) / "train-images-idx3-ubyte")
    assert "15,689 bytes instead of 15,696" in told()


def test_images_of_another_size_are_told(named: Path) -> None:
    other_size(raw_dir(named, TINY) / "train-images-idx3-ubyte")
    assert "its header differs" in told()


@pytest.mark.parametrize("which", range(4))
def test_each_missing_file_is_named(named: Path, which: int) -> None:
    path = raw_dir(named, TINY) / TINY.files[which].name
    path.unlink()
    assert f"{path}: no such file" in told()


def test_a_file_that_is_still_packed_is_told_with_how_to_unpack_it(named: Path) -> None:
    path = raw_dir(named, TINY) / "t10k-labels-idx1-ubyte"
    path.rename(path.with_name(path.name + ".gz"))
    assert "is still packed" in told() and "gunzip" in told()


def test_a_folder_in_a_files_place_is_told(named: Path) -> None:
    path = raw_dir(named, TINY) / "t10k-labels-idx1-ubyte"
    path.unlink()
    path.mkdir()
    assert f"{path}: can't be read" in told()


def test_offline_the_three_ways_out_are_named() -> None:
    message = told()
    assert "MNIST is not in the cache" in message and "Name or service not known" in message
    for way in ("--data-dir", "RAYPAR_DATA_DIR", str(cache_dir() / "MNIST" / "raw")):
        assert way in message


def test_a_failed_download_leaves_no_files_behind() -> None:
    told()
    assert [p.name for p in cache_dir().iterdir()] == [".MNIST.lock"]


def test_an_absent_set_is_downloaded_to_the_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, root: str) -> None:
        asked.append(name)
        filled(Path(root))
        (raw_dir(Path(root), TINY) / "train-images-idx3-ubyte.gz").write_bytes(b"packed")

    monkeypatch.setattr(datasets, "_download_with_torchvision", download)
    assert ensure_image_set("MNIST") == ensure_image_set("MNIST") == cache_dir()
    assert asked == ["MNIST"]
    assert sorted(p.name for p in raw_dir(cache_dir(), TINY).iterdir()) == sorted(f.name for f in TINY.files)
    assert sorted(p.name for p in cache_dir().iterdir()) == [".MNIST.lock", "MNIST"]


def test_a_download_that_breaks_off_is_not_taken_for_the_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, root: str) -> None:
        folder = raw_dir(Path(root), TINY)
        folder.mkdir(parents=True)
        (folder / "train-images-idx3-ubyte").write_bytes(b"half")
        raise RuntimeError("connection lost")

    monkeypatch.setattr(datasets, "_download_with_torchvision", download)
    assert "connection lost" in told()
    assert not (cache_dir() / "MNIST").exists()


def test_a_damaged_cache_is_told_with_the_folder_to_remove() -> None:
    filled(cache_dir())
    cut(raw_dir(cache_dir(), TINY) / "train-labels-idx1-ubyte")
    message = told()
    assert "half-downloaded" in message and f"remove {raw_dir(cache_dir(), TINY)}" in message


def test_a_cache_that_can_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "can't be downloaded" in told() and "--data-dir" in told()


def test_processes_that_ask_at_once_download_once(tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from raypar.workloads import datasets\n"
        "from test_workloads_datasets import TINY, filled\n"
        "datasets.IMAGE_SETS = {'MNIST': TINY}\n"
        "def download(name, root):\n"
        f"    with open({str(tmp_path / 'log')!r}, 'a') as log: log.write('once ')\n"
        "    time.sleep(0.2)\n"
        "    filled(Path(root))\n"
        "datasets._download_with_torchvision = download\n"
        "print(datasets.ensure_image_set('MNIST'))\n"
    )
    asking = [subprocess.Popen([sys.executable, script], stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [p.wait(60) for p in asking] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "once "
