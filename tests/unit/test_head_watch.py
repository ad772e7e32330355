"""The processes that a private Ray can't do without are looked after; where one ends, the study breaks off at once."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from raypar.errors import ClusterError
from raypar.run.head import HeadWatch
from raypar.run.interruption import Broken, heeded


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
