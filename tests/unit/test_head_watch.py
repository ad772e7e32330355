"""The processes that a private Ray can't do without are looked after; where one ends, the study breaks off at once."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from raypar.errors import ClusterError
from raypar.run.head import HeadWatch
from raypar.run.interruption import Broken, heeded, what_broke


def a_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def work() -> None:
    for _ in range(6000):
        try:
            time.sleep(0.01)
        except Exception as error:
            raise AssertionError("what would tidy up caught it") from error


def test_a_head_that_is_killed_breaks_the_work_off_whatever_catches_exceptions() -> None:
    with a_process() as head, heeded():
        watch = HeadWatch({"gcs_server": head.pid})
        head.kill()
        with watch.watching(), pytest.raises(Broken) as caught:
            work()
    assert isinstance(caught.value.error, ClusterError)
    assert watch.lost == f"Ray was lost: its head, gcs_server ended (process {head.pid})"


def test_a_head_that_lives_disturbs_nobody_and_one_that_ended_with_the_work_is_known() -> None:
    with a_process() as head:
        watch = HeadWatch({"raylet": head.pid})
        with watch.watching():
            pass
        assert watch.lost == ""
        head.kill()
        head.wait()
        later = HeadWatch({"raylet": head.pid})
        with later.watching():
            pass
        assert "its raylet ended" in later.lost


STUCK = """
import os, sys, time
from pathlib import Path
from raypar.cli.common import quiet
from raypar.run import head
from raypar.run.interruption import heeded, uninterrupted, when_leaving_at_once

head.GRACE_S = 0.0
with heeded(), quiet(Path(sys.argv[2])) as console:
    back = lambda: os.write(console.file.fileno(), b"the terminal is put back\\n")
    with when_leaving_at_once(back), head.HeadWatch({"gcs_server": int(sys.argv[1])}).watching(), uninterrupted():
        time.sleep(60)  # as a call that looks after no signal
"""


def test_work_that_cannot_be_broken_off_is_ended_with_the_message_and_the_terminal_is_put_back(tmp_path: Path) -> None:
    with a_process() as head:
        head.kill()
        head.wait()
    command = [sys.executable, "-c", STUCK, str(head.pid), str(tmp_path / "log")]
    stuck = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (stuck.returncode, stuck.stdout) == (1, "the terminal is put back\n")
    assert stuck.stderr.startswith(f"error: Ray was lost: its head, gcs_server ended (process {head.pid})\n  → ")


def test_a_keyboard_interrupt_that_ray_made_anew_is_known_to_be_a_loss() -> None:
    assert what_broke() is None
    with a_process() as head, heeded():
        head.kill()
        with HeadWatch({"gcs_server": head.pid}).watching(), pytest.raises(KeyboardInterrupt):
            work()
        lost = what_broke()
        assert isinstance(lost, ClusterError) and "gcs_server" in str(lost)
    with heeded():
        assert what_broke() is None
