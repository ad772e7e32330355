"""Step times that raypar predicts for slower networks, against measured ones.

Workers train three networks by DDP in network namespaces of this machine, each a host whose link has a limited rate
and a delay. Predictions are those of `raypar model predict --network 1Gbit,1ms`: the step model's bound, and the range
that takes in what published trainings lose beyond it. Their compute time is measured right before and after, with as
many workers at once that do not communicate and so share the cores in the same way. Nothing about the network is
measured: gradients are sent as gloo does, at the share of the link's rate that TCP leaves (1448/1538), with the one-way
delay of a frame.

A machine of few cores can't carry every network. Before each case, the hosts time all-reduces as `raypar model network`
does, and a case counts if a large one takes at most `MAX_SLOWER` of its nominal time. The others are listed. By
default, each number of workers meets each network once, with one of the models (a Latin square). Needs root and Linux.
A relay in user space delays the frames; at 1 Gbit/s it uses a fifth of a core.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, product
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

from raypar import Study, Workload, units
from raypar.analysis.laws import Scaling
from raypar.analysis.stats import Estimate
from raypar.errors import RayparError
from raypar.predict import all_reduces
from raypar.predict.calibration import calibrate, observed_points, variation_of
from raypar.predict.facts import facts_of
from raypar.predict.layers import layer_costs
from raypar.predict.network import Algorithm, Network, all_reduce_cost, fit_network, parse_network
from raypar.predict.outlook import look_ahead, rates_by_model
from raypar.predict.predict import JobSpec, Prediction, Sweep, communication_of, predict
from raypar.run.ranks import ALLOCATOR, RankEnd, trial_result
from raypar.study.trial import TrialResult, TrialSpec
from raypar.study.workload import Config
from raypar.train.affinity import allowed_cores
from raypar.train.job import RankContext, RankOutcome, RunSettings, TrialJob
from raypar.workloads import resnet, transformer, wide_mlp

RATES_BIT_PER_S = {"2Gbit": 2e9, "1Gbit": 1e9, "500Mbit": 500e6, "100Mbit": 100e6}
DELAYS_S = {"0.1ms": 0.0001, "1ms": 0.001, "5ms": 0.005}
DEFAULT_RATES = ("2Gbit", "500Mbit", "100Mbit")
MEDIAN_BAR, WORST_BAR = 0.08, 0.20
MAX_SLOWER = 1.1
MAX_DRIFT, MAX_ATTEMPTS = 0.1, 3
CASE_S = 5.0  # of the steps of a case, about
NUM_STEPS = (4, 25)
NUM_ALONE_STEPS = 12
NUM_WARMUP_STEPS = 2
PROBE_MIB = {"2Gbit": 16, "1Gbit": 16, "500Mbit": 16, "100Mbit": 4}
FIRST_PORT = 20_000
WORKLOADS = (wide_mlp, resnet, transformer, all_reduces.workload)
ROW = "{:<14} {:<22} {:<26} {:<18} {:<25} {:<11} {:<11} {:<9} {}"
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
class Model:
    """Network to train.

    Attributes:
        options: of its workload.
        samples: the option with the number of training samples.
        batch_size: of a worker.
    """

    workload: Workload
    options: Mapping[str, Any]
    samples: str
    batch_size: int


MODELS = {
    # 2.0 million weights in 5 layers of equal size.
    "mlp": Model(wide_mlp, {"width": 768, "depth": 4}, "num_points", 128),
    # 11.2 million, most of them in the last layers; most work is in the first. Batch norm.
    "resnet18": Model(resnet, {"architecture": "resnet18", "image_size": 32}, "num_images", 16),
    # 3.2 million in many tensors, and attention without any.
    "transformer": Model(transformer, {"width": 256, "sequence_length": 32}, "num_sequences", 16),
}


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

    setting: Setting
    num_workers: int
    model: str

    @property
    def name(self) -> str:
        return f"{self.num_workers} x {self.model}"


class Hosts:
    """Lab with a process on each host that runs raypar's ranks."""

    def __init__(self, num_hosts: int, folder: Path) -> None:
        self._folder, self._ports = folder, count(FIRST_PORT)
        self._workloads = {each.name: cloudpickle.dumps(each) for each in WORKLOADS}
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
        reports: list[Mapping[str, float]] = []
        outcomes = self._outcomes([self._job(spec, i, num_hosts, i, master) for i in range(num_hosts)], reports)
        return replace(self._result(spec, outcomes), reports=tuple(reports))

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
        job = TrialJob(spec, 1, self._workloads[spec.workload], RunSettings(log_dir=self._folder))
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

    def _outcomes(
        self, jobs: Sequence[tuple[TrialJob, RankContext]], reports: list[Mapping[str, float]] | None = None
    ) -> list[RankOutcome]:
        """Send each host its job and return their outcomes, by host. Append the first host's reports to `reports`."""
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
                    if host == 0 and reports is not None:
                        reports.append(message[1])
                    self._pipes[host].send(True)
                elif message[0] == "done":
                    outcomes[host] = message[1]
                elif message[0] == "error":  # the others are positions
                    raise SystemExit(f"host {host}: {message[3]}")
        return [outcomes[host] for host in range(len(jobs))]

    def _result(self, spec: TrialSpec, outcomes: Sequence[RankOutcome]) -> TrialResult:
        ends = {rank: RankEnd(outcome) for rank, outcome in enumerate(outcomes)}
        return trial_result(spec, ends, started_at=time.time())


