"""Batch files for Slurm, and the parts of a job that need no Slurm. The jobs themselves run in tests/real."""

import io
import json
import os
import shlex
import signal
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest
from command import joined, raypar, refused

from raypar.errors import RayparError
from raypar.run import slurm
from raypar.run.sbatch import BatchFile, lead_s, parse_time_s, slurm_time
from raypar.run.slurm import MIN_STORE_BYTES, Job, Stop, num_gpus_of, ray_environment, store_bytes

STUDY = """
from raypar import Study, grid
from raypar.workloads import digits
study = Study(workload=digits, space={"lr": grid(0.1, 0.2)})
"""
GIB = 2**30
GOLDEN = """\
#!/bin/bash
# Study mine on 4 nodes, written by `raypar cluster slurm`.
# Submit it with `sbatch .raypar/slurm/mine.sbatch`; again, it runs what is missing.
# `scancel --batch --signal=TERM JOB` stops it with a report.
#SBATCH --job-name=mine
#SBATCH --chdir='/home/alice/a study'
#SBATCH --output='/home/alice/a study/.raypar/slurm/mine-%j.out'
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=a100:8
#SBATCH --time=1-12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --exclusive
set -e
module load cuda
export PATH={bin}:"$PATH"
exec {python} -P -m raypar.run.slurm study --file .raypar/slurm/mine.sbatch --lead 120 --until-done -- {words}
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(STUDY)
    return tmp_path


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Commands of Slurm that print a text or fail; returns a function that sets one. Each call is logged."""
    folder = tmp_path / "slurm-bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def set_command(name, printed="", error="", code=0):
        lines = ["#!/bin/sh", f'echo "{name} $*" >>{folder}/calls', f"echo {shlex.quote(printed)}"]
        lines += [f"echo {shlex.quote(error)} >&2", f"exit {code}"]
        (folder / name).write_text("\n".join(lines))
        (folder / name).chmod(0o755)
        return folder / "calls"

    return set_command


@pytest.mark.parametrize(
    ("text", "seconds", "written"),
    [
        ("2h", 7200, "02:00:00"),
        ("90m", 5400, "01:30:00"),
        ("90", 5400, "01:30:00"),  # Slurm's minutes
        ("1h30m", 5400, "01:30:00"),
        ("90:30", 5460, "01:31:00"),  # Slurm counts whole minutes
        ("1:30:00", 5400, "01:30:00"),
        ("1d", 86400, "1-00:00:00"),
        ("1-12", 129600, "1-12:00:00"),
        ("1-12:30", 131400, "1-12:30:00"),
        ("1-12:30:00", 131400, "1-12:30:00"),
    ],
)
def test_times_are_slurms_or_have_units(text, seconds, written):
    assert parse_time_s(text) == seconds
    assert slurm_time(seconds) == written


@pytest.mark.parametrize("text", ["", "2x", "-5", "0", "1m", "h", "2h later", "1e999h", "infinite"])
def test_other_times_are_refused(text):
    with pytest.raises(RayparError, match="--time"):
        parse_time_s(text)


def test_a_job_stops_early_enough_for_its_report_and_not_much_earlier():
    assert [lead_s(minutes * 60) for minutes in (2, 10, 20, 600)] == [30, 60, 120, 120]


def test_the_batch_file_is_one_that_a_slurm_user_can_read():
    batch = BatchFile(
        study="mine",
        words=["my study.py", "--repeats", "3"],
        folder=Path("/home/alice/a study"),
        nodes=4,
        time_s=parse_time_s("1-12"),
        resources={"cpus-per-task": "64", "gpus-per-node": "a100:8", "mem": None},
        options=["--exclusive"],
        setup=["module load cuda"],
        continues=True,
    )
    python = Path(sys.executable)
    expected = GOLDEN.replace("{bin}", str(python.parent)).replace("{python}", python.name)
    expected = expected.replace("{words}", "'my study.py' --repeats 3")
    assert batch.text == expected


def test_only_print_writes_and_submits_nothing(study):
    code, out, err = raypar("cluster", "slurm", "mine.py", "--time", "2h", "--repeats", "5", "--print")
    assert (code, err) == (0, "") and "#SBATCH --time=02:00:00\n" in out and "#SBATCH --no-requeue\n" in out
    assert out.endswith("-- mine.py --repeats 5\n")
    assert not (study / ".raypar").exists()


