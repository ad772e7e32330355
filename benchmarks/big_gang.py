"""Trials in gangs of many ranks: the broker's time with simulated nodes, and a real gang of 64 ranks.

Simulated: the real broker, with its dispatcher and scheduler, on a private Ray. Its nodes, of 8 ranks each, are
simulated by other processes that make the calls of the nodes' agents: each rank is ready, makes one report, and ends
with an outcome as of an empty trial; what the first rank of a node does comes alone, and what the others do comes
together, as agents send it. The broker's time is that of its process (user and system), from one trial's start to the
next one's. The first trial, before which all workers greet the broker, does not count.

Real (`--real`): 50 empty trials in one warm gang of 64 ranks (`--ranks N`) on this machine, whose Ray node claims as
many CPUs. Each rank imports torch, joins the process group and does one all-reduce.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
from common import Figure, begin, empty_study, parser_for, preload_of, print_bar, print_row, progress, scratch, times

from raypar import units
from raypar.run.agent import AgentAddress, Ended, News, Ready, Reported
from raypar.run.broker import Broker
from raypar.run.dispatcher import DispatchConfig
from raypar.run.gang_pool import GangPool
from raypar.run.placement import Node
from raypar.run.pool import GangPolicy, Greeting, Pool
from raypar.run.ranks import RankEnd
from raypar.run.runner import GangReady, TrialEnded
from raypar.study.conditions import RankConditions
from raypar.train.affinity import Core
from raypar.train.job import RankContext, RankOutcome, RunSettings
from raypar.train.position import Position

RANKS_PER_NODE = 8
NUM_RANKS = (8, 64, 512, 4096)
MAX_BROKER_S = {512: 0.5, 4096: 4.0}
MAX_GROWTH = 8 * 1.25  # of the broker's time from 512 to 4,096 ranks, if it is linear
NUM_CLIENTS = 2  # processes that simulate the nodes
GANG = "1"
MOVES = Position({"0": 12})
OUTCOME = RankOutcome(
    startup_s=0.1,
    warmup_s=0.01,
    train_time_s=0.1,
    eval_time_s=0.01,
    wall_s=0.3,
    num_samples=1280,
    step_times_s=(0.01,) * 10,
    conditions=RankConditions(pid=1),
)


class SimulatedPool(GangPool):
    """A pool without Ray: the broker opens one gang, whose workers greet it by themselves."""

    is_short_of_memory = False

    def __init__(self, settings: RunSettings, policy: GangPolicy, num_nodes: int) -> None:
        nodes = [Node(node_id(i), node_id(i), {"CPU": float(RANKS_PER_NODE)}) for i in range(num_nodes)]
        Pool.__init__(self, nodes, settings, policy)

    start, request_nodes = Pool.start, Pool.request_nodes

    async def fork_address(self, gang_id: str, greeting: Greeting) -> str:
        """Return no address: there are no ranks."""
        return ""


class MeasuredBroker(Broker):
    """The broker over simulated nodes. It tells its processor time."""

    def __init__(self, config: DispatchConfig, num_nodes: int) -> None:
        super().__init__(config)
        self._num_nodes = num_nodes

    def make_pool(self) -> GangPool:
        """Return a pool of simulated nodes."""
        return SimulatedPool(self._config.settings, self._config.gangs, self._num_nodes)

    async def cpu_s(self) -> float:
        """Return the seconds that its process has computed."""
        used = psutil.Process().cpu_times()
        return used.user + used.system


class Nodes:
    """Simulated nodes of the gang: the calls of their agents."""

    def __init__(self, broker: Any, numbers: Sequence[int], world_size: int) -> None:
        self._broker, self._numbers, self._world_size = broker, numbers, world_size

    async def serve(self) -> None:
        """Run trials until the broker closes the gang."""
        await asyncio.gather(*map(self._serve, self._numbers))

    async def _serve(self, number: int) -> None:
        ranks = range(number * RANKS_PER_NODE, (number + 1) * RANKS_PER_NODE)
        await asyncio.gather(*(self._hello(number, rank, ranks) for rank in ranks))
        known, ended = News(0), [list[Any](), list[Any]()]
        while True:
            ready = [Ready(rank, ("host", 1) if rank == 0 else None) for rank in ranks]
            for done, back in zip(ended, (ready[:1], ready[1:]), strict=True):
                await self._broker.accept.remote(GANG, [*done, *back])
            turn = known.number
            while known.number == turn:
                known = await self._news(ranks, known)
                if known.is_closing:
                    return
            turn = known.number
            reported = [Reported(turn, rank, 0, None if rank else {"epoch": 1.0}, MOVES) for rank in ranks]
            for part in (reported[:1], reported[1:]):
                await self._broker.accept.remote(GANG, part)
            while not known.verdicts:
                known = await self._news(ranks, known)
            done = [Ended(turn, rank, RankEnd(OUTCOME, position=MOVES)) for rank in ranks]
            ended = [done[:1], done[1:]]

    async def _hello(self, number: int, rank: int, ranks: range) -> None:
        first = rank == ranks[0]
        context = RankContext(rank, self._world_size, rank - ranks[0], RANKS_PER_NODE, number)
        cores = tuple(Core(i, 0, i) for i in range(RANKS_PER_NODE))
        greeting = Greeting(node_id(number), node_id(number), node_id(number), context, cores)
        await self._broker.hello.remote(GANG, greeting, AgentAddress("", b"") if first else None)

    async def _news(self, ranks: range, known: News) -> News:
        news: News = await self._broker.news.remote(GANG, ranks, replace(known, turn=None))
        same = news.number == known.number
        return replace(news, verdicts=(*known.verdicts, *news.verdicts) if same else news.verdicts)


def node_id(number: int) -> str:
    return f"node{number}"


def simulated(num_ranks: int, num_trials: int) -> tuple[list[float], list[float]]:
    """Return the broker's processor time and the wall time of each trial but the first, in seconds."""
    import ray

    study, num_nodes = empty_study(), num_ranks // RANKS_PER_NODE
    specs = [study.trial({"num_workers": num_ranks}, i, order=i) for i in range(num_trials + 1)]
    with scratch() as folder:
        config = DispatchConfig(b"", RunSettings(folder), GangPolicy(True, 4), max_retries=0, in_lockstep=False)
        options = {"num_cpus": 0, "max_concurrency": 100_000}
        broker = ray.remote(MeasuredBroker).options(**options).remote(config, num_nodes)
        ray.get(broker.start.remote(tuple(specs)))
        clients = [
            ray.remote(num_cpus=0)(Nodes)
            .options(max_concurrency=10)
            .remote(broker, range(i, num_nodes, NUM_CLIENTS), num_ranks)
            for i in range(min(NUM_CLIENTS, num_nodes))
        ]
        serving = [client.serve.remote() for client in clients]
        num_seen = 0

        def await_one(kind: type) -> None:
            nonlocal num_seen
            while True:
                events = ray.get(broker.events.remote(num_seen))
                for _, event in events:
                    num_seen += 1
                    if isinstance(event, kind):
                        assert not isinstance(event, TrialEnded) or event.result.is_complete, event
                        return

        await_one(GangReady)
        cpu_s, wall_s = [], []
        for i in range(len(specs)):
            before_s, begun_s = ray.get(broker.cpu_s.remote()), time.perf_counter()
            ray.get(broker.define.remote(f"tune{i}", None))
            await_one(TrialEnded)
            ray.get(broker.release.remote(f"tune{i}", let_finish=True))
            wall_s.append(time.perf_counter() - begun_s)
            cpu_s.append(ray.get(broker.cpu_s.remote()) - before_s)
        ray.get(broker.close.remote())
        ray.get(serving)
        for actor in (*clients, broker):
            ray.kill(actor)
    return cpu_s[1:], wall_s[1:]


