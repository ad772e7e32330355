"""A rank gets its cores before it has threads."""

import json
import subprocess
import sys

import pytest

from raypar import gpus
from raypar.gpus import Gpu
from raypar.train import affinity
from raypar.train.affinity import CAN_PIN, Core, ProcessTree, allowed_cores, cores_near_gpu, host_cores, topology

# Run in a new interpreter, because pinning this one would pin all later tests.
PINNED = """
import json, os
from raypar.train.affinity import allowed_cores, pin
before = allowed_cores()
print(json.dumps([before, pin(before[-1:]), [*os.sched_getaffinity(0)], allowed_cores()]))
"""


@pytest.mark.skipif(not CAN_PIN, reason="this system can't bind processes to cores")
def test_a_pinned_process_stays_on_its_core_and_knows_the_allowed_ones():
    before, pinned, actual, allowed = json.loads(subprocess.check_output([sys.executable, "-c", PINNED]))
    assert before == allowed == list(allowed_cores()) and pinned == actual == before[-1:]


UNBOUND = """
import json, os
from raypar.train.affinity import allowed_cores, bind_rank, pin
first = allowed_cores()[:1]
pin(first)
off, actual = bind_rank(first, "off"), sorted(os.sched_getaffinity(0))
print(json.dumps([off, actual, bind_rank(first, None), bind_rank((), None)]))
"""


@pytest.mark.skipif(not CAN_PIN, reason="this system can't bind processes to cores")
def test_an_unpinned_rank_runs_on_all_cores_although_its_parent_was_bound_to_one():
    own, actual, pinned, none = json.loads(subprocess.check_output([sys.executable, "-c", UNBOUND]))
    assert own == none == [] and actual == list(allowed_cores()) and pinned == actual[:1]


# Prints its number of threads, then their cores when asked. Its second child is to keep its cores.
TREE = """
import json, os, subprocess, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
children = [subprocess.Popen(["sleep", "60"], process_group=0) for _ in range(2)]
print(json.dumps([child.pid for child in children]), flush=True)
sys.stdin.readline()
later = subprocess.Popen(["sleep", "60"])
tasks = [int(task) for task in os.listdir("/proc/self/task")]
everyone = [*map(os.sched_getaffinity, tasks), *(os.sched_getaffinity(each.pid) for each in (*children, later))]
print(json.dumps([sorted(cores) for cores in everyone]), flush=True)
for child in (*children, later):
    child.kill()
"""


@pytest.mark.skipif(not CAN_PIN or len(allowed_cores()) < 2, reason="needs two cores to bind processes to")
def test_processes_leave_cores_with_all_their_threads_and_children_except_some():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TREE], stdin=pipe, stdout=pipe, text=True) as process:
        _, left_out = json.loads(process.stdout.readline())
        tree, taken = ProcessTree(process.pid, frozenset([left_out])), allowed_cores()[:1]
        tree.keep_off(allowed_cores())  # no core would be left
        tree.keep_off(taken)
        *threads, child, left_out_cores, later = json.loads(process.communicate("\n")[0])
    rest = list(allowed_cores()[1:])
    assert len(threads) == 2 and threads == [rest, rest] and child == later == rest
    assert left_out_cores == list(allowed_cores())


@pytest.mark.skipif(not CAN_PIN, reason="this system can't bind processes to cores")
def test_processes_that_have_ended_leave_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    ProcessTree(process.pid).keep_off(allowed_cores()[:1])


def test_threads_of_a_core_and_cores_of_a_socket_are_distinguished(tmp_path):
    cores = {0: (0, "0,4"), 1: (0, "1,5"), 2: (1, "2-3"), 3: (1, "2-3"), 4: (0, "0,4"), 5: (0, ""), 6: (0, "none")}
    for number, (package, siblings) in cores.items():
        (core_dir := tmp_path / f"cpu{number}" / "topology").mkdir(parents=True)
        (core_dir / "physical_package_id").write_text(f"{package}\n")
        (core_dir / "thread_siblings_list").write_text(f"{siblings}\n")
    expected = (Core(0, 0, 0), Core(2, 1, 2), Core(3, 1, 2), Core(4, 0, 0))
    assert topology((0, 2, 3, 4), tmp_path) == expected
    assert topology((5, 6, 7), tmp_path) == (Core(5, 0, 5), Core(6, 0, 6), Core(7, 0, 7))  # unreadable
    assert tuple(core.number for core in host_cores()) == allowed_cores()


def test_cores_near_a_gpu_follow_the_visible_devices(tmp_path, monkeypatch):
    cards = tuple(Gpu(i, f"GPU-{i}", "card", f"0000:{i:02x}:00.0") for i in range(3))
    monkeypatch.setattr(gpus, "all_gpus", lambda: cards)
    for card, cores in zip(cards[:2], ("0-3,8-11", "4-7,12-15"), strict=True):
        (tmp_path / card.bus_id).mkdir()
        (tmp_path / card.bus_id / "local_cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(affinity, "local_cores", lambda gpu: gpus.local_cores(gpu, tmp_path))
    seen = {"CUDA_VISIBLE_DEVICES": "1,0,2"}
    assert cores_near_gpu(0, seen) == {4, 5, 6, 7, 12, 13, 14, 15} and cores_near_gpu(1, seen) == {
        0,
        1,
        2,
        3,
        8,
        9,
        10,
        11,
    }
    assert cores_near_gpu(0, {}) == cores_near_gpu(1, seen)
    assert (
        cores_near_gpu(2, seen)
        == cores_near_gpu(3, seen)
        == cores_near_gpu(0, {"CUDA_VISIBLE_DEVICES": ""})
        == frozenset()
    )
