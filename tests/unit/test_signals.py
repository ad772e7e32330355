"""The first signal, a second Ctrl-C, and uninterrupted blocks."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from raypar import signals as interruption
from raypar.signals import Interrupted, handle_signals, raise_again, uninterrupted, was_interrupted

HEAD = """
import os, signal, subprocess, sys, time
from raypar.signals import *
def send(number=signal.SIGINT): os.kill(os.getpid(), number); [None for _ in range(1000)]
"""


@pytest.fixture(autouse=True)
def signals_are_not_ignored(monkeypatch):
    """Under nohup or in a shell's background, some are."""
    # Other tests of this process may have started child processes.
    monkeypatch.setattr(interruption, "end_descendants", lambda: None)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in interruption.SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(code):
    command = [sys.executable, "-c", HEAD + textwrap.dedent(code)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_is_raised_in_the_main_thread_with_its_number(number, code):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught, handle_signals():
        signal.raise_signal(number)
    assert caught.value.exit_code == code
    assert signal.getsignal(number) is before and not was_interrupted()


def test_a_signal_waits_for_the_end_of_the_outermost_uninterrupted_block():
    happened = []
    with pytest.raises(Interrupted), handle_signals():  # noqa: PT012
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGTERM)
                happened.append("inner continues")
            happened.append("outer continues")
            assert was_interrupted()
        happened.append("never")
    assert happened == ["inner continues", "outer continues"]


def test_nothing_is_raised_after_the_first_signal():
    with handle_signals():
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        with uninterrupted():
            signal.raise_signal(signal.SIGHUP)
        assert was_interrupted()


SWALLOWED = """
os.register_at_fork(after_in_parent=send)  # Python only reports exceptions of such a callback
try:
    with handle_signals():
        raise_again()
        if os.fork() == 0:
            os._exit(0)
        print("continues")
        raise_again()
        print("never")
except Interrupted as error:
    sys.exit(error.exit_code)
"""


def test_a_swallowed_interrupt_is_raised_again():
    done = run(SWALLOWED)
    assert (done.returncode, done.stdout) == (130, "continues\n") and "Exception ignored" in done.stderr
    with pytest.raises(Interrupted), handle_signals(), uninterrupted():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise_again()  # not before the end of the block
        has_continued = True
    assert has_continued
    raise_again()


def test_an_error_after_a_signal_becomes_an_interrupt():
    with pytest.raises(Interrupted), handle_signals(), uninterrupted():  # noqa: PT012
        signal.raise_signal(signal.SIGHUP)
        raise BrokenPipeError
    with pytest.raises(BrokenPipeError), handle_signals(), uninterrupted():
        raise BrokenPipeError


def test_ctrl_c_is_pythons_own_without_handling_and_ignored_signals_stay_ignored():
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert not isinstance(caught.value, Interrupted)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with handle_signals():
        signal.raise_signal(signal.SIGINT)
        assert not was_interrupted()


CHILD = """
code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, process_group=0)
print(child.pid, child.stdout.readline(), flush=True)
"""
TWICE = "with handle_signals(), uninterrupted(): send({}); send(); print('never')"


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        *((TWICE.format(int(number)), 128 + number, "") for number in (signal.SIGINT, signal.SIGTERM)),
        ("with handle_signals(): send()", 1, "Interrupted: signal 2"),
    ],
)
def test_a_second_ctrl_c_exits_at_once_and_no_process_is_left(body, code, error):
    done = run(CHILD + body)
    assert done.returncode == code and done.stderr.strip().endswith(error) and "never" not in done.stdout
    assert error or not done.stderr
    for pid in done.stdout.split():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"  # a zombie until its new parent reaps it


@pytest.mark.parametrize("number", ["SIGHUP", "SIGTERM"])
def test_a_repeated_sigterm_or_sighup_is_one_request(number):
    done = run(f"""
        with handle_signals():
            try:
                send(signal.{number})
            except Interrupted:
                send(signal.{number})
                print("in good order")
    """)
    assert done.stdout == "in good order\n" and done.returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_swallowed_by_a_library_keeps_its_exit_code(number, code):
    with pytest.raises(Interrupted) as caught, handle_signals():  # noqa: PT012
        with pytest.raises(Interrupted):
            signal.raise_signal(number)
        assert Interrupted().exit_code == code
        raise KeyboardInterrupt
    assert caught.value.exit_code == code and Interrupted().exit_code == 130
