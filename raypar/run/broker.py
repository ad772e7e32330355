"""The broker: an actor that owns a study's gangs and brings trials and gangs together.

Tune's trials ask it to run something (`submit`, `follow`), gangs' workers ask it for work (`hello`,
`next_assignment`, `report`, `finish`), the driver hears what happens (`news`) and takes results (`take`). A trial runs
in an idle gang of its placement, else in a new one; cores are leased for the time of a trial, so that parked gangs
hold none.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from raypar.run.capacity import CoreLeases, fits
from raypar.run.events import Event, GangReady, GangStarting, Notice, TrialReported, TrialRetried, TrialStarted
from raypar.run.gang import Assignment, ForkAgent, Greeting, train_gang
from raypar.run.runner import RunSettings, is_retried
from raypar.run.supervise import RankEnd
from raypar.study.trial import Failure, FailureKind, Placement, TrialResult, TrialSpec
from raypar.train.job import merge

POLL_S = 10.0  # how long a question waits for news before it is asked anew
LEASE_S = 60.0  # a trial whose Tune trainable asks nothing for so long has lost it
CLOSE_S = 10.0
TINY_CPU = 0.001  # what a worker reserves in Ray where the broker alone decides about the cores


@dataclass(frozen=True)
class BrokerConfig:
    """What is the same for all trials of a run.

    Attributes:
        owns_cluster: nobody else uses this Ray: gangs reserve next to no CPU, and the broker's leases keep trials
            apart. Otherwise gangs reserve what they need, and parked ones make room for others.
        in_lockstep: after each report a trial waits for Tune's decision (a scheduler decides on it).
        max_parked_gangs: more idle gangs than this are closed, least recently used first.
    """

    workload: bytes
    settings: RunSettings
    max_retries: int
    owns_cluster: bool
    in_lockstep: bool
    max_parked_gangs: int


@dataclass(eq=False)
class _Run:
    """A trial that was submitted."""

    spec: TrialSpec
    attempt: int = 1
    gang: _Gang | None = None
    reports: list[Mapping[str, float]] = field(default_factory=list)
    verdicts: dict[int, bool] = field(default_factory=dict)  # of report i: go on?
    decided: int = -1  # the last report that Tune has decided on
    stop_wanted: bool = False
    kill: bool = False
    ends: dict[int, RankEnd] = field(default_factory=dict)
    first_failure: Failure | None = None
    started_at: float = 0.0
    started_s: float = 0.0
    cores: dict[int, tuple[int, ...]] = field(default_factory=dict)
    result: TrialResult | None = None
    followed_s: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Gang:
    """A gang that was started."""

    id: str
    placement: Placement
    started_s: float = field(default_factory=time.monotonic)
    last_used_s: float = field(default_factory=time.monotonic)
    workers: dict[int, Greeting] = field(default_factory=dict)
    runs: list[_Run] = field(default_factory=list)  # by turn
    waiting: set[int] = field(default_factory=set)  # ranks that are ready for the next turn
    current: _Run | None = None
    master_address: tuple[str, int] = ("", 0)
    closing: bool = False

    @property
    def is_idle(self) -> bool:
        return self.current is None and not self.closing and len(self.waiting) == self.placement.num_workers


class Broker:
    """See the module. Every method runs on one event loop, so that none is interrupted between two awaits."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._changed = asyncio.Condition()
        self._runs: dict[str, _Run] = {}
        self._queue: list[tuple[str, _Run]] = []
        self._gangs: dict[str, _Gang] = {}
        self._numbers = itertools.count(1)
        self._news: list[Event] = []
        self._agents: dict[str, tuple[Any, asyncio.Future[tuple[str, tuple[int, ...]]]]] = {}
        self._cores = CoreLeases()
        self._waits_for_nodes: set[Placement] = set()
        # Importing TorchTrainer takes seconds: alongside the fork server's imports, not after them.
        threading.Thread(target=_import_trainer, daemon=True).start()

    async def start(self) -> None:
        """Start a fork server on every node, before the first gang asks for one."""
        self._loop = asyncio.get_running_loop()
        self._me = ray.get_runtime_context().current_actor
        self._housekeeper = asyncio.ensure_future(self._keep_house())
        if self._config.settings.isolation == "warm":
            for node in ray.nodes():
                if node["Alive"]:
                    self._agent(node["NodeID"])

    # ---- for Tune's trials

    async def define(self, uid: str, spec: TrialSpec) -> None:
        """Say what the Tune trial `uid` is to do, and queue it."""
        run = _Run(spec)
        self._runs[uid] = run
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not fits(spec.placement, nodes):
            if _may_grow():
                if spec.placement not in self._waits_for_nodes:
                    self._waits_for_nodes.add(spec.placement)
                    self._tell(
                        Notice(f"waiting for nodes: {spec.placement} does not fit on the {len(nodes)} there are")
                    )
            else:
                failure = Failure(FailureKind.REFUSED, f"{spec.placement} can never fit on the cluster's nodes")
                self._conclude(run, failure)
                await self._wake()
                return
        self._queue.append((uid, run))
        await self._wake()

    async def follow(self, uid: str, after: int) -> tuple[list[Mapping[str, float]], str | None]:
        """The reports after the first `after`, and the final state where the trial is over; waits for either.

        Asking with a larger `after` says that Tune wants the trial to go on past the reports before.
        """
        async with self._changed:
            await self._until(lambda: uid in self._runs, POLL_S)
            run = self._runs.get(uid)
            if run is None:
                return [], None
            run.decided = max(run.decided, after - 1)
            self._changed.notify_all()
            run.followed_s = float("inf")
            try:
                await self._until(lambda: len(run.reports) > after or run.result is not None, POLL_S)
            finally:
                run.followed_s = time.monotonic()
            return run.reports[after:], run.result.state.value if run.result else None

    async def stop(self, uid: str) -> None:
        """End a trial at its next report; kill it where it doesn't get there in time."""
        run = self._runs.get(uid)
        if run is None or run.result is not None:
            return
        run.stop_wanted = True
        if run.gang is None:
            self._queue = [(u, r) for u, r in self._queue if r is not run]
            self._conclude(run, None)
        else:
            self._loop.call_later(self._config.settings.stop_grace_s, self._kill_soon, run, run.attempt)
        await self._wake()

    async def take(self, uid: str) -> TrialResult:
        """A trial's result, once it is over; the broker forgets the trial."""
        async with self._changed:
            await self._changed.wait_for(lambda: uid in self._runs and self._runs[uid].result is not None)
        result = self._runs.pop(uid).result
        assert result is not None
        return result

    async def news(self) -> list[Event]:
        """What has happened since it was last asked; waits for something, though not for ever."""
        async with self._changed:
            await self._until(lambda: bool(self._news), POLL_S)
            told, self._news = self._news, []
            return told

    async def close(self) -> None:
        """Stop what runs and let the gangs go."""
        self._housekeeper.cancel()
        for uid in list(self._runs):
            await self.stop(uid)
            self._kill_soon(self._runs[uid], self._runs[uid].attempt)
        for gang in self._gangs.values():
            gang.closing = True
        async with self._changed:
            self._changed.notify_all()
            await self._until(lambda: not self._gangs, CLOSE_S)

    # ---- for the gangs' workers

    async def hello(self, gang_id: str, rank: int, greeting: Greeting) -> str:
        """A worker is up. Returns its node's fork server's address (empty where ranks are fresh interpreters)."""
        gang = self._gangs[gang_id]
        address = ""
        if self._config.settings.isolation == "warm":
            address, cores = await self._agent(greeting.node_id)
        else:
            from raypar.train.affinity import allowed_cores

            cores = allowed_cores()
        self._cores.add_host(greeting.host, cores)
        gang.workers[rank] = greeting
        if len(gang.workers) == gang.placement.num_workers:
            self._tell(GangReady(gang.placement, time.monotonic() - gang.started_s))
        return address

    async def next_assignment(
        self, gang_id: str, rank: int, turn: int, master_address: tuple[str, int] | None
    ) -> Assignment | None:
        """What a worker is to do next; waits for it. None: nothing more, leave."""
        gang = self._gangs[gang_id]
        if master_address is not None:
            gang.master_address = master_address
        gang.waiting.add(rank)
        if len(gang.waiting) == gang.placement.num_workers:  # all ranks are back: the gang can be used again
            gang.last_used_s = time.monotonic()
            if self._config.settings.isolation == "fresh" and gang.runs:
                gang.closing = True
        await self._wake()
        async with self._changed:
            await self._changed.wait_for(lambda: len(gang.runs) > turn or (gang.closing and gang.current is None))
        if len(gang.runs) <= turn:
            return None
        gang.waiting.discard(rank)
        run = gang.runs[turn]
        settings = self._config.settings
        return Assignment(
            uid=self._uid_of(run),
            workload=self._config.workload,
            config=run.spec.config,
            seed=run.spec.seed,
            master_address=gang.master_address,
            cores=run.cores.get(rank, ()),
            environment=settings.environment,
            sys_path=settings.sys_path,
            log_dir=str(settings.log_dir / run.spec.identity),
            attempt=run.attempt,
        )

    async def report(self, uid: str, attempt: int, rank: int, index: int, metrics: Mapping[str, float] | None) -> bool:
        """A rank's report. The answer (go on?) is the same for every rank: the first one to ask fixes it."""
        run = self._runs.get(uid)
        if run is None or run.attempt != attempt:
            return False
        if rank == 0 and metrics is not None:
            run.reports.append(metrics)
            self._tell(TrialReported(run.spec, metrics))
            await self._wake()
        if self._config.in_lockstep:
            async with self._changed:
                await self._changed.wait_for(lambda: run.decided >= index or run.stop_wanted or run.kill)
        return run.verdicts.setdefault(index, not run.stop_wanted)

    async def wait_for_kill(self, uid: str, attempt: int) -> bool:
        """True when a rank has to be killed, False when its trial is over without."""
        run = self._runs.get(uid)
        if run is None:
            return False
        async with self._changed:
            await self._changed.wait_for(lambda: run.kill or run.result is not None or run.attempt != attempt)
        return run.kill and run.attempt == attempt

    async def finish(self, gang_id: str, uid: str, attempt: int, rank: int, end: RankEnd) -> None:
        """A rank has ended."""
        gang, run = self._gangs[gang_id], self._runs.get(uid)
        if run is None or run.attempt != attempt:
            return
        run.ends[rank] = end
        if end.failure is not None and run.first_failure is None:
            run.first_failure = end.failure
            run.kill = True  # the peers may hang in a collective
        if len(run.ends) == gang.placement.num_workers:
            self._release(run)
            # A rank that was killed because it didn't stop in time is no failure.
            failure = None if run.stop_wanted and not _is_error(run.first_failure) else run.first_failure
            self._retry_or_conclude(uid, run, failure)
        await self._wake()

    # ---- inside

    def _retry_or_conclude(self, uid: str, run: _Run, failure: Failure | None) -> None:
        if failure is not None and not run.stop_wanted and is_retried(failure, run.attempt, self._config.max_retries):
            self._tell(TrialRetried(run.spec, failure.message))
            again = _Run(run.spec, attempt=run.attempt + 1, followed_s=run.followed_s)
            self._runs[uid] = again
            self._queue.insert(0, (uid, again))
        else:
            self._conclude(run, failure)

    def _conclude(self, run: _Run, failure: Failure | None) -> None:
        workers = run.gang.workers if run.gang else {}
        environment: dict[str, Any] = {"node": [workers[rank].hostname for rank in sorted(workers)]}
        if run.gang:
            environment |= {"gang": run.gang.id, "nth_in_gang": run.gang.runs.index(run) + 1}
        outcomes = {rank: end.outcome for rank, end in run.ends.items() if end.outcome is not None}
        if run.stop_wanted and not outcomes and failure is None:
            failure = Failure(FailureKind.CRASH, "was stopped before its first report")
        result = merge(
            run.spec,
            outcomes,
            tuple(run.reports),
            attempts=run.attempt,
            started_at=run.started_at,
            environment=environment,
            failure=failure,
        )
        run.result = replace(result, wall_s=time.monotonic() - run.started_s) if run.started_s else result

    def _pump(self) -> None:
        """Start what can be started."""
        for uid, run in list(self._queue):
            gang = next((g for g in self._gangs.values() if g.is_idle and g.placement == run.spec.placement), None)
            if gang is not None and self._lease(gang, run):
                self._queue.remove((uid, run))
                self._start_run(gang, run)
        unserved = [run.spec.placement for _, run in self._queue]
        for gang in self._gangs.values():  # a starting or busy gang will serve one of those that wait for it
            if not gang.closing and gang.placement in unserved and not (gang.is_idle):
                unserved.remove(gang.placement)
        wanted = {run.spec.placement for _, run in self._queue}
        for placement in unserved:
            if any(g.is_idle and g.placement == placement for g in self._gangs.values()):
                continue  # it has a gang, and waits for cores
            if not self._make_room(placement, wanted):
                break  # strictly in order: nobody overtakes the trial that waits for room
            self._start_gang(placement)

    def _make_room(self, placement: Placement, wanted: set[Placement]) -> bool:
        """Whether a gang can be started now; closes parked gangs (that nobody waits for) where it can't yet."""
        idle = sorted((g for g in self._gangs.values() if g.is_idle), key=lambda g: g.last_used_s)
        spare = [g for g in idle if g.placement not in wanted] or []
        if len(idle) >= self._config.max_parked_gangs and spare:
            spare.pop(0).closing = True
        if self._config.owns_cluster and placement.device == "cpu":
            return True
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for key, need in (("CPU", placement.num_cpus), ("GPU", _num_gpus(placement))):
            total = sum(node.get(key, 0) for node in nodes)
            held = sum(g.placement.num_cpus if key == "CPU" else _num_gpus(g.placement) for g in self._gangs.values())
            if self._config.owns_cluster and key == "CPU":
                continue
            if need and held + need > total:
                for gang in spare:
                    gang.closing = True
                return False
        return True

    def _start_run(self, gang: _Gang, run: _Run) -> None:
        gang.current, run.gang = run, gang
        run.started_at, run.started_s = time.time(), time.monotonic()
        gang.runs.append(run)
        self._tell(TrialStarted(run.spec, run.attempt))
        limit_s = self._config.settings.trial_timeout_s
        if limit_s is not None:
            failure = Failure(FailureKind.CRASH, f"took longer than {limit_s:g} s")
            self._loop.call_later(limit_s, self._kill_soon, run, run.attempt, failure)

    def _lease(self, gang: _Gang, run: _Run) -> bool:
        hosts = {rank: gang.workers[rank].host for rank in sorted(gang.workers)}
        cores = self._cores.lease(hosts, gang.placement.cpus_per_worker)
        if cores is None:
            return False
        run.cores = cores
        return True

    def _release(self, run: _Run) -> None:
        if run.gang is not None:
            self._cores.release({r: w.host for r, w in run.gang.workers.items()}, run.cores)
            run.gang.current = None
        run.cores = {}

    def _start_gang(self, placement: Placement) -> None:
        gang = _Gang(f"{next(self._numbers)}", placement)
        self._gangs[gang.id] = gang
        self._tell(GangStarting(placement))
        resources: dict[str, float] = {"CPU": TINY_CPU if self._config.owns_cluster else placement.cpus_per_worker}
        if placement.device == "cuda":
            resources["GPU"] = 1
        settings = self._config.settings

        def run() -> None:
            error = "ended"
            try:
                train_gang(
                    self._me,
                    gang.id,
                    placement,
                    resources,
                    str(settings.log_dir / "gangs"),
                    fresh=settings.isolation == "fresh",
                )
            except BaseException as e:
                error = f"{type(e).__name__}: {e}"
            asyncio.run_coroutine_threadsafe(self._gang_ended(gang, error), self._loop)

        threading.Thread(target=run, daemon=True, name=f"gang-{gang.id}").start()

    async def _gang_ended(self, gang: _Gang, error: str) -> None:
        del self._gangs[gang.id]
        group = next((w.placement_group for w in gang.workers.values() if w.placement_group), None)
        if not gang.closing and group is not None:
            # Train's own cleaner needs the dashboard; without it the group of a lost gang would hold its resources.
            ray.util.remove_placement_group(group)
        run = gang.current
        if run is not None and run.result is None:
            self._release(run)
            failure = Failure(FailureKind.GANG_LOST, f"its gang was lost: {error[:2000]}")
            self._retry_or_conclude(self._uid_of(run), run, failure)
        elif not gang.workers and not gang.closing:
            # It never came up: trying again for ever would help nobody.
            for uid, waiting in [(u, r) for u, r in self._queue if r.spec.placement == gang.placement][:1]:
                self._queue.remove((uid, waiting))
                failure = Failure(FailureKind.GANG_LOST, f"its gang could not start: {error[:2000]}")
                self._retry_or_conclude(uid, waiting, failure)
        await self._wake()

    def _kill_soon(self, run: _Run, attempt: int, failure: Failure | None = None) -> None:
        if run.result is None and run.attempt == attempt and len(run.ends) < run.spec.placement.num_workers:
            run.first_failure = run.first_failure or failure
            run.kill = True
            self._waking = asyncio.ensure_future(self._wake())

    async def _keep_house(self) -> None:
        """Stop trials whose Tune trainable was lost: it can't say goodbye."""
        while True:
            await asyncio.sleep(LEASE_S / 4)
            for uid, run in list(self._runs.items()):
                if run.result is None and time.monotonic() - run.followed_s > LEASE_S:
                    await self.stop(uid)

    def _agent(self, node_id: str) -> asyncio.Future[tuple[str, tuple[int, ...]]]:
        """The node's fork server (its address, the machine's cores), started where there is none yet."""
        if node_id not in self._agents:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            settings = self._config.settings
            agent = (
                ray.remote(num_cpus=0)(ForkAgent)
                .options(scheduling_strategy=strategy)
                .remote(settings.preload, settings.sys_path)
            )
            self._agents[node_id] = (agent, asyncio.ensure_future(_answer(agent.describe.remote())))
        return self._agents[node_id][1]

    def _uid_of(self, run: _Run) -> str:
        return next(uid for uid, known in self._runs.items() if known is run)

    def _tell(self, event: Event) -> None:
        self._news.append(event)

    async def _wake(self) -> None:
        self._pump()
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, condition: Any, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait_for(condition), timeout_s)
        except TimeoutError:
            pass


async def _answer(reference: Any) -> tuple[str, tuple[int, ...]]:
    address, cores = await reference
    return address, tuple(cores)


def _num_gpus(placement: Placement) -> int:
    return placement.num_workers if placement.device == "cuda" else 0


def _is_error(failure: Failure | None) -> bool:
    return failure is not None and failure.kind is FailureKind.ERROR


def _import_trainer() -> None:
    import ray.train.torch  # noqa: F401


def _may_grow() -> bool:
    """Whether the cluster has an autoscaler that may add nodes."""
    from ray._private.state import state

    limits: Sequence[Any] | Mapping[str, Any] | None = state.get_max_resources_from_cluster_config()
    return bool(limits)
