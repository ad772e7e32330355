"""Step times that raypar predicts for slower networks, against measured ones.

Workers train `wide_mlp` by DDP in network namespaces of this machine, each a host whose link has a limited rate and a
delay. Predictions are those of `raypar model predict --network 1Gbit,1ms`. Their compute time is measured right before
and after, with as many workers at once that do not communicate and so share the cores in the same way. Nothing about
the network is measured: gradients are sent as gloo does, at the share of the link's rate that TCP leaves (1448/1538),
with the one-way delay of a frame. A setting is within the bar if all its cases are. Needs root and Linux. A relay in
user space delays the frames; at 1 Gbit/s it uses a fifth of a core.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
from common import (
    BUSY_LOAD,
    Figure,
    begin,
    failure,
    parser_for,
    print_bar,
    print_row,
    progress,
    scratch,
    times,
    warn_of_load,
)
from netlab import Lab, Shape, why_not

from raypar import Study, units
from raypar.analysis.laws import Scaling
from raypar.predict.calibration import calibrate, observed_points, variation_of
from raypar.predict.layers import layer_costs
from raypar.predict.network import Algorithm, Network, parse_network
from raypar.predict.predict import JobSpec, Prediction, communication_of, predict
from raypar.run.ranks import ALLOCATOR, RankEnd, trial_result
from raypar.study.trial import TrialResult, TrialSpec
from raypar.train.affinity import allowed_cores
from raypar.train.job import RankContext, RankOutcome, RunSettings, TrialJob
from raypar.workloads import wide_mlp

RATES_BIT_PER_S = {"1Gbit": 1e9, "100Mbit": 100e6}
DELAYS_S = {"1ms": 0.001, "5ms": 0.005}
BAR = 0.15
NUM_WITHIN = 3
# 2.0 million weights: a step's gradients take two workers 0.7 s at 100 Mbit/s and 0.07 s at 1 Gbit/s, computing 0.02 s.
MODEL = {"width": 768, "depth": 4}
PER_WORKER_BATCH = 128
NUM_STEPS = {"1Gbit": 25, "100Mbit": 5}
NUM_ALONE_STEPS = 20
NUM_WARMUP_STEPS = 2
FIRST_PORT = 20_000
ROW = "{:<12} {:<30} {:<28} {:<20} {:<28} {:<11} {}"
# Runs any number of ranks, one after the other, each started by its job.
SERVE = """
import sys
from multiprocessing.connection import Connection
from raypar.train.worker import main
line = Connection(int(sys.argv[1]))
while True:
    try:
        main(line)
    except EOFError:
        break
