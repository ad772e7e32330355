"""Locks between studies, held by real processes. The GPUs are made up, since a lock needs only their names."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from raypar.errors import RayparError
from raypar.gpus import Gpu
from raypar.predict import probe
from raypar.run import locks
from raypar.run.locks import Holder, Lock, leased_cores, leased_gpus, locked_cores, one_execution, present
from raypar.run.runner import TrialEnded
from raypar.study.trial import TrialResult, TrialState
from raypar.train.affinity import Core

HOLDS = """
import sys
from raypar.run.locks import Holder, leased_cores, one_execution, present
from raypar.train.affinity import Core

name, size, share = sys.argv[1], *map(int, sys.argv[2:])
me = Holder.here(name, ["raypar", "study", f"{name}.py"])

def tell(event):
    print(event.text, flush=True)

machine = [Core(n, 0, n) for n in range(size)]
with one_execution(me, "store"), leased_cores(me, machine, tell, share=bool(share)), present(me) as neighbours:
    print("has", *sorted(each.study for each in neighbours()), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(locks.FOLDER_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def start():
    """Start a process that runs a study on the first cores of a machine. It prints its waits, then "has"."""
    with contextlib.ExitStack() as stack:

        def started(name, *numbers, share=0, code=HOLDS):
            command = [sys.executable, "-c", code, name, *map(str, (*numbers, share))]
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
    """Return a holder whose process outlives this one."""
    return Holder(study, os.getppid(), me().user, "raypar")


FOUR = [Core(number, 0, number) for number in range(4)]


# ---- one execution of a study


def test_a_second_execution_is_refused_until_the_first_has_ended(start, folder):
    first = start("mine", 2)
    line_of(first)
    with pytest.raises(RayparError) as refused, one_execution(me("mine"), "store"):
        pass
    words = f"study `mine` is already running in process {first.pid} (`raypar study mine.py`)"
    assert refused.value.message == words
    with one_execution(me("other"), "store"), one_execution(me("mine"), "another store"):
        pass
    first.kill()
    first.wait()
    with one_execution(me("mine"), "store"):
        pass
    assert [*folder.glob("study-*")] == []


def test_a_removed_lock_file_is_created_anew():
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


def test_of_two_studies_the_second_waits_for_the_first(start):
    processes = {name: start(name, 2) for name in ("one", "two")}
    lines = {name: line_of(process) for name, process in processes.items()}
    first = next(name for name, line in lines.items() if line == "has")
    second = ({*processes} - {first}).pop()
    pid = processes[first].pid
    assert lines[second].startswith(f"waiting for cores: study `{first}` (process {pid}) has 2 of 2 cores; ")
    processes[first].kill()
    assert line_of(processes[second]) == "has"


def test_studies_on_separate_cores_run_at_once_and_see_each_other(start):
    assert line_of(start("part", 2)) == "has"
    with leased_cores(me(), FOUR[2:], print), present(me()) as neighbours:
        assert [each.study for each in neighbours()] == ["part"]


def test_a_waiting_study_holds_no_core_and_later_ones_queue_behind_it(start):
    line_of(start("first", 3))
    second = start("second", 4)
    assert "study `first`" in line_of(second)
    assert f"has 3 of 4 cores, study `second` (process {second.pid}) is next; " in line_of(start("late", 4))
    with locked_cores(me(), {3}) as holder:
        assert holder == ""


def test_an_interrupted_wait_leaves_no_lock(start):
    first = start("first", 4)
    line_of(first)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), leased_cores(me(), FOUR, interrupt):
        pass
    first.kill()
    first.wait()
    with leased_cores(me(), FOUR, interrupt):
        assert not Lock("core-0").acquire()


def test_a_machine_is_shared_on_request(start):
    with leased_cores(me("first"), FOUR, print), present(me("first")) as neighbours:
        assert neighbours() == frozenset()
        guest = start("guest", 4, share=1)
        assert line_of(guest) == "has first"
        assert {(each.study, each.pid) for each in neighbours()} == {("guest", guest.pid)}
        guest.kill()
        guest.wait()
        assert neighbours() == frozenset()


def test_a_killed_study_is_not_present_even_if_its_process_id_is_in_use_again(folder):
    with present(me("mine")) as neighbours:
        left = folder / f"{locks.PRESENT}{os.getppid()}"
        left.write_text(json.dumps({"study": "killed", "pid": os.getppid(), "user": "", "command": ""}))
        assert neighbours() == frozenset()
        assert not left.exists()


def test_a_sharing_study_does_not_queue_but_others_wait_for_it(start):
    first = start("first", 2)
    line_of(first)
    assert "study `first`" in line_of(start("second", 2))  # it is next
    guest = start("guest", 4, share=1)
    assert line_of(guest) == "has first"
    assert f"study `guest` (process {guest.pid}) has 2 of 4 cores" in line_of(start("late", 4))


def test_the_network_probe_holds_all_cores(monkeypatch, tmp_path):
    class Runner(contextlib.nullcontext):
        """Stands in for the ranks."""

        def __init__(self, _, cores):
            super().__init__(self)
            assert cores == FOUR

        def run(self, _, specs, listener):
            assert not any(Lock(f"core-{number}").acquire() for number in range(4))
            listener(TrialEnded(TrialResult(*specs, TrialState.FINISHED, reports=({"num_bytes": 4, "time_s": 1.0},))))

    monkeypatch.setattr(probe, "LocalRunner", Runner)
    for name in ("host_cores", "own_cores"):
        monkeypatch.setattr(probe, name, lambda: FOUR)
    assert probe.probe_all_reduces(2, tmp_path) == ((4, 1.0),)


def test_a_cluster_trial_locks_all_of_its_cores_or_none(start):
    first = start("first", 2)
    has = f"study `first` (process {first.pid})"
    assert line_of(first) == "has"
    for wanted in ((1,), (1, 2), (3, 0)):
        with locked_cores(me(), wanted) as holder:
            assert holder == has
            with locked_cores(other("late"), (3,)) as late:
                assert late == ""
    with locked_cores(me(), (2, 3)) as holder:
        assert holder == ""
        with locked_cores(other("late"), (3,)) as late:
            assert late == str(me())
    with locked_cores(me(), ()) as holder:
        assert holder == ""
    first.kill()
    first.wait()
    with locked_cores(me(), range(4)) as holder:
        assert holder == ""


# ---- GPUs

HOLDS_GPUS = """
import sys
from raypar.gpus import Gpu
from raypar.run.locks import Holder, leased_gpus

name, least, most, share = sys.argv[1], *map(int, sys.argv[2:])
machine = [Gpu(0, "GPU-a", "H100", "0000:1b:00.0"), Gpu(1, "", "AMD GPU", "0000:2b:00.0", is_amd=True)]

def tell(event):
    print(event.text, flush=True)

with leased_gpus(Holder.here(name, []), machine, least, most, tell, share=bool(share)) as gpus:
    print([gpu.index for gpu in gpus], flush=True)
    sys.stdin.read()
"""
# The same as in `HOLDS_GPUS`.
TWO_GPUS = [Gpu(0, "GPU-a", "H100", "0000:1b:00.0"), Gpu(1, "", "AMD GPU", "0000:2b:00.0", is_amd=True)]


def start_on_gpus(start, name, least, most, *, share=0):
    return start(name, least, most, share=share, code=HOLDS_GPUS)


def test_studies_with_one_gpu_each_run_side_by_side(start):
    one = start_on_gpus(start, "one", 1, 1)
    assert line_of(one) == "[0]"
    two = start_on_gpus(start, "two", 1, 2)
    assert line_of(two) == "[1]"
    for process in (one, two):
        process.kill()
        process.wait()
    with leased_gpus(me(), TWO_GPUS, 1, 2, print) as gpus:
        assert gpus == tuple(TWO_GPUS)


def test_a_study_waiting_for_gpus_holds_no_cores(start):
    with leased_gpus(other("first"), TWO_GPUS, 2, 2, print):
        waits = line_of(start_on_gpus(start, "second", 1, 1))
        assert waits.startswith("waiting for GPUs: study `first` (") and "has 2 of 2 GPUs; " in waits
        assert "--share-machine" in waits
        assert line_of(start("third", 2)) == "has"


def test_shared_gpus_are_free_ones_first(start):
    with leased_gpus(other("first"), TWO_GPUS[:1], 1, 1, print):
        assert line_of(start_on_gpus(start, "guest", 1, 1, share=1)) == "[1]"
        assert line_of(start_on_gpus(start, "another", 2, 2, share=1)) == "[0, 1]"


# ---- a folder that others write to


def test_links_and_special_files_are_refused(folder, tmp_path):
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


def test_a_link_or_file_in_place_of_the_folder_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RayparError, match="can't lock"):
        Lock("core-0").acquire()
    folder.unlink()
    folder.write_text("")
    with pytest.raises(RayparError, match="can't lock"):
        Lock("core-0").acquire()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_every_user_can_lock_and_read_whatever_the_umask(folder):
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
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are private
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as two users")
def test_another_user_can_take_a_released_lock(monkeypatch, every_users_folder):
    monkeypatch.setenv(locks.FOLDER_VARIABLE, str(every_users_folder / "locks"))
    lock = Lock("core-0")
    assert lock.acquire()
    lock.sign(me())
    as_nobody = """
import os
import psutil  # while this process can still read it
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
def test_a_malformed_lock_file_names_no_holder(text):
    assert Holder.parse(text) is None


def test_control_characters_of_a_holder_are_removed():
    text = json.dumps({"study": "\x1b[2Js", "pid": 7, "user": "u\n", "command": "c" * 4000, "more": 1}).encode()
    holder = Holder.parse(text)
    assert holder is not None and str(holder) == "study `[2Js` (process 7 of u)" and len(holder.command) < 1000