def test_a_submitted_study_says_how_to_follow_stop_and_continue_it(study, fake_slurm):
    calls = fake_slurm("sbatch", "17;cluster2")
    code, out, err = raypar("cluster", "slurm", "mine.py", "--time", "2h", width=200)
    assert (code, out) == (0, "") and calls.read_text() == "sbatch --parsable .raypar/slurm/mine.sbatch\n"
    file = study / ".raypar" / "slurm" / "mine.sbatch"
    assert "raypar.run.slurm study" in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    assert (study / ".raypar").stat().st_mode & 0o777 == 0o700
    for words in (
        "Slurm job 17; its output goes to .raypar/slurm/mine-17.out",
        "tail -F .raypar/slurm/mine-17.out",
        "scancel --batch --signal=TERM 17",
        "sbatch .raypar/slurm/mine.sbatch",
    ):
        assert words in err


def test_several_jobs_divide_a_study(study, fake_slurm):
    fake_slurm("sbatch", "17")
    code, _, err = raypar(*["cluster", "slurm", "mine.py", "--time", "2h", "--repeats", "6", "--jobs", "3"], width=200)
    assert code == 0 and "tail -F .raypar/slurm/mine-17_*.out" in err
    text = (study / ".raypar" / "slurm" / "mine.sbatch").read_text()
    assert "\n#SBATCH --array=1-3\n" in text and f"\n#SBATCH --output={study}/.raypar/slurm/mine-%A_%a.out\n" in text
    assert text.endswith('-- mine.py --repeats 6 --part "$SLURM_ARRAY_TASK_ID/3"\n')
    refused(
        "--jobs 3: the study has 2 blocks",
        *["cluster", "slurm", "mine.py", "--time", "2h", "--repeats", "2", "--jobs", "3"],
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("--nodes", "2", "--cpus-per-node", "4"), "needs 9 CPUs in one gang, the cluster has 8"),
        (("--cpus-per-node", "16", "--gpus-per-node", "a100:2"), "needs 3 GPUs in one gang, the cluster has 2"),
        (("--nodes", "2"), None),  # only Slurm knows
    ],
)
def test_a_study_that_does_not_fit_on_the_nodes_is_refused(study, fake_slurm, sizes, message):
    fake_slurm("sbatch", "17")
    widest = '"num_workers": grid(1, 9)' if "4" in sizes else '"num_workers": grid(1, 3), "device": grid("cuda")'
    (study / "mine.py").write_text(STUDY.replace('"lr": grid(0.1, 0.2)', widest))
    command = ["cluster", "slurm", "mine.py", "--time", "2h", *sizes]
    if message is None:
        assert raypar(*command)[0] == 0
    else:
        refused(message, *command)


def test_attach_and_stop_name_the_commands_for_a_slurm_job(study):
    folder = study / ".raypar" / "slurm"
    folder.mkdir(parents=True)
    for name in ("mine-9.out", "mine-12_2.out", "mine-b-13.out", "other-14.out"):
        (folder / name).touch()
    for verb in ("attach", "stop"):
        code, _, err = raypar("cluster", verb, "mine", "--address", "http://127.0.0.1:9", width=300)
        assert code == 2 and "no Ray dashboard answers" in err
        assert "tail -F .raypar/slurm/mine-12_2.out" in err and "scancel --batch --signal=TERM 12" in err


def test_slurms_reason_for_a_refusal_is_shown(study, fake_slurm):
    fake_slurm("sbatch", error="sbatch: error: invalid partition specified: gpu", code=1)
    refused("Slurm refuses the job: invalid partition specified: gpu", "cluster", "slurm", "mine.py", "--time", "2h")