def real(num_ranks: int, num_trials: int) -> None:
    """Print the times of empty trials in a real gang."""
    import cloudpickle
    import common
    from ray.cluster_utils import Cluster

    from raypar.run.cluster import TRAIN_ENVIRONMENT, joined_cluster
    from raypar.run.tune import TuneRunner

    os.environ.update(TRAIN_ENVIRONMENT)
    cloudpickle.register_pickle_by_value(common)
    study = empty_study()
    specs = [study.trial({"num_workers": num_ranks}, i, order=i) for i in range(num_trials)]
    ready_s, ends_s, results = [], [time.perf_counter()], []

    def listen(event: Any) -> None:
        if isinstance(event, GangReady):
            ready_s.append(event.seconds)
            ends_s[:] = [time.perf_counter()]
        elif isinstance(event, TrialEnded):
            ends_s.append(time.perf_counter())
            results.append(event.result)
            progress(f"{len(results)}/{num_trials}: {ends_s[-1] - ends_s[-2]:.1f} s {event.result.failure or ''}")

    head = {"num_cpus": num_ranks, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        with scratch() as folder, joined_cluster(cluster.address):
            settings = RunSettings(log_dir=folder, exclusive=True, preload=preload_of(study))
            TuneRunner(settings, owns_cluster=False).run(study, specs, listen)
    finally:
        cluster.shutdown()
    failed = [result for result in results if result.failure]
    seconds = [b - a for a, b in itertools.pairwise(ends_s[1:])]
    print_row(f"gang of {num_ranks} real ranks: ready after", units.seconds(statistics.median(ready_s)))
    print_row("an empty trial in it, after the first", Figure.of(seconds).show(units.seconds))
    print_bar(f"failed trials of {len(results)}", len(failed), "{:.0f}".format, at_most=0)
    assert all(result.final["sum"] == num_ranks for result in results if not result.failure)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--trials", type=int, default=5, help="simulated ones of each size [default: %(default)s]")
    parser.add_argument("--real", action="store_true", help="a real gang instead of simulated ones")
    parser.add_argument("--ranks", type=int, default=64, help="of the real gang [default: %(default)s]")
    args = begin(parser)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    if args.real:
        real(args.ranks, 5 if args.quick else 50)
        return
    import cloudpickle
    import ray

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    medians_s = {}
    for num_ranks in NUM_RANKS[:3] if args.quick else NUM_RANKS:
        cpu_s, wall_s = simulated(num_ranks, args.trials)
        medians_s[num_ranks] = statistics.median(cpu_s)
        title = f"{num_ranks} ranks: broker's time of an empty trial"
        print_bar(title, Figure.of(cpu_s), units.seconds, at_most=MAX_BROKER_S.get(num_ranks))
        print_row("  with the calls of the simulated nodes, on all cores", Figure.of(wall_s).show(units.seconds))
    if len(medians_s) == len(NUM_RANKS):
        print_bar("growth from 512 to 4,096 ranks", medians_s[4096] / medians_s[512], times, at_most=MAX_GROWTH)


if __name__ == "__main__":
    main()
