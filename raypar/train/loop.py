"""The training of one trial on one rank: warm up and undo it, then timed epochs, each followed by an evaluation."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from raypar.study.workload import Config, Data, Split, Workload
from raypar.trace import mark
from raypar.train import batches
from raypar.train.affinity import CpuWatch
from raypar.train.job import Channel, RankOutcome
from raypar.train.optim import build_optimizer
from raypar.train.timer import StepTimer

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
EVAL_BATCH_SIZE = 1000


@dataclass(frozen=True)
class Place:
    """Where this rank stands among the others."""

    rank: int
    world_size: int
    device: torch.device

    def reduce(self, values: list[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        """The values reduced over all ranks, in double precision."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(tensor, how)
        return [float(v) for v in tensor.tolist()]

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


@dataclass
class _Timed:
    """What the epochs add up to on this rank."""

    train_time_s: float = 0.0
    eval_time_s: float = 0.0
    num_samples: int = 0


def train(
    workload: Workload,
    config: Config,
    seed: int,
    place: Place,
    cores: tuple[int, ...],
    channel: Channel,
    start_s: float,
) -> RankOutcome:
    """Train one trial's rank and tell what it took.

    Args:
        start_s: ``time.monotonic()`` when the rank was asked for.

    The model's weights, the data order and so the losses depend on config and seed, not on the number of ranks
    (up to the rounding of a different order of summation).
    """
    assert workload.model is not None and workload.data is not None
    dtype = DTYPES[config["precision"]]

    def cast(inputs: Tensor) -> Tensor:
        return inputs if inputs.dtype == dtype or not _is_numeric_input(inputs) else inputs.to(dtype)

    data = _limited(workload.data(config), config.get("num_samples"))
    if not batches.num_steps(len(data.train), config["batch_size"], drop_last=config["drop_last"]):
        raise ValueError(f"batch_size={config['batch_size']} leaves no full batch of {len(data.train)} samples")
    torch.manual_seed(seed)  # the same weights on every rank
    bare = workload.model(config).to(place.device, dtype)
    if place.world_size > 1:
        devices = [place.device.index] if place.device.type == "cuda" else None
        model: nn.Module = nn.parallel.DistributedDataParallel(bare, device_ids=devices)
    else:
        model = bare
    split_order = partial(
        batches.shares,
        batch_size=config["batch_size"],
        rank=place.rank,
        world_size=place.world_size,
        drop_last=config["drop_last"],
    )
    if config["loader"] == "resident":
        stream = batches.resident(data, cast, place.device, split_order)
    else:
        stream = batches.dataloader(data, cast, place.device, split_order, config["num_loader_workers"])
    loss_of = workload.loss or nn.functional.cross_entropy
    metrics = workload.metrics if workload.metrics is not None else {"accuracy": accuracy}

    def reseed() -> None:
        # Dropout and the like: a stream of its own for every rank.
        torch.manual_seed(seed * 7919 + place.rank + 1)

    mark("rank: first step")
    warm_start_s = time.monotonic()
    reseed()
    _warm_up(model, bare, stream, loss_of, config, len(data.train), seed)
    warmup_s = time.monotonic() - warm_start_s

    reseed()
    optimizer = build_optimizer(model.parameters(), config)
    watch = CpuWatch(cores)
    step_times_s: list[float] = []
    timed = _Timed()
    stopped = False
    for epoch in range(1, config["epochs"] + 1):
        order = batches.epoch_order(len(data.train), seed, epoch)
        place.barrier()
        watch.start()
        timer = StepTimer(place.device)
        losses, sizes = _run_epoch(model, optimizer, stream(order), loss_of, timer)
        watch.stop()
        step_times_s += timer.step_times_s()
        eval_start_s = time.perf_counter()
        val = _evaluate(bare, data, cast, loss_of, metrics, place)
        eval_time_s = time.perf_counter() - eval_start_s
        weighted = sum(loss * size for loss, size in zip(losses, sizes, strict=True))
        loss_sum, count = place.reduce([weighted, float(sum(sizes))], dist.ReduceOp.SUM)
        slowest_s, slowest_eval_s = place.reduce([timer.total_s, eval_time_s], dist.ReduceOp.MAX)
        timed.train_time_s += timer.total_s
        timed.eval_time_s += eval_time_s
        timed.num_samples += sum(sizes)
        report = {
            "epoch": epoch,
            "train_loss": loss_sum / count,
            **val,
            "train_time_s": slowest_s,
            "eval_time_s": slowest_eval_s,
            "throughput_samples_per_s": count / slowest_s,
        }
        if not channel.report(report):
            stopped = epoch < config["epochs"]
            break
    return RankOutcome(
        stopped=stopped,
        startup_s=warm_start_s - start_s,
        warmup_s=warmup_s,
        train_time_s=timed.train_time_s,
        eval_time_s=timed.eval_time_s,
        num_samples=timed.num_samples,
        step_times_s=tuple(step_times_s),
        environment=watch.summary(),
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per sample: 1 where the largest output is the target's. Shapes ``(batch, classes)``, ``(batch,)``."""
    return outputs.argmax(1) == targets


def _is_numeric_input(inputs: Tensor) -> bool:
    # int64 inputs are token numbers for an embedding and stay what they are.
    return inputs.is_floating_point() or inputs.dtype == torch.uint8


def _limited(data: Data, num_samples: int | None) -> Data:
    if num_samples is None:
        return data
    train = Split(data.train.inputs[:num_samples], data.train.targets[:num_samples])
    return Data(train, data.val, data.transform, data.train_dataset)


def _step(model: nn.Module, optimizer: Optimizer, batch: batches.Batch, loss_of: Callable[..., Tensor]) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(batch.inputs), batch.targets)
    (loss if batch.weight == 1.0 else loss * batch.weight).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def _run_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    stream: Iterator[batches.Batch],
    loss_of: Callable[..., Tensor],
    timer: StepTimer,
) -> tuple[list[float], list[int]]:
    """One timed pass; returns each step's mean loss and number of samples on this rank."""
    model.train()
    losses: list[Tensor] = []
    sizes: list[int] = []
    timer.start()
    for batch in stream:
        losses.append(_step(model, optimizer, batch, loss_of))
        sizes.append(batch.num_samples)
        timer.lap()
    timer.stop()
    return torch.stack(losses).double().tolist(), sizes  # read once, after the clock


