"""The step times that raypar predicts for slower networks, against measured ones.

Workers train `wide_mlp` by DDP in network namespaces of this machine, each a host with a link of its own, limited in
rate and delayed. Predicted is what `raypar predict --network 1Gbit,1ms` would say: computing as measured by as many
workers at once that do not communicate (so that they share the cores in the same way), right beside the measurement;
the network as asked for, nothing measured: gradients as gloo sends them, of the link's rate the share that TCP
leaves (1448/1538), the delay of a frame one way. A setting is within the bar if all its cases are. Needs root and
Linux. A relay in user space delays the frames: at 1 Gbit/s it takes a fifth of a core.
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
from common import BUSY_CORES, LOG_TAIL_CHARS, Figure, begin, parser_for, progress, scratch, tell, times

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from netlab import Lab, Shape, why_not

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
# Any number of ranks, one after the other: each is started by its job.
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
    """A network by the names of its rate and delay."""

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
    """What is measured on a setting."""

    num_workers: int
    overlap: bool

    @property
    def name(self) -> str:
        return f"{self.num_workers} workers, {'overlapped' if self.overlap else 'sent after backward'}"


class Hosts:
    """A lab with a process on each host that runs raypar's ranks."""

    def __init__(self, num_hosts: int, folder: Path) -> None:
        self._folder, self._ports = folder, count(FIRST_PORT)
        self._workload = cloudpickle.dumps(wide_mlp)
        self._cores = allowed_cores()
        self.lab = Lab(num_hosts)
        self._lines = [self._started(host) for host in range(num_hosts)]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.close()
        for line in self._lines:
            line.close()

    def together(self, spec: TrialSpec) -> TrialResult:
        """One trial, with a rank on each host."""
        num_hosts = self.lab.num_hosts
        master = self.lab.address(0), next(self._ports)
        outcomes = self._outcomes([self._job(spec, i, num_hosts, i, master) for i in range(num_hosts)])
        return self._result(spec, outcomes)

    def apart(self, spec: TrialSpec) -> list[TrialResult]:
        """As many trials of one worker as there are hosts, at the same time."""
        jobs = [self._job(spec, 0, 1, host, ("127.0.0.1", 0)) for host in range(self.lab.num_hosts)]
        return [self._result(spec, [outcome]) for outcome in self._outcomes(jobs)]

    def _started(self, host: int) -> Connection:
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
        """Of each host's job."""
        for line, job in zip(self._lines, jobs, strict=True):
            line.send(job)
        found: dict[int, RankOutcome] = {}
        while len(found) < len(jobs):
            for line in wait([line for host, line in enumerate(self._lines) if host not in found]):
                host = self._lines.index(line)
                try:
                    message = self._lines[host].recv()
                except EOFError:
                    raise SystemExit(f"host {host}:\n{self._log_path(host).read_text()[-LOG_TAIL_CHARS:]}") from None
                if message[0] == "report":
                    self._lines[host].send(True)
                elif message[0] == "done":
                    found[host] = message[1]
                else:
                    raise SystemExit(f"host {host}: {message[3]}")
        return [found[host] for host in range(len(jobs))]

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
    """One round's measurement and prediction of a case.

    Attributes:
        measured_s: mean time of a step.
        predicted: with an all-reduce as gloo does it.
        by_ring: with one by ring, without gloo's segments.
        cpu_wait_share: of the time in which the workers that don't communicate could have run, what they waited.
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
    """All cases of the lab's number of workers on a network, with what computing takes measured around each."""
    hosts.lab.shape(setting.shape)
    num_workers = hosts.lab.num_hosts
    batch_size = num_workers * PER_WORKER_BATCH
    specs = {case: trial(num_workers, batch_size, num_steps, {"overlap": case.overlap}) for case in cases}
    # Two batch sizes tell what a step takes however small its batch.
    whole, half = trial(1, PER_WORKER_BATCH, NUM_ALONE_STEPS), trial(1, PER_WORKER_BATCH // 2, NUM_ALONE_STEPS)
    alone = [*hosts.apart(whole), *hosts.apart(half)]
    results = {}
    for case, spec in specs.items():
        results[case] = hosts.together(spec)
        alone += [*hosts.apart(whole), *hosts.apart(half)]
    waited = statistics.median(max(result.environment["cpu_wait_share"]) for result in alone)
    found = {}
    for case, spec in specs.items():
        layers = layer_costs(wide_mlp, spec.config)
        calibration = calibrate(observed_points(alone), layers, variation_of(alone))
        training = JobSpec(Scaling.STRONG, batch_size, num_samples=num_steps * batch_size)
        predicted = {}
        for algorithm in (Algorithm.GLOO, Algorithm.RING):
            how = communication_of(spec.config, setting.network, algorithm)
            (predicted[algorithm],) = predict(calibration, training, how, [num_workers]).predictions
        rate = results[case].throughput_samples_per_s
        assert rate is not None
        found[case] = Pair(batch_size / rate, predicted[Algorithm.GLOO], predicted[Algorithm.RING], waited)
    return found


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="[default: 3]")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[2, 4], help="more than cores share them evenly [default: 2 4]"
    )
    names = [Setting(rate, delay).name for rate in RATES_BIT_PER_S for delay in DELAYS_S]
    parser.add_argument("--networks", nargs="+", choices=names, default=names, help="[default: all four]")
    args = begin(parser)
    if (why := why_not()) is not None:
        print(f"not measured: {why}")
        return
    begun_s = time.monotonic()
    num_rounds = 1 if args.quick else args.rounds
    settings = [Setting(*name.split(",")) for name in args.networks]
    shuffled = random.Random(0)
    pairs: dict[tuple[Setting, Case], list[Pair]] = {}
    loads = []
    with scratch() as folder:
        for num_workers in args.workers:
            cases = [Case(num_workers, overlap) for overlap in (True, False)]
            with Hosts(num_workers, folder) as hosts:
                hosts.apart(trial(1, PER_WORKER_BATCH, 1))  # imports
                for i in range(num_rounds):
                    for setting in shuffled.sample(settings, len(settings)):
                        num_steps = 3 if args.quick else NUM_STEPS[setting.rate]
                        for case, pair in measure(hosts, setting, cases, num_steps).items():
                            pairs.setdefault((setting, case), []).append(pair)
                        loads.append(os.getloadavg()[0])
                        progress(f"{num_workers} workers, round {i + 1}/{num_rounds}: {setting.name}")
    show(settings, pairs)
    if max(loads) > max(args.workers) + BUSY_CORES:
        print(f"NOTE: others were at work meanwhile (load up to {max(loads):.1f})")
    print(f"{units.counted(num_rounds, 'round')}, {time.monotonic() - begun_s:.0f} s in all")