def test_all_mistakes_are_reported_at_once_and_nothing_is_written(study, monkeypatch):
    monkeypatch.setenv("PATH", "")
    given = ["--time", "2x", "--nodes", "0", "--mem", "much", "--gpus-per-node", "all", "--cpus-per-node", "0"]
    given += ["--option", "--array=1-4", "--option", "exclusive", "--option", "--mem=4G"]
    given += ["--tracking-uri", "http://me:secret@host"]
    code, out, err = raypar("cluster", "slurm", "mine.py", *given, "--set", "epochs=-1", width=200)
    assert code == 2 and out == "" and "secret" not in err
    for words in (
        "11 mistakes",
        "sbatch is not on the PATH",
        "--time 2x: must be a duration",
        "--nodes 0: must be at least 1",
        "--mem much",
        "--gpus-per-node all",
        "--cpus-per-node 0",
        "--option --array=1-4: raypar sets it",
        "--option exclusive: must be an option of sbatch",
        "--option --mem=4G: raypar sets it → use --mem",
        "others can see it",
        "epochs",
    ):
        assert words in joined(err)
    assert not (study / ".raypar").exists()


@pytest.mark.parametrize("flag", ["--address", "--exclusive", "--min-nodes", "--share-machine", "--no-ray", "--fresh"])
def test_flags_of_another_ray_are_refused(study, flag):
    refused(f"No such option: {flag}", "cluster", "slurm", "mine.py", "--time", "2h", flag)


@pytest.mark.parametrize(
    ("given", "memory"),
    [
        ({"SLURM_MEM_PER_NODE": "8192"}, 8 * GIB),
        ({"SLURM_MEM_PER_CPU": "1024"}, 4 * GIB),
        ({"SLURM_MEM_PER_GPU": "16384"}, 32 * GIB),
        ({"SLURM_MEM_PER_NODE": "0"}, 64 * GIB),  # all of the node's
        ({}, 64 * GIB),
    ],
)
def test_the_object_store_is_a_share_of_the_jobs_memory(given, memory):
    assert store_bytes(given, 4, 2, 64.0 * GIB, 64.0 * GIB) == int(0.3 * memory)


def test_the_object_store_fits_into_shared_memory_and_has_a_minimum():
    assert store_bytes({}, 4, 0, 64.0 * GIB, 1.0 * GIB) == int(0.9 * GIB)
    assert store_bytes({"SLURM_MEM_PER_CPU": "100"}, 1, 0, 64.0 * GIB, 64.0 * GIB) == MIN_STORE_BYTES


@pytest.mark.parametrize(
    ("given", "num"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"SLURM_JOB_GPUS": "4,5"}, 2),
        ({}, 0),
    ],
)
def test_a_node_has_the_gpus_of_the_job_not_of_the_machine(given, num):
    assert num_gpus_of(given) == num


def test_rays_processes_are_no_tasks_of_srun_and_have_a_private_token():
    given = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "PMI_RANK": "0", "RAY_AUTH_TOKEN": "mine"}
    made = ray_environment({**given, "HF_HOME": "/data"}, Path("/tmp/own"))
    assert made["SLURM_JOB_ID"] == "7" and made["HF_HOME"] == "/data"
    assert {"SLURM_PROCID", "SLURM_NTASKS", "PMI_RANK", "RAY_AUTH_TOKEN"}.isdisjoint(made)
    assert (made["RAY_AUTH_MODE"], made["RAY_AUTH_TOKEN_PATH"]) == ("token", "/tmp/own/token")


