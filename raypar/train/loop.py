"""The training of one trial on one rank: warm up and undo it, then timed steps, with evaluations between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypar.parallel.strategy import (
    Batch,
    DistContext,
    Span,
    Strategy,
    Task,
    build_strategy,
    no_span,
    restore,
    snapshot,
)
from raypar.study.workload import Config, Workload
from raypar.trace import mark
from raypar.train import data as batches
from raypar.train.checkpoint import Checkpoints, generator_states, set_generator_states, set_weights, weights_of
from raypar.train.data import fingerprint
from raypar.train.evaluate import Evaluation
from raypar.train.job import NO_PROFILING, Channel, Profiling, RankOutcome
from raypar.train.precision import numerics_of
from raypar.train.profile import ProfiledPass, profile
from raypar.train.saved_model import BestWeights
from raypar.train.step import Stepper, compiled
from raypar.train.telemetry import Telemetry


class StepTimer:
    """Times the steps of one epoch.

    On a CPU a step ends when the host reaches `lap`. On a GPU the host runs ahead, so that events are put into the
    stream and read after the last step; only the ends of the region wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._stamps: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._start_s = 0.0
        self.total_s = 0.0

    def start(self) -> None:
        """Open the timed region, the device idle."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            self._mark()
        elif self._device.type == "mps":
            torch.mps.synchronize()
        self._start_s = time.perf_counter()
        self._stamps = [self._start_s]

    def lap(self) -> None:
        """A step is over."""
        if self._on_gpu:
            self._mark()
        else:
            self._stamps.append(time.perf_counter())

    def stop(self) -> None:
        """Close the timed region, the device idle again."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        self.total_s = time.perf_counter() - self._start_s

    def step_times_s(self) -> list[float]:
        """Seconds per step since `start`."""
        if self._on_gpu:
            pairs = zip(self._events, self._events[1:], strict=False)
            return [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return [b - a for a, b in zip(self._stamps, self._stamps[1:], strict=False)]

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)


NO_ENERGY = "the training went on from a checkpoint, and what it took before was not kept"


@dataclass
class TrainTotals:
    """What the counted steps add up to on this rank."""

    train_time_s: float = 0.0
    eval_time_s: float = 0.0
    num_samples: int = 0
    num_steps: int = 0
    step_times_s: list[float] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)


