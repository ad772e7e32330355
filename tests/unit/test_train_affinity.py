"""A rank gets its cores before it has threads."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from raypar.train.affinity import CAN_PIN, Core, allowed_cores, host_cores, topology

needs_pinning = pytest.mark.skipif(not CAN_PIN, reason="this system can't bind processes to cores")


def printed_by(code: str) -> Any:
    """Return what a fresh interpreter prints as JSON: to pin this one would pin every test after it."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_pinning
def test_a_pinned_process_and_what_it_starts_stay_on_the_core() -> None:
    printed = printed_by("""
        import json, os, subprocess, sys, threading
        from raypar.train.affinity import allowed_cores, pin
        last = allowed_cores()[-1]
        seen = {"last": last, "pinned": pin([last])}
        def look():
            seen["thread"] = sorted(os.sched_getaffinity(0))
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        child = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
        seen["child"] = [int(core) for core in subprocess.check_output(child).split()]
        print(json.dumps(seen))
    """)
    assert printed["pinned"] == printed["thread"] == printed["child"] == [printed["last"]]


@needs_pinning
def test_the_allowed_cores_are_the_same_for_a_process_that_is_pinned_and_it_stays_pinned() -> None:
    printed = printed_by("""
        import json, os
        from raypar.train.affinity import allowed_cores, pin
        before = allowed_cores()
        pin(before[:1])
        print(json.dumps([before, allowed_cores(), sorted(os.sched_getaffinity(0))]))
    """)
    before, after, pinned = printed
    assert before == after == list(allowed_cores())
    assert pinned == before[:1]


def a_topology(folder: Path, cores: dict[int, tuple[int, str]]) -> Path:
    """Write a topology: of each core its package, and the list of its physical core's threads."""
    for number, (package, siblings) in cores.items():
        (core_dir := folder / f"cpu{number}" / "topology").mkdir(parents=True)
        (core_dir / "physical_package_id").write_text(f"{package}\n")
        (core_dir / "thread_siblings_list").write_text(f"{siblings}\n")
    return folder


def test_threads_of_a_core_and_cores_of_a_socket_are_told_apart(tmp_path: Path) -> None:
    folder = a_topology(tmp_path, {0: (0, "0,4"), 1: (0, "1,5"), 2: (1, "2-3"), 3: (1, "2-3"), 4: (0, "0,4")})
    assert topology((0, 2, 3, 4), folder) == (Core(0, 0, 0), Core(2, 1, 2), Core(3, 1, 2), Core(4, 0, 0))


@pytest.mark.parametrize("siblings", ["", "none"])
def test_a_core_of_which_nothing_can_be_read_stands_alone(tmp_path: Path, siblings: str) -> None:
    folder = a_topology(tmp_path, {0: (0, siblings)})
    assert topology((0, 7), folder) == (Core(0, 0, 0), Core(7, 0, 7))


def test_the_cores_of_this_machine_are_those_that_it_allows() -> None:
    assert tuple(core.number for core in host_cores()) == allowed_cores()
