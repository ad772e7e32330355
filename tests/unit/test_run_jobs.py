"""Studies as jobs of a cluster, without a cluster: addresses, commands, ids, and what travels."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nothing_starts import NOWHERE
from ray.exceptions import AuthenticationError

from raypar.cli.cluster import words_of, write
from raypar.errors import ClusterError, RayparError
from raypar.run import jobs
from raypar.run.auth import VARIABLES
from raypar.run.jobs import OVERRIDES, STUDY_KEY, Jobs, RunsAlready, check_dashboard, command_on_head, connected, pack


@pytest.mark.parametrize("address", ["", "head:99999", "head:0", "me:secret-word@head:8265"])
def test_what_is_no_address_of_a_dashboard_is_refused(address):
    with pytest.raises(ClusterError, match=r"is no http://host:port|is no place for a password") as error:
        check_dashboard(f"http://{address}")
    assert "secret-word" not in str(error.value)
    for good in ("http://127.0.0.1:8265", "http://[::1]:8265/", "https://ray.example.org"):
        check_dashboard(good)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No token, and no address that Ray would take instead."""
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        pytest.skip("a Ray in this process would lose its token, and end the process")
    for name in (*VARIABLES, *OVERRIDES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("bare")
def test_where_no_dashboard_is_the_message_says_where_and_one_that_wants_a_token_is_told_apart(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:7")
    where = f"no Ray dashboard at --address {NOWHERE}: .*{NOWHERE}"
    with pytest.raises(ClusterError, match=where), connected(NOWHERE, print):
        pass

    def refuse(_):
        raise AuthenticationError("401")

    monkeypatch.setattr(jobs, "_client", refuse)
    with pytest.raises(ClusterError, match="asks for a token, and you have given none"), connected(NOWHERE, print):
        pass


def test_a_command_on_the_head_is_what_was_asked_in_a_folder_that_stays(tmp_path):
    home, travelled, bin_folder = (tmp_path / name for name in ("a home", "pa rcel", "bin"))
    for folder in (home, travelled, bin_folder):
        folder.mkdir()
    program = bin_folder / "raypar"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
    program.chmod(0o755)
    flags = {"--set": ("lr=1", "x='; rm -rf / #"), "--fresh": True, "--profile": False, "--repeats": 3, "--seed": None}
    command = command_on_head("my study", "a study.py", words_of(flags | {"--data-dir": Path("~/my data")}))
    environment = {"HOME": str(home), "PATH": f"{bin_folder}:/usr/bin:/bin"}
    done = subprocess.run(command, shell=True, cwd=travelled, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        *(str(home / "raypar-studies" / "my study"), "study", str(travelled / "a study.py")),
        *("--address", "auto", "--set=lr=1", "--set=x='; rm -rf / #", "--fresh", "--repeats=3"),
        *("--data-dir", str(home / "my data")),
    ]


def test_what_a_job_writes_steers_no_terminal(capsys):
    write("2026-01-31 03:50:55,828\tINFO job_manager.py:581 -- Runtime env is setting up.\n")
    write("Running entrypoint for job raypar-1: exec raypar study\none\x1b[2Jtwo\n")
    assert capsys.readouterr().out == "one?[2Jtwo\n"


def details(submission_id, metadata, status="RUNNING", start_time=1000, driver_exit_code=None, message=None):
    """A job, as Ray describes it."""
    return SimpleNamespace(**locals())


class Dashboard:
    """Stands in for a cluster's, which takes seconds to start: keeps what is submitted, and refuses as Ray does.

    `logs`: of each connection, until it is lost; `num_unseen`: jobs that somebody has submitted since a client looked.
    """

    def __init__(self, jobs=(), logs=()):
        self.jobs, self.logs, self.num_unseen = list(jobs), list(logs), 0

    def submit_job(self, *, submission_id, metadata, **_):
        if any(job.submission_id == submission_id for job in self.jobs):
            raise RuntimeError(f"ValueError: Job with submission_id {submission_id} already exists.")
        self.jobs.append(details(submission_id, metadata))
        return submission_id

    def list_jobs(self):
        return self.jobs[: len(self.jobs) - self.num_unseen]

    def get_job_info(self, job_id):
        return next(job for job in self.jobs if job.submission_id == job_id)

    async def tail_job_logs(self, _):
        for chunk in self.logs.pop(0):
            yield chunk
        if self.logs:
            raise RuntimeError("the connection was lost")


@pytest.mark.parametrize(("exit_code", "as_in_a_shell"), [(-9, 137), (2, 2), (0, 0), (None, None)])
def test_a_log_that_is_read_again_is_written_once_until_the_study_is_over(exit_code, as_in_a_shell, monkeypatch):
    monkeypatch.setattr(jobs.time, "sleep", lambda _: None)
    over = details("1", {STUDY_KEY: "s"}, "FAILED", driver_exit_code=exit_code)
    dashboard = Dashboard([over], [("ab", "cd\n"), ("abc", "d\ne"), ("abcd\nefg",)])
    written = []
    assert Jobs(dashboard, NOWHERE).follow("1", written.append, skip=2).exit_code == as_in_a_shell
    assert "".join(written) == "cd\nefg"


@pytest.mark.parametrize("name", ["s", "a study (with) ümlauts/..", "x" * 300, "s-1"])
def test_of_two_clients_that_submit_a_study_at_once_one_is_refused(name, tmp_path):
    dashboard = Dashboard()
    client = Jobs(dashboard, NOWHERE)
    for number in (1, 2):
        job_id = client.submit(name, tmp_path, "true", {})
        assert job_id.endswith(f"-{number}") and re.fullmatch(r"raypar-[A-Za-z0-9_-]{1,90}", job_id)
        for dashboard.num_unseen in (1, 0):
            with pytest.raises(RunsAlready, match="runs on this cluster already"):
                client.submit(name, tmp_path, "true", {})
        assert len(dashboard.jobs) == number
        dashboard.jobs[-1].status = "SUCCEEDED"


def test_ids_differ_where_names_are_alike_and_where_jobs_were_removed(tmp_path):
    dashboard = Dashboard()
    client = Jobs(dashboard, NOWHERE)
    names = ("a b", "a_b", "a.b", "a_b-1", "a", "a-1")
    assert len({client.submit(name, tmp_path, "true", {}) for name in names}) == 6
    for number in (1, 2):
        assert client.submit("s", tmp_path, "true", {}) == f"raypar-s-{number}"
        dashboard.jobs[-1].status = "FAILED"
    del dashboard.jobs[-2]
    assert client.submit("s", tmp_path, "true", {}) == "raypar-s-3"


@pytest.mark.parametrize("latest", [("STOPPED", 2000), ("RUNNING", 1000)], ids=["later", "running"])
@pytest.mark.parametrize("turn", [1, -1])
def test_the_job_of_a_study_is_the_one_that_runs_or_else_the_latest(latest, turn):
    both = [details("old", {STUDY_KEY: "s"}, "STOPPED", 1000), details("new", {STUDY_KEY: "s"}, *latest)]
    by_study = Jobs(Dashboard([details("another's", {}), *both[::turn]]), NOWHERE).studies()
    assert {study: job.id for study, job in by_study.items()} == {"s": "new"}


def make(folder, *names, text=""):
    for path in (folder / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text or path.name)


def packed(folder, tmp_path, *modules):
    to = tmp_path / "packed"
    to.mkdir()
    names = {str(path) for path in pack(folder / "study.py", [folder / name for name in modules], to)}
    assert {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()} == names
    for name in names:
        assert (to / name).read_text() == (folder / name).read_text()
    return names


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "mine", "study.py")
    return tmp_path / "mine"


def test_what_lies_beside_a_study_travels_and_what_is_nobodys_business_does_not(folder, tmp_path):
    make(folder, "helpers.py", "package/__init__.py", "package/deep/part.py", "data/x.csv", "config.yaml")
    make(folder, ".env", ".git/config", ".raypar/log", ".ssh/id", "host.key", "cert.pem", "mlflow.db", "mlflow.db-wal")
    make(folder, "__pycache__/a.pyc", "package/__pycache__/b.pyc", "my_env/pyvenv.cfg", "my_env/lib/torch.py")
    expected = {"study.py", "helpers.py", "package/__init__.py", "package/deep/part.py", "data/x.csv", "config.yaml"}
    assert packed(folder, tmp_path) == expected


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
@pytest.mark.parametrize("is_repository", [True, False])
def test_what_git_ignores_stays_but_for_the_modules_that_a_study_imported(is_repository, folder, tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_DIR", raising=False)
    if is_repository:
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
    make(folder, "made.py", "not_needed.py", "large/x.bin", "sub/kept.txt", "sub/dropped.txt")
    (folder / ".gitignore").write_text("made.py\nnot_needed.py\nlarge/\n")
    (folder / "sub" / ".gitignore").write_text("dropped.txt\n")
    assert packed(folder, tmp_path, "made.py") == {"study.py", "made.py", "sub/kept.txt"}


def test_without_git_everything_that_may_travels(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    make(folder, "ignored.txt")
    (folder / ".gitignore").write_text("ignored.txt\n")
    assert packed(folder, tmp_path) == {"study.py", "ignored.txt"}


def test_what_is_too_large_is_named_with_the_fix(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "MAX_BYTES", 3000)
    make(folder, "small.txt")
    make(folder, *(f"images/{number}.bin" for number in range(3)), text="x" * 1500)
    with pytest.raises(RayparError) as error:
        packed(folder, tmp_path)
    assert all(part in str(error.value) for part in (f"{folder / 'study.py'}: ", ": images (", ".gitignore"))
    assert not list((tmp_path / "packed").iterdir())


def test_a_home_folder_does_not_travel(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    with pytest.raises(RayparError, match="give the study a folder of its own"):
        pack(folder / "study.py", [], tmp_path)


@pytest.mark.parametrize(("file", "module"), [("cmd.py", "cmd"), ("email/__init__.py", "email"), ("ray.py", "ray")])
def test_a_folder_with_a_module_that_would_hide_one_on_the_cluster_does_not_travel(folder, tmp_path, file, module):
    make(folder, "utils.py", "sub/json.py", "queue/data.txt", file)
    with pytest.raises(RayparError, match=f"hides the module `{module}` ") as refused:
        packed(folder, tmp_path)
    assert "rename" in refused.value.hint and not list((tmp_path / "packed").iterdir())
    (folder / file).unlink()
    (tmp_path / "packed").rmdir()
    assert packed(folder, tmp_path) == {"study.py", "utils.py", "sub/json.py", "queue/data.txt"}
