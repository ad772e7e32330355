"""Files that are the same for everyone: taken where they are whole, else downloaded once and checked."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from raypar.errors import DataError
from raypar.workloads.datasets import DataFile, FileSet, cache_dir, ensure_files

CONTENTS = {"one.txt": b"one\n", "two.txt": b"two and more\n"}


def few_files(origin: Path) -> FileSet:
    """Two files whose URLs lead to a folder of this machine."""
    files = [
        DataFile(name, len(body), (origin / name).as_uri(), hashlib.sha256(body).hexdigest())
        for name, body in CONTENTS.items()
    ]
    return FileSet("few files", "few/raw", tuple(files))


def put(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in CONTENTS.items():
        (folder / name).write_bytes(body)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAYPAR_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def online(tmp_path: Path) -> FileSet:
    return few_files(put(tmp_path / "origin"))


def told(files: FileSet) -> str:
    with pytest.raises(DataError) as caught:
        ensure_files(files)
    assert caught.value.hint
    return str(caught.value)


def test_an_absent_set_is_downloaded_to_the_cache_once(online: FileSet, tmp_path: Path) -> None:
    folder = ensure_files(online)
    assert folder == cache_dir() / "few" / "raw"
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == CONTENTS
    for path in (tmp_path / "origin").iterdir():
        path.unlink()
    assert ensure_files(online) == folder


def test_a_download_of_other_contents_is_refused_and_nothing_is_kept(online: FileSet, tmp_path: Path) -> None:
    (tmp_path / "origin" / "two.txt").write_bytes(b"two and less\n")
    message = told(online)
    assert "can't be downloaded" in message and "hash" in message
    assert [p.name for p in cache_dir().iterdir()] == [".few-files.lock"]


def test_offline_the_ways_out_are_named(tmp_path: Path) -> None:
    message = told(few_files(tmp_path / "nowhere"))
    for way in ("--data-dir", "RAYPAR_DATA_DIR", str(cache_dir() / "few" / "raw"), "few files is not in the cache"):
        assert way in message


def test_a_named_folder_is_taken_and_nothing_is_downloaded_into_it(
    online: FileSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path / "named"))
    assert "named: no such folder" in told(online)
    (tmp_path / "named").mkdir()
    assert f"{tmp_path / 'named/few/raw/one.txt'}: no such file" in told(online)
    assert list((tmp_path / "named").iterdir()) == []
    folder = put(tmp_path / "named" / "few" / "raw")
    assert ensure_files(online) == folder


@pytest.mark.parametrize(("body", "what"), [(b"tw", "half-downloaded: 2 bytes instead of 13"), (b"2" * 14, "corrupt")])
def test_a_damaged_file_is_named_with_both_lengths(online: FileSet, body: bytes, what: str) -> None:
    (put(cache_dir() / "few" / "raw") / "two.txt").write_bytes(body)
    message = told(online)
    assert f"two.txt: is {what}" in message and f"remove {cache_dir() / 'few' / 'raw'}" in message


def test_processes_that_ask_at_once_download_once(online: FileSet, tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from raypar.workloads import datasets as files\n"
        "from test_workloads_files import few_files\n"
        "download = files.download\n"
        "def counted(file, path):\n"
        f"    with open({str(tmp_path / 'log')!r}, 'a') as log: log.write(file.name + ' ')\n"
        "    download(file, path)\n"
        "files.download = counted\n"
        f"files.ensure_files(few_files(Path({str(tmp_path / 'origin')!r})))\n"
    )
    asking = [subprocess.Popen([sys.executable, script], stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [p.wait(60) for p in asking] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "one.txt two.txt "
