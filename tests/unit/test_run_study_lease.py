"""The lease of a study in its store's folder, for machines without a common lock."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from raypar.errors import RayparError
from raypar.run import study_lease
from raypar.run.locks import Holder
from raypar.run.study_lease import STALE_S, leased_study
from raypar.track.client import lease_path

ME = Holder.here("mine", ["raypar", "study", "mine.py"])


@pytest.fixture
def path(tmp_path):
    return lease_path("mine", f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "elsewhere")


def left_by(path, age_s=0.0, **changes):
    """Write the lease of another process, last renewed `age_s` ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = dataclasses.replace(study_lease._Owner.of(ME), host="node7", token="theirs", **changes)
    path.write_text(json.dumps(dataclasses.asdict(owner)))
    now = path.stat().st_mtime
    os.utime(path, (now - age_s, now - age_s))


def refusal(path):
    with pytest.raises(RayparError) as refused, leased_study(ME, path):
        pass
    return str(refused.value)


def test_a_study_running_on_another_node_is_refused_until_its_lease_is_stale(path):
    left_by(path, age_s=30, machine="another", pid=4711)
    text = refusal(path)
    assert "study `mine` is already running in process 4711 on node7 (`raypar study mine.py`)" in text
    assert "last seen 30 s ago" in text and "→" in text
    left_by(path, age_s=STALE_S + 5, machine="another", pid=4711)
    with leased_study(ME, path):
        assert json.loads(path.read_text())["pid"] == os.getpid() and path.stat().st_mode & 0o077 == 0
        assert "last seen 0 s ago" in refusal(path)
    assert [*path.parent.iterdir()] == []


def test_a_killed_process_of_this_machine_blocks_nobody(path):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    left_by(path, pid=process.pid)
    with leased_study(ME, path):
        pass
    left_by(path)
    assert "is already running in process" in refusal(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}', "\0"])
def test_a_malformed_lease_counts_while_it_is_fresh(path, text):
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert "running in another process" in refusal(path)
    os.utime(path, (1, 1))
    with leased_study(ME, path):
        pass


def test_one_of_several_processes_takes_an_abandoned_lease(path):
    left_by(path, age_s=STALE_S + 5, machine="another")
    together, hold = threading.Barrier(8), threading.Event()

    def attempt(_):
        together.wait()
        with contextlib.suppress(RayparError), leased_study(ME, path):
            hold.wait()
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(attempt, n) for n in range(8)]
        while sum(future.done() for future in futures) < 7:
            pass
        hold.set()
        assert sum(future.result() for future in futures) == 1
    assert [*path.parent.iterdir()] == []


def test_the_owner_renews_its_lease_until_it_is_taken_over(path, monkeypatch):
    monkeypatch.setattr(study_lease, "BEAT_S", 0.01)
    renewed = threading.Event()
    utime = os.utime
    monkeypatch.setattr(study_lease.os, "utime", lambda *given: (utime(*given), renewed.set()))
    with leased_study(ME, path):
        assert renewed.wait(60)
        left_by(path, machine="another")
    assert json.loads(path.read_text())["token"] == "theirs", "another's lease is not removed"


def test_created_folders_are_removed_and_a_missing_store_has_no_lease(tmp_path, path):
    with leased_study(ME, path):
        assert path.exists()
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    with leased_study(ME, tmp_path / "file" / "leases" / "x"):
        pass


def test_each_study_and_store_has_its_own_lease(tmp_path):
    uris = [f"sqlite:///{tmp_path / name}" for name in ("a.db", "b.db")] + ["http://head:5000"]
    paths = {lease_path(study, uri, tmp_path) for uri in uris for study in ("one", "two")}
    assert len(paths) == 6 and {path.parent for path in paths} == {tmp_path / ".raypar" / "leases"}
