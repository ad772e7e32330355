"""A study in a terminal: a view that is drawn over and gone at the end, and what a closed terminal does to it."""

from __future__ import annotations

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
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import RAYPAR, TIMEOUT_S, Cli, runs_of, signals_not_ignored
from telling import until

# Trials wait for the file `wait` to go away once two have started.
STUDY = """
from dataclasses import replace
from pathlib import Path

from raypar import Study, grid
from raypar.workloads import digits

FOLDER = Path(__file__).parent


def model(config):
    import time
    from raypar.workloads.digits import build

    starts = FOLDER / "starts"
    with starts.open("a") as file:
        file.write(f"{config['lr']}\\n")
    while (FOLDER / "wait").exists() and len(starts.read_text().splitlines()) >= 2:
        time.sleep(0.05)
    return build(config)


study = Study(
    workload=replace(digits, name="seen", model=model),
    space={"lr": grid(0.1, 0.2, 0.3)},
    num_repeats=1,
    config={"epochs": 1, "batch_size": 768, "hidden_size": 32},
)
"""
NOISE = re.compile(r"Traceback|WARN|INFO|c10d|alembic|ray::|Deprecat")
SHOW, HIDE, ERASE = "\x1b[?25h", "\x1b[?25l", "\x1b[2K"


class Terminal:
    """80 × 24, the controlling terminal of what is started in it; keeps all that is written."""

    def __init__(self, cli: Cli, *arguments: str, **environment: str) -> None:
        self.text = ""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        kept = {key: value for key, value in cli._environment({}).items() if key not in ("COLUMNS", "NO_COLOR")}
        with signals_not_ignored():
            self.process = subprocess.Popen(
                [RAYPAR, *arguments],
                cwd=cli.folder,
                env={**kept, "TERM": "xterm-256color", **environment},
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is gone
            while part := os.read(self._master, 65536):
                self.text += part.decode(errors="replace")

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def hang_up(self) -> None:
        """What closing the window does: the kernel's SIGHUP, and nobody takes what is written any more."""
        os.killpg(self.process.pid, signal.SIGHUP)
        os.close(self._master)

    def end(self) -> int:
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    made = Cli(tmp_path)
    made.write("seen.py", STUDY)
    made.write("wait", "")
    made.write("starts", "")
    yield made
    for pid in made.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(terminal: Terminal, pattern: str) -> None:
    def is_there() -> bool:
        return bool(re.search(pattern, terminal.text)) or terminal.process.poll() is not None

    until(is_there, lambda: f"{pattern} in {terminal.text[-500:]}", TIMEOUT_S)
    assert terminal.process.poll() is None, terminal.text


def test_the_view_counts_the_trials_and_leaves_nothing_behind_but_the_report(cli: Cli) -> None:
    terminal = Terminal(cli, "study", "seen.py", "--no-ray")
    wait_for(terminal, r"1/3 trials, 1 running, 1 queued, [\d.]+ (ms|s|min)")
    (cli.folder / "wait").unlink()
    assert terminal.end() == 0
    assert not NOISE.search(terminal.text)
    assert terminal.text.count(HIDE) == terminal.text.count(SHOW) == 1 and terminal.text.rfind(SHOW) > 0
    drawn, _, left = terminal.text.rpartition(ERASE)
    assert "running" in drawn and "running" not in left and "queued" not in left
    assert "seen: 3 points, 3 trials" in left
    assert all(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) <= 80 for line in drawn.splitlines())


def test_ctrl_c_in_a_terminal_ends_the_view_with_the_report_and_the_cursor_is_back(cli: Cli) -> None:
    terminal = Terminal(cli, "study", "seen.py", "--no-ray", NO_COLOR="1")
    wait_for(terminal, "1/3 trials, 1 running")
    terminal.press_ctrl_c()
    assert terminal.end() == 130
    left = terminal.text.rpartition(ERASE)[2]
    assert "Partial: interrupted when 1 of 3 trials were done." in left and "`raypar resume seen`" in left
    assert terminal.text.rfind(SHOW) > terminal.text.rfind(HIDE) and not NOISE.search(terminal.text)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.text)  # no colour where none is wanted
    assert cli.processes() == {}


def test_a_dumb_terminal_gets_plain_lines(cli: Cli) -> None:
    (cli.folder / "wait").unlink()
    terminal = Terminal(cli, "study", "seen.py", "--no-ray", TERM="dumb")
    assert terminal.end() == 0
    assert "\x1b" not in terminal.text and not NOISE.search(terminal.text)
    assert len(re.findall(r"^\[\d/3\] lr=", terminal.text, re.MULTILINE)) == 3


def test_a_closed_terminal_ends_the_study_and_loses_no_finished_trial(cli: Cli) -> None:
    terminal = Terminal(cli, "study", "seen.py", "--no-ray")
    wait_for(terminal, "1/3 trials, 1 running")
    terminal.hang_up()
    assert terminal.process.wait(TIMEOUT_S) != 0  # which code, nobody is there to see
    assert cli.processes() == {}
    assert [run.info.status for run in runs_of(cli.folder, "seen", "trial")] == ["FINISHED"]
    (execution,) = runs_of(cli.folder, "seen", "execution")
    assert execution.info.status == "KILLED"
