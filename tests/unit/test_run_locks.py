"""Locks between studies, held by real processes: one execution of a study, one study on a core, one on a GPU.

The GPUs are made up: a lock needs their names only.
"""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from raypar.errors import RayparError
from raypar.gpus import Gpu
from raypar.predict import probe
from raypar.run import locks
from raypar.run.locks import (
    CoreLease,
    Holder,
    Lock,
    first_cores,
    leased_cores,
    leased_gpus,
    locked_cores,
    one_execution,
)
from raypar.run.runner import TrialEnded
from raypar.study.trial import TrialResult, TrialState
from raypar.train.affinity import CAN_PIN, Core, allowed_cores, host_cores

HOLDS = """
import sys
from raypar.run.locks import Holder, first_cores, leased_cores, one_execution
from raypar.train.affinity import Core

name, num_cores, size, share = sys.argv[1], *map(int, sys.argv[2:])
me = Holder.here(name, ["raypar", "study", f"{name}.py"])
machine = [Core(n, 0, n % max(2, size // 2)) for n in range(size)]

def tell(event):
    print(event.text, flush=True)

with one_execution(me, "store"), leased_cores(me, machine, first_cores(num_cores), tell, share=bool(share)) as lease:
    print(sorted(lease.cores), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(locks.FOLDER_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def start():
    """Start a process that runs a study on so many cores of a machine; it prints what it waits for, and its cores."""
    with contextlib.ExitStack() as stack:

        def started(name, num_cores, size, *, share=0, code=HOLDS):
            command = [sys.executable, "-c", code, name, *map(str, (num_cores, size, share))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = stack.enter_context(subprocess.Popen(command, text=True, **pipes))
            stack.callback(process.kill)
            return process

        yield started


def line_of(process):
    line = process.stdout.readline().rstrip("\n")
    assert line, process.stderr.read()
    return line


def me(study="s"):
    return Holder.here(study, ["raypar", "study", f"{study}.py"])


def other(study):
    """Somebody else: a process that runs as long as this one."""
    return Holder(study, os.getppid(), me().user, "raypar")


FOUR = [Core(number, 0, number) for number in range(4)]


# ---- one execution of a study


def test_a_second_execution_is_refused_with_process_and_command_of_the_first_until_that_is_killed(start, folder):
    first = start("mine", 1, 2)
    line_of(first)
    with pytest.raises(RayparError) as refused, one_execution(me("mine"), "store"):
        pass
    words = f"study `mine` is being run already, by process {first.pid} (`raypar study mine.py`)"
    assert refused.value.message == words
    with one_execution(me("other"), "store"), one_execution(me("mine"), "another store"):
        pass
    first.kill()
    first.wait()
    with one_execution(me("mine"), "store"):
        pass
    assert [*folder.glob("study-*")] == []


def test_a_lock_that_its_holder_removes_is_not_taken_over():
    first, late = Lock("study-0"), Lock("study-0")
    assert first.acquire() and not late.acquire()
    flock = locks.fcntl.flock

    def released_in_between(fd, how):
        locks.fcntl.flock = flock
        first.release(remove=True)
        flock(fd, how)

    locks.fcntl.flock = released_in_between
    assert late.acquire() and not Lock("study-0").acquire()
    late.release(remove=True)


def test_children_of_a_killed_study_do_not_hold_its_lock(folder):
    code = """