def train(
    workload: Workload,
    config: Config,
    seed: int,
    context: DistContext,
    cores: tuple[int, ...],
    channel: Channel,
    start_s: float,
    model_dir: Path | None = None,
    profiling: Profiling = NO_PROFILING,
    profile_dir: Path | None = None,
    checkpoint_dir: Path | None = None,
) -> RankOutcome:
    """Train one trial's rank and tell what it took.

    Args:
        start_s: ``time.monotonic()`` when the rank was asked for.
        model_dir: where rank 0 leaves the trained model, if the config keeps it.
        profile_dir: where rank 0 leaves the traces of the profiling.
        checkpoint_dir: of this trial alone; where the config asks for checkpoints, they are there while it trains, and
            the training goes on from one that is there already: with the same batches, draws and times as if it had
            not been interrupted, after another warm-up.

    The model's weights, the data order and so the losses depend on config and seed, not on the number of ranks
    (up to the rounding of a different order of summation).
    """
    assert workload.model is not None and workload.data is not None
    numerics = numerics_of(config, context.device)
    data_start_s = time.monotonic()
    data = workload.data(config)
    num_samples = _num_samples(batches.num_train_samples(data), config)
    data_time_s = time.monotonic() - data_start_s
    steps_per_epoch = batches.num_steps(num_samples, config["batch_size"], drop_last=config["drop_last"])
    if not steps_per_epoch:
        raise ValueError(f"batch_size={config['batch_size']} leaves no full batch of {num_samples} samples")
    total_steps = steps_per_epoch * config["epochs"]
    torch.manual_seed(seed)  # the same weights on every rank
    model = numerics.convert(workload.model(config))
    evaluation = Evaluation(workload, data, config, numerics, context)
    strategy = build_strategy(Task(workload, config, model, evaluation.sample(), context))
    if config["compile"]:
        strategy.module = compiled(strategy.module)
    share, num_shares = strategy.share
    split_order = partial(
        batches.shares,
        batch_size=config["batch_size"],
        rank=share,
        num_shares=num_shares,
        drop_last=config["drop_last"],
    )
    if config["loader"] == "resident":
        stream = batches.resident(data, num_samples, numerics.cast, context.device, split_order)
    else:
        stream = batches.dataloader(data, numerics.cast, context.device, split_order, config)
    loss_of: Callable[..., Tensor] = workload.loss or nn.functional.cross_entropy

    def new_stepper(span: Span = no_span) -> Stepper:
        # Dropout and the like: a stream of its own for every share of a batch.
        torch.manual_seed(seed * 7919 + share + 1)
        strategy.reset_state()
        return Stepper(strategy, numerics, loss_of, config, total_steps, span)

    mark("rank: first step")
    warm_start_s = time.monotonic()
    _warm_up(new_stepper(), strategy, stream, config, batches.epoch_order(num_samples, seed, 0))
    warmup_s = time.monotonic() - warm_start_s

    stepper = new_stepper()
    best_weights = BestWeights(workload, config, model_dir if context.rank == 0 and config["keep_model"] else None)
    watch = Telemetry(cores, context.device)
    timed = TrainTotals()
    stopped = False
    whole = model
    num_epochs = 0 if profiling.instead_of_training else config["epochs"]
    checkpoint_every = config.get("checkpoint_every_epochs")
    checkpoints = Checkpoints(checkpoint_dir if checkpoint_every and num_epochs else None, context)
    if saved := checkpoints.load():
        timed = _put_back(saved, strategy, stepper, best_weights, context)
        # The runner counts an attempt's reports from the first.
        stopped = any(not channel.report(report) for report in timed.reports)
    num_resumed_steps = timed.num_steps
    missing = range(timed.num_steps, timed.num_steps if stopped else num_epochs * steps_per_epoch)
    order_of = partial(batches.epoch_order, num_samples, seed)
    orders = batches.orders(order_of, missing, steps_per_epoch, config["batch_size"])
    for steps in batches.segments((stream(order) for order in orders), len(missing), config["eval_every_steps"]):
        context.barrier()
        watch.start()
        context.barrier()  # reading counters takes one rank longer than another
        timer = StepTimer(context.device)
        losses, sizes = _run_segment(stepper, strategy, steps, timer)
        watch.stop()
        whole = strategy.full_model()
        eval_start_s = time.perf_counter()
        val = evaluation(whole)
        eval_time_s = time.perf_counter() - eval_start_s
        timed.step_times_s += timer.step_times_s()
        timed.train_time_s += timer.total_s
        timed.eval_time_s += eval_time_s
        timed.num_samples += sum(sizes)
        timed.num_steps += len(sizes)
        weighted = sum(loss * size for loss, size in zip(losses, sizes, strict=True))
        loss_sum, count = context.sum(torch.tensor([weighted, sum(sizes)], dtype=torch.float64)).tolist()
        slowest_s, slowest_eval_s = context.max([timer.total_s, eval_time_s])
        epoch = timed.num_steps / steps_per_epoch
        report = {
            "epoch": int(epoch) if epoch.is_integer() else epoch,
            "step": timed.num_steps,
            "train_loss": loss_sum / count,
            **val,
            "lr": stepper.lr,
            **stepper.take_grad_norm(),
            "train_time_s": slowest_s,
            "eval_time_s": slowest_eval_s,
            "throughput_samples_per_s": count / slowest_s,
            "eval_samples_per_s": evaluation.size / slowest_eval_s,
            "eval_steps_per_s": evaluation.num_steps / slowest_eval_s,
        }
        best_weights.update(whole, report)
        timed.reports.append(report)
        if not channel.report(report):
            stopped = timed.num_steps < total_steps
            break
        if checkpoint_every and timed.num_steps < total_steps:
            period = checkpoint_every * steps_per_epoch
            if timed.num_steps // period > (timed.num_steps - len(sizes)) // period:
                checkpoints.save(timed.num_steps, _state_of(strategy, stepper, best_weights, timed, context))
    best_weights.save(whole)
    profiled: Mapping[str, Any] = {}
    if profiling.num_steps and not stopped:
        more = batches.full_batches(order_of, config["epochs"] + 1, stream, config["batch_size"])
        looked_into = ProfiledPass(new_stepper, more, context, strategy.module)
        profiled = profile(
            looked_into,
            profiling.num_steps,
            profile_dir,
            context,
            numerics,
            config["num_threads"],
            strategy.full_model(),
            evaluation.sample(),
        )
    checkpoints.remove()
    environment = watch.summary() if timed.num_steps else {}
    counters = watch.counters() if timed.num_steps else None
    if checkpoint_every:
        environment["checkpoint_s"] = checkpoints.time_s
    if checkpoints.why_not:
        environment["not_resumed"] = checkpoints.why_not
    if num_resumed_steps and counters is not None:
        environment["resumed_at_epoch"] = num_resumed_steps / steps_per_epoch
        counters = replace(counters, package_j=None, gpu_j=None, no_energy=(NO_ENERGY,))
    return RankOutcome(
        stopped=stopped,
        startup_s=warm_start_s - start_s,
        data_time_s=data_time_s,
        warmup_s=warmup_s,
        train_time_s=timed.train_time_s if timed.num_steps else None,
        eval_time_s=timed.eval_time_s if timed.num_steps else None,
        num_samples=timed.num_samples if timed.num_steps else None,
        step_times_s=tuple(timed.step_times_s),
        environment=environment,
        counters=counters,
        profile=profiled,
        data=fingerprint(workload, data, num_samples) if context.rank == 0 else {},
    )


