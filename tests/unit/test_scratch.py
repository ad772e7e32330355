"""Folders of killed processes are removed at the next start; folders in use and other files stay."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from raypar import scratch
from raypar.scratch import (
    LOCK_FILE,
    PREFIX,
    make_folder,
    remove_abandoned,
    remove_folder,
    remove_logs,
    room_for,
    scratch_folder,
)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def other_process(temporary):
    """Yield a process and its scratch folder, which is not empty."""
    code = "from raypar.scratch import make_folder as make; (f := make()).joinpath('token').touch(); "
    code += "print(f, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    with process:
        yield process, temporary / process.stdout.readline().strip()


def test_only_folders_of_killed_processes_are_removed(temporary):
    kept = ["raypar-results", "raypar-baseline", "ray", "session_2026-01-01_00-00-00_000000_1"]
    for name in kept:
        (temporary / name).mkdir()
        (temporary / name / "mine").touch()
    with other_process(temporary) as (process, folder), other_process(temporary) as (other, in_use):
        ours = make_folder()
        assert folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) == 0o700
        process.kill()
        process.wait()
        with scratch_folder() as another:
            assert {path.name for path in temporary.iterdir()} == {*kept, *(p.name for p in (ours, in_use, another))}
        assert {path.name for path in temporary.iterdir()} == {*kept, ours.name, in_use.name}
        other.send_signal(signal.SIGSTOP)
        remove_abandoned()
        assert in_use.is_dir()
        other.kill()
    remove_folder(ours)
    assert {path.name for path in temporary.iterdir()} == {*kept}


def test_a_folder_removed_before_it_was_locked_is_created_again(monkeypatch):
    real, seen = scratch._lock, []

    def too_late(path, flags=0):
        if flags and len(seen) < 2:
            seen.append(path.parent)
            path.touch()
            remove_abandoned()
        return real(path, flags)

    monkeypatch.setattr(scratch, "_lock", too_late)
    folder = make_folder()
    assert folder not in seen and (folder / LOCK_FILE).exists()
    assert not any(path.exists() for path in seen)
    remove_folder(folder)


def test_links_and_folders_of_other_users_are_left_alone(temporary, tmp_path_factory, monkeypatch):
    target = tmp_path_factory.mktemp("target")
    (target / LOCK_FILE).touch()
    (temporary / f"{PREFIX}linkedto").symlink_to(target)
    (temporary / f"{PREFIX}ofothers").mkdir()
    (temporary / f"{PREFIX}ofothers" / LOCK_FILE).symlink_to(target / LOCK_FILE)
    with other_process(temporary) as (process, abandoned):
        process.kill()
    with monkeypatch.context() as patch:
        patch.setattr(scratch.os, "getuid", lambda: os.geteuid() + 1)
        remove_abandoned()
    assert abandoned.is_dir()
    remove_abandoned()
    assert not abandoned.exists() and (target / LOCK_FILE).exists() and len(list(temporary.iterdir())) == 2


def test_a_folder_for_sockets_has_a_short_path(temporary):
    for length in range(40, 140, 3):
        parent = temporary / ("x" * max(1, length - len(str(temporary)) - 1))
        folder = make_folder(parent, socket=len("fork"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "fork"))
        assert folder.parent in (parent, Path("/tmp"))
        remove_folder(folder)
        assert not folder.exists()
    assert (room_for(31, Path("/tmp")), room_for(31, temporary / ("x" * 100))) == (Path("/tmp"), Path("/tmp"))


def test_logs_of_failed_trials_are_kept_for_a_month(temporary):
    mine, recent, old = (temporary / f"{scratch.LOGS_PREFIX}{name}" for name in ("mine", "recent", "old"))
    for path in (mine / "good" / "log", mine / "gangs" / "x", mine / "failed" / "log", recent / "a", old / "a"):
        path.parent.mkdir(parents=True)
        path.touch()
    month_ago = time.time() - scratch.STALE_LOGS_S - 60
    os.utime(old, (month_ago, month_ago))
    (temporary / f"{scratch.LOGS_PREFIX}link").symlink_to(recent)
    remove_logs(mine.name, ["failed"])
    assert [path.name for path in mine.iterdir()] == ["failed"] and (mine / "failed" / "log").exists()
    assert (recent / "a").exists() and not old.exists()
    remove_logs(recent.name, [])
    remove_logs("raypar-logs-never-there", [])
    assert not recent.exists() and mine.exists()