import os, signal, subprocess
from raypar.run.locks import Holder, one_execution
with one_execution(Holder.here("mine", []), "store"):
    print(subprocess.Popen(["sleep", "60"], stdout=-3, stderr=-3).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    try:
        with one_execution(me("mine"), "store"):
            pass
    finally:
        os.kill(int(killed.stdout), signal.SIGKILL)


# ---- cores


def test_of_two_studies_that_start_together_on_two_cores_the_second_waits_for_the_first(start):
    processes = {name: start(name, 2, 2) for name in ("one", "two")}
    lines = {name: line_of(process) for name, process in processes.items()}
    first = next(name for name, line in lines.items() if line == "[0, 1]")
    second = ({*processes} - {first}).pop()
    pid = processes[first].pid
    assert lines[second].startswith(f"waiting for cores: study `{first}` (process {pid}) has 2 of 2 cores; ")
    processes[first].kill()
    assert line_of(processes[second]) == "[0, 1]"


def test_studies_that_fit_side_by_side_have_disjoint_cores_and_of_physical_cores_each_its_own(start):
    processes = [start(name, 2, 8) for name in ("one", "two")]
    one, two = (set(json.loads(line_of(process))) for process in processes)
    assert len(one) == len(two) == 2 and {number % 4 for number in one | two} == {0, 1, 2, 3}
    third = set(json.loads(line_of(start("three", 4, 8))))
    assert third == set(range(8)) - one - two  # the second threads of their physical cores are all that is left


def test_a_study_that_waits_holds_no_core_and_those_that_come_later_wait_behind_it(start):
    line_of(start("first", 3, 4))
    second = start("second", 2, 4)
    assert "study `first`" in line_of(second)
    late = start("late", 1, 4)
    words = f"has 3 of 4 cores, study `second` (process {second.pid}) is next; "
    assert words in line_of(late)
    lease = CoreLease(me(), FOUR)
    assert lease.take(first_cores(1)) and lease.cores == {3}
    lease.release()


def test_a_study_that_is_interrupted_while_it_waits_leaves_no_lock(start):
    first = start("first", 4, 4)
    line_of(first)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), leased_cores(me(), FOUR, first_cores(1), interrupt):
        pass
    first.kill()
    first.wait()
    with leased_cores(me(), FOUR, first_cores(4), interrupt) as lease:
        assert lease.cores == {0, 1, 2, 3}


def test_a_machine_is_shared_on_request_and_both_studies_know(start):
    guest_of = "--share-machine: shares cores with study `first` (process {}); "
    with leased_cores(other("first"), FOUR, first_cores(4), print) as host:
        assert host.companions() == frozenset()
        guest = start("guest", 2, 4, share=1)
        assert line_of(guest).startswith(guest_of.format(os.getppid())) and line_of(guest) == "[0, 1]"
        (companion,) = host.companions()
        assert (companion.study, companion.pid) == ("guest", guest.pid)
        guest.kill()
        guest.wait()
        assert host.companions() == frozenset()
    told = []
    with leased_cores(me(), FOUR, first_cores(2), told.append, share=True) as lease:
        assert told == [] and lease.cores == {0, 1} and lease.companions() == frozenset()


@pytest.mark.skipif(not CAN_PIN or len(allowed_cores()) < 2, reason="needs two cores, and to bind processes to them")
def test_a_study_s_processes_leave_the_cores_that_another_study_takes(monkeypatch):
    monkeypatch.setattr(locks, "POLL_S", 0.01)
    machine, before = host_cores(), os.sched_getaffinity(0)
    mine, theirs = (core.number for core in machine[:2])
    first, second = CoreLease(me("first"), machine), CoreLease(other("second"), machine)
    assert first.take(lambda free: [mine])
    over = threading.Event()
    with first.keeping_off_others(), subprocess.Popen(["sleep", "60"]) as child:
        thread = threading.Thread(target=over.wait)
        thread.start()
        try:
            assert os.sched_getaffinity(0) == {core.number for core in machine}
            assert second.take(lambda free: [theirs])
            everywhere = (0, child.pid, thread.native_id)
            give_up_s = time.monotonic() + 60
            while any(theirs in os.sched_getaffinity(each) for each in everywhere):
                assert time.monotonic() < give_up_s
                time.sleep(0.01)
            assert all(mine in os.sched_getaffinity(each) for each in everywhere)
            os.sched_setaffinity(0, {mine})
        finally:
            over.set()
            child.kill()
    assert os.sched_getaffinity(0) == before
    first.release()
    second.release()


