"""Trials on this machine without Ray: ranks are forked directly. For tests, debugging, and machines without Ray."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType

import cloudpickle

from raypar.run.placement import CoreLeases
from raypar.run.ranks import ForkClient, ForkServer, RankEnd, RankProcess, SpawnedRank, cause, supervise, trial_result
from raypar.run.runner import Listener, TrialEnded, TrialReported, TrialRetried, TrialStarted, is_retried
from raypar.study.study import Study
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec
from raypar.train.affinity import host_cores
from raypar.train.job import RankContext, RunSettings, TrialJob


class LocalRunner:
    """Runs one trial after the other; a search needs Ray."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._server: ForkServer | None = None

    def __enter__(self) -> LocalRunner:
        if self._settings.isolation == "warm":
            self._server = ForkServer(self._settings.preload, self._settings.sys_path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server:
            self._server.close()
            self._server = None

    def run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener) -> None:
        workload = cloudpickle.dumps(study.workload)
        for spec in specs:
            for attempt in range(1, study.max_retries + 2):
                listener(TrialStarted(spec, attempt))
                result = self._run_trial(TrialJob(spec, attempt, workload, self._settings), listener)
                if result.failure is None or not is_retried(result.failure, attempt, study.max_retries):
                    break
                listener(TrialRetried(spec, result.failure.message))
            listener(TrialEnded(result))

    def _run_trial(self, job: TrialJob, listener: Listener) -> TrialResult:
        spec = job.spec
        started_at, requested_at_s = time.time(), time.monotonic()
        world_size = spec.placement.num_workers
        here, affinity = dict.fromkeys(range(world_size), "here"), spec.config.get("cpu_affinity")
        leases = CoreLeases()
        leases.add_host("here", host_cores())
        if (why_not := leases.refusal(here, affinity)) is not None:
            refused = Failure(FailureKind.REFUSED, why_not)
            return trial_result(spec, {}, attempts=job.attempt, started_at=started_at, failure=refused)
        cores = leases.lease(here, spec.placement.cpus_per_worker, affinity) or {}  # one trial at a time: all are free
        reports: list[Mapping[str, float]] = []
        failures: list[Failure] = []
        processes: list[RankProcess] = []
        lock = threading.Lock()

        def kill_all() -> None:
            for process in processes:
                process.kill()

        def on_report(rank: int, metrics: Mapping[str, float]) -> bool:
            if rank == 0:
                reports.append(metrics)
                listener(TrialReported(spec, metrics))
            return True

        def run_rank(context: RankContext, process: RankProcess) -> RankEnd:
            end = supervise(process, job, context, lambda _, metrics: on_report(context.rank, metrics))
            if end.failure is not None:
                with lock:
                    failures[:1] = [cause(failures[0] if failures else None, end) or end.failure]
                kill_all()  # others may hang in a collective
            return end

        timer: threading.Timer | None = None
        with contextlib.ExitStack() as stack:
            listen = stack.enter_context(socket.socket())
            listen.bind(("127.0.0.1", 0))
            listen.listen()
            contexts = []
            stack.push(lambda kind, *_: kill_all() if kind else None)
            for rank in range(world_size):
                log_path = job.log_path(rank)
                log_path.parent.mkdir(parents=True, exist_ok=True)
                master = listen if rank == 0 else None
                if self._server:
                    client = ForkClient(self._server.address)
                    stack.callback(client.close)
                    processes.append(client.fork(log_path, master))
                else:
                    processes.append(SpawnedRank(log_path, master))
                contexts.append(
                    RankContext(
                        rank=rank,
                        world_size=world_size,
                        local_rank=rank,
                        local_world_size=world_size,
                        node_rank=0,
                        master_address=listen.getsockname(),
                        requested_at_s=requested_at_s,
                        cores=cores.get(rank, ()),
                    )
                )
            if self._settings.trial_timeout_s is not None:
                limit_s = self._settings.trial_timeout_s

                def too_long() -> None:
                    with lock:
                        failures.append(
                            Failure(FailureKind.HUNG, f"took longer than {limit_s:g} s", log_path=str(job.log_path(0)))
                        )
                    kill_all()

                timer = threading.Timer(limit_s, too_long)
                timer.start()
            try:
                with ThreadPoolExecutor(world_size) as pool:
                    try:
                        each = zip(contexts, processes, strict=True)
                        ranks = [pool.submit(run_rank, *one) for one in each]
                        wait(ranks)
                        ends = [rank.result() for rank in ranks]
                    except BaseException:  # here: at its end the pool waits for its threads, and they for the ranks
                        kill_all()
                        raise
            finally:
                if timer:
                    timer.cancel()
        return trial_result(
            spec,
            dict(enumerate(ends)),
            reports=reports,
            attempts=job.attempt,
            started_at=started_at,
            environment={"node": [socket.gethostname()] * world_size},
            failure=failures[0] if failures else None,
        )
