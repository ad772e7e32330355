"""Rank processes: forked from a warm server or started fresh, and supervised to their end.

The fork server is a single-threaded process that only imports torch and the packages that the study's files import.
Its forks skip torch's 1-3 s of imports and are otherwise pristine: generators, default dtype, threads, environment,
working folder and memory are those of the server, which runs no trial.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from raypar import units
from raypar.errors import Mistake
from raypar.measure import telemetry
from raypar.measure.breakdown import profile_of
from raypar.run.forkserver import REPLACED_ROOT, command, kill_group, replaced
from raypar.scratch import make_folder, remove_folder
from raypar.signals import is_running
from raypar.study.conditions import Conditions
from raypar.study.observation import Observation, ObservedRank
from raypar.study.profile import Profile
from raypar.study.quantity import BUILT_IN
from raypar.study.strategy import sync_period
from raypar.study.trial import (
    DataRecord,
    Failure,
    FailureKind,
    LoadSample,
    TrialResult,
    TrialSpec,
    TrialState,
    end_state,
    gang_step_times_s,
)
from raypar.train.job import REPLACED_VARIABLES, CheckJob, RankContext, RankOutcome, Revision, TrialJob
from raypar.train.position import Position
from raypar.train.requests import SERVER, Request

# DDP needs nn.parallel.
BASE_PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "raypar.train.loop", "raypar.train.worker")
# A rank that runs a command trains nothing. Forks of it may run the command's script.
COMMAND_PRELOAD = (
    *("torch", "torch.distributed.run", "torch.nn.parallel", "threadpoolctl"),
    *("raypar.train.worker", "raypar.train.command", "raypar.measure.memory", "raypar.measure.telemetry"),
)
LATE_PRELOAD = "raypar.train.rank_imports"

CLOSE_GRACE_S = 1.0
EXIT_GRACE_S = 5.0
CHECK_LIMIT_S = 60.0
LOG_TAIL_CHARS = 4000
LOG_HEAD_BYTES = LOG_TAIL_BYTES = 5 * 10**6  # kept of each rank's log
# Signals that a program hardly sends itself: the user, the system or raypar did.
SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Failures that the loss of a rank causes: its own, and those of its peers. A kill by raypar looks the same.
OF_LOST_RANKS = (FailureKind.KILLED, FailureKind.CRASH, FailureKind.PEER_LOST)

# With these glibc settings, a rank keeps the memory that it frees. By default, large tensors are returned to the kernel
# and paged in again in each step, which takes up to a third of its time.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(64 * 2**20)}


class RankProcess:
    """A started rank.

    Attributes:
        connection: connection to `raypar.train.worker.main`.
        was_killed: `kill` has ended it.
        resources: closed when it has ended.

    Args:
        exit_code: waits up to a number of seconds for its end; returns None while it runs.
    """

    def __init__(self, pid: int, connection: socket.socket, exit_code: Callable[[float], int | None]) -> None:
        self.pid, self.connection, self._exit_code = pid, Connection(connection.detach()), exit_code
        self.was_killed = False
        self.resources = contextlib.ExitStack()

    def begin(self, log_path: Path, listen: socket.socket | None = None) -> None:
        """Give the process its files. Raises OSError if it has ended."""
        with log_path.open("ab") as log:
            fds = [log.fileno(), *([listen.fileno()] if listen else [])]
            self.connection.send(len(fds))
            for fd in fds:
                send_handle(self.connection, fd, 0)

    def kill(self) -> None:
        """Kill the rank and every process that it started. Does nothing if it has ended."""
        self.was_killed = self.was_killed or is_running(self.pid)
        kill_group(self.pid)

    def join(self, timeout_s: float) -> int | None:
        """Wait for its end; return the exit code (negative: a signal), or None after the timeout."""
        code = self._exit_code(timeout_s)
        if code is not None:
            kill_group(self.pid)  # loader processes that outlived the rank
            self.resources.close()
        return code


class ForkServerLost(ConnectionError):
    """The fork server has ended."""

    def __init__(self) -> None:
        super().__init__("the fork server, the process that starts ranks, has ended")


@contextlib.contextmanager
def _loss_noticed() -> Iterator[None]:
    """Turn connection errors of an ended fork server into ForkServerLost."""
    try:
        yield
    except (EOFError, ConnectionError, FileNotFoundError):
        raise ForkServerLost from None


class ForkClient:
    """Connection to a fork server on this machine. Its ranks end when it closes.

    Args:
        forks_ahead: with each rank, request the process of the next one. It sleeps until it is needed, so that a trial
            does not wait for the fork.

    Raises:
        ForkServerLost: the server has ended.
    """

    def __init__(self, address: str, *, forks_ahead: bool = False) -> None:
        self._forks_ahead = forks_ahead
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix_socket, _loss_noticed():
            unix_socket.connect(address)
            self._connection = Connection(unix_socket.detach())
        self._requested: deque[socket.socket] = deque()  # connections to processes whose pids are not known yet
        self._asleep: RankProcess | None = None
        self._exit_codes: dict[int, int] = {}
        self.is_lost = False  # the server has ended, and that was noticed

    def wait_until_ready(self) -> str:
        """Wait until the server has imported its modules, before the first fork. Raises like `fork`.

        Returns:
            A notice for the user about modules that it has not imported; usually empty.
        """
        with _loss_noticed():
            self._connection.send((Request.READY, (), 0))
            return str(self._connection.recv()[1])

    def fork(self, log_path: Path, listen: socket.socket | None = None, *, is_check: bool = False) -> RankProcess:
        """Start a rank or a check, after the server has imported its modules.

        Raises:
            ForkServerLost: the server has ended.
        """
        process = self._begun_ahead(log_path, listen) if self._asleep or self._requested else None
        if process is None:
            self._request(Request.CHECK if is_check else Request.RANK)
            process = self._next_process()
            with _loss_noticed():
                process.begin(log_path, listen)
        if self._forks_ahead:
            with contextlib.suppress(ForkServerLost):  # the end of this rank will show it
                self._request(Request.AHEAD)
        return process

    def _begun_ahead(self, log_path: Path, listen: socket.socket | None) -> RankProcess | None:
        """Return the process that was forked ahead, with its files; None if it was killed."""
        process = self._next_process()
        with contextlib.suppress(OSError):
            process.begin(log_path, listen)
            return process
        process.connection.close()
        return None

    def _request(self, kind: Request) -> None:
        ours, theirs = socket.socketpair()
        self._requested.append(ours)
        with theirs, _loss_noticed():
            self._connection.send((kind, (), 1))
            send_handle(self._connection, theirs.fileno(), 0)

    def _next_process(self) -> RankProcess:
        while self._asleep is None:
            with _loss_noticed():
                self._receive()
        process, self._asleep = self._asleep, None
        return process

    def _receive(self) -> None:
        """Wait for and note the next process, or the end of one."""
        pid, code = self._connection.recv()
        if code is None:
            self._asleep = RankProcess(pid, self._requested.popleft(), partial(self._exit_code, pid))
        else:
            self._exit_codes[pid] = code

    def _exit_code(self, pid: int, timeout_s: float) -> int | None:
        while pid not in self._exit_codes:
            if self._connection.closed:
                return -signal.SIGKILL  # the forks go with it
            if not wait([self._connection], timeout_s):
                return None
            try:
                self._receive()
            except (EOFError, OSError):
                self.is_lost = True
                return -signal.SIGKILL  # the server's forks go with it
        return self._exit_codes.pop(pid)

    def close(self) -> None:
        self._connection.close()
        for connection in self._requested:
            connection.close()
        if self._asleep is not None:
            self._asleep.connection.close()


def answers(address: str) -> bool:
    """Return whether a fork server is alive at this address."""
    try:
        ForkClient(address).close()
    except OSError:
        return False
    return True


def check_workload(server: str, job: CheckJob, log_path: Path, limit_s: float = CHECK_LIMIT_S) -> list[Mistake]:
    """Return the mistakes in a workload's data and model, found by a fork of a server.

    Args:
        server: address of the fork server.
        log_path: file for the output of the workload's functions.

    Returns:
        The mistakes; none if the check exceeds the limit or its process dies. The trials will show why.
    """
    try:
        with contextlib.closing(ForkClient(server)) as client:
            process = client.fork(log_path, is_check=True)
            try:
                process.connection.send((job, None))
                kind, *answer = process.connection.recv() if process.connection.poll(limit_s) else ("",)
            finally:
                process.kill()
                process.join(EXIT_GRACE_S)
    except (EOFError, OSError):  # ForkServerLost is an OSError
        return []
    mistakes: list[Mistake] = answer[0] if kind == "checked" else []
    return mistakes


class ForkServer:
    """Owns a fork server process: the server ends with its owner, and the forks with the server."""

    def __init__(
        self,
        preload: tuple[str, ...] = (),
        sys_path: tuple[str, ...] = (),
        *,
        base_preload: tuple[str, ...] = BASE_PRELOAD,
        revision: Revision | None = None,
    ) -> None:
        # Other users can't read this folder, and so can't request forks.
        self.address = str(make_folder(socket=len("fork")) / "fork")
        server_end, self._owner_end = os.pipe()
        modules = (*base_preload, *preload)
        # Otherwise OpenBLAS starts threads on import, and forks of a multithreaded process are not pristine.
        replaced = {"OPENBLAS_NUM_THREADS": "1"} if modules else {}
        if modules:
            replaced[SERVER] = self.address
        if revision is None or not revision.is_command:
            replaced |= ALLOCATOR
        environment = {
            **os.environ,
            **replaced,
            REPLACED_VARIABLES: json.dumps({name: os.environ.get(name) for name in replaced}),
        }
        if revision is not None and revision.checkout is not None:
            environment |= revision_environment(revision)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(self.address)
            listener.listen(socket.SOMAXCONN)
            fds = (listener.fileno(), server_end)
            self._process = subprocess.Popen(
                command(
                    *fds,
                    modules,
                    python=revision.python if revision else "",
                    folders=sys_path,
                    late=LATE_PRELOAD if base_preload else "",
                ),
                pass_fds=fds,
                cwd=None if revision is None else revision.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self.pid = self._process.pid
        os.close(server_end)

    @classmethod
    def of(cls, revision: Revision) -> ForkServer:
        """Start the fork server of a version of the code."""
        base_preload = COMMAND_PRELOAD if revision.is_command else BASE_PRELOAD
        return cls(revision.preload, revision.sys_path, base_preload=base_preload, revision=revision)

    def close(self) -> None:
        os.close(self._owner_end)
        self._process.terminate()  # while importing, it doesn't notice its owner's end
        try:
            self._process.wait(CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_folder(Path(self.address).parent)


class ForkAgent:
    """Owner of a fork server, which it replaces if it ends. With Ray, an actor per node and revision."""

    def __init__(self, revision: Revision) -> None:
        self._make = partial(ForkServer.of, revision)
        self._server = self._make()

    def address(self) -> str:
        """Return the fork server's address; replace a dead server."""
        if not answers(self._server.address):
            self._server.close()
            self._server = self._make()
        return self._server.address

    def close(self) -> None:
        self._server.close()