def trial(model: Model, num_workers: int, batch_size: int, num_steps: int, **options: Any) -> TrialSpec:
    config = {
        **model.options,
        **options,
        "num_workers": num_workers,
        "batch_size": batch_size,
        model.samples: num_steps * batch_size,
        "epochs": 1,
        "num_warmup_steps": NUM_WARMUP_STEPS,
        "optimizer": "sgd",
        "lr": 0.01,
        "device": "cpu",
    }
    return Study(workload=model.workload, config=config, name="networks").trial({}, 0)


@dataclass(frozen=True)
class Pair:
    """Measurement and prediction of a case, of one round.

    Attributes:
        measured_s: mean time of a step.
        predicted: with gloo's all-reduce on the nominal network.
        by_ring: with a plain ring all-reduce, without gloo's segments.
        by_probe: on the network fitted to the timed all-reduces.
        expected: median and 90 % range.
        slower: time of the largest all-reduce by its time on the nominal network.
        drift: relative difference of the compute times before and after.
        cpu_wait_share: share of their runnable time that the workers without communication waited for a core.
    """

    measured_s: float
    predicted: Prediction
    by_ring: Prediction
    by_probe: Prediction
    expected: Estimate
    slower: float
    drift: float
    cpu_wait_share: float

    @property
    def compute_s(self) -> float:
        return self.predicted.step.compute_s + self.predicted.step.optimizer_s

    def ratio_of(self, predicted: Prediction) -> float:
        return predicted.step_time_s.value / self.measured_s

    @property
    def ratio(self) -> float:
        return self.ratio_of(self.predicted)

    @property
    def is_held(self) -> bool:
        """True if the range holds the measured time."""
        return not self.expected.excludes(self.measured_s)

    @property
    def ratio_by_ring(self) -> float:
        return self.ratio_of(self.by_ring)

    @property
    def ratio_by_probe(self) -> float:
        return self.ratio_of(self.by_probe)


def settled(hosts: Hosts, case: Case, *, is_quick: bool) -> Pair:
    """Measure a case again while other load disturbs it, at most `MAX_ATTEMPTS` times; return the steadiest."""
    pairs: list[Pair] = []
    problem = ""
    for _ in range(MAX_ATTEMPTS):
        try:
            pairs.append(measure(hosts, case, is_quick=is_quick))
        except RayparError as error:  # the times of one worker contradict each other
            problem = str(error)
            continue
        if pairs[-1].drift <= MAX_DRIFT:
            break
    if not pairs:
        raise SystemExit(f"{case.name}, {case.setting.name}: {problem}")
    return min(pairs, key=lambda pair: pair.drift)


