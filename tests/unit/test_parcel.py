"""What travels to a cluster with a study file, and what stays at home."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from raypar.errors import RayparError
from raypar.run import jobs as parcel
from raypar.run.jobs import pack


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def packed(folder: Path, tmp_path: Path, *modules: str) -> set[str]:
    to = tmp_path / "parcel"
    to.mkdir()
    told = {str(path) for path in pack(folder / "study.py", [folder / name for name in modules], to)}
    assert {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()} == told
    for name in told:
        assert (to / name).read_text() == (folder / name).read_text()
    return told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    make(path, "study.py")
    return path


def test_what_lies_beside_a_study_travels_and_what_is_nobodys_business_does_not(folder: Path, tmp_path: Path) -> None:
    make(folder, "helpers.py", "package/__init__.py", "package/deep/part.py", "data/x.csv", "config.yaml")
    make(folder, ".env", ".git/config", ".raypar/log", ".ssh/id", "host.key", "cert.pem", "mlflow.db", "mlflow.db-wal")
    make(folder, "__pycache__/a.pyc", "package/__pycache__/b.pyc", "my_env/pyvenv.cfg", "my_env/lib/torch.py")
    expected = {"study.py", "helpers.py", "package/__init__.py", "package/deep/part.py", "data/x.csv", "config.yaml"}
    assert packed(folder, tmp_path) == expected


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
@pytest.mark.parametrize("is_repository", [True, False])
def test_what_git_ignores_stays_but_for_the_modules_that_a_study_imported(
    is_repository: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GIT_DIR", raising=False)
    if is_repository:
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
    make(folder, "made.py", "not_needed.py", "large/x.bin", "sub/kept.txt", "sub/dropped.txt")
    (folder / ".gitignore").write_text("made.py\nnot_needed.py\nlarge/\n")
    (folder / "sub" / ".gitignore").write_text("dropped.txt\n")
    assert packed(folder, tmp_path, "made.py") == {"study.py", "made.py", "sub/kept.txt"}


def test_without_git_everything_that_may_travels(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    make(folder, "ignored.txt")
    (folder / ".gitignore").write_text("ignored.txt\n")
    assert packed(folder, tmp_path) == {"study.py", "ignored.txt"}


def test_what_is_too_large_is_named_with_the_way_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcel, "MAX_BYTES", 3000)
    make(folder, "small.txt")
    (folder / "images").mkdir()
    for number in range(3):
        (folder / "images" / f"{number}.bin").write_bytes(b"x" * 1500)
    to = tmp_path / "parcel"
    to.mkdir()
    with pytest.raises(RayparError) as error:
        pack(folder / "study.py", [], to)
    for part in (str(folder / "study.py"), "images (", ".gitignore", "--data-dir"):
        assert part in str(error.value)
    assert not list(to.iterdir())


def test_a_home_folder_does_not_travel(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    with pytest.raises(RayparError, match="give the study a folder of its own"):
        pack(folder / "study.py", [], tmp_path)