def revision_environment(revision: Revision) -> dict[str, str]:
    """Return the environment variables that make an interpreter import a checkout's code and this process's raypar."""
    assert revision.repository is not None and revision.checkout is not None
    kept = (
        replaced(entry, revision.repository, revision.checkout)
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry
    )
    return {
        "PYTHONPATH": os.pathsep.join([revision.raypar_path, *filter(None, kept)]),
        REPLACED_ROOT: f"{revision.repository}{os.pathsep}{revision.checkout}",
    }


def spawn(log_path: Path, listen: socket.socket | None = None, revision: Revision | None = None) -> RankProcess:
    """Start a rank in a fresh interpreter: a fork server that imports nothing and runs one rank."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(ForkServer(base_preload=(), revision=revision)))
        client = stack.enter_context(contextlib.closing(ForkClient(server.address)))
        process = client.fork(log_path, listen)
        process.resources = stack.pop_all()
    return process


@dataclass(frozen=True)
class RankEnd:
    """End of a rank: an outcome or a failure. Both are missing if it could not begin."""

    outcome: RankOutcome | None = None
    failure: Failure | None = None
    cores_held_by: str = ""  # the study that holds cores which it needs, so it could not begin
    was_killed: bool = False  # by raypar, so its end explains nothing
    load: tuple[LoadSample, ...] = ()  # of its machine, from the first rank there
    position: Position = field(default_factory=Position)  # the last known one in its collective operations


def cause(first: Failure | None, end: RankEnd) -> Failure | None:
    """Return why a trial failed, as far as its ranks that have ended show.

    A rank that lost its peers may report before the peer whose death is the cause.

    Args:
        first: the cause before this rank ended.
    """
    if first is None or (first.kind is FailureKind.PEER_LOST and not end.was_killed):
        return end.failure or first
    return first


NO_CONDITIONS = Conditions()
OF_RANKS = {q.key: q.of_ranks for q in BUILT_IN if q.of_ranks is not None}  # attributes of `RankOutcome`


def trial_result(
    spec: TrialSpec,
    ends: Mapping[int, RankEnd],
    *,
    metric: str = "",
    reports: Sequence[Mapping[str, float]] = (),
    attempts: int = 1,
    started_at: float = 0.0,
    conditions: Conditions = NO_CONDITIONS,
    failure: Failure | None = None,
) -> TrialResult:
    """Combine the ends of a trial's ranks: each time is the slowest rank's, and conditions are kept per rank.

    Args:
        metric: the study's.
        started_at: Unix time.
        conditions: conditions known to the runner, without those of the ranks.
        failure: why the trial failed or does not fit. None: it fails only if no rank has an outcome and it has not
            diverged.
    """
    outcomes = [end.outcome for _, end in sorted(ends.items()) if end.outcome is not None and not end.outcome.is_idle]
    ended = TrialState.STOPPED if any(outcome.stopped for outcome in outcomes) else TrialState.FINISHED
    ended = end_state(ended, reports, metric)
    if ended is TrialState.DIVERGED:
        # A rank that waits for stopped ranks loses its connections, or is killed.
        failure = None if failure and failure.kind in OF_LOST_RANKS else failure
    elif failure is None and not outcomes:
        failure = Failure(FailureKind.CRASH, "was stopped before it had a result")
    state = ended
    if failure is not None:
        state = TrialState.DOES_NOT_FIT if failure.kind is FailureKind.DOES_NOT_FIT else TrialState.FAILED
    combined: dict[str, Any] = {}
    for name, combine in OF_RANKS.items():
        values = [value for outcome in outcomes if (value := getattr(outcome, name)) is not None]
        combined[name] = combine(values) if values else None
    is_known = all(outcome.num_samples for outcome in outcomes if outcome.observed)
    num_samples = sum(outcome.num_samples or 0 for outcome in outcomes) if is_known else 0
    train_time_s = combined["train_time_s"]
    conditions, energy_j = _measured(conditions, outcomes)
    observed = sorted(chain.from_iterable(outcome.observed for outcome in outcomes), key=lambda rank: rank.rank)
    result = TrialResult(
        spec=spec,
        state=state,
        attempts=attempts,
        started_at=started_at,
        **combined,
        throughput_samples_per_s=num_samples / train_time_s if num_samples and train_time_s else None,
        reports=tuple(reports),
        step_times_s=tuple(chain.from_iterable(map(_step_times_s, outcomes))),
        energy_j=energy_j,
        conditions=conditions,
        failure=failure,
        profile=_profile(outcomes, spec, observed),
        observation=Observation(ranks=tuple(observed)) if observed else None,
        data=next((outcome.data for outcome in outcomes if outcome.data), DataRecord()),
        load=tuple(chain.from_iterable(end.load for _, end in sorted(ends.items()))),
    )
    stalls_s = telemetry.stalls(gang_step_times_s(result), sync_period(spec.config))
    if stalls_s and not _start_epochs(observed, min(stalls_s)):
        result = replace(result, conditions=replace(conditions, stalls_s=tuple(stalls_s)))
    return result


def _step_times_s(outcome: RankOutcome) -> Iterator[tuple[float, ...]]:
    """Yield the step times of a rank, or of each rank that its command ran."""
    if outcome.observed_step_times_s:
        yield from outcome.observed_step_times_s
    elif outcome.step_times_s or outcome.conditions.steps_from is None:  # of a command, the first machine alone has any
        yield outcome.step_times_s


def _start_epochs(observed: Sequence[ObservedRank], step_s: float) -> bool:
    """Return whether steps as long as this wait for the first batch of an epoch: then they are no stalls."""
    firsts = [loader.first_batch_s or 0.0 for rank in observed for loader in rank.loaders if loader.num_iterations > 1]
    return max(firsts, default=0.0) >= step_s / 2


def _profile(outcomes: Sequence[RankOutcome], spec: TrialSpec, observed: Sequence[ObservedRank]) -> Profile | None:
    if observed:
        return Profile(
            ranks=tuple(rank.breakdown for rank in observed),
            num_steps=min(rank.num_steps - rank.num_warmup_steps for rank in observed),
            step_s=max(rank.breakdown.step_s for rank in observed),
            overhead=None,
            matches_collectives=False,
        )
    recorded = [outcome.profile for outcome in outcomes if outcome.profile is not None]
    return profile_of(recorded, spec.config) if recorded and len(recorded) == len(outcomes) else None


def _measured(conditions: Conditions, outcomes: Sequence[RankOutcome]) -> tuple[Conditions, float | None]:
    """Return the conditions including those of the ranks, and the total energy of their counters in joules."""
    ranks = [outcome.conditions for outcome in outcomes]
    counters = [outcome.counters for outcome in outcomes if outcome.counters is not None]
    if not counters or len(counters) < len(outcomes):
        return replace(conditions, ranks=tuple(ranks)), None
    loads = telemetry.other_loads(counters)
    ranks = [
        replace(rank, num_node_cores=counter.num_cores, other_load_cores=load)
        for rank, counter, load in zip(ranks, counters, loads, strict=True)
    ]
    reasons = dict.fromkeys(reason for counter in counters for reason in counter.no_energy)
    energy_j, energy_of = telemetry.energy(counters) or (None, "")
    conditions = replace(conditions, ranks=tuple(ranks), energy_of=energy_of, no_energy="; ".join(reasons))
    return conditions, energy_j


def supervise(
    process: RankProcess,
    job: TrialJob,
    context: RankContext,
    on_report: Callable[[int, Mapping[str, float], Position], bool],
    on_position: Callable[[Position], object],
) -> RankEnd:
    """Run a rank that has its job to its end. After its outcome, its process may need some time: see `await_end`.

    Args:
        on_report: called with the index, the metrics and the position of each report; returns whether the rank
            continues.
        on_position: called with the rank's position when it stands still, has moved again, or has left its loop.

    If another thread kills the process, this returns a failure.
    """
    end: RankEnd | None = None
    position = Position()
    rank, log_path = context.rank, job.log_path(context.rank)
    kills_before = num_memory_kills()
    sampling = job.settings.sampling if context.local_rank == 0 else None
    stack = contextlib.ExitStack()
    load = stack.enter_context(sampling()) if sampling else ()
    try:
        index = 0
        while end is None:
            match process.connection.recv():
                case ("report", metrics, position):
                    process.connection.send(on_report(index, metrics, position))
                    index += 1
                case ("position", position):
                    on_position(position)
                case ("done", outcome):
                    end = RankEnd(outcome=outcome)
                case ("error", kind, name, message, traceback):
                    is_plain = message and kind in (FailureKind.DOES_NOT_FIT, FailureKind.INVALID)
                    text = message if is_plain else f"{name}: {message}" if message else name
                    end = RankEnd(failure=Failure(kind, text, rank, traceback, str(log_path)))
    except (EOFError, OSError):
        pass  # the process has ended; its exit code says more
    finally:
        stack.close()
    if end is not None and end.outcome is not None:
        return replace(end, position=position, load=tuple(load))
    code = await_end(process, log_path)
    # The kernel's count is for the whole machine: it may have killed another program's process at the same moment.
    took_too_much = not process.was_killed and num_memory_kills() > kills_before
    if end is None:
        end = RankEnd(failure=_crash(rank, log_path, code, took_too_much), was_killed=process.was_killed)
    elif took_too_much and end.failure is not None and end.failure.kind is FailureKind.CRASH:  # of one of its loaders
        end = RankEnd(failure=replace(end.failure, kind=FailureKind.OUT_OF_MEMORY))
    return replace(end, position=position, load=tuple(load))


def await_end(process: RankProcess, log_path: Path) -> int | None:
    """Wait for the end of a rank's process, which must be near, and complete its log.

    Returns:
        Its exit code; None if it does not end.
    """
    if (code := process.join(EXIT_GRACE_S)) is None:
        process.kill()
        code = process.join(EXIT_GRACE_S)
    process.connection.close()
    drop_middle(log_path)
    return code


def _crash(rank: int, log_path: Path, code: int | None, took_too_much: bool) -> Failure:
    kind, how = FailureKind.CRASH, f"ended with exit code {code}"
    if code == -signal.SIGKILL and took_too_much:
        kind = FailureKind.OUT_OF_MEMORY
        how = "was killed by the kernel: the machine or its control group is out of memory"
    elif code is None:
        how = "did not end when it was killed"
    elif code < 0:
        kind = FailureKind.KILLED if -code in SENT_BY_OTHERS else FailureKind.CRASH
        how = f"was killed by {signal.Signals(-code).name}"
    log_end = ""  # in place of a traceback
    with contextlib.suppress(OSError):
        log_end = log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:]
    return Failure(kind, f"rank {rank} {how}", rank, log_end, str(log_path))


def drop_middle(log_path: Path) -> None:
    """Replace the middle of a long log with its size, once the log is complete."""
    with contextlib.suppress(OSError), log_path.open("r+b") as log:
        length = os.fstat(log.fileno()).st_size - LOG_HEAD_BYTES - LOG_TAIL_BYTES
        if length > 0:
            log.seek(-LOG_TAIL_BYTES, os.SEEK_END)
            tail = log.read()
            log.seek(LOG_HEAD_BYTES)
            log.write(f"\n… {units.size(length)} omitted …\n".encode() + tail)
            log.truncate()


def num_memory_kills() -> int:
    """Return the number of processes killed for their memory since this machine started; 0 without /proc/vmstat."""
    with contextlib.suppress(OSError):
        return int(dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines()).get("oom_kill", 0))
    return 0
