"""A process is told to be running until it has ended, whether somebody has asked for its exit code or not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raypar.run.processes import is_running


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="no waitid here, which waits for an end and leaves it to others")
def test_a_process_runs_until_it_has_ended_reaped_or_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert is_running(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process.returncode is None and not is_running(process.pid)
        process.wait()
        assert not is_running(process.pid)