"""


@dataclass(frozen=True)
class Setting:
    """Rate and delay of a network, by name."""

    rate: str
    delay: str

    @property
    def name(self) -> str:
        return f"{self.rate},{self.delay}"

    @cached_property
    def shape(self) -> Shape:
        return Shape(RATES_BIT_PER_S[self.rate], DELAYS_S[self.delay])

    @cached_property
    def network(self) -> Network:
        return parse_network(self.name)


@dataclass(frozen=True)
class Case:
    """A measurement on a setting."""

    num_workers: int
    overlap: bool

    @property
    def name(self) -> str:
        return f"{self.num_workers} workers, {'overlapped' if self.overlap else 'sent after backward'}"


class Hosts:
    """Lab with a process on each host that runs raypar's ranks."""

    def __init__(self, num_hosts: int, folder: Path) -> None:
        self._folder, self._ports = folder, count(FIRST_PORT)
        self._workload = cloudpickle.dumps(wide_mlp)
        self._cores = allowed_cores()
        self.lab = Lab(num_hosts)
        self._pipes = [self._start_host(host) for host in range(num_hosts)]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.close()
        for pipe in self._pipes:
            pipe.close()

    def together(self, spec: TrialSpec) -> TrialResult:
        """Run one trial, with a rank on each host."""
        num_hosts = self.lab.num_hosts
        master = self.lab.address(0), next(self._ports)
        outcomes = self._outcomes([self._job(spec, i, num_hosts, i, master) for i in range(num_hosts)])
        return self._result(spec, outcomes)

    def apart(self, spec: TrialSpec) -> list[TrialResult]:
        """Run a trial of one worker on every host, at the same time."""
        jobs = [self._job(spec, 0, 1, host, ("127.0.0.1", 0)) for host in range(self.lab.num_hosts)]
        return [self._result(spec, [outcome]) for outcome in self._outcomes(jobs)]

    def _start_host(self, host: int) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs, self._log_path(host).open("ab") as log:
            command = [sys.executable, "-c", SERVE, str(theirs.fileno())]
            environment = {**os.environ, **ALLOCATOR}
            self.lab.popen(host, command, pass_fds=[theirs.fileno()], stdout=log, stderr=log, env=environment)
        return Connection(ours.detach())

    def _log_path(self, host: int) -> Path:
        return self._folder / f"host{host}.log"

    def _job(
        self, spec: TrialSpec, rank: int, world_size: int, host: int, master: tuple[str, int]
    ) -> tuple[TrialJob, RankContext]:
        job = TrialJob(spec, 1, self._workload, RunSettings(log_dir=self._folder))
        context = RankContext(
            rank=rank,
            world_size=world_size,
            local_rank=0,
            local_world_size=1,
            node_rank=rank,
            master_address=master,
            requested_at_s=time.monotonic(),
            cores=(self._cores[host % len(self._cores)],),
            environment={"GLOO_SOCKET_IFNAME": "eth0"},
        )
        return job, context

    def _outcomes(self, jobs: Sequence[tuple[TrialJob, RankContext]]) -> list[RankOutcome]:
        """Send each host its job and return their outcomes, by host."""
        for pipe, job in zip(self._pipes, jobs, strict=True):
            pipe.send(job)
        outcomes: dict[int, RankOutcome] = {}
        while len(outcomes) < len(jobs):
            for pipe in wait([pipe for host, pipe in enumerate(self._pipes) if host not in outcomes]):
                host = self._pipes.index(pipe)
                try:
                    message = self._pipes[host].recv()
                except EOFError:
                    raise failure(f"the rank of host {host}", 1, self._log_path(host).read_text()) from None
                if message[0] == "report":
                    self._pipes[host].send(True)
                elif message[0] == "done":
                    outcomes[host] = message[1]
                elif message[0] == "error":  # the others are positions
                    raise SystemExit(f"host {host}: {message[3]}")
        return [outcomes[host] for host in range(len(jobs))]

    def _result(self, spec: TrialSpec, outcomes: Sequence[RankOutcome]) -> TrialResult:
        ends = {rank: RankEnd(outcome) for rank, outcome in enumerate(outcomes)}
        return trial_result(spec, ends, started_at=time.time())


def trial(num_workers: int, batch_size: int, num_steps: int, options: Mapping[str, Any] | None = None) -> TrialSpec:
    config = {
        **MODEL,
        **(options or {}),
        "num_workers": num_workers,
        "batch_size": batch_size,
        "num_points": num_steps * batch_size,
        "num_warmup_steps": NUM_WARMUP_STEPS,
        "optimizer": "sgd",
        "lr": 0.01,
        "device": "cpu",
    }
    return Study(workload=wide_mlp, config=config, name="networks").trial({}, 0)


@dataclass(frozen=True)
class Pair:
    """Measurement and prediction of a case, of one round.

    Attributes:
        measured_s: mean time of a step.
        predicted: with gloo's all-reduce.
        by_ring: with a plain ring all-reduce, without gloo's segments.
        cpu_wait_share: share of their runnable time that the workers without communication waited for a core.
    """

    measured_s: float
    predicted: Prediction
    by_ring: Prediction
    cpu_wait_share: float

    @property
    def compute_s(self) -> float:
        return self.predicted.step.compute_s + self.predicted.step.optimizer_s

    @property
    def ratio(self) -> float:
        return self.predicted.step_time_s.value / self.measured_s

    @property
    def ratio_by_ring(self) -> float:
        return self.by_ring.step_time_s.value / self.measured_s


