"""Command as a trial: raypar starts it once on each machine, reads its output, and ends its processes together.

The first rank of a machine runs it, on the cores of all ranks of that machine. The other ranks only hold their cores.
The fork server ends all processes that a rank leaves behind, in any session.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raypar import observe
from raypar.errors import WorkloadError
from raypar.hooks import REPORT_FILE, numbers_of
from raypar.measure.laps import COUNTS, UNTIMED, LapTimer
from raypar.observe.profiler import NAME as PROFILE
from raypar.observe.ranks import read_ranks
from raypar.scratch import scratch_folder
from raypar.study.command import Command, PlaceValues, number_in
from raypar.study.conditions import RankConditions
from raypar.study.script_settings import script_settings
from raypar.study.trial import SINCE_LAUNCH
from raypar.train.affinity import bind_rank
from raypar.train.job import PROFILE_FOLDER, REPLACED_VARIABLES, Channel, RankContext, RankOutcome, TrialJob
from raypar.train.logged_run import LoggedRun, private_store
from raypar.train.script_launch import ForkedScript, launch_of
from raypar.train.script_times import check_applied, with_times

MAX_ERROR_LINES = 20
STOP_GRACE_S = 5.0  # for a command to end after SIGTERM
FINISHED = b"finished\n"  # from the first machine to the others
PORT_TIMEOUT_S = 120.0  # for the first machine to say which port is free


class CommandFailed(RuntimeError):
    """The command ended with an exit code other than 0."""


class OutputReader:
    """Reports in a command's output: JSON lines, and values by regular expressions.

    A line ``{"loss": 0.5, "step": 10}`` is a report. Values by expression make a report once every metric has a value,
    or once one of them appears again. An epoch or step by expression holds for all lines up to the next one. The time
    of a report is that of the last line with one of its values.
    """

    def __init__(self, metrics: Mapping[str, str]) -> None:
        self._patterns = {name: re.compile(pattern) for name, pattern in metrics.items()}
        self._num_metrics = len(self._patterns.keys() - COUNTS.keys())
        self._counts: dict[str, float] = {}
        self._pending: dict[str, float] = {}
        self._at_s = 0.0

    def reports(self, line: str, at_s: float = 0.0) -> Iterator[tuple[dict[str, float], float]]:
        """Yield the reports that a line completes, each with its time."""
        text = line.strip()
        if text.startswith("{") and text.endswith("}"):
            with contextlib.suppress(ValueError):
                content = json.loads(text)
                if numbers := numbers_of(content):
                    yield numbers, at_s
                return
        values = {name: value for name, p in self._patterns.items() if (value := number_in(p, line)) is not None}
        counts = {name: values.pop(name) for name in COUNTS if name in values}
        if self._pending.keys() & values.keys() or self._counts != {**self._counts, **counts}:
            yield from self.rest()
        self._counts |= counts
        self._pending |= values
        if values:
            self._at_s = at_s
        if values and len(self._pending) == self._num_metrics:
            yield from self.rest()

    def rest(self) -> Iterator[tuple[dict[str, float], float]]:
        """Yield the incomplete report, if there is one."""
        if self._pending:
            pending, self._pending = self._pending, {}
            yield {**self._counts, **pending}, self._at_s


_FIRST_FAILED = re.compile(r"Root Cause.*?local_rank: ([1-9]\d*)", re.DOTALL)  # in torchrun's last lines
RANK_FOLDER = "ranks"  # in a trial's folder: output of all ranks of torchrun except the first


def without_other_ranks(folder: Path) -> dict[str, str]:
    """Return variables that make torchrun print only its first rank's output, and write the others' output to files.

    Otherwise the lines of several ranks would mix, and a metric could be that of any rank. Options in the command take
    precedence.
    """
    # torchrun needs a list of ranks. The filter drops the output of ranks from 10 on.
    files = ",".join(f"{rank}:3" for rank in range(1, 10))
    return {"PET_REDIRECTS": files, "PET_LOCAL_RANKS_FILTER": "0", "PET_LOG_DIR": str(folder)}


def lines_of_other_ranks(folder: Path) -> Iterator[str]:
    """Yield the lines in the files of `without_other_ranks`, each with its rank, stdout before stderr."""
    for path in sorted(folder.glob("*/attempt_*/*/std*.log"), key=lambda path: (path.parent, "err" in path.name)):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                yield f"[local rank {path.parent.name}] {line.rstrip()}"


def run_command(
    command: Command, job: TrialJob, context: RankContext, channel: Channel, listen_fd: int | None
) -> RankOutcome:
    """Run the command of this rank's machine; other ranks of the machine return at once.

    Raises:
        CommandFailed: the exit code is not 0.
        WorkloadError: the command can't be started, or its event files can't be read.
        SettingNotApplied: the command ran without one of its settings.
    """
    if context.local_rank:
        return RankOutcome(is_idle=True)
    if context.world_size % context.local_world_size:
        machines = f"{context.local_world_size} of {context.world_size} workers are on this machine"
        hint = "choose num_workers and nodes so that they divide evenly"
        raise WorkloadError(f"{machines}: a command needs the same number on each machine", hint=hint)
    import torch

    from raypar.measure.telemetry import Telemetry

    cores = bind_rank(context.node_cores or context.cores, job.spec.config.get("cpu_affinity"))
    num_nodes = context.world_size // context.local_world_size
    study_folder = _folder(job)
    with contextlib.ExitStack() as stack:
        port, links = _meet(context, num_nodes, listen_fd, stack)
        values = _places(job, context, num_nodes, port).with_config(job.spec.config)
        Path(job.artifact_dir).mkdir(parents=True, exist_ok=True)
        is_first = context.rank == 0
        folder = study_folder / command.folder.format_map(values)
        events = EventFiles(folder / command.tensorboard.format_map(values)) if command.tensorboard else None
        telemetry = Telemetry(cores, torch.device("cpu"))
        events_folder = stack.enter_context(scratch_folder())
        private = stack.enter_context(private_store(job, is_first=is_first))
        settings = _settings(command, job) | private.settings
        words, reports_to = command.filled(values), channel if is_first else None
        process = _CommandProcess(command, words, folder, job, reports_to, context, stack, events_folder, settings)
        startup_s = time.monotonic() - context.requested_at_s
        telemetry.start()
        process.wait(None if is_first else links[0])
        telemetry.stop()
        if is_first and not process.is_stopped:
            for link in links:
                link.sendall(FINISHED)
            if events is not None:
                process.report_events(events)
        logged = private.keep()
        process.report_logged(logged, job.settings.metric)
        laps, (ranks, why_not) = process.laps.result(), read_ranks(events_folder)
        if not process.is_stopped:
            changes = script_settings(job.spec.config, command.names)
            check_applied(changes, events_folder, context.rank, ranks, why_not)
    load = telemetry.summary()
    load.pop("cpu_wait_share", None)  # of this process, which only reads the output
    conditions = RankConditions(
        cores=cores,
        num_threads=int(str(job.spec.config["num_threads"])),
        pid=os.getpid(),
        peak_rss_bytes=process.process.peak_bytes or None,  # of the largest of the command's processes
        logged_elsewhere=logged.overruled or None,
        **load,
    )
    outcome = RankOutcome(
        stopped=process.is_stopped,
        startup_s=startup_s,
        wall_s=time.monotonic() - context.requested_at_s,
        conditions=conditions,
        counters=telemetry.counters(),
    )
    return with_times(outcome, laps, ranks, why_not)


def _settings(command: Command, job: TrialJob) -> dict[str, Any]:
    """Return the settings that the trial changes, and the steps to profile."""
    settings: dict[str, Any] = script_settings(job.spec.config, command.names)
    if num_steps := job.profiling.num_steps:
        settings[PROFILE] = (str(job.artifact_dir / PROFILE_FOLDER), num_steps)
    return settings


def _places(job: TrialJob, context: RankContext, num_nodes: int, port: int) -> PlaceValues:
    return PlaceValues(
        num_nodes,
        context.node_rank,
        context.local_world_size,
        context.master_address[0],
        port,
        job.spec.seed,
        job.spec.repeat,
        str(job.artifact_dir),
    )


def _folder(job: TrialJob) -> Path:
    """Return the folder in which a trial's command runs: that of the study file, or a copy of its files.

    Raises:
        WorkloadError: this machine doesn't have the folder, and there is no copy.
    """
    folder = Path(job.revision.sys_path[0]) if job.revision.sys_path else Path.cwd()
    if folder.is_dir():
        return folder
    if not job.settings.sources:
        hint = "put the study's folder on shared storage, or on every machine under the same name"
        raise WorkloadError(f"{folder}: {socket.gethostname()} has no such folder to run the command in", hint=hint)
    copy = job.folder / "sources"
    for name, content in job.settings.sources.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    return copy


def _meet(
    context: RankContext, num_nodes: int, listen_fd: int | None, stack: contextlib.ExitStack
) -> tuple[int, list[socket.socket]]:
    """Agree on a free port of the first machine.

    Returns:
        The port, and the first machine's connections to the others; on another machine, its connection to the first.
        They close when the first machine's command has ended, after `FINISHED` if it was not stopped.
    """
    if context.rank:
        link = stack.enter_context(socket.create_connection(context.master_address, PORT_TIMEOUT_S))
        with link.makefile() as lines:
            port = int(lines.readline())
        link.settimeout(None)
        return port, [link]
    with socket.socket() as free:
        free.bind(("", 0))
        port = int(free.getsockname()[1])
    links: list[socket.socket] = []
    if num_nodes > 1 and listen_fd is not None:
        listener = stack.enter_context(socket.socket(fileno=os.dup(listen_fd)))
        for _ in range(num_nodes - 1):
            links.append(stack.enter_context(listener.accept()[0]))
            links[-1].sendall(f"{port}\n".encode())
    return port, links


def _original_environment() -> dict[str, str]:
    """Return this process's environment without the variables that the fork server has set for ranks."""
    environment = dict(os.environ)
    for name, value in json.loads(environment.pop(REPLACED_VARIABLES, "{}")).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


