"""`raypar ab` on a real repository: the code that runs, the stored results, and the cleanup."""

import json
import os
import signal
import subprocess

import pytest
from harness import TIMEOUT_S, Cli

from raypar.execution.stored import read_study
from raypar.track.store import default_tracking_uri

STUDY = '''"""Whose code is it?"""
import time
import beside
from raypar import Study, Workload

def model(config):
    from torch import nn
    return nn.Sequential(nn.Linear(8, beside.WIDTH), nn.Linear(beside.WIDTH, 2))

def data(config):
    import torch
    from pathlib import Path
    from raypar.study.workload import Data, Split
    Path("data/seen").write_text("1")
    while Path("data/hold").exists():
        time.sleep(0.01)
    generator = torch.Generator().manual_seed(0)
    split = Split(torch.randn(512, 8, generator=generator), torch.randint(2, (512,), generator=generator))
    return Data(train=split, val=split)

def value(outputs, targets):
    import package_of_ab
    return outputs.new_full((len(outputs),), package_of_ab.VALUE + beside.VALUE)

workload = Workload(name="whose", model=model, data=data, metrics={"value": value}, metric="value")
study = Study(workload=workload, config={"batch_size": 32, "epochs": 2}, num_repeats=3)
'''


class Repository(Cli):
    """A repository whose two commits differ in a package in src/, importable from the working tree, and in a module."""

    def make(self):
        self.folder.mkdir()
        self.git("init", "-q", "-b", "main")
        self.put(".gitignore", "data/\n.raypar/\nmlflow.db*\nstdout\nstderr\n")
        self.put("studies/whose.py", STUDY)
        (self.folder / "data").mkdir()
        for number in (1, 2):
            self.change(number)
            self.commit(f"number {number}")
        return self

    def change(self, number):
        self.put("src/package_of_ab/__init__.py", f"VALUE = {number}\n")
        self.put("studies/beside.py", f"WIDTH, VALUE = 16, {10 * number}\n")

    def put(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def git(self, *words):
        identity = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        done = subprocess.run(["git", *identity, *words], cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, message):
        self.git("add", "-A")
        self.git("commit", "-qm", message)

    def num_worktrees(self):
        return len(self.git("worktree", "list").splitlines())

    def results(self, study):
        return read_study(study, default_tracking_uri(self.folder), self.folder).results


@pytest.fixture
def repository(tmp_path, monkeypatch):
    made = Repository(tmp_path / "repository").make()
    path = [str(tmp_path / "repository" / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    return made


FLAGS = ("studies/whose.py", "--max-repeats", "4")


@pytest.mark.core
def test_each_revision_runs_its_own_code_and_the_verdict_is_printed_and_stored(repository):
    repository.change(3)
    words = ("HEAD~1", ".", "--link", "data", "--markdown", "data/ab.md", "--json", "--", "study", *FLAGS, "--no-ray")
    done = repository.run("ab", *words)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    results = repository.results(document["study"])
    values = {result.spec.point["revision"]: result.final["value"] for result in results}
    assert values == {document["a"]: 11.0, document["b"]: 33.0}  # the package's and the module's, of each
    (point,) = document["points"]
    assert point["metric_result"] == "higher" and point["has_equal_losses"] is True
    assert point["num_pairs"] in (3, 4) and len(results) == 2 * point["num_pairs"]
    assert {frozenset(r.code) for r in results} == {frozenset({"whose.py", "beside.py"})}
    assert len({r.code["beside.py"] for r in results}) == 2
    markdown = (repository.folder / "data/ab.md").read_text()
    assert document["answer"].split(" (")[0] in markdown.replace("### ", "") and "| revision |" in markdown
    assert repository.num_worktrees() == 1 and repository.processes() == {}
    # The store has all results, and changed files make another study.
    assert document["b"] in repository.done("report", document["study"])
    refused = repository.run("store", "resume", document["study"])
    assert refused.returncode == 2 and "run `raypar ab 'HEAD~1' . --link data" in refused.stderr
    again = repository.run("ab", *words[:7], "--", "study", *FLAGS, "--no-ray")
    assert json.loads(again.stdout)["points"] == document["points"]
    assert len(repository.results(document["study"])) == len(results)
    repository.change(4)
    plan = repository.run("ab", "HEAD~1", ".", "--", "study", *FLAGS, "--no-ray", "--dry-run")
    assert "= 6 to 8 trials" in plan.stdout and document["study"] not in plan.stdout


@pytest.mark.ray
def test_on_ray_each_revision_keeps_its_own_warm_gang(repository):
    done = repository.run(
        "ab", "HEAD~1", "HEAD", "--link", "data", "--json", "--", "study", *FLAGS, "--set", "num_workers=2"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    results = repository.results(document["study"])
    gangs = {}
    for result in results:
        gangs.setdefault(result.spec.point["revision"], {})[result.conditions.nth_in_gang] = result.conditions.gang
    assert [len(set(of_revision.values())) for of_revision in gangs.values()] == [1, 1]
    assert len({gang for of_revision in gangs.values() for gang in of_revision.values()}) == 2
    assert all(sorted(of_revision) == list(range(1, len(results) // 2 + 1)) for of_revision in gangs.values())
    values = {result.spec.point["revision"]: result.final["value"] for result in results}
    assert values == {document["a"]: 11.0, document["b"]: 22.0}
    assert repository.num_worktrees() == 1
    repository.wait_for_its_processes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_worktree_and_no_process(repository, number, code):
    repository.put("data/hold", "")
    process = repository.start("ab", "HEAD~1", "HEAD", "--link", "data", "--", "study", *FLAGS, "--no-ray")
    repository.wait(process, (repository.folder / "data/seen").exists)
    assert repository.num_worktrees() == 3
    os.killpg(process.pid, number)
    assert process.wait(TIMEOUT_S) == code
    assert repository.num_worktrees() == 1 and repository.processes() == {}
    assert "`raypar ab 'HEAD~1' HEAD --link data -- study studies/whose.py" in repository.output()


def test_the_next_command_removes_what_a_killed_one_leaves(repository):
    repository.put("data/hold", "")
    process = repository.start("ab", "HEAD~1", "HEAD", "--link", "data", "--", "study", *FLAGS, "--no-ray")
    repository.wait(process, (repository.folder / "data/seen").exists)
    process.kill()
    process.wait(TIMEOUT_S)
    repository.wait_for_its_processes()
    assert repository.num_worktrees() == 3
    repository.done("ab", "HEAD~1", "HEAD", "--", "study", *FLAGS, "--no-ray", "--dry-run")
    assert repository.num_worktrees() == 1


def test_trials_that_fail_in_one_revision_give_exit_code_4(repository):
    repository.put("src/package_of_ab/__init__.py", "raise RuntimeError('broken here')\n")
    done = repository.run(
        "ab", "HEAD", ".", "--link", "data", "--fail-if-slower", "5%", "--", "study", *FLAGS, "--no-ray"
    )
    assert done.returncode == 4 and "no times to compare: .@changes-" in done.stdout
    assert "RuntimeError: broken here" in done.stdout
