"""Runner without Ray, for tests, debugging, and machines that have no Ray. Its ranks are forked directly.

`raypar.run.dispatcher` decides what runs. Its gangs are threads of this process here.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import cloudpickle

from raypar.errors import BrokeOff
from raypar.run.dispatcher import ArtifactPiece, DispatchConfig, Dispatcher
from raypar.run.placement import Node
from raypar.run.pool import Gang, GangPolicy, Greeting, Pool, Turn, start_rank
from raypar.run.ranks import ForkAgent, ForkClient, ForkServerLost, RankEnd, RankProcess, await_end, supervise
from raypar.run.runner import GangReady, GangStarting, Listener, More
from raypar.run.trials import Attempt
from raypar.signals import uninterrupted
from raypar.study.study import Study
from raypar.study.trial import Failure, FailureKind, TrialSpec
from raypar.train.affinity import Core, cores_near_gpu, own_cores
from raypar.train.job import RankContext, Revision, RunSettings, TrialJob
from raypar.train.position import Position
from raypar.units import listed

if TYPE_CHECKING:
    from raypar.run.local_search import LocalSearch

MAX_SERVER_STARTS = 5  # consecutive starts of a fork server that ends before it is ready
HERE = Node("here", "here", {"CPU": sys.maxsize, "GPU": sys.maxsize})  # ranks may share cores and GPUs
# Events that are not passed on: gangs start instantly, and artifacts are in their place already.
HIDDEN = (GangStarting, GangReady, ArtifactPiece)


class LocalRunner:
    """Runs one trial after another, or those of a search as many at a time as it allows.

    Args:
        cores: cores that trials may use; None: all of this machine.
        servers: fork servers by revision label, which outlive this runner; None: the runner starts its own.
    """

    def __init__(
        self,
        settings: RunSettings,
        cores: Sequence[Core] | None = None,
        servers: Mapping[str, ForkAgent] | None = None,
    ) -> None:
        self._settings, self._cores = settings, tuple(own_cores() if cores is None else cores)
        self._revisions = settings.revisions or (settings.revision(),)
        self._owns_servers, self._servers = servers is None, dict(servers or {})
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> LocalRunner:
        if self._owns_servers and self._settings.isolation == "warm":
            for revision in self._revisions:
                server = self._resources.enter_context(contextlib.closing(ForkAgent(revision)))
                self._servers[revision.label] = server
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()
        self._servers.clear()

    def run(self, study: Study, specs: Sequence[TrialSpec], listener: Listener, more: More | None = None) -> None:
        """Run the specs (see `raypar.run.runner.Runner`)."""
        policy = GangPolicy(owns_cluster=True, max_parked=1, cores=self._cores, is_local=True)
        workload, metric = cloudpickle.dumps(study.workload), study.judged_by.name
        config = DispatchConfig(workload, self._settings, policy, study.max_retries, in_lockstep=False, metric=metric)
        to_run: Iterator[TrialSpec] = chain(specs, chain.from_iterable(iter(more, ())) if more else ())
        num_at_a_time = 1
        search: LocalSearch | None = None
        if study.is_search or study.scheduler is not None:
            from raypar.run.local_search import LocalSearch  # imports Ray Tune

            search = LocalSearch(study, specs, self._settings.auto, lambda spec: this_run.stop(spec))
            to_run, num_at_a_time = search.specs(), min(search.max_concurrent, max(1, len(self._cores)))
            config = replace(config, max_trials=num_at_a_time)
        this_run = _Run(config, listener, self._fork_address, search.note if search else None)
        try:
            for revision in self._revisions:
                self._fork_address(revision, this_run.notify)
            this_run.run(to_run, num_at_a_time)
        except KeyboardInterrupt:
            this_run.pass_on()  # keep the trials that have ended
            raise

    def _fork_address(self, revision: Revision, notify: Callable[[str], None]) -> str:
        """Return the address of the revision's ready fork server; empty if ranks are fresh interpreters.

        Raises:
            BrokeOff: several servers in a row ended before they were ready.
        """
        if (server := self._servers.get(revision.label)) is None:
            return ""
        for _ in range(MAX_SERVER_STARTS):
            address = server.address()
            with contextlib.suppress(ForkServerLost), contextlib.closing(ForkClient(address)) as client:
                if text := client.wait_until_ready():
                    notify(text)
                return address
        modules = listed(revision.preload, 5) or "torch"
        problem = f"the process that imports {modules} and starts ranks ended {MAX_SERVER_STARTS} times in a row"
        raise BrokeOff(problem, hint="`--isolation fresh` starts every rank in a new interpreter")


class _Run:
    """One run of the dispatcher. A thread that calls the dispatcher or the listener holds its lock."""

    def __init__(
        self,
        config: DispatchConfig,
        listener: Listener,
        fork_address: Callable[[Revision, Callable[[str], None]], str],
        observe: Listener | None,
    ) -> None:
        self._config, self._listener, self._fork_address = config, listener, fork_address
        self._observe = observe  # sees each event before the listener
        self._lock = threading.Condition()
        self._pool = Pool((HERE,), config.settings, config.gangs)
        self._dispatcher = Dispatcher(config, self._pool, (), call_later=self._call_later, on_change=self._on_change)
        self._num_events = 0
        self._processes: dict[RankProcess, Attempt] = {}  # running ranks
        self._served: set[str] = set()  # gangs that have a thread
        self._is_over = False

    def notify(self, text: str) -> None:
        with self._lock:
            self._dispatcher.notify(text)
            self.pass_on()

    def pass_on(self) -> None:
        """Pass on the dispatcher's events."""
        with self._lock, uninterrupted():
            for _, event in self._dispatcher.events.take(self._num_events):
                self._num_events += 1
                if not isinstance(event, HIDDEN):
                    if self._observe is not None:
                        self._observe(event)
                    self._listener(event)

    def stop(self, spec: TrialSpec) -> None:
        """Stop a running trial at its report."""
        self._dispatcher.release(spec.identity, let_finish=False)

    def run(self, specs: Iterator[TrialSpec], num_at_a_time: int) -> None:
        """Run trials to their ends."""
        if num_at_a_time == 1:  # in this thread, which signals interrupt
            self._run_trials(specs)
            return
        with ThreadPoolExecutor(num_at_a_time) as executor:
            try:
                threads = [executor.submit(self._run_trials, specs) for _ in range(num_at_a_time)]
                for thread in wait(threads, return_when=FIRST_EXCEPTION).done:
                    thread.result()
            except BaseException:  # here, since the executor waits at its end for its threads
                with self._lock:
                    self._is_over = True
                    for attempt in self._dispatcher.trials.running():
                        attempt.kill()
                        attempt.end()
                    self._on_change()
                raise

    def _run_trials(self, specs: Iterator[TrialSpec]) -> None:
        """Run one trial after another to its end. Threads that share the trials may run each other's."""
        while True:
            with self._lock:
                if self._is_over or (spec := next(specs, None)) is None:
                    return
                self._dispatcher.define(spec.identity, spec)
                self._dispatcher.release(spec.identity, let_finish=True)  # drop it once it is over
            self.pass_on()
            while (gang := self._gang_for(spec)) is not None:
                self._serve(gang, spec)
                with self._lock:
                    del self._pool.gangs[gang.id]
                    self._served.remove(gang.id)
                    self._dispatcher.dispatch()  # another trial may have waited for this gang
            self.pass_on()

    def _is_waiting(self, spec: TrialSpec) -> bool:
        """Return whether a trial has not ended."""
        return not self._is_over and self._dispatcher.trials.get(spec.identity) is not None

    def _gang_for(self, spec: TrialSpec) -> Gang | None:
        """Wait for a gang without a thread; None: the trial has ended meanwhile."""
        with self._lock:
            free = [gang for gang in self._pool.gangs.values() if gang.id not in self._served]
            while not free and self._is_waiting(spec):
                self._lock.wait()
                free = [gang for gang in self._pool.gangs.values() if gang.id not in self._served]
            if not self._is_waiting(spec):
                return None
            self._served.add(free[0].id)
            return free[0]

    def _serve(self, gang: Gang, spec: TrialSpec) -> None:
        """Act as a gang's workers for one trial, usually this one."""
        address = self._fork_address(self._config.settings.revision(gang.placement.revision), self.notify)
        name, size, on_gpu = socket.gethostname(), gang.placement.num_workers, gang.placement.device == "cuda"
        with socket.socket() as listen:
            listen.bind(("127.0.0.1", 0))
            listen.listen(max(128, 2 * size))
            with self._lock:
                for rank in range(size):
                    near = cores_near_gpu(rank) if on_gpu else frozenset[int]()
                    context = RankContext(rank, size, rank, size, node_rank=0)
                    self._dispatcher.worker_is_up(gang.id, Greeting(HERE.id, HERE.machine, name, context, (), near))
                for rank in range(size):
                    self._dispatcher.worker_is_ready(gang.id, rank, listen.getsockname())
                self._lock.wait_for(lambda: gang.turn is not None or not self._is_waiting(spec))
                turn = gang.turn
            self.pass_on()
            if turn is not None:  # otherwise the trial was refused
                self._run_turn(gang, turn, address, listen)

    def _run_turn(self, gang: Gang, turn: Turn, fork_address: str, listen: socket.socket) -> None:
        attempt = self._dispatcher.trials.attempt(turn.uid, turn.attempt)
        assert attempt is not None
        job = self._config.settings.job(turn.spec, turn.attempt, self._config.workload, turn.uid)
        with ThreadPoolExecutor(len(gang.workers)) as executor:
            try:
                ranks = [
                    executor.submit(self._run_rank, attempt, job, turn, worker.context, fork_address, listen)
                    for worker in gang.workers.values()
                ]
                for each in ranks:
                    each.result()
            except BaseException:  # here, since the executor waits at its end for its threads, which wait for the ranks
                with self._lock:
                    attempt.kill()
                    attempt.end()
                    self._on_change()
                raise

    def _run_rank(
        self,
        attempt: Attempt,
        job: TrialJob,
        turn: Turn,
        context: RankContext,
        fork_address: str,
        listen: socket.socket,
    ) -> None:
        def on_position(position: Position) -> None:
            with self._lock:
                self._dispatcher.note_position(attempt, context.rank, position)

        def on_report(index: int, metrics: Mapping[str, float], position: Position) -> bool:
            with self._lock:
                of_first = None if context.rank else metrics
                self._dispatcher.rank_reported(attempt, context.rank, index, of_first, position)
                self.pass_on()
                self._lock.wait_for(lambda: attempt.is_reported(index))
                return attempt.continues(index)

        try:
            with contextlib.ExitStack() as stack:
                forks = stack.enter_context(contextlib.closing(ForkClient(fork_address))) if fork_address else None
                process, context = start_rank(job, turn, context, forks, listen)
                with self._lock:
                    self._processes[process] = attempt
                    self._on_change()  # the attempt may have been killed meanwhile
                end = supervise(process, job, context, on_report, on_position)
                if end.outcome is not None:
                    await_end(process, job.log_path(context.rank))
                with self._lock:
                    del self._processes[process]
        except ForkServerLost as error:
            end = RankEnd(failure=Failure(FailureKind.GANG_LOST, f"no rank was started: {error}"))
        with self._lock:
            if not attempt.is_over:
                self._dispatcher.rank_ended(attempt, context.rank, end)

    def _on_change(self) -> None:
        self._lock.notify_all()
        for process, attempt in self._processes.items():
            if attempt.kill_requested:
                process.kill()

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> threading.Timer:
        def call_now() -> None:
            with self._lock:
                call()

        timer = threading.Timer(delay_s, call_now)
        timer.daemon = True
        timer.start()
        return timer
