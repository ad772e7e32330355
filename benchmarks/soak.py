"""Soak test: a long study whose processes get signals at random, the driver included, from its first second on.

Every 2 to 20 seconds, a process of the study gets KILL, SEGV, STOP or TERM; signal and process are drawn with a seed.
One signal in four goes to the fork server, which starts all ranks, and one in ten to the driver. With --no-ray, the
study runs without Ray.

A driver that has ended is started again. If no trial ends for a minute, all stopped processes are continued; after five
minutes, the driver is killed. At the end, every trial must be in the store, finished, exactly once. No process may be
left, and the temporary folder must be empty. "Locked out" are drivers that fail although neither they nor their
processes got a signal. "Ended without a message" are drivers that got no signal themselves and give no reason for their
failure.

A second, undisturbed study measures memory: the driver and Ray's head (gcs_server and raylet) must not grow from the
100th trial to the last.

Needs two cores.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from common import begin, parser_for, print_bar, print_row, progress, scratch
from faultlab import VICTIMS, find
from study_process import finished, num_duplicates, output, start

from raypar import units

STUDY = """
from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"lr": grid(*(n / 1000 for n in range(1, NUM_POINTS + 1))), "num_workers": grid(1, 2)},
    num_repeats=1,
    max_retries=20,
    config={"epochs": EPOCHS, "batch_size": 64},
)
"""
NAME = "soak"
MARK = "RAYPAR_SOAK"  # a variable that all processes of the study inherit
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, signal.SIGTERM)
PAUSE_S = (2.0, 20.0)
DRIVER_SHARE, FORK_SERVER_SHARE = 0.1, 0.25  # of the signals
CONTINUE_S, GIVE_UP_S = 60.0, 300.0  # without a trial that has ended
END_S = 15.0  # for processes whose driver was killed
SAMPLE_S = 0.5
MAX_LOCKED_OUT = 3
HEAD = ("Ray's head", "raylet")
EARLY_TRIAL = 100
MAX_GROWTH_BYTES = 50e6
SAID = re.compile(r"^(error|failed|[\w ]+ failed): \S|^(interrupted|broke off)", re.MULTILINE)
DONE = re.compile(r"^\S+ [\d:]+  \[ *(\d+)/\d+\]", re.MULTILINE)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--trials", type=int, default=500, help="[default: %(default)s]")
    parser.add_argument("--memory-trials", type=int, default=250, help="0: none [default: %(default)s]")
    parser.add_argument(
        "--epochs", type=int, default=2, help="per trial, about half a second each on two cores [default: %(default)s]"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the signals [default: %(default)s]")
    parser.add_argument("--no-ray", action="store_true", help="run the study without Ray, and measure no memory")
    args = begin(parser)
    num_trials, num_for_memory = (20, 120) if args.quick else (args.trials, args.memory_trials)
    with scratch() as folder:
        flags = ("--no-ray",) if args.no_ray else ()
        is_complete = soak(folder, 2 * (num_trials // 2), args.epochs, random.Random(args.seed), flags)
    if num_for_memory and not args.no_ray:
        with scratch() as folder:
            measure_memory(folder, num_for_memory)
    sys.exit(not is_complete)


def write_study(folder: Path, num_trials: int, epochs: int) -> None:
    text = STUDY.replace("NUM_POINTS", str(num_trials // 2)).replace("EPOCHS", str(epochs))
    (folder / f"{NAME}.py").write_text(text)


# ---- signals


@dataclass
class Soak:
    """Tally of a study under signals."""

    signals: Counter[str] = field(default_factory=Counter)
    num_drivers: int = 0
    num_locked_out: int = 0
    num_silent: int = 0  # ended without a message
    num_continued: int = 0
    num_stuck: int = 0  # ended by force: no trial for minutes, though all was continued


def soak(folder: Path, num_trials: int, epochs: int, rng: random.Random, flags: Sequence[str]) -> bool:
    """Run a study under signals, print its figures; return whether it held. Flags: of `raypar study`."""
    temporary = folder / "t"
    temporary.mkdir()
    write_study(folder, num_trials, epochs)
    os.environ |= {MARK: folder.name, "TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary)}
    begun_s, tally = time.monotonic(), Soak()
    try:
        while tally.num_locked_out < MAX_LOCKED_OUT:
            exit_code = drive(folder, rng, tally, flags)
            stored = finished(folder, NAME)
            said = (folder / "stderr").read_text().strip().splitlines()[:1]
            after = units.seconds(time.monotonic() - begun_s)
            progress(f"{len(stored)}/{num_trials} after {after}, exit {exit_code}{': ' if said else ''}{''.join(said)}")
            if len(stored) >= num_trials and exit_code == 0:
                break
        _, running = psutil.wait_procs(processes(), timeout=END_S)
        stored, duplicates = finished(folder, NAME), num_duplicates(folder, NAME)
        # But for the folder that Ray keeps its sessions in, and torch's cache of compiled kernels.
        others = {temporary / "ray", *temporary.glob("torchinductor_*")}
        left = sorted({*temporary.iterdir(), *temporary.glob("ray/*")} - others)
    finally:
        for process in processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for name in (MARK, "TMPDIR", "RAY_TMPDIR"):
            del os.environ[name]
    num_lost = num_trials - len({result.spec.identity for result in stored})
    print_row(f"{num_trials} trials", f"{units.seconds(time.monotonic() - begun_s)}, {tally.num_drivers} drivers")
    print_row("signals", ", ".join(f"{name} {count}×" for name, count in sorted(tally.signals.items())) or "none")
    print_row("trials repeated", str(sum(result.attempts > 1 for result in stored)))
    print_row("continued after a minute without progress; ended by force", f"{tally.num_continued}; {tally.num_stuck}")
    figures = {
        "finished trials lost": num_lost,
        "finished trials doubled": duplicates,
        "locked out": tally.num_locked_out,
        "ended without a message": tally.num_silent,
        "processes that run on": len(running),
        "left in the temporary folder": len(left),
    }
    for title, count in figures.items():
        print_bar(title, count, "{:g}".format, at_most=0)
    if any(figures.values()):
        print("\n".join([*map(str, left[:20]), *map(str, running), output(folder)[-3000:]]), flush=True)
    return not any(figures.values())


def drive(folder: Path, rng: random.Random, tally: Soak, flags: Sequence[str]) -> int:
    """Run `raypar study` once, with signals, until it has ended; return its exit code."""
    driver = start(folder, "study", f"{NAME}.py", *flags)
    tally.num_drivers += 1
    is_hit = False  # the driver got a signal
    num_before, num_done, progress_s = sum(tally.signals.values()), 0, time.monotonic()
    next_s = time.monotonic() + rng.uniform(0, PAUSE_S[1])
    continued_s = progress_s
    while driver.poll() is None:
        time.sleep(SAMPLE_S)
        now_s, count = time.monotonic(), num_ended(folder)
        if count > num_done:
            num_done, progress_s = count, now_s
        elif now_s - progress_s > GIVE_UP_S:
            tally.num_stuck += 1
            is_hit = True
            driver.kill()
        elif now_s - max(progress_s, continued_s) > CONTINUE_S:
            continued_s = now_s
            tally.num_continued += 1
            continue_all()
        if now_s >= next_s:
            next_s = now_s + rng.uniform(*PAUSE_S)
            victims = sorted((p for p in processes() if p.pid != driver.pid), key=lambda process: process.pid)
            if victims:
                number, victim = rng.choice(SIGNALS), rng.choice(victims)
                name, share = number.name, rng.random()
                if share < DRIVER_SHARE:
                    victim = psutil.Process(driver.pid)
                elif share < DRIVER_SHARE + FORK_SERVER_SHARE:
                    with contextlib.suppress(LookupError, psutil.Error):  # there is none at the moment
                        victim = find(driver.pid, VICTIMS["fork server"])
                        name += " of the fork server"
                with contextlib.suppress(psutil.Error):
                    victim.send_signal(number)
                    tally.signals[name] += 1
                    is_hit = is_hit or victim.pid == driver.pid
    exit_code = driver.wait()
    if exit_code and sum(tally.signals.values()) == num_before:
        tally.num_locked_out += 1
        progress(f"locked out: {output(folder)[-2000:]}")
    if exit_code and not is_hit and not says_why(folder):
        tally.num_silent += 1
        progress(f"ended with exit code {exit_code}, without a message: {output(folder)[-2000:]}")
    continue_all()
    psutil.wait_procs(processes(), timeout=END_S)
    return exit_code


def says_why(folder: Path) -> bool:
    """Return True if a failed driver printed a readable reason."""
    errors = (folder / "stderr").read_text()
    return "Traceback" not in errors and bool(SAID.search(output(folder)))


def processes() -> list[psutil.Process]:
    """Return the processes of the study, whatever their parent is now."""
    return [process for process in psutil.process_iter() if is_marked(process)]


def is_marked(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        is_here = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
        return is_here and process.environ().get(MARK) == os.environ[MARK]
    return False


def continue_all() -> None:
    for process in processes():
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)


def num_ended(folder: Path) -> int:
    """Return the number of the last trial that the driver has reported."""
    numbers = DONE.findall((folder / "stdout").read_text())
    return int(numbers[-1]) if numbers else 0


# ---- memory


def measure_memory(folder: Path, num_trials: int) -> None:
    """Run a study that nothing disturbs, and print how far the driver and Ray's head have grown."""
    write_study(folder, num_trials, 1)
    driver = start(folder, "study", f"{NAME}.py")
    early: dict[str, list[int]] = {}
    late: dict[str, list[int]] = {}
    try:
        for num_done in samples(folder, driver):
            for name, size in sizes(driver.pid).items():
                if EARLY_TRIAL <= num_done <= EARLY_TRIAL + 10:
                    early.setdefault(name, []).append(size)
                elif num_done >= num_trials - 10:
                    late.setdefault(name, []).append(size)
    finally:
        if driver.poll() is None:
            driver.kill()
    if driver.wait():
        raise SystemExit(f"the study failed:\n{output(folder)[-3000:]}")
    for name in early:
        grown = statistics.median(late[name]) - statistics.median(early[name])
        title = f"memory of {name}: growth from trial {EARLY_TRIAL} to {num_trials}"
        print_bar(title, grown, units.size, at_most=MAX_GROWTH_BYTES)


def samples(folder: Path, driver: subprocess.Popen[str]) -> Iterator[int]:
    """Yield the number of trials that have ended, twice a second, until the study has."""
    while driver.poll() is None:
        time.sleep(SAMPLE_S)
        yield num_ended(folder)


def sizes(driver: int) -> dict[str, int]:
    """Return the resident bytes of the driver and of Ray's head; nothing where they are ending."""
    with contextlib.suppress(psutil.Error, LookupError):
        head = [find(driver, VICTIMS[name]).memory_info().rss for name in HEAD]
        return {"the driver": psutil.Process(driver).memory_info().rss, "Ray's head": sum(head)}
    return {}


if __name__ == "__main__":
    main()
