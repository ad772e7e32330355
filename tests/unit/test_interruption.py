"""What the first signal does, what the second one does, and what neither of them may tear."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from raypar.run.interruption import Interrupted, heeded, interrupted_by, interruptible, uninterrupted

# Other tests of this process may have started something that is to stay.
heed = partial(heeded, ends_descendants=False)
HEAD = """
import os, signal, subprocess, sys, time
from raypar.run import interruption
from raypar.run.interruption import *
def send(number=signal.SIGINT): os.kill(os.getpid(), number); [None for _ in range(1000)]
"""


@pytest.fixture(autouse=True)
def sigint_is_heeded() -> object:
    """Tests may be started where it is ignored, as a shell's background jobs are."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_is_raised_in_the_main_thread_and_says_which_it_was(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught, heed():
        signal.raise_signal(number)
    assert caught.value.exit_code == code
    assert signal.getsignal(number) is before and interrupted_by() is None


def test_inside_uninterrupted_a_signal_waits_for_the_end_of_the_outermost() -> None:
    happened = []

    def work() -> None:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGTERM)
                happened.append("inner goes on")
            happened.append("outer goes on")
            assert interrupted_by() == signal.SIGTERM
        happened.append("never")

    with pytest.raises(Interrupted), heed():
        work()
    assert happened == ["inner goes on", "outer goes on"]


def test_after_the_first_nothing_is_raised_so_that_things_can_be_put_away() -> None:
    with heed():
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        with uninterrupted():
            signal.raise_signal(signal.SIGTERM)
        assert interrupted_by() == signal.SIGINT


def test_a_wait_inside_may_be_torn_at_once_or_before_it_begins() -> None:
    with heed(), uninterrupted(), pytest.raises(Interrupted), interruptible():
        signal.raise_signal(signal.SIGINT)
    happened = []
    with heed(), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted), interruptible():
            happened.append("never")
    assert happened == []


def test_what_fails_after_a_signal_counts_as_interrupted_and_what_fails_without_one_as_itself() -> None:
    def fail_after_a_signal() -> None:
        signal.raise_signal(signal.SIGHUP)
        raise BrokenPipeError

    with pytest.raises(Interrupted), heed(), uninterrupted():
        fail_after_a_signal()
    with pytest.raises(BrokenPipeError), heed(), uninterrupted():
        raise BrokenPipeError


def test_at_the_end_a_signal_may_be_noted_only() -> None:
    with heed():
        with uninterrupted(then_raise=False):
            signal.raise_signal(signal.SIGINT)
        assert interrupted_by() == signal.SIGINT


def test_without_heeding_ctrl_c_is_what_it_always_is() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert not isinstance(caught.value, Interrupted)


def test_what_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with heed():
        signal.raise_signal(signal.SIGINT)
        assert interrupted_by() is None


def test_the_second_signal_ends_everything_at_once_even_where_the_main_thread_does_not_answer(tmp_path: Path) -> None:
    done = run(
        """
        interruption.SAME_REQUEST_S = 0.0
        child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
                                 stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        with heeded(), when_leaving_at_once(lambda: print("cursor", child.pid, flush=True)):
            try:
                send()
            except Interrupted:
                # A second one while the main thread sits in foreign code, as `os.wait` here is.
                later = "import os, sys, time; time.sleep(0.2); os.kill(int(sys.argv[1]), 15)"
                subprocess.Popen([sys.executable, "-c", later, str(os.getpid())])
                signal.pthread_sigmask(signal.SIG_BLOCK, [])
                while True:
                    try:
                        os.waitpid(child.pid, 0)
                    except ChildProcessError:
                        time.sleep(600)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (130, "")
    word, pid = done.stdout.split()
    assert word == "cursor" and not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("numbers", ["SIGHUP, signal.SIGHUP", "SIGTERM, signal.SIGTERM"])
def test_one_request_that_arrives_twice_is_one(tmp_path: Path, numbers: str) -> None:
    done = run(
        f"""
        interruption.SAME_REQUEST_S = 600.0
        with heeded():
            try:
                for number in (signal.{numbers}):
                    send(number)
            except Interrupted:
                send(number)
                print("in good order")
        """,
        tmp_path,
    )
    assert done.stdout == "in good order\n" and done.returncode == 0


def test_what_was_started_does_not_outlive_an_interrupted_program(tmp_path: Path) -> None:
    done = run(
        """
        code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0)
        print(child.pid, child.stdout.readline())
        with heeded():
            send()
        """,
        tmp_path,
    )
    assert done.stderr.strip().endswith("Interrupted: signal 2")
    for pid in done.stdout.split():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"  # reaped by whoever inherits it
