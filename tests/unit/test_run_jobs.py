"""Studies as jobs of a cluster, without a cluster: addresses, commands, ids, and what travels."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nothing_starts import NOWHERE

from raypar.cli.cluster import words_of, write
from raypar.errors import ClusterError, RayparError
from raypar.run import jobs
from raypar.run.auth import VARIABLES
from raypar.run.jobs import OVERRIDES, STUDY_KEY, Jobs, RunsAlready, check_dashboard, command_on_head, connected, pack


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:8265", "is no dashboard"),
        ("http://", "is no http://host:port"),
        ("http://head:99999", "is no http://host:port"),
        ("http://head:8265/jobs", "is no http://host:port"),
        ("http://me:secret-word@head:8265", "is no place for a password"),
    ],
)
def test_what_is_no_address_of_a_dashboard_is_refused(address: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as error:
        check_dashboard(address)
    assert "secret-word" not in str(error.value) and error.value.hint
    for good in ("http://127.0.0.1:8265", "http://[::1]:8265/", "https://ray.example.org"):
        check_dashboard(good)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token, and no address that Ray would take instead."""
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        pytest.skip("a Ray in this process would lose its token, and end the process")
    for name in (*VARIABLES, *OVERRIDES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


class Server(BaseHTTPRequestHandler):
    """Answers like something that is no dashboard, or like one that wants a token."""

    code = 404

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


@pytest.mark.usefixtures("bare")
def test_where_no_dashboard_is_the_message_tells_how_to_reach_one(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "somewhere-else:1")
    for address in (NOWHERE, server):
        with pytest.raises(ClusterError, match="no Ray dashboard") as error, connected(address, print):
            pass
        assert address in str(error.value) and "ssh -N -L 8265" in str(error.value)


@pytest.mark.usefixtures("bare")
def test_a_dashboard_that_wants_a_token_is_told_apart(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "code", 401)
    with pytest.raises(ClusterError, match="asks for a token, and you have given none"), connected(server, print):
        pass
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong-" * 5)
    with pytest.raises(ClusterError, match="doesn't take the token") as error, connected(server, print):
        pass
    assert "wrong-wrong" not in str(error.value)


def test_a_command_on_the_head_is_what_was_asked_in_a_folder_that_stays(tmp_path: Path) -> None:
    home, travelled, bin_folder = (tmp_path / name for name in ("a home", "pa rcel", "bin"))
    for folder in (home, travelled, bin_folder):
        folder.mkdir()
    program = bin_folder / "raypar"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
    program.chmod(0o755)
    flags = words_of(
        {
            "--set": ("lr=0.1", "x='; rm -rf / #"),
            "--fresh": True,
            "--profile": False,
            "--repeats": 3,
            "--seed": None,
            "--data-dir": Path("~/my data"),
        }
    )
    command = command_on_head("my study", "a study.py", flags)
    path = f"{bin_folder}:/usr/bin:/bin"
    environment = {"HOME": str(home), "PATH": path}
    done = subprocess.run(command, shell=True, cwd=travelled, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        str(home / "raypar-studies" / "my study"),
        "study",
        str(travelled / "a study.py"),
        *("--address", "auto", "--set=lr=0.1", "--set=x='; rm -rf / #", "--fresh", "--repeats=3"),
        *("--data-dir", str(home / "my data")),
    ]


def test_a_log_that_is_read_again_is_written_once() -> None:
    async def chunks(*texts: str) -> AsyncIterator[str]:
        for text in texts:
            yield text

    written: list[str] = []
    log = jobs._Log(written.append, 2)
    asyncio.run(log.take(chunks("ab", "cd\n")))
    asyncio.run(log.take(chunks("abc", "d\ne")))
    asyncio.run(log.take(chunks("abcd\nefg")))
    assert "".join(written) == "cd\nefg"


def test_what_a_job_writes_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    write("2026-01-31 03:50:55,828\tINFO job_manager.py:581 -- Runtime env is setting up.\n")
    write("Running entrypoint for job raypar-1: exec raypar study\none\x1b[2Jtwo\n")
    assert capsys.readouterr().out == "one?[2Jtwo\n"


def test_a_study_that_a_signal_has_ended_exits_as_a_shell_tells_it() -> None:
    def code(driver_exit_code: int | None) -> int | None:
        details = SimpleNamespace(
            submission_id="1",
            metadata={},
            status="FAILED",
            message=None,
            driver_exit_code=driver_exit_code,
            start_time=1,
        )
        return jobs._job(details).exit_code

    assert (code(-9), code(2), code(0), code(None)) == (137, 2, 0, None)


class Dashboard:
    """Stands in for a cluster's, which takes seconds to start: it keeps what is submitted, and refuses as Ray does."""

    def __init__(self) -> None:
        self.jobs: list[SimpleNamespace] = []

    def submit_job(self, *, submission_id: str, metadata: dict[str, str], **_: Any) -> str:
        if any(job.submission_id == submission_id for job in self.jobs):
            raise RuntimeError(f"ValueError: Job with submission_id {submission_id} already exists.")
        self.add(submission_id, metadata)
        return submission_id

    def add(
        self, submission_id: str, metadata: dict[str, str], status: str = "RUNNING", start_time: int = 1000
    ) -> None:
        known = {"submission_id": submission_id, "metadata": metadata, "status": "RUNNING", "start_time": 1000}
        self.jobs.append(SimpleNamespace(**known, message="", driver_exit_code=None))

    def list_jobs(self) -> list[SimpleNamespace]:
        return list(self.jobs)


class Stale(Dashboard):
    """As a client sees it that has looked just before somebody else submitted something."""

    def __init__(self, now: Dashboard) -> None:
        self.before, self.jobs = list(now.jobs), now.jobs

    def list_jobs(self) -> list[SimpleNamespace]:
        return self.before


@pytest.mark.parametrize("name", ["s", "a study (with) ümlauts/..", "x" * 300, "s-1"])
def test_of_two_clients_that_submit_a_study_at_once_one_is_refused(name: str, tmp_path: Path) -> None:
    dashboard = Dashboard()
    client = Jobs(dashboard, NOWHERE)
    for number in (1, 2, 3):
        late = Jobs(Stale(dashboard), NOWHERE)
        job_id = client.submit(name, tmp_path, "true", {})
        assert job_id.endswith(f"-{number}") and re.fullmatch(r"raypar-[A-Za-z0-9_-]{1,90}", job_id)
        for other in (late, client):
            with pytest.raises(RunsAlready, match="runs on this cluster already"):
                other.submit(name, tmp_path, "true", {})
        assert len(dashboard.jobs) == number
        dashboard.jobs[-1].status = "SUCCEEDED"


def test_ids_differ_where_names_are_alike_and_where_jobs_were_removed(tmp_path: Path) -> None:
    dashboard = Dashboard()
    client = Jobs(dashboard, NOWHERE)
    names = ("a b", "a_b", "a.b", "a_b-1", "a", "a-1")
    assert len({client.submit(name, tmp_path, "true", {}) for name in names}) == 6
    for number in (1, 2, 3):
        assert client.submit("s", tmp_path, "true", {}) == f"raypar-s-{number}"
        dashboard.jobs[-1].status = "FAILED"
    dashboard.jobs = [job for job in dashboard.jobs if job.submission_id != "raypar-s-1"]
    assert client.submit("s", tmp_path, "true", {}) == "raypar-s-4"


def test_the_job_of_a_study_is_the_one_that_runs_or_else_the_latest() -> None:
    dashboard = Dashboard()
    dashboard.add("another's", {})
    for name in ("x", "y"):
        dashboard.add(name, {STUDY_KEY: "s"})
    first, second = dashboard.jobs[1:]
    client = Jobs(dashboard, NOWHERE)
    for runs, over in ((first, second), (second, first)):
        runs.status, over.status = "RUNNING", "STOPPED"
        (job,) = client.studies().values()
        assert (job.id, job.study, job.is_over) == (runs.submission_id, "s", False)
    for later, earlier in ((first, second), (second, first)):
        later.status = earlier.status = "STOPPED"
        later.start_time, earlier.start_time = 2000, 1000
        assert client.studies()["s"].id == later.submission_id


# ---- what travels with a study file


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def packed(folder: Path, tmp_path: Path, *modules: str) -> set[str]:
    to = tmp_path / "packed"
    to.mkdir()
    names = {str(path) for path in pack(folder / "study.py", [folder / name for name in modules], to)}
    assert {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()} == names
    for name in names:
        assert (to / name).read_text() == (folder / name).read_text()
    return names


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


def test_what_is_too_large_is_named_with_the_fix(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_BYTES", 3000)
    make(folder, "small.txt")
    (folder / "images").mkdir()
    for number in range(3):
        (folder / "images" / f"{number}.bin").write_bytes(b"x" * 1500)
    to = tmp_path / "packed"
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
