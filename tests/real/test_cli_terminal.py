"""A study in a terminal: its live view, Ctrl-C and a closed terminal."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading

import pytest
from faultlab import Faulty, next_held
from harness import BIN, TIMEOUT_S, Cli, finished, runs_of, until

NOISE = re.compile(r"Traceback|WARN|INFO|c10d|alembic|ray::|Deprecat")
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SHOW, HIDE, ERASE = "\x1b[?25h", "\x1b[?25l", "\x1b[2K"


def shown(text):
    """Return the written lines without control sequences."""
    return CODES.sub("", text).splitlines()


class Terminal:
    """Controlling terminal, 80 × 24, of a study whose second trial is held; keeps all output."""

    def __init__(self, folder, **environment):
        self.cli, self.study, self.text = Cli(folder), Faulty(folder, 3), ""
        self.master, slave = pty.openpty()
        self.resize(80)
        how = self.cli.how(TERM="xterm-256color", **environment)
        how["env"] = {
            key: value for key, value in how["env"].items() if key not in {"COLUMNS", "NO_COLOR"} - {*environment}
        }
        how |= dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        take = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
        command = [BIN / "raypar", "study", "faulty.py", "--no-ray"]
        self.process = subprocess.Popen(command, start_new_session=True, preexec_fn=take, **how)
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        for name in ("stdout", "stderr"):
            self.cli.write(name, "")
        self.study.go(next_held(self.study, self.process)[0])
        next_held(self.study, self.process)
        pattern = r"1/3 trials, 1 running, 1 queued\s[^(]* finishes at (about \d\d:\d\d \(|any moment)"
        until(lambda: re.search(pattern, self.text), lambda: self.text[-500:], TIMEOUT_S)

    def resize(self, num_columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, num_columns, 0, 0))

    def _read(self):
        with contextlib.suppress(OSError):  # the other end is gone
            while part := os.read(self.master, 65536):
                self.text += part.decode(errors="replace")

    def end(self):
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code


@pytest.fixture
def terminal(request, tmp_path):
    opened = Terminal(tmp_path, **getattr(request, "param", {}))
    yield opened
    for pid in opened.cli.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_live_view_counts_trials_and_leaves_only_the_report(terminal):
    num_before = len(terminal.text)
    terminal.resize(44)
    until(lambda: terminal.text.count("elapsed", num_before) > 2, lambda: terminal.text[num_before:], TIMEOUT_S)
    narrow = terminal.text.rpartition("trials,")[0].rpartition("elapsed")[0].rpartition("elapsed")[2]
    assert max(map(len, shown(narrow))) <= 44
    terminal.resize(80)
    terminal.study.hold_no_more()
    terminal.study.go(terminal.study.held()[0])
    assert terminal.end() == 0
    assert not NOISE.search(terminal.text)
    assert terminal.text.count(HIDE) == terminal.text.count(SHOW) == 1 and terminal.text.rfind(SHOW) > 0
    drawn, _, left = terminal.text.rpartition(ERASE)
    assert "running" in drawn and "running" not in left and "queued" not in left
    assert re.search("faulty: .*3 trials", left)
    assert max(map(len, shown(drawn))) <= 80


@pytest.mark.parametrize("terminal", [{"NO_COLOR": "1"}], indirect=True)
def test_ctrl_c_in_a_terminal_ends_the_view_with_the_report_and_restores_the_cursor(terminal):
    os.write(terminal.master, b"\x03")
    assert terminal.end() == 130
    left = terminal.text.rpartition(ERASE)[2]
    assert "Partial: interrupted when 1 of 3 trials were done." in left and "`raypar store resume faulty`" in left
    assert terminal.text.rfind(SHOW) > terminal.text.rfind(HIDE) and not NOISE.search(terminal.text)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.text)  # no colour
    assert terminal.cli.processes() == {}


def test_a_closed_terminal_ends_the_study_and_loses_no_finished_trial(terminal):
    os.killpg(terminal.process.pid, signal.SIGHUP)  # like the kernel when the window closes
    os.close(terminal.master)
    assert terminal.process.wait(TIMEOUT_S) != 0  # any code
    assert terminal.cli.processes() == {}
    assert len(finished(terminal.cli.folder)) == 1
    (execution,) = runs_of(terminal.cli.folder, "faulty", "execution")
    assert execution.info.status == "KILLED"
