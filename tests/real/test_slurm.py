"""Studies as jobs of a real Slurm: a login host and three compute nodes in namespaces of this machine (needs root).

The nodes share this machine's cores and have no network but their own. Homes are shared, /tmp is not.
"""

import re

import pytest
from harness import digits_study, until
from slurmlab import SlurmLab, why_not
from slurmlab.submitted import Submitted

WHY_NOT = why_not()
pytestmark = [
    *(pytest.mark.cluster, pytest.mark.timeout(1200)),
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
]
STUDY = digits_study('{"num_workers": grid(1, 2, 3)}', config={"epochs": 1})


@pytest.fixture(scope="module")
def lab():
    with SlurmLab(3) as lab:
        yield lab


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
    look = "ls -A /tmp; ps -eo args | grep '[r]ay::\\|[r]aylet' || true"
    for node in range(1, lab.num_nodes + 1):
        left = lab.run(look, user="root", node=node).splitlines()
        assert not [line for line in left if line.startswith("raypar-") or "ray:" in line or "raylet" in line], left


def check_all_trials_are_there_once(study):
    rows = study.rows()
    assert len(rows) == len({row["identity"] for row in rows}) == 3
    assert {row["state"] for row in rows} == {"finished"}


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


def test_the_jobs_of_an_array_share_the_blocks_and_a_report(lab, submit):
    study = submit("alice", "--nodes 3 --time 20m --cpus-per-node 1 --jobs 2 --repeats 2", STUDY)
    assert study.until_over() == ("COMPLETED", "0:0"), study.output()
    for part, block in ((1, 1), (2, 2)):
        assert f"part {part} of 2: block {block}; `raypar report mine` covers all parts" in study.output()
    rows = study.rows()
    assert len(rows) == 6 and {row["state"] for row in rows} == {"finished"}
    by_block = {block: {row["config.num_workers"] for row in rows if row["repeat"] == block} for block in "12"}
    assert by_block == {"1": {*"123"}, "2": {*"123"}}
    assert "Ran on node1, node2, node3 (2 cores" in study.run("raypar report mine --verbose")
    assert "Traceback" not in study.output()
    check_nothing_is_left(lab)


def test_a_study_whose_time_is_over_continues_and_wastes_one_trial(lab, submit):
    study = submit("alice", "--nodes 2 --time 30m --cpus-per-node 1 --until-done")
    first = study.until_held()
    study.faulty.go(first)
    second = study.until_held()
    # The job's time is soon over: Slurm sends its signal two minutes before the limit, or up to three.
    study.end_in_minutes(2)
    study.until(study.was_requeued, "another run")
    assert "stopping: finished trials are kept" in study.output() and "Ctrl-C" not in study.output()
    assert "Partial: interrupted when 1 of 3 trials were done." in study.output()
    assert f"job {study.job_id} is in the queue again" in study.output()
    assert study.faulty.starts() == [first, second]
    (study.folder / "holds").unlink()
    study.start_again()
    assert study.until_over() == ("COMPLETED", "0:0"), study.output()
    assert "1 of 3 trials are in the store already" in study.output()
    check_all_trials_are_there_once(study)
    starts = study.faulty.starts()  # nothing lost, nothing twice, except the trial that ran at the end of the time
    assert len(starts) == 4 and starts.count(second) == 2 and len({*starts}) == 3
    check_nothing_is_left(lab)


def test_where_requeueing_is_forbidden_another_job_continues(lab, submit):
    study = submit("bob", "--nodes 2 --time 30m --cpus-per-node 1 --until-done")
    study.faulty.go(study.until_held())
    study.until_held()
    lab.run(f"scontrol update JobId={study.job_id} Requeue=0", user="root")
    study.run(f"scancel --batch --signal=USR1 {study.job_id}")  # as before a preemption
    study.until_over()
    (study.folder / "holds").unlink()
    study.job_id = re.search(r"the job's time is over: job (\d+) continues", study.output())[1]
    assert study.until_over() == ("COMPLETED", "0:0"), study.output()
    check_all_trials_are_there_once(study)


def test_a_job_that_loses_its_first_node_runs_again_on_others(lab, submit):
    study = submit("alice", "--nodes 2 --time 30m --cpus-per-node 1 --until-done")
    study.faulty.go(study.until_held())
    study.until_held()
    assert study.run(f"squeue --noheader --job={study.job_id} --format=%B").strip() == "node1"
    lab.power_off(1)
    try:
        study.until(study.was_requeued, "another run")
        (study.folder / "holds").unlink()
        study.start_again()
        assert study.until_over() == ("COMPLETED", "0:0"), study.output()
    finally:
        lab.power_on(1)
    check_all_trials_are_there_once(study)


def test_a_job_whose_ray_head_dies_ends_and_continues(lab, submit):
    study = submit("bob", "--nodes 2 --time 30m --cpus-per-node 1")
    study.faulty.go(study.until_held())
    study.until_held()
    lab.run("pkill -KILL gcs_server", user="root", node=1)
    assert study.until_over() == ("FAILED", "1:0"), study.output()
    assert "Ray has ended on node1" in study.output()
    (study.folder / "holds").unlink()
    study.job_id = study.run("sbatch --parsable .raypar/slurm/faulty.sbatch").split()[-1]
    assert study.until_over() == ("COMPLETED", "0:0"), study.output()
    check_all_trials_are_there_once(study)


def test_a_study_survives_a_nodes_power_cut_and_ends_with_a_report_at_sigterm(lab, submit):
    study = submit("alice", "--nodes 3 --time 30m --cpus-per-node 1")
    first = study.until_held()
    lab.power_off(3)
    try:
        study.until(lambda: "the cluster has 2 nodes" in study.output(), "the loss of a node")
        study.faulty.go(first)
        study.until_held()
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
    check_all_trials_are_there_once(study)


def test_a_job_whose_ray_does_not_start_on_a_node_ends_with_the_reason(lab, submit):
    lab.run("chmod 555 /tmp", user="root", node=2)
    try:
        study = submit("bob", "--nodes 2 --time 10m --cpus-per-node 1 --set num_workers=1,2", STUDY)
        assert study.until_over() == ("FAILED", "1:0"), study.output()
    finally:
        lab.run("chmod 1777 /tmp", user="root", node=2)
    assert "Ray has ended on node2" in study.output() and "Permission denied" in study.output()
    check_nothing_is_left(lab)