def test_the_network_is_probed_on_cores_that_no_study_has(monkeypatch, tmp_path):
    leased = []

    class Runner(contextlib.nullcontext):
        """Stands in for the ranks."""

        def __init__(self, _, cores):
            super().__init__(self)
            leased.extend(core.number for core in cores)

        def run(self, _, specs, listener):
            assert not any(Lock(f"core-{number}").acquire() for number in leased)
            listener(TrialEnded(TrialResult(*specs, TrialState.FINISHED, reports=({"num_bytes": 4, "time_s": 1.0},))))

    monkeypatch.setattr(probe, "LocalRunner", Runner)
    monkeypatch.setattr(probe, "host_cores", lambda: FOUR)
    with leased_cores(other("first"), FOUR, first_cores(1), print):
        assert probe.probe_all_reduces(2, tmp_path) == ((4, 1.0),)
    assert leased == [1, 2]


def test_a_trial_on_a_cluster_has_all_of_its_cores_or_hears_who_has_which(start):
    first = start("first", 2, 4)
    has = f"study `first` (process {first.pid})"
    assert line_of(first) == "[0, 1]"
    rest = CoreLease(other("late"), FOUR)
    for wanted in ((1,), (1, 2), (3, 0)):
        with locked_cores(me(), wanted, FOUR) as taken:
            assert taken == {0: has, 1: has}
            assert rest.take(first_cores(2)) and rest.cores == {2, 3}
            rest.release()
    with locked_cores(me(), (2, 3), FOUR) as taken:
        assert taken == {} and not rest.take(first_cores(1))
        with locked_cores(me(), (2,), FOUR) as of_its_other_trials:  # which it knows of
            assert of_its_other_trials == {0: has, 1: has, 2: str(me())}
    with locked_cores(me(), (), FOUR) as taken:
        assert taken == {}
    first.kill()
    first.wait()
    with locked_cores(me(), range(4), FOUR) as taken:
        assert taken == {}


# ---- GPUs

HOLDS_GPUS = """
import sys
from raypar.gpus import Gpu
from raypar.run.locks import Holder, leased_gpus

name, least, most, share = sys.argv[1], *map(int, sys.argv[2:])
machine = [Gpu(0, "GPU-a", "H100", "0000:1b:00.0"), Gpu(1, "", "AMD GPU", "0000:2b:00.0", is_amd=True)]

def tell(event):
    print(event.text, flush=True)

with leased_gpus(Holder.here(name, []), machine, least, most, tell, share=bool(share)) as lease:
    print([gpu.index for gpu in lease.gpus], flush=True)
    sys.stdin.read()
"""
# As `HOLDS_GPUS` has them.
TWO_GPUS = [Gpu(0, "GPU-a", "H100", "0000:1b:00.0"), Gpu(1, "", "AMD GPU", "0000:2b:00.0", is_amd=True)]


def start_on_gpus(start, name, least, most, *, share=0):
    return start(name, least, most, share=share, code=HOLDS_GPUS)


def test_of_two_studies_that_start_together_on_two_gpus_the_second_waits_for_the_first(start):
    processes = {name: start_on_gpus(start, name, 2, 2) for name in ("one", "two")}
    lines = {name: line_of(process) for name, process in processes.items()}
    first = next(name for name, line in lines.items() if line == "[0, 1]")
    second = ({*processes} - {first}).pop()
    has = f"waiting for GPUs: study `{first}` (process {processes[first].pid}) has 2 of 2 GPUs; "
    assert lines[second].startswith(has) and "--share-machine" in lines[second]
    processes[first].kill()
    assert line_of(processes[second]) == "[0, 1]"


def test_studies_that_need_one_gpu_each_run_side_by_side_and_one_takes_more_where_they_are_free(start):
    one = start_on_gpus(start, "one", 1, 1)
    assert line_of(one) == "[0]"
    two = start_on_gpus(start, "two", 1, 2)
    assert line_of(two) == "[1]"
    for process in (one, two):
        process.kill()
        process.wait()
    with leased_gpus(me(), TWO_GPUS, 1, 2, print) as lease:
        assert lease.gpus == tuple(TWO_GPUS)