def measure(hosts: Hosts, case: Case, *, is_quick: bool) -> Pair:
    """Measure a case, all-reduces on its network, and the compute time alone before and after."""
    hosts.lab.shape(case.setting.shape)
    num_workers, model, network = hosts.lab.num_hosts, MODELS[case.model], case.setting.network
    probe = hosts.together(all_reduce_trial(num_workers, PROBE_MIB[case.setting.rate]))
    samples = [(report["num_bytes"], report["time_s"]) for report in probe.reports]
    nominal_s = float(all_reduce_cost(samples[-1][0], num_workers, network, Algorithm.GLOO).total_s)
    # Two batch sizes separate a step's fixed time from its time per sample.
    alone = [trial(model, 1, size, NUM_ALONE_STEPS) for size in (model.batch_size, model.batch_size // 2)]
    before = [result for spec in alone for result in hosts.apart(spec)]
    layers = layer_costs(model.workload, alone[0].config)
    gradient_bytes = sum(layer.num_gradient_bytes for layer in layers)
    sending_s = float(all_reduce_cost(gradient_bytes, num_workers, network, Algorithm.GLOO).total_s)
    least, most = NUM_STEPS
    num_steps = least if is_quick else max(least, min(most, round(CASE_S / sending_s)))
    batch_size = num_workers * model.batch_size
    spec = trial(model, num_workers, batch_size, num_steps)
    result = hosts.together(spec)
    after = [result for spec in alone for result in hosts.apart(spec)]
    compute_only = [*before, *after]
    took_s = [statistics.median(result.train_time_s or 0.0 for result in results) for results in (before, after)]
    calibration = calibrate(observed_points(compute_only), layers, variation_of(compute_only))
    training = JobSpec(Scaling.STRONG, batch_size, num_samples=num_steps * batch_size)

    def sweep_of(network: Network, algorithm: Algorithm) -> Sweep:
        shared = min(1.0, len(allowed_cores()) / num_workers)
        how = replace(communication_of(spec.config, network, algorithm), cores_per_worker=shared)
        return predict(calibration, training, how, [1, num_workers])

    sweep = sweep_of(network, Algorithm.GLOO)
    alone_s = sweep.predictions[0].step_time_s.value
    facts = facts_of(
        config=spec.config,
        scaling=Scaling.STRONG,
        layers=layers,
        step_time_s=alone_s,
        latency_s=network.latency_s,
    )
    rates = rates_by_model(training, sweep, {})
    outlook = look_ahead(rates, facts, [1, num_workers], nodes_of=1, sweep=sweep)
    expected_s = outlook.expected[-1].time_s
    assert expected_s is not None

    rate = result.throughput_samples_per_s
    assert rate is not None
    return Pair(
        measured_s=batch_size / rate,
        predicted=sweep.predictions[-1],
        by_ring=sweep_of(network, Algorithm.RING).predictions[-1],
        by_probe=sweep_of(fit_network(samples, num_workers, Algorithm.GLOO), Algorithm.GLOO).predictions[-1],
        expected=expected_s,
        slower=samples[-1][1] / nominal_s,
        drift=max(took_s) / min(took_s) - 1,
        cpu_wait_share=statistics.median(max(each.conditions.of_ranks("cpu_wait_share")) for each in compute_only),
    )


def all_reduce_trial(num_workers: int, max_mib: int) -> TrialSpec:
    config: Config = {"num_workers": num_workers, "device": "cpu", "max_mib": max_mib}
    return Study(workload=all_reduces.workload, config=config, name="networks").trial({}, 0)


def cases_of(args: Any) -> list[Case]:
    """Return all cases, or a Latin square of them: every pair of a network and a number of workers once."""
    named = product(enumerate(args.rates), enumerate(args.delays), enumerate(args.workers))
    cases = []
    for (i, rate), (j, delay), (k, num_workers) in named:
        models = args.models if args.every else [args.models[(i + j + k) % len(args.models)]]
        cases += [Case(Setting(rate, delay), num_workers, model) for model in models]
    return cases


def main() -> None:
    parser = parser_for(__doc__, rounds=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8], help="[default: 2 4 8]")
    for name, choices, default in (
        ("--rates", RATES_BIT_PER_S, DEFAULT_RATES),
        ("--delays", DELAYS_S, tuple(DELAYS_S)),
        ("--models", MODELS, tuple(MODELS)),
    ):
        shown = " ".join(default)
        parser.add_argument(name, nargs="+", choices=list(choices), default=list(default), help=f"[default: {shown}]")
    parser.add_argument("--every", action="store_true", help="measure every model in every setting")
    args = begin(parser)
    if (why := why_not()) is not None:
        print(f"not measured: {why}")
        return
    begun_s = time.monotonic()
    cases, shuffled = cases_of(args), random.Random(0)
    pairs: dict[Case, list[Pair]] = {}
    loads = []
    with scratch() as folder:
        for num_workers in args.workers:
            of_count = [case for case in cases if case.num_workers == num_workers]
            with Hosts(num_workers, folder) as hosts:
                for model in {case.model for case in of_count}:
                    hosts.apart(trial(MODELS[model], 1, MODELS[model].batch_size, 1))  # imports
                for i in range(args.rounds):
                    for case in shuffled.sample(of_count, len(of_count)):
                        pair = settled(hosts, case, is_quick=args.quick)
                        pairs.setdefault(case, []).append(pair)
                        loads.append(os.getloadavg()[0])
                        text = f"{pair.ratio:.2f}x, probe {pair.ratio_by_probe:.2f}x, link {pair.slower:.2f}x"
                        text += f", range {pair.expected.low:.3g} to {pair.expected.high:.3g} s: {pair.is_held}"
                        text += f", drift {pair.drift:.0%}"
                        progress(f"{case.name}, {case.setting.name}, round {i + 1}/{args.rounds}: {text}")
    show(pairs)
    warn_of_load(max(loads), max(args.workers) + BUSY_LOAD)
    print(f"{units.counted(args.rounds, 'round')}, {time.monotonic() - begun_s:.0f} s in all")


def show(pairs: Mapping[Case, Sequence[Pair]]) -> None:
    heads = "network", "case", "measured step", "predicted", "predicted / measured", "plain ring", "by probe", "link"
    print(ROW.format(*heads, "waited"))
    errors: dict[bool, list[float]] = {True: [], False: []}
    num_disturbed = 0
    by_probe = []
    for case in sorted(pairs, key=lambda case: (case.num_workers, case.setting.name)):
        rounds = pairs[case]
        measured, ratio, by_ring, probed, slower, wait_share = (
            Figure.of([getattr(pair, name) for pair in rounds])
            for name in ("measured_s", "ratio", "ratio_by_ring", "ratio_by_probe", "slower", "cpu_wait_share")
        )
        predicted_s = statistics.median(pair.predicted.step_time_s.value for pair in rounds)
        compute_s = statistics.median(pair.compute_s for pair in rounds)
        is_carried = slower.value <= MAX_SLOWER
        is_disturbed = statistics.median(pair.drift for pair in rounds) > MAX_DRIFT
        num_disturbed += is_disturbed
        errors[is_carried and not is_disturbed].append(abs(ratio.value - 1))
        by_probe.append(abs(probed.value - 1))
        print(
            ROW.format(
                case.setting.name,
                case.name,
                spread(measured, units.seconds),
                f"{units.seconds(predicted_s)} ({units.seconds(compute_s)})",
                spread(ratio, times),
                times(by_ring.value),
                times(probed.value),
                times(slower.value) + ("" if is_carried else " *") + (" +" if is_disturbed else ""),
                units.percent(wait_share.value),
            )
        )
    print(
        "predicted: its compute time in brackets; plain ring: without gloo's segments; by probe: from the all-reduces"
    )
    print(
        "timed on the network; link: time of the largest of them by its nominal time; waited: share of their runnable"
    )
    print("time that workers without communication waited for a core")
    print(f"*: this machine doesn't carry this network for so many hosts (link over {MAX_SLOWER:g}x); not counted")
    print(f"+: other load: compute times before and after differ by over {MAX_DRIFT:.0%}; not counted\n")
    print_row("cases, of them disturbed, of them counted", f"{len(pairs)}, {num_disturbed}, {len(errors[True])}")
    if errors[True]:
        print_bar("step time, median error", statistics.median(errors[True]), units.percent, at_most=MEDIAN_BAR)
        print_bar("step time, worst error", max(errors[True]), units.percent, at_most=WORST_BAR)
    expected = [pair for rounds in pairs.values() for pair in rounds if pair.slower <= MAX_SLOWER]
    if expected:
        held = statistics.fmean(pair.is_held for pair in expected)
        print_row("range of `model predict` holds the step time", f"{units.percent(held)} of {len(expected)}")
        off = statistics.median(abs(pair.expected.value / pair.measured_s - 1) for pair in expected)
        print_row("its median: median error", units.percent(off))
    print_row("all cases, from the timed all-reduces: median error", units.percent(statistics.median(by_probe)))
    print_row("all cases, from the timed all-reduces: worst error", units.percent(max(by_probe)))


def spread(figure: Figure, fmt: Callable[[float], str]) -> str:
    return f"{fmt(figure.value)} [{fmt(figure.low)} … {fmt(figure.high)}]" if figure.count > 1 else fmt(figure.value)


if __name__ == "__main__":
    main()