class EventFiles:
    """TensorBoard's event files that a command writes below a folder; earlier files don't count."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._others = frozenset(self._paths())

    def _paths(self) -> Iterator[Path]:
        return self.folder.rglob("*tfevents*")

    def scalars(self) -> dict[int, tuple[float, dict[str, float]]]:
        """Return Unix time and values by tag of each step, in order.

        Raises:
            WorkloadError: there are no files, or they can't be read.
        """
        paths = sorted(set(self._paths()) - self._others)
        if not paths:
            hint = "give Workload.from_command the tensorboard= folder that the script writes to"
            raise WorkloadError(f"{self.folder}: the command has written no event files there", hint=hint)
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        except ImportError:
            problem = "event files can't be read: tensorboard is not installed"
            raise WorkloadError(problem, hint="pip install tensorboard") from None
        by_step: dict[int, tuple[float, dict[str, float]]] = {}
        for path in paths:
            events = EventAccumulator(str(path), size_guidance={"scalars": 0})
            events.Reload()
            for tag in events.Tags()["scalars"]:
                for event in events.Scalars(tag):
                    at_s, values = by_step.get(event.step, (event.wall_time, {}))
                    by_step[event.step] = max(at_s, event.wall_time), {**values, tag: float(event.value)}
        return dict(sorted(by_step.items()))


class _Program(subprocess.Popen[bytes]):
    """Command in processes of its own, in one process group."""

    @property
    def peak_bytes(self) -> int:
        from raypar.measure.memory import children_peak_bytes

        return children_peak_bytes() or 0

    def send_to_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def first_failed(self, last_lines: str) -> int | None:
        """Return the local rank that failed first, if it was another than the first, whose output was read."""
        failed = _FIRST_FAILED.search(last_lines)
        return int(failed[1]) if failed else None


def _may_fork(command: Command, job: TrialJob) -> bool:
    """Return whether forks of this rank may run the command's script: it has imported what the script does."""
    if command.shell or command.fresh_process or job.settings.isolation != "warm" or sys.platform != "linux":
        return False
    has_torch = any(name.partition(".")[0] == "torch" for name in job.revision.preload)
    return has_torch and len([*Path("/proc/self/task").iterdir()]) == 1  # a fork has one thread


