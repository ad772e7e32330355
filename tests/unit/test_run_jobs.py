"""Studies as jobs of a cluster, without a cluster: addresses, commands, logs and uploads."""

import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
from nothing_starts import NOWHERE
from ray._private.runtime_env.packaging import create_package
from ray.job_submission import JobStatus
from typer.testing import CliRunner

from raypar.cli import cluster
from raypar.cli.app import app
from raypar.cli.cluster import ended, write
from raypar.errors import ClusterError, RayparError
from raypar.run.auth import VARIABLES
from raypar.run.jobs import OVERRIDES, STUDY_KEY, check_dashboard, command_on_head, connect, follow, latest_jobs, submit

STUDY = """
from raypar import Study
from raypar.workloads import digits

study = Study(workload=digits, space={})
"""


@pytest.mark.parametrize("address", ["", "head:123456", "head/path", "me:secret-word@head:8265"])
def test_a_malformed_dashboard_address_is_refused(address):
    with pytest.raises(ClusterError, match="must be the URL of a dashboard, http://host:port") as error:
        check_dashboard(f"http://{address}")
    assert "secret-word" not in str(error.value)
    for good in ("http://127.0.0.1:8265", "http://[::1]:8265/", "https://ray.example.org"):
        check_dashboard(good)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """Remove the token and Ray's own settings of an address."""
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        pytest.skip("a Ray in this process would lose its token, and end the process")
    for name in (*VARIABLES, *OVERRIDES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("bare")
def test_a_missing_dashboard_is_named_whatever_ray_address_says(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:7")
    with pytest.raises(ClusterError, match=f"no Ray dashboard answers at --address {NOWHERE}"):
        connect(NOWHERE, print)


def test_a_command_on_the_head_has_its_flags_and_a_lasting_folder(tmp_path):
    home, travelled, bin_folder = (tmp_path / name for name in ("a home", "pa rcel", "bin"))
    for folder in (home, travelled, bin_folder):
        folder.mkdir()
    program = bin_folder / "raypar"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
    program.chmod(0o755)
    flags = ["--set", "lr=1", "--set", "x='; rm -rf / #", "--fresh", "--data-dir", "~/my data"]
    command = command_on_head("my study", "a study.py", flags)
    environment = {"HOME": str(home), "PATH": f"{bin_folder}:/usr/bin:/bin"}
    done = subprocess.run(command, shell=True, cwd=travelled, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        *(str(home / "raypar-studies" / "my study"), "study", str(travelled / "a study.py")),
        *("--address", "auto", "--set", "lr=1", "--set", "x='; rm -rf / #", "--fresh"),
        *("--data-dir", str(home / "my data")),
    ]


def test_only_given_flags_go_to_the_head(tmp_path, monkeypatch):
    (tmp_path / "s.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    submitted = []
    monkeypatch.setattr(cluster, "submit", lambda *arguments: submitted.append(arguments) or 0)
    flags = ["--set", "lr=1", "--profile", "--repeats", "3", "--set", "epochs=2", "--until=settled", "--data-dir", "/d"]
    done = CliRunner().invoke(app, ["study", "s.py", "--address", NOWHERE, *flags])
    assert done.exit_code == 0, done.output
    ((name, path, address, words, *_),) = submitted
    assert (name, path, address) == ("s", tmp_path / "s.py", NOWHERE)
    given = [("--set", "lr=1"), ("--set", "epochs=2"), ("--repeats", "3"), ("--until", "settled"), ("--data-dir", "/d")]
    assert sorted(words) == sorted([*(word for pair in given for word in pair), "--profile"])


def test_a_jobs_output_is_filtered_for_the_terminal(capsys):
    write("2026-01-31 03:50:55,828\tINFO job_manager.py:581 -- Runtime env is setting up.\n")
    write("Running entrypoint for job raypar-1: exec raypar study\none\x1b[2Jtwo\n")
    assert capsys.readouterr().out == "one?[2Jtwo\n"


def job(submission_id, metadata, status="RUNNING", start_time=1000, driver_exit_code=None, message=None):
    """Return a job like Ray's."""
    return SimpleNamespace(**{**locals(), "status": JobStatus(status)})


class Client:
    """Stands in for Ray's client of a cluster."""

    def __init__(self, jobs=(), log=()):
        self.jobs, self.log, self.submitted = list(jobs), log, {}

    def get_address(self):
        return NOWHERE

    def submit_job(self, **submitted):
        self.submitted = submitted
        return "job"

    def list_jobs(self):
        return self.jobs

    def get_job_info(self, job_id):
        return next(job for job in self.jobs if job.submission_id == job_id)

    async def tail_job_logs(self, _):
        for chunk in self.log:
            yield chunk


@pytest.mark.parametrize(("exit_code", "as_in_a_shell"), [(-9, 137), (2, 2), (0, 0)])
def test_a_followed_study_sets_the_clients_exit_code(exit_code, as_in_a_shell):
    over = job("1", {STUDY_KEY: "s"}, "FAILED" if exit_code else "SUCCEEDED", driver_exit_code=exit_code)
    written = []
    assert follow(Client([over], ["ab\n", "cd\n", "ef\n"]), "1", written.append, skip=4) is over
    assert "".join(written) == "d\nef\n" and ended("s", over) == as_in_a_shell


@pytest.mark.parametrize(
    ("code", "message"),
    [(127, "`raypar` is not installed on the head"), (None, "study `s` did not start: no such image")],
)
def test_a_study_that_never_began_is_reported_with_the_reason(code, message):
    over = job("1", {STUDY_KEY: "s"}, "FAILED", driver_exit_code=code, message="no such image")
    with pytest.raises(RayparError, match=message):
        ended("s", over)


def test_a_lost_connection_names_the_command_that_follows_again():
    with pytest.raises(ClusterError, match="the connection was lost") as lost:
        follow(Client([job("1", {STUDY_KEY: "s"})]), "1", print)
    assert "`raypar cluster attach` follows it again" in lost.value.hint


def test_a_running_study_is_not_submitted_again(tmp_path, monkeypatch):
    client = Client([job("1", {STUDY_KEY: "my study"})])
    monkeypatch.setattr("raypar.run.jobs.connect", lambda *_: client)
    with pytest.raises(RayparError, match="study `my study` is already running on this cluster") as refused:
        cluster.submit("my study", tmp_path / "s.py", NOWHERE, [], [], "sqlite:///x")
    assert f"`raypar cluster stop 'my study' --address {NOWHERE}`" in refused.value.hint and not client.submitted


@pytest.mark.parametrize("latest", [("STOPPED", 2000), ("RUNNING", 1000)], ids=["later", "running"])
@pytest.mark.parametrize("turn", [1, -1])
def test_a_studys_job_is_the_running_or_the_latest_one(latest, turn):
    both = [job("old", {STUDY_KEY: "s"}, "STOPPED", 1000), job("new", {STUDY_KEY: "s"}, *latest)]
    by_study = latest_jobs(Client([job("another's", {}), *both[::turn], job("no study's", None)]))
    assert {study: each.submission_id for study, each in by_study.items()} == {"s": "new"}


def make(folder, *names):
    for path in (folder / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)


def uploaded(folder, tmp_path, study="study.py"):
    """Return the names of the files that Ray packs for a job."""
    client = Client()
    submit(client, "study", folder / study, "true", {})
    environment = client.submitted["runtime_env"]
    create_package(environment["working_dir"], tmp_path / "package.zip", True, excludes=environment["excludes"])
    with zipfile.ZipFile(tmp_path / "package.zip") as package:
        return {name for name in package.namelist() if not name.endswith("/")}


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "mine", "study.py")
    return tmp_path / "mine"


def test_files_beside_a_study_are_uploaded_except_private_ones(folder, tmp_path):
    expected = {"study.py", "helpers.py", "package/__init__.py", "package/deep/part.py", "data/x.csv", "config.yaml"}
    make(folder, *expected)
    make(folder, ".env", ".git/config", ".raypar/log", ".ssh/id", "host.key", "cert.pem", "mlflow.db", "mlflow.db-wal")
    make(folder, "package/b.pyc", "my_env/pyvenv.cfg", "my_env/lib/torch.py", "node_modules/x.js", "mlruns/0/meta.yaml")
    make(folder, "ignored.txt", "data/dropped.txt")
    (folder / ".gitignore").write_text("ignored.txt\n")
    (folder / "data" / ".rayignore").write_text("dropped.txt\n")
    make(tmp_path, "elsewhere/large.bin")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert uploaded(folder, tmp_path) == expected


def test_files_ignored_by_git_are_not_uploaded(folder, tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("secrets.yaml\nscratch/\n*.local\n!kept.local\n")
    make(folder, "secrets.yaml", "scratch/x.py", "a [b] #1.local", "kept.local", "sub/secrets.yaml", "sub/y.py")
    assert uploaded(folder, tmp_path) == {"study.py", "kept.local", "sub/y.py"}


def test_the_hidden_study_of_a_script_is_uploaded(folder, tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text(".*_study.py\n")
    make(folder, "train.py", ".train_study.py", ".other_study.py")
    assert uploaded(folder, tmp_path, ".train_study.py") == {"study.py", "train.py", ".train_study.py"}


def test_a_home_folder_is_not_uploaded(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    with pytest.raises(RayparError, match="move the study to a separate folder"):
        uploaded(folder, tmp_path)


@pytest.mark.parametrize(("file", "module"), [("cmd.py", "cmd"), ("email/__init__.py", "email"), ("ray.py", "ray")])
def test_a_file_that_would_hide_a_module_on_the_cluster_is_refused(folder, tmp_path, file, module):
    make(folder, "utils.py", "sub/json.py", "queue/data.txt", file)
    with pytest.raises(RayparError, match=f"hides the module `{module}` ") as refused:
        uploaded(folder, tmp_path)
    assert "rename" in refused.value.hint
    (folder / file).unlink()
    assert uploaded(folder, tmp_path) == {"study.py", "utils.py", "sub/json.py", "queue/data.txt"}