def _warm_up(
    model: nn.Module,
    bare: nn.Module,
    stream: batches.BatchStream,
    loss_of: Callable[..., Tensor],
    config: Config,
    num_samples: int,
    seed: int,
) -> None:
    """Run some steps so that what is done once (threads, kernels, buckets) is done, then put the weights back."""
    if not config["num_warmup_steps"]:
        return
    initial = copy.deepcopy(bare.state_dict())
    optimizer = build_optimizer(model.parameters(), config)
    model.train()
    order = batches.epoch_order(num_samples, seed, 0)[: config["num_warmup_steps"] * config["batch_size"]]
    for batch in stream(order):
        _step(model, optimizer, batch, loss_of)
    bare.load_state_dict(initial)
    optimizer.zero_grad()


def _evaluate(
    bare: nn.Module,
    data: Data,
    cast: Callable[[Tensor], Tensor],
    loss_of: Callable[..., Tensor],
    metrics: Mapping[str, Callable[[Any, Any], Any]],
    place: Place,
) -> dict[str, float]:
    """``val_loss`` and every metric, each a mean over ``data.val``; the ranks share the samples."""
    size = len(data.val)
    begin, end = place.rank * size // place.world_size, (place.rank + 1) * size // place.world_size
    sums = dict.fromkeys(["val_loss", *metrics], 0.0)
    bare.eval()
    with torch.inference_mode():
        for at in range(begin, end, EVAL_BATCH_SIZE):
            part = slice(at, min(end, at + EVAL_BATCH_SIZE))
            x, y = data.val.inputs[part].to(place.device), data.val.targets[part].to(place.device)
            outputs = bare(cast(data.transform(x) if data.transform else x))
            sums["val_loss"] += float(loss_of(outputs, y)) * len(y)
            for name, metric in metrics.items():
                sums[name] += float(metric(outputs, y).double().sum())
    totals = place.reduce(list(sums.values()), dist.ReduceOp.SUM)
    return {name: total / size for name, total in zip(sums, totals, strict=True)}
