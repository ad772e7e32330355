"""Trials on this machine without Ray: ranks are forked directly. For tests, debugging, and machines without Ray."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import cloudpickle

from raypar.errors import BrokeOff
from raypar.files import make_private_folder
from raypar.run.placement import CoreLeases
from raypar.run.ranks import (
    EXIT_GRACE_S,
    ForkAgent,
    ForkClient,
    ForkServerLost,
    RankEnd,
    RankProcess,
    cause,
    spawn,
    supervise,
    trial_result,
)
from raypar.run.runner import (
    Listener,
    More,
    Notice,
    StoppedPoints,
    TrialEnded,
    TrialReported,
    TrialRetried,
    TrialStarted,
    ends_training,
    is_retried,
)
from raypar.run.standstill import Standstill, explained
from raypar.study.conditions import Conditions
from raypar.study.study import Study
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec
from raypar.train.affinity import Core, cores_near_gpu, host_cores
from raypar.train.job import RankContext, Revision, RunSettings, TrialJob
from raypar.train.position import Position
from raypar.units import listed

MAX_SERVER_STARTS = 5  # in a row, of a fork server that ends before it is ready


class LocalRunner:
    """Runs one trial after the other; a search needs Ray.

    Args:
        cores: that trials may use; None: all of this machine.
        servers: fork servers by the label of their revision, which go on when this ends; None: it has its own.
    """

    def __init__(
        self,
        settings: RunSettings,
        cores: Sequence[Core] | None = None,
        servers: Mapping[str, ForkAgent] | None = None,
    ) -> None:
        self._settings, self._cores = settings, host_cores() if cores is None else cores
        self._owns_servers, self._servers = servers is None, dict(servers or {})
        self._notices: set[str] = set()  # of the servers, as shown
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> LocalRunner:
        if self._owns_servers and self._settings.isolation == "warm":
            for revision in self._settings.revisions or (self._settings.revision(),):
                server = self._resources.enter_context(contextlib.closing(ForkAgent(revision)))
                self._servers[revision.label] = server
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()
        self._servers.clear()

    def _fork_address(self, revision: Revision, listener: Listener) -> str | None:
        """Return where the revision's fork server is ready; None where ranks are fresh interpreters.

        Raises:
            BrokeOff: servers end before they are ready, one after the other.
        """
        if (server := self._servers.get(revision.label)) is None:
            return None
        for _ in range(MAX_SERVER_STARTS):
            address = server.address()
            with contextlib.suppress(ForkServerLost), contextlib.closing(ForkClient(address)) as client:
                text = client.wait_until_ready()
                if text and text not in self._notices:
                    self._notices.add(text)
                    listener(Notice(text))
                return address
        modules = listed(revision.preload, 5) or "torch"
        problem = f"the process that imports {modules} and starts ranks ended {MAX_SERVER_STARTS} times in a row"
        raise BrokeOff(problem, hint="`--isolation fresh` starts every rank in an interpreter of its own")

    def run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener, more: More | None = None) -> None:
        """Run the specs (see `raypar.run.runner.Runner`)."""
        workload, stopped, notice = cloudpickle.dumps(study.workload), StoppedPoints(), None
        for revision in self._settings.revisions or (self._settings.revision(),):
            self._fork_address(revision, listener)
        for spec in chain(specs, chain.from_iterable(iter(more, ())) if more else ()):
            if (refusal := stopped.refusal(spec)) is not None:
                listener(TrialEnded(trial_result(spec, {}, started_at=time.time(), failure=refusal)))
                continue
            for attempt in range(1, study.max_retries + 2):
                listener(TrialStarted(spec, attempt))
                job = self._settings.job(spec, attempt, workload)
                address = self._fork_address(job.revision, listener)
                result = _LocalAttempt(job, study.judged_by.name, listener, address, self._cores).run()
                notice = stopped.note(spec, result.failure, has_reported=bool(result.reports))
                if result.failure is None or not is_retried(result.failure, attempt, study.max_retries):
                    break
                if stopped.refusal(spec) is not None:
                    break
                listener(TrialRetried(spec, result.failure.message))
            listener(TrialEnded(result))
            if notice is not None:
                listener(Notice(notice))


class _LocalAttempt:
    """One attempt at a trial: its ranks are started, supervised and killed together."""

    def __init__(
        self, job: TrialJob, metric: str, listener: Listener, fork_address: str | None, cores: Sequence[Core]
    ) -> None:
        self._job, self._metric, self._listener, self._cores = job, metric, listener, cores
        self._fork_address = fork_address
        self._world_size = job.spec.placement.num_workers
        self._reports: list[Mapping[str, float]] = []
        self._processes: list[RankProcess] = []
        self._failure: Failure | None = None
        self._changed = threading.Condition()  # what its ranks have reported, and why it failed
        self._has_first_ended = False  # rank 0
        self._standstill = Standstill(self._world_size, str(job.log_path(0)))

    def run(self) -> TrialResult:
        started_at, spec = time.time(), self._job.spec
        hosts, affinity = dict.fromkeys(range(self._world_size), "here"), spec.config.get("cpu_affinity")
        leases = CoreLeases()
        leases.add_host("here", self._cores)
        ends: dict[int, RankEnd] = {}
        if (reason := leases.refusal(hosts, affinity)) is not None:
            self._failure = Failure(FailureKind.REFUSED, reason)
        else:  # one trial at a time: all cores are free
            near = {rank: cores_near_gpu(rank) for rank in hosts} if spec.placement.device == "cuda" else {}
            cores = leases.lease(hosts, spec.placement.cpus_per_worker, affinity, near) or {}
            try:
                ends = self._run_ranks(cores)
            except ForkServerLost as error:  # those that were started have been killed
                for process in self._processes:
                    process.join(EXIT_GRACE_S)
                self._failure = Failure(FailureKind.GANG_LOST, f"no rank was started: {error}")
        return trial_result(
            spec,
            ends,
            metric=self._metric,
            reports=self._reports,
            attempts=self._job.attempt,
            started_at=started_at,
            conditions=Conditions(node=(socket.gethostname(),) * self._world_size if ends else ()),
            failure=explained(self._failure, ends),
        )

    def _run_ranks(self, cores: Mapping[int, tuple[int, ...]]) -> dict[int, RankEnd]:
        requested_at_s, limit_s, size = time.monotonic(), self._job.settings.trial_timeout_s, self._world_size
        with contextlib.ExitStack() as stack:
            listen = stack.enter_context(socket.socket())
            listen.bind(("127.0.0.1", 0))
            listen.listen()
            address = listen.getsockname()
            stack.push(lambda kind, *_: self._kill() if kind else None)
            for rank in range(size):
                self._start(rank, listen if rank == 0 else None, stack)
            all_cores = tuple(core for rank in range(size) for core in cores.get(rank, ()))
            contexts = [
                RankContext(
                    rank, size, rank, size, 0, address, requested_at_s, cores.get(rank, ()), node_cores=all_cores
                )
                for rank in range(size)
            ]
            if limit_s is not None:
                timer = threading.Timer(limit_s, self._time_out, (limit_s,))
                timer.start()
                stack.callback(timer.cancel)
            with ThreadPoolExecutor(size) as pool:
                try:
                    return dict(enumerate(pool.map(self._supervise, self._processes, contexts)))
                except BaseException:  # here: at its end the pool waits for its threads, and they for the ranks
                    self._kill()
                    raise

    def _start(self, rank: int, listen: socket.socket | None, stack: contextlib.ExitStack) -> None:
        log_path = self._job.log_path(rank)
        make_private_folder(log_path.parent)
        if self._fork_address is None:
            self._processes.append(spawn(log_path, listen, self._job.revision))
            return
        client = stack.enter_context(contextlib.closing(ForkClient(self._fork_address)))
        self._processes.append(client.fork(log_path, listen))

    def _supervise(self, process: RankProcess, context: RankContext) -> RankEnd:
        spec = self._job.spec

        def on_position(position: Position) -> None:
            with self._changed:
                failure = self._standstill.note(context.rank, position)
                self._failure = self._failure or failure
            if failure is not None:
                self._kill()

        def on_report(index: int, metrics: Mapping[str, float], position: Position) -> bool:
            def is_reported() -> bool:
                return len(self._reports) > index or self._has_first_ended

            with self._changed:
                if context.rank == 0:
                    self._reports.append(metrics)
                    self._changed.notify_all()
                if not is_reported():
                    on_position(replace(position, is_out=True))
                # All ranks stop at the same report, which rank 0's decides.
                self._changed.wait_for(is_reported)
                self._standstill.note(context.rank, position)
                decisive = self._reports[index] if index < len(self._reports) else {}
            if context.rank == 0:
                self._listener(TrialReported(spec, metrics))
            return not ends_training(spec, decisive, self._metric)

        end = supervise(process, self._job, context, on_report, on_position)
        with self._changed:
            self._has_first_ended |= context.rank == 0
            self._changed.notify_all()
            if end.failure is not None:
                self._failure = cause(self._failure, end)
        if end.failure is not None:
            self._kill()  # others may hang in a collective
        return end

    def _time_out(self, limit_s: float) -> None:
        hung = Failure(FailureKind.HUNG, f"took longer than {limit_s:g} s", log_path=str(self._job.log_path(0)))
        with self._changed:
            self._failure = self._failure or hung
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