class _CommandProcess:
    """Started command.

    Attributes:
        process: it runs the command.
        laps: times of its steps and reports.
        is_stopped: raypar has ended it.
    """

    def __init__(
        self,
        command: Command,
        words: tuple[str, ...],
        folder: Path,
        job: TrialJob,
        channel: Channel | None,
        context: RankContext,
        stack: contextlib.ExitStack,
        events_folder: Path,
        settings: Mapping[str, Any],
    ) -> None:
        self.laps, self.is_stopped = LapTimer(), False
        self._words, self._channel, self._reader = words, channel, OutputReader(command.metrics)
        self._launched_at_s = context.requested_at_s
        self._rank_folder = job.folder / f"{RANK_FOLDER}-{context.node_rank}"  # machines may share the trial's folder
        stack.callback(shutil.rmtree, self._rank_folder, ignore_errors=True)
        self._reported: set[str] = set()
        self._num_reports, self._last_lines = 0, deque[str](maxlen=MAX_ERROR_LINES)
        fifo = stack.enter_context(scratch_folder()) / "reports"
        os.mkfifo(fifo, 0o600)
        # Also open for writing, so that the file doesn't end with one of its writers.
        self._fifo = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
        stack.callback(os.close, self._fifo)
        inherited = _original_environment()
        environment = {
            **inherited,
            **without_other_ranks(self._rank_folder),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")]),
            "PYTHONUNBUFFERED": "1",  # a line is read, and timed, when it is printed
            "OMP_NUM_THREADS": str(job.spec.config["num_threads"]),
            REPORT_FILE: str(fifo),
            **observe.environment(events_folder, inherited, settings),
        }
        print(f"$ {shlex.join(words)}", flush=True)
        if not folder.is_dir():
            hint = "check folder= of the workload"
            raise WorkloadError(f"{folder}: there is no such folder", hint=hint)
        launch = None
        if _may_fork(command, job):
            launch = launch_of(words, environment["PATH"], folder, {**job.settings.environment, **context.environment})
        self.process: _Program | ForkedScript
        if launch is not None:
            self.process = ForkedScript(launch, environment, folder, self._rank_folder)
            return
        try:
            self.process = _Program(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except OSError as error:
            hint = "check the command's first word, a program in PATH or in the folder of this Python"
            raise WorkloadError(f"{words[0]}: can't be started: {error.strerror}", hint=hint) from None

    def wait(self, link: socket.socket | None) -> None:
        """Read the output until the command has ended or is stopped. Raises CommandFailed.

        Args:
            link: connection to the first machine; if it closes without `FINISHED`, this command is stopped. None: this
                is the first machine.
        """
        process, buffers = self.process, {"output": b"", "reports": b""}
        assert process.stdout is not None
        ended, has_ended = os.pipe()
        threading.Thread(target=lambda: (process.wait(), os.write(has_ended, b".")), daemon=True).start()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, "output")
            selector.register(self._fifo, selectors.EVENT_READ, "reports")
            selector.register(ended, selectors.EVENT_READ, "ended")
            if link is not None:
                selector.register(link, selectors.EVENT_READ, "link")
            is_over = False
            while True:
                ready = selector.select(0 if is_over else None)
                sources = {key.data: key for key, _ in ready}
                for source in buffers.keys() & sources.keys():
                    key = sources[source]
                    data = os.read(key.fd, 1 << 16)
                    if not data:  # its output is closed
                        selector.unregister(key.fileobj)
                    *lines, buffers[source] = (buffers[source] + data).replace(b"\r", b"\n").split(b"\n")
                    for line in lines:
                        self._take(source, line.decode(errors="replace"))
                if link is not None and "link" in sources:
                    selector.unregister(link)
                    if link.recv(len(FINISHED)) != FINISHED and process.poll() is None:
                        self._stop()
                if "ended" in sources and not is_over:
                    is_over = True
                    selector.unregister(ended)
                elif is_over and not buffers.keys() & sources.keys():
                    break
        os.close(ended)
        os.close(has_ended)
        if buffers["output"]:
            self._take("output", buffers["output"].decode(errors="replace"))
        for report, at_s in self._reader.rest():
            self._report(report, at_s, is_ordered=False)
        process.stdout.close()
        failed = process.first_failed("\n".join(self._last_lines))
        for text in lines_of_other_ranks(self._rank_folder):
            print(text, flush=True)
            if failed and text.startswith(f"[local rank {failed}] "):
                self._last_lines.append(text)
        if process.returncode and not self.is_stopped:
            raise CommandFailed(self._failure(process.returncode))

    def report_events(self, events: EventFiles) -> None:
        """Report the scalars of event files, one report per step. Raises WorkloadError.

        Their times are step times if there are no others. They are not used if a later step was written earlier, as
        when an evaluation counts separate steps.
        """
        laps, scalars = LapTimer(), events.scalars()
        moments_s = [at_s for at_s, _ in scalars.values()]
        if self.laps.result().source == UNTIMED and moments_s == sorted(moments_s):
            self.laps = laps
        to_monotonic_s = time.monotonic() - time.time()
        for step, (at_s, values) in scalars.items():
            if not self.is_stopped:
                laps.report({"step": float(step)}, at_s)
                self._send({"step": float(step), **values}, at_s + to_monotonic_s)

    def report_logged(self, logged: LoggedRun, metric: str) -> None:
        """Report the values of a metric that the command logged to MLflow, unless it has reported the metric.

        Their times are step times if there are no others.
        """
        if metric in self._reported:
            return
        laps, launched_at = LapTimer(), time.time() - (time.monotonic() - self._launched_at_s)
        for report in logged.reports(metric, launched_at):
            laps.report(report, self._launched_at_s + report[SINCE_LAUNCH])
            if not self.is_stopped:
                self._send(report, self._launched_at_s + report[SINCE_LAUNCH])
        if self.laps.result().source == UNTIMED:
            self.laps = laps

    def _take(self, source: str, line: str) -> None:
        if source == "output":
            print(line, flush=True)
            self._last_lines.append(line)
            for report, at_s in self._reader.reports(line, time.monotonic()):
                self._report(report, at_s, is_ordered=False)
            return
        with contextlib.suppress(ValueError, KeyError):
            content = json.loads(line)
            if "report" in content:
                self._report(content["report"], content["at_s"], is_ordered=True)
            else:
                self.laps.step(content["at_s"])

    def _report(self, metrics: Mapping[str, float], at_s: float, *, is_ordered: bool) -> None:
        self.laps.report(metrics, at_s, is_ordered=is_ordered)
        self._send(metrics, at_s)

    def _send(self, metrics: Mapping[str, float], at_s: float) -> None:
        self._num_reports += 1
        self._reported |= metrics.keys()
        report = {"epoch": self._num_reports, **metrics, SINCE_LAUNCH: at_s - self._launched_at_s}
        if self._channel is not None and not self._channel.report(report):
            self._channel = None
            self._stop()

    def _stop(self) -> None:
        self.is_stopped = True
        for number, grace_s in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, None)):
            self.process.send_to_all(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
                return

    def _failure(self, code: int) -> str:
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        last = next((line.strip() for line in reversed(self._last_lines) if line.strip()), "it printed nothing")
        return "\n".join([f"{shlex.join(self._words)} {how}: {last}", *self._last_lines])