def _state_of(
    strategy: Strategy, stepper: Stepper, best_weights: BestWeights, timed: TrainTotals, context: DistContext
) -> dict[str, Any]:
    """All that the rest of the training depends on, and what there is to tell of it so far."""
    return {
        "weights": weights_of(strategy.module),
        "stepper": stepper.state(),
        "keeper": best_weights.state(),
        "generators": generator_states(context.device),
        "timed": asdict(timed),
    }


def _put_back(
    state: Mapping[str, Any], strategy: Strategy, stepper: Stepper, best_weights: BestWeights, context: DistContext
) -> TrainTotals:
    """The inverse of `_state_of`."""
    set_weights(strategy.module, state["weights"])
    stepper.load(state["stepper"])
    best_weights.load(state["keeper"])
    set_generator_states(state["generators"], context.device)
    return TrainTotals(**state["timed"])


def _num_samples(available: int, config: Config) -> int:
    wanted = config["num_samples"]
    if wanted is not None and wanted > available:
        raise ValueError(f"num_samples={wanted} is more than the {available} training samples")
    return wanted or available


def _run_segment(
    stepper: Stepper, strategy: Strategy, steps: Iterator[Batch], timer: StepTimer
) -> tuple[list[float], list[int]]:
    """The timed region; returns each step's mean loss and number of samples on this rank."""
    strategy.module.train()
    losses: list[Tensor] = []
    sizes: list[int] = []
    timer.start()
    counts = int(strategy.counts_samples)
    for batch in steps:
        losses.append(stepper.step(batch))
        sizes.append(batch.num_samples * counts)
        timer.lap()
    timer.stop()
    return torch.stack(losses).double().tolist(), sizes  # read once, after the clock


def _warm_up(
    stepper: Stepper,
    strategy: Strategy,
    stream: batches.BatchStream,
    config: Config,
    order: Tensor,
) -> None:
    """Run some steps so that what is done once (threads, kernels, buckets) is done, then put the weights back."""
    num_steps, batch_size = config["num_warmup_steps"], config["batch_size"]
    if not num_steps:
        return
    initial = snapshot(strategy.module)
    strategy.module.train()
    for batch in stream(order[: num_steps * batch_size]):
        stepper.step(batch)
    minds_size = config["compile"] or strategy.depends_on_shape
    if minds_size and not config["drop_last"] and (last := len(order) % batch_size):
        for batch in stream(order[:last]):  # made ready for a batch of another size as well
            stepper.step(batch)
    restore(strategy.module, initial)
    stepper.clear()
