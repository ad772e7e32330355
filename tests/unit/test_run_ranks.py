"""Processes run until they have ended, reaped or not; a fork server is ready once it has imported."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raypar.run.ranks import ForkClient, ForkServer
from raypar.signals import is_running


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="no waitid here, which waits for an end and leaves it to others")
def test_a_process_runs_until_it_has_ended_reaped_or_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert is_running(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process.returncode is None and not is_running(process.pid)
        process.wait()
        assert not is_running(process.pid)


def test_a_fork_server_is_ready_when_it_has_imported_all(tmp_path: Path) -> None:
    (tmp_path / "comes_last.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    server = ForkServer(("comes_last",), (str(tmp_path),))
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address)) as client:
        client.wait_until_ready()
        assert (tmp_path / "imported").exists()
        client.fork(tmp_path / "log").kill()  # and it goes on as before


def test_who_waits_for_a_fork_server_that_dies_is_told() -> None:
    with contextlib.closing(ForkServer()) as server, contextlib.closing(ForkClient(server.address)) as client:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises((EOFError, OSError)):
            client.wait_until_ready()
