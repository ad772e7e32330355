"""Runner without Ray, for tests, debugging, and machines that have no Ray. Its ranks are forked directly.

`raypar.run.dispatcher` decides what runs. Its gangs are threads of this process here.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import cloudpickle

from raypar.errors import BrokeOff
from raypar.run.dispatcher import ArtifactPiece, DispatchConfig, Dispatcher
from raypar.run.placement import Node
from raypar.run.pool import Gang, GangPolicy, Greeting, Pool, Turn, start_rank
from raypar.run.ranks import ForkAgent, ForkClient, ForkServerLost, RankEnd, RankProcess, await_end, supervise
from raypar.run.runner import Event, GangReady, GangStarting, Listener, More
from raypar.run.trials import Attempt
from raypar.signals import uninterrupted
from raypar.study.study import Study
from raypar.study.trial import Failure, FailureKind, TrialSpec
from raypar.train.affinity import Core, cores_near_gpu, own_cores
from raypar.train.job import RankContext, Revision, RunSettings, TrialJob
from raypar.train.position import Position
from raypar.units import listed

MAX_SERVER_STARTS = 5  # consecutive starts of a fork server that ends before it is ready
HERE = Node("here", "here", {"CPU": sys.maxsize, "GPU": sys.maxsize})  # ranks may share cores and GPUs
# Events that are not passed on: gangs start instantly, and artifacts are in their place already.
HIDDEN = (GangStarting, GangReady, ArtifactPiece)


class LocalRunner:
    """Runs one trial after another.

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
        this_run = _Run(config, listener, self._fork_address)
        try:
            for revision in self._revisions:
                self._fork_address(revision, this_run.notify)
            for spec in self._specs(study, specs, this_run, more):
                this_run.run(spec)
        except KeyboardInterrupt:
            this_run.pass_on()  # keep the trials that have ended
            raise

    def _specs(
        self, study: Study, specs: Sequence[TrialSpec], this_run: _Run, more: More | None
    ) -> Iterable[TrialSpec]:
        if not study.is_search and study.scheduler is None:
            return chain(specs, chain.from_iterable(iter(more, ())) if more else ())
        from raypar.run.local_search import LocalSearch  # imports Ray Tune

        search = LocalSearch(study, specs, self._settings.auto, this_run.stop)
        this_run.observe = search.note
        return search.specs()

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
        self, config: DispatchConfig, listener: Listener, fork_address: Callable[[Revision, Callable[[str], None]], str]
    ) -> None:
        self._config, self._listener, self._fork_address = config, listener, fork_address
        self._lock = threading.Condition()
        self._pool = Pool((HERE,), config.settings, config.gangs)
        self._dispatcher = Dispatcher(config, self._pool, (), call_later=self._call_later, on_change=self._on_change)
        self._num_events = 0
        self._attempt: Attempt | None = None  # the last one
        self._processes: set[RankProcess] = set()  # its running ranks
        self.observe: Callable[[Event], object] = lambda _: None  # sees each event before the listener

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
                    self.observe(event)
                    self._listener(event)

    def stop(self, spec: TrialSpec) -> None:
        """Stop a running trial at its report."""
        self._dispatcher.release(spec.identity, let_finish=False)

    def run(self, spec: TrialSpec) -> None:
        """Run a trial to its end."""
        with self._lock:
            self._dispatcher.define(spec.identity, spec)
            self._dispatcher.release(spec.identity, let_finish=True)  # drop it once it is over
        self.pass_on()
        while self._dispatcher.trials.get(spec.identity) is not None:
            (gang,) = self._pool.gangs.values()
            self._serve(gang)
            del self._pool.gangs[gang.id]
        self.pass_on()

    def _serve(self, gang: Gang) -> None:
        """Act as a gang's workers for one trial."""
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
            self.pass_on()
            if gang.turn is not None:  # otherwise the trial was refused
                self._run_turn(gang, gang.turn, address, listen)

    def _run_turn(self, gang: Gang, turn: Turn, fork_address: str, listen: socket.socket) -> None:
        self._attempt = attempt = self._dispatcher.trials.attempt(turn.uid, turn.attempt)
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
                    self._processes.add(process)
                    self._on_change()  # the attempt may have been killed meanwhile
                end = supervise(process, job, context, on_report, on_position)
                if end.outcome is not None:
                    await_end(process, job.log_path(context.rank))
                with self._lock:
                    self._processes.remove(process)
        except ForkServerLost as error:
            end = RankEnd(failure=Failure(FailureKind.GANG_LOST, f"no rank was started: {error}"))
        with self._lock:
            if not attempt.is_over:
                self._dispatcher.rank_ended(attempt, context.rank, end)

    def _on_change(self) -> None:
        self._lock.notify_all()
        if self._attempt is not None and self._attempt.kill_requested:
            for process in self._processes:
                process.kill()

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> threading.Timer:
        def call_now() -> None:
            with self._lock:
                call()

        timer = threading.Timer(delay_s, call_now)
        timer.daemon = True
        timer.start()
        return timer