def a_job(continues=True, **variables):
    return Job(Path("mine.sbatch"), 60.0, continues, {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", **variables})


@pytest.fixture
def clock(monkeypatch):
    """Fake time, and signal handlers that are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    now = [1000.0]
    monkeypatch.setattr(slurm.time, "time", lambda: now[0])
    yield now
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("printed", "variables", "end"),
    [
        ("2026-11-29T07:00:00", {}, datetime(2026, 11, 29, 7).timestamp()),
        ("NONE", {"SLURM_JOB_END_TIME": "1000"}, None),
        ("", {"SLURM_JOB_END_TIME": "1000"}, 1000.0),
        ("", {}, None),
    ],
)
def test_a_jobs_end_is_what_slurm_says_now(fake_slurm, printed, variables, end):
    fake_slurm("squeue", printed)
    assert a_job(**variables).end() == end


def test_a_job_stops_its_lead_before_its_end_even_if_the_signal_comes_early(clock, monkeypatch):
    monkeypatch.setattr(Job, "end", lambda _: 2000.0)
    stop = Stop(a_job())
    assert stop.at == 1940 and not stop.is_due()
    clock[0] = 1880
    os.kill(os.getpid(), signal.SIGUSR1)  # a minute early
    assert not stop.is_due()
    clock[0] = 1940
    assert stop.is_due() and not stop.is_final


def test_a_job_without_a_known_end_or_that_is_preempted_stops_at_the_signal(clock, monkeypatch):
    for end in (None, 9999.0):
        monkeypatch.setattr(Job, "end", lambda _, end=end: end)
        stop = Stop(a_job())
        assert not stop.is_due()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.is_due() and stop.is_due() and not stop.is_final


def test_sigterm_is_a_final_stop(clock, monkeypatch):
    monkeypatch.setattr(Job, "end", lambda _: 2000.0)
    stop = Stop(a_job())
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.is_due() and stop.is_final


class FakeNodes:
    """Nodes with or without a Ray."""

    error = None

    def __init__(self, _):
        pass

    def start(self, *_):
        if self.error:
            raise self.error
        return "10.0.0.1:1234"

    def end(self):
        pass


@pytest.fixture
def supervised(clock, monkeypatch, fake_slurm, tmp_path):
    """Run a job whose study finishes trials and ends with a code; return the job's exit code."""
    monkeypatch.setattr(slurm, "JobNodes", FakeNodes)
    monkeypatch.setattr(slurm, "end_descendants", lambda: None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    fake_slurm("squeue", "RUNNING")
    fake_slurm("scontrol")

    def supervise(code, num_finished, *, continues=True, end=None, sent=None, **variables):
        def run_study(_, __, folder, *___):
            (folder / "tally").write_text(str(num_finished))
            if sent:
                os.kill(os.getpid(), sent)
            return code

        monkeypatch.setattr(slurm, "run_study", run_study)
        monkeypatch.setattr(Job, "end", lambda _: end)
        return slurm.supervise(a_job(continues, **variables), ["study", "mine.py"])

    return supervise


def test_a_study_that_time_has_stopped_goes_back_into_the_queue(supervised, tmp_path, capsys):
    assert supervised(slurm.STOPPED_BY_TIME, 3) == 138
    assert "job 7 is in the queue again" in capsys.readouterr().out
    assert "scontrol requeue 7" in (tmp_path / "slurm-bin" / "calls").read_text()
    assert not [*tmp_path.glob("raypar-*")]


def test_a_site_that_forbids_requeueing_gets_another_job(supervised, fake_slurm, capsys):
    fake_slurm("scontrol", error="Requested operation is presently disabled", code=1)
    calls = fake_slurm("sbatch", "8")
    assert supervised(slurm.STOPPED, 3, sent=signal.SIGUSR1) == 143
    assert "job 8 continues" in capsys.readouterr().out
    assert "sbatch --parsable --dependency=afterany:7 mine.sbatch\n" in calls.read_text()
    supervised(slurm.STOPPED, 3, sent=signal.SIGUSR1, SLURM_ARRAY_TASK_ID="2")
    assert calls.read_text().endswith("--dependency=afterany:7 --array=2 mine.sbatch\n")  # its part only
    fake_slurm("sbatch", error="not from here", code=1)
    supervised(slurm.STOPPED, 3, sent=signal.SIGUSR1)
    assert "run `sbatch mine.sbatch` to continue" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "num_finished", "how", "printed"),
    [
        (0, 3, {}, ""),
        (1, 3, {}, ""),
        (138, 0, {}, "no trial has finished in it: give it more time"),
        (138, 3, {"continues": False}, "the job's time is over: run `sbatch mine.sbatch` to continue"),
        (143, 3, {"sent": signal.SIGTERM}, ""),
        (138, 3, {"sent": signal.SIGTERM}, ""),
        (0, 3, {"end": 1000.0}, ""),  # complete at the last moment
    ],
)
def test_other_studies_stay_ended(supervised, tmp_path, capsys, code, num_finished, how, printed):
    assert supervised(code, num_finished, **how) == code
    assert printed in capsys.readouterr().out
    calls = tmp_path / "slurm-bin" / "calls"
    assert not calls.exists() or "requeue" not in calls.read_text()


def test_a_job_that_scancel_has_ended_is_not_revived(supervised, fake_slurm):
    calls = fake_slurm("squeue", "COMPLETING")
    assert supervised(138, 3) == 138
    assert "requeue" not in calls.read_text()


def test_a_ray_that_does_not_start_ends_the_job_with_the_reason(supervised, monkeypatch, capsys):
    report = {"node": "node2", "ended": 3, "log": ["one", "two"]}
    monkeypatch.setattr(FakeNodes, "error", slurm.ClusterError(slurm.ended(report)))
    assert supervised(0, 0) == 1
    assert "Ray has ended on node2 with exit code 3. The end of its log:\n  one\n  two" in capsys.readouterr().out


class Told(io.StringIO):
    """Reports of a node; the file exists once there is one."""

    def __init__(self, seen):
        super().__init__()
        self._seen = seen

    def write(self, text):
        self._seen.touch()
        return super().write(text)

    def reports(self):
        return [json.loads(line.removeprefix(slurm.REPORT)) for line in self.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("ray", "reports"),
    [
        ("echo no port; exit 3", [{"node": "node1", "ended": 3, "log": ["no port"]}]),
        # The second start succeeds, and the end after it is final.
        (
            "mkdir {ray} 2>&- && exit 1; echo 10.0.0.1:6379 >{ray}/ray_current_cluster;"
            "until [ -e {seen} ]; do sleep 0.1; done; exit 4",
            [{"node": "node1", "up": "10.0.0.1:6379"}, {"node": "node1", "ended": 4, "log": []}],
        ),
    ],
)
def test_a_nodes_part_starts_ray_again_once_reports_its_end_and_leaves_nothing(tmp_path, monkeypatch, ray, reports):
    told = Told(tmp_path / "seen")

    def command(_address, folder, _variables):
        return ["sh", "-c", ray.format(ray=folder / "ray", seen=tmp_path / "seen")]

    monkeypatch.setattr(slurm, "ray_command", command)
    monkeypatch.setattr(slurm, "end_descendants", lambda: None)
    monkeypatch.setattr(slurm, "end_without_first_node", lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    reading, writing = os.pipe()
    os.write(writing, b"token\nfirst 127.0.0.1\n")  # and no end
    try:
        variables = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURMD_NODENAME": "node1", "TMPDIR": str(tmp_path)}
        assert slurm.serve(os.fdopen(reading), told, variables) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(writing)
    assert told.reports() == reports
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]


JOB = "JobState=RUNNING Requeue={} NodeList={} BatchHost=node1"


def set_scontrol(fake_slurm, job):
    """Make `scontrol show` print a job, and the names of its nodes, which are separated by commas; return the calls."""
    calls = fake_slurm("scontrol")
    script = calls.with_name("scontrol")
    which = f"case $2 in job) echo {shlex.quote(job)};; hostnames) echo $3 | tr , ' ';; esac"
    script.write_text(f'#!/bin/sh\necho "scontrol $*" >>{calls}\n{which}\n')
    fake_slurm("scancel")
    return calls


@pytest.mark.parametrize(
    ("requeues", "nodes", "name", "last"),
    [
        (1, "node2,node3", "node2", "scontrol requeue 7"),
        (0, "node2,node3", "node2", "scancel 7"),
        (1, "node2,node3", "node3", "scontrol show hostnames node2,node3"),  # node2 does it
    ],
)
def test_one_of_the_other_nodes_ends_a_job_that_lost_its_first_node(fake_slurm, requeues, nodes, name, last):
    calls = set_scontrol(fake_slurm, JOB.format(requeues, nodes))
    slurm.end_without_first_node("7", name, threading.Event(), raised())
    assert calls.read_text().splitlines()[-1] == last


@pytest.mark.parametrize("job", [JOB.format(1, "node2").replace("RUNNING", "COMPLETING"), ""])
def test_a_node_leaves_a_job_alone_that_slurm_ends(fake_slurm, job):
    calls = set_scontrol(fake_slurm, job)
    slurm.end_without_first_node("7", "node2", threading.Event(), raised())
    assert calls.read_text().splitlines() == ["scontrol show job 7"]


def test_a_node_asks_nothing_when_the_first_one_ends_the_job(fake_slurm):
    calls = set_scontrol(fake_slurm, JOB.format(1, "node2"))
    slurm.end_without_first_node("7", "node2", raised(), threading.Event())
    assert not calls.exists()


def raised():
    """Return an event that is set."""
    event = threading.Event()
    event.set()
    return event
