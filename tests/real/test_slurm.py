"""Studies as jobs of a real Slurm: a login host and three compute nodes in namespaces of this machine (needs root).

The nodes share this machine's cores and have no network but their own. Homes are shared, /tmp is not.
"""

import csv
import io
import math
import os
import re
import shlex
import time

import pytest
from faultlab import Faulty
from harness import digits_study, until
from slurmlab import USERS, SlurmLab, why_not

WHY_NOT = why_not()
pytestmark = [
    *(pytest.mark.cluster, pytest.mark.timeout(1200)),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
LIMIT_S = 600.0  # on a busy machine, the first gang of two jobs takes minutes
STUDY = digits_study('{"num_workers": grid(1, 2, 3)}', config={"epochs": 1})
OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


@pytest.fixture(scope="module")
def lab():
    with SlurmLab(3) as lab:
        yield lab


class Submitted:
    """A study that a user has submitted in a new folder of the home. `flags`: those of `raypar cluster slurm`."""

    def __init__(self, lab, user, flags, study=None):
        self.lab, self.user = lab, user
        self.folder = lab.home(user) / "studies"
        self.folder.mkdir()
        self.faulty = None if study else Faulty(self.folder, 3)
        self.name = "mine" if study else "faulty"
        if study:
            (self.folder / "mine.py").write_text(study)
        for path in (self.folder, *self.folder.iterdir()):
            os.chown(path, USERS[user], USERS[user])
        printed = self.run(f"raypar cluster slurm {self.name}.py {flags}")
        self.job_id = re.search(r"as Slurm job (\d+);", printed)[1]

    def run(self, command, **how):
        """Run a command in the folder, on the login host."""
        return self.lab.run(f"cd {shlex.quote(f'/home/{self.user}/studies')} && {command}", user=self.user, **how)

    def state(self):
        return self.lab.job(self.job_id, "JobState")

    def output(self):
        file = self.folder / ".raypar" / "slurm" / f"{self.name}-{self.job_id}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def until(self, condition, what):
        """Wait for a condition while the job is pending or running."""

        def is_met():
            return condition() or self.state() in OVER

        until(is_met, lambda: f"{what}\n{self.output()}\n{self.lab.logs()}", LIMIT_S)
        assert condition(), f"{what}: the job is {self.state()}\n{self.output()}"

    def until_over(self):
        """Wait for the job's end; return its state and exit code."""
        until(lambda: self.state() in OVER, lambda: f"the end\n{self.output()}\n{self.lab.logs()}", LIMIT_S)
        return self.state(), self.lab.job(self.job_id, "ExitCode")

    def until_held(self):
        """Wait for a trial in mid-epoch; return its learning rate."""
        self.until(self.faulty.held, "a held trial")
        return self.faulty.held()[0]

    def rows(self):
        """Return the study's trials, as `raypar store export` writes them on the login host."""
        self.run(f"raypar store export {self.name} {self.name}.csv")
        return list(csv.DictReader(io.StringIO((self.folder / f"{self.name}.csv").read_text())))

    def end(self):
        """End the job, and remove the folder."""
        self.run(f"scancel {self.job_id}", check=False)
        self.lab.run("rm -rf ~/studies", user=self.user)


@pytest.fixture
def submit(lab):
    """Submit studies that end with the test."""
    made = []

    def submit(*arguments):
        made.append(Submitted(lab, *arguments))
        return made[-1]

    yield submit
    for study in made:
        study.end()
    until(lambda: not lab.run("squeue --noheader", user="root").strip(), "an empty queue", 60)


def check_nothing_is_left(lab):
    """Assert that the nodes run no Ray and have no files of a job."""
    for node in range(1, lab.num_nodes + 1):
        left = lab.run("ls -A /tmp; ps -eo args | grep '[r]ay::\\|[r]aylet' || true", user="root", node=node).split(
            "\n"
        )
        assert not [line for line in left if "ray" in line and line != ".raypar-locks"], left


def test_two_jobs_at_once_share_nodes_and_both_have_all_results(lab, submit):
    studies = [submit(user, "--nodes 3 --time 20m --cpus-per-node 1", STUDY) for user in ("alice", "bob")]
    for study in studies:
        study.until(lambda study=study: "[1/3]" in study.output(), "the first trial")
        assert re.search(r"mine +1 +[123] ", study.run("raypar list"))
        assert "num_workers" in study.run("raypar report mine")
    for study in studies:
        assert study.until_over() == ("COMPLETED", "0:0"), study.output()
        rows = {row["config.num_workers"]: row for row in study.rows()}
        assert len(rows) == 3 and {row["state"] for row in rows.values()} == {"finished"}
        assert {*rows["3"]["environment.node"].split()} == {"node1", "node2", "node3"}
        assert "Ctrl-C" not in study.output() and "Traceback" not in study.output()
        assert not (lab.home(study.user) / ".ray").exists()  # no token in the shared home
    check_nothing_is_left(lab)


def test_a_study_whose_time_is_over_continues_and_wastes_one_trial(lab, submit):
    study = submit("alice", "--nodes 2 --time 30m --cpus-per-node 1 --until-done")
    first = study.until_held()
    study.faulty.go(first)
    study.until(lambda: study.faulty.held() and study.faulty.held()[0] != first, "the second trial")
    second = study.until_held()
    # The job's time is soon over: Slurm sends its signal two minutes before the limit, or up to three.
    run_s = time.time() - float(study.run(f"date -d $(squeue -h -j {study.job_id} -o %S) +%s"))
    study.run(f"scontrol update JobId={study.job_id} TimeLimit={math.ceil(run_s / 60) + 2}")
    study.until(lambda: lab.job(study.job_id, "Restarts") == "1" and study.state() == "PENDING", "another run")
    assert "stopping: finished trials are kept" in study.output() and "Ctrl-C" not in study.output()
    assert "Partial: interrupted when 1 of 3 trials were done." in study.output()
    assert f"job {study.job_id} is in the queue again" in study.output()
    assert study.faulty.starts() == [first, second]
    (study.folder / "holds").unlink()
    lab.run(f"scontrol update JobId={study.job_id} TimeLimit=30 StartTime=now", user="root")  # not in two minutes
    assert study.until_over() == ("COMPLETED", "0:0"), study.output()
    assert "1 of 3 trials are in the store already" in study.output()
    rows = study.rows()
    assert len(rows) == len({row["identity"] for row in rows}) == 3
    starts = study.faulty.starts()  # nothing lost, nothing twice, except the trial that ran at the end of the time
    assert len(starts) == 4 and starts.count(second) == 2 and len({*starts}) == 3
    check_nothing_is_left(lab)


def test_a_study_survives_a_nodes_power_cut_and_ends_with_a_report_at_sigterm(lab, submit):
    study = submit("alice", "--nodes 3 --time 30m --cpus-per-node 1")
    first = study.until_held()
    lab.power_off(3)
    try:
        study.until(lambda: "the cluster has 2 nodes" in study.output(), "the loss of a node")
        study.faulty.go(first)
        study.until(lambda: study.faulty.held() and study.faulty.held()[0] != first, "the second trial")
        study.run(f"scancel --batch --signal=TERM {study.job_id}")
        assert study.until_over() == ("FAILED", "143:0"), study.output()
    finally:
        lab.power_on(3)
    assert "Partial: interrupted when 1 of 3 trials were done." in study.output()
    command = "sbatch .raypar/slurm/faulty.sbatch"
    assert f"interrupted; run `{command}` to continue" in study.output()
    (study.folder / "holds").unlink()
    study.job_id = study.run(f"{command} --parsable").split()[-1]
    assert study.until_over() == ("COMPLETED", "0:0"), study.output()
    rows = study.rows()
    assert len(rows) == len({row["identity"] for row in rows}) == 3


def test_a_job_whose_ray_does_not_start_on_a_node_ends_with_the_reason(lab, submit):
    lab.run("chmod 555 /tmp", user="root", node=2)
    try:
        study = submit("bob", "--nodes 2 --time 10m --cpus-per-node 1", STUDY)
        assert study.until_over() == ("FAILED", "1:0"), study.output()
    finally:
        lab.run("chmod 1777 /tmp", user="root", node=2)
    assert "Ray has ended on node2" in study.output() and "Permission denied" in study.output()
    check_nothing_is_left(lab)