def test_a_study_that_waits_for_gpus_leaves_the_cores_to_others(start):
    with leased_gpus(other("first"), TWO_GPUS, 2, 2, print):
        assert "study `first`" in line_of(start_on_gpus(start, "second", 1, 1))
        line = line_of(start("third", 2, 2))
        assert line == "[0, 1]"  # its cores


def test_gpus_are_shared_on_request_and_both_studies_know(start):
    with leased_gpus(other("first"), TWO_GPUS, 2, 2, print) as host:
        guest = start_on_gpus(start, "guest", 1, 1, share=1)
        shares = f"--share-machine: shares GPUs with study `first` (process {os.getppid()}); "
        assert line_of(guest).startswith(shares) and line_of(guest) == "[0]"
        assert {(holder.study, holder.pid) for holder in host.companions()} == {("guest", guest.pid)}


# ---- a folder that others write to


def test_files_that_other_users_could_have_put_there_are_neither_followed_nor_written_to(folder, tmp_path):
    Lock("any").acquire()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "core-0").symlink_to(victim)
    (folder / "core-1").hardlink_to(victim)
    os.mkfifo(folder / "core-2")
    (folder / "core-3").mkdir()
    for number in range(4):
        with pytest.raises(RayparError, match="studies can't lock cores there") as refused:
            Lock(f"core-{number}").acquire()
        assert Lock(f"core-{number}").holder() is None
        assert locks.FOLDER_VARIABLE in str(refused.value)
    assert victim.read_text() == "precious"


def test_a_folder_that_is_a_link_or_no_folder_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RayparError, match="can't lock"):
        Lock("core-0").acquire()
    folder.unlink()
    folder.write_text("")
    with pytest.raises(RayparError, match="can't lock"):
        Lock("core-0").acquire()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_every_user_can_lock_and_read_whatever_the_umask_and_nobody_can_remove(folder):
    before = os.umask(0o077)
    try:
        lock = Lock("core-0")
        assert lock.acquire()
        lock.sign(me())
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert stat.S_IMODE((folder / "core-0").stat().st_mode) == 0o666
    assert Lock("core-0").holder() == me()
    lock.release()
    assert Lock("core-0").holder() is None


@pytest.fixture
def every_users_folder():
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are one user's
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be two users")
def test_another_user_waits_for_a_core_and_takes_it_later(monkeypatch, every_users_folder):
    monkeypatch.setenv(locks.FOLDER_VARIABLE, str(every_users_folder / "locks"))
    lock = Lock("core-0")
    assert lock.acquire()
    lock.sign(me())
    as_nobody = """
import os
from raypar.run.locks import Holder, Lock
os.setgroups([]); os.setgid(65534); os.setuid(65534)
lock = Lock("core-0")
print(lock.acquire(), lock.holder(), flush=True)
input()
print(lock.acquire(), flush=True)
lock.sign(Holder.here("theirs", []))
input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", as_nobody], **pipes) as nobody:
        assert nobody.stdout.readline() == f"False study `s` (process {os.getpid()} of {me().user})\n"
        lock.release()
        nobody.stdin.write("\n")
        nobody.stdin.flush()
        assert nobody.stdout.readline() == "True\n" and not lock.acquire()
        nobody.kill()
    assert lock.acquire()
    lock.release()


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"nobody", b"[1]", b"\xff\xfe", b"[" * 4096, b'{"study": "s"}'),
        *(
            json.dumps({"study": "s", "pid": pid, "user": "u", "command": "c"}).encode()
            for pid in (0, -1, True, "1", 2**40, None)
        ),
        json.dumps({"study": ["s"], "pid": 1, "user": "u", "command": "c"}).encode(),
    ],
)
def test_what_others_wrote_into_a_lock_is_no_holder_unless_it_is_one(text):
    assert Holder.parse(text) is None


def test_a_holder_that_others_have_written_has_no_control_characters():
    text = json.dumps({"study": "\x1b[2Js", "pid": 7, "user": "u\n", "command": "c" * 4000, "more": 1}).encode()
    holder = Holder.parse(text)
    assert holder is not None and str(holder) == "study `[2Js` (process 7 of u)" and len(holder.command) < 1000