def show(settings: Sequence[Setting], pairs: Mapping[tuple[Setting, Case], Sequence[Pair]]) -> None:
    print(ROW.format("network", "case", "measured step", "predicted", "predicted / measured", "plain ring", "waited"))
    within = []
    for setting in settings:
        cases = {case: found for (own, case), found in pairs.items() if own == setting}
        for case, found in cases.items():
            measured, ratio, by_ring, waited = (
                Figure.of([getattr(pair, name) for pair in found])
                for name in ("measured_s", "ratio", "ratio_by_ring", "cpu_wait_share")
            )
            predicted_s = statistics.median(pair.predicted.step_time_s.value for pair in found)
            compute_s = statistics.median(pair.compute_s for pair in found)
            print(
                ROW.format(
                    setting.name,
                    case.name,
                    spread(measured, units.seconds),
                    f"{units.seconds(predicted_s)} ({units.seconds(compute_s)})",
                    spread(ratio, times),
                    times(by_ring.value),
                    units.percent(waited.value),
                )
            )
        if all(abs(Figure.of([pair.ratio for pair in found]).value - 1) <= BAR for found in cases.values()):
            within.append(setting.name)
    print("predicted: in brackets, of it computing; plain ring: predicted / measured without gloo's segments;")
    print("waited: of the time in which workers that don't communicate could have run, what they waited for a core\n")
    shown = f"{len(within)} of {len(settings)} ({'; '.join(within)})"
    if len(settings) == len(RATES_BIT_PER_S) * len(DELAYS_S):
        shown += f"   bar ≥ {NUM_WITHIN}: {'reached' if len(within) >= NUM_WITHIN else 'NOT REACHED'}"
    tell(f"settings with all cases within {BAR:.0%}", shown)


def spread(figure: Figure, how: Callable[[float], str]) -> str:
    return f"{how(figure.value)} [{how(figure.low)} … {how(figure.high)}]"


if __name__ == "__main__":
    main()