def measure(hosts: Hosts, setting: Setting, cases: Sequence[Case], num_steps: int) -> dict[Case, Pair]:
    """Measure all cases on a network, and the compute time alone before and after each."""
    hosts.lab.shape(setting.shape)
    num_workers = hosts.lab.num_hosts
    batch_size = num_workers * PER_WORKER_BATCH
    specs = {case: trial(num_workers, batch_size, num_steps, {"overlap": case.overlap}) for case in cases}
    # Two batch sizes separate a step's fixed time from its time per sample.
    full, half = trial(1, PER_WORKER_BATCH, NUM_ALONE_STEPS), trial(1, PER_WORKER_BATCH // 2, NUM_ALONE_STEPS)
    compute_only = [*hosts.apart(full), *hosts.apart(half)]
    results = {}
    for case, spec in specs.items():
        results[case] = hosts.together(spec)
        compute_only += [*hosts.apart(full), *hosts.apart(half)]
    wait_share = statistics.median(max(result.conditions.of_ranks("cpu_wait_share")) for result in compute_only)
    pairs = {}
    for case, spec in specs.items():
        layers = layer_costs(wide_mlp, spec.config)
        calibration = calibrate(observed_points(compute_only), layers, variation_of(compute_only))
        training = JobSpec(Scaling.STRONG, batch_size, num_samples=num_steps * batch_size)
        predicted = {}
        for algorithm in (Algorithm.GLOO, Algorithm.RING):
            how = communication_of(spec.config, setting.network, algorithm)
            (predicted[algorithm],) = predict(calibration, training, how, [num_workers]).predictions
        rate = results[case].throughput_samples_per_s
        assert rate is not None
        pairs[case] = Pair(batch_size / rate, predicted[Algorithm.GLOO], predicted[Algorithm.RING], wait_share)
    return pairs


def main() -> None:
    parser = parser_for(__doc__, rounds=3)
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=[2, 4],
        help="they share the cores evenly [default: 2 4]",
    )
    names = [Setting(rate, delay).name for rate in RATES_BIT_PER_S for delay in DELAYS_S]
    parser.add_argument("--networks", nargs="+", choices=names, default=names, help="[default: all four]")
    args = begin(parser)
    if (why := why_not()) is not None:
        print(f"not measured: {why}")
        return
    begun_s = time.monotonic()
    settings = [Setting(*name.split(",")) for name in args.networks]
    shuffled = random.Random(0)
    pairs: dict[tuple[Setting, Case], list[Pair]] = {}
    loads = []
    with scratch() as folder:
        for num_workers in args.workers:
            cases = [Case(num_workers, overlap) for overlap in (True, False)]
            with Hosts(num_workers, folder) as hosts:
                hosts.apart(trial(1, PER_WORKER_BATCH, 1))  # imports
                for i in range(args.rounds):
                    for setting in shuffled.sample(settings, len(settings)):
                        num_steps = 3 if args.quick else NUM_STEPS[setting.rate]
                        for case, pair in measure(hosts, setting, cases, num_steps).items():
                            pairs.setdefault((setting, case), []).append(pair)
                        loads.append(os.getloadavg()[0])
                        progress(f"{num_workers} workers, round {i + 1}/{args.rounds}: {setting.name}")
    show(settings, pairs)
    warn_of_load(max(loads), max(args.workers) + BUSY_LOAD)
    print(f"{units.counted(args.rounds, 'round')}, {time.monotonic() - begun_s:.0f} s in all")


def show(settings: Sequence[Setting], pairs: Mapping[tuple[Setting, Case], Sequence[Pair]]) -> None:
    print(ROW.format("network", "case", "measured step", "predicted", "predicted / measured", "plain ring", "waited"))
    within = []
    for setting in settings:
        cases = {case: rounds for (where, case), rounds in pairs.items() if where == setting}
        for case, rounds in cases.items():
            measured, ratio, by_ring, wait_share = (
                Figure.of([getattr(pair, name) for pair in rounds])
                for name in ("measured_s", "ratio", "ratio_by_ring", "cpu_wait_share")
            )
            predicted_s = statistics.median(pair.predicted.step_time_s.value for pair in rounds)
            compute_s = statistics.median(pair.compute_s for pair in rounds)
            print(
                ROW.format(
                    setting.name,
                    case.name,
                    spread(measured, units.seconds),
                    f"{units.seconds(predicted_s)} ({units.seconds(compute_s)})",
                    spread(ratio, times),
                    times(by_ring.value),
                    units.percent(wait_share.value),
                )
            )
        if all(abs(statistics.median(pair.ratio for pair in rounds) - 1) <= BAR for rounds in cases.values()):
            within.append(setting.name)
    print("predicted: its compute time in brackets; plain ring: predicted / measured without gloo's segments;")
    print("waited: share of their runnable time that workers without communication waited for a core\n")
    print_row("settings within the bar", "; ".join(within) or "none")
    title = f"settings of {len(settings)} with all cases within {BAR:.0%}"
    if len(settings) == len(RATES_BIT_PER_S) * len(DELAYS_S):
        print_bar(title, len(within), str, at_least=NUM_WITHIN)
    else:
        print_row(title, str(len(within)))


def spread(figure: Figure, fmt: Callable[[float], str]) -> str:
    return f"{fmt(figure.value)} [{fmt(figure.low)} … {fmt(figure.high)}]"


if __name__ == "__main__":
    main()
