"""Training of one trial on one rank: a warm-up that is undone, then timed segments with an evaluation after each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypar.errors import WorkloadError
from raypar.measure.memory import NUM_COUNTED_STEPS, MemoryMonitor, limit_on_gpu
from raypar.measure.profile import ProfiledSteps
from raypar.measure.spans import RecordedSteps
from raypar.measure.steps import StepTimer
from raypar.measure.telemetry import Telemetry
from raypar.parallel.loss import Kind
from raypar.parallel.strategy import (
    Batch,
    DistContext,
    Span,
    Task,
    build_strategy,
    no_span,
    on_device,
    share_of,
    wait_for_device,
)
from raypar.study.conditions import RankConditions
from raypar.study.options import memory_limit_bytes
from raypar.study.workload import Config, Workload
from raypar.trace import mark
from raypar.train import checkpoint
from raypar.train.checkpoint import Checkpoints
from raypar.train.data import TrainBatches
from raypar.train.data_identity import fingerprint
from raypar.train.evaluate import Evaluation
from raypar.train.flops import flop_per_sample, peak_flops
from raypar.train.job import MODEL_FOLDER, NO_PROFILING, PROFILE_FOLDER, Channel, Profiling, RankOutcome
from raypar.train.model_check import ModelFacts, model_facts
from raypar.train.precision import numerics_of
from raypar.train.saved_model import BestWeights
from raypar.train.step import Stepper, compiled
from raypar.train.workload_check import check_workload

# Seconds of warm-up beyond ``num_warmup_steps``, by type of device: a GPU needs them to raise its clock.
MIN_WARMUP_S = {"cuda": 1.0}
NO_ENERGY = "the training resumed from a checkpoint, and the energy before that is unknown"


@dataclass
class TrainTotals:
    """Sums over this rank's timed steps; times in seconds."""

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
    channel: Channel,
    *,
    start_s: float,
    cores: tuple[int, ...] = (),
    artifact_dir: Path | None = None,
    checkpoint_dir: Path | None = None,
    profiling: Profiling = NO_PROFILING,
) -> RankOutcome:
    """Train one rank of a trial.

    The losses depend on config and seed, not on the number of ranks (except for rounding).

    Args:
        config: complete, from `raypar.study.options.resolve`.
        start_s: ``time.monotonic()`` when the rank was requested.
        cores: the cores that the rank is pinned to; empty: not pinned.
        artifact_dir: folder for the trained model and the profile's traces, written by rank 0; None: neither is kept.
        checkpoint_dir: this trial's folder, used only if the config asks for checkpoints. The training resumes from its
            checkpoint, if there is one, after another warm-up.

    Raises:
        ValueError: the data has too few samples for the config.
    """
    limit_bytes = memory_limit_bytes(config)
    if limit_bytes is not None and context.device.type == "cuda":
        limit_on_gpu(context.device, limit_bytes)
    training, stopped = Training(workload, config, seed, context), False
    mark("rank: first step")
    warmup_start_s = time.monotonic()
    training.warm_up()
    warmup_s = time.monotonic() - warmup_start_s
    if limit_bytes is not None:
        training.memory.check(limit_bytes, context.max([training.memory.peak_bytes or 0])[0])  # on all ranks, or none

    num_steps = 0 if profiling.instead_of_training else training.num_steps
    keeps_model = context.rank == 0 and config["keep_model"]
    best_weights = BestWeights(workload, config, artifact_dir / MODEL_FOLDER if artifact_dir and keeps_model else None)
    telemetry = Telemetry(cores, context.device)
    saves = config["checkpoint_every_epochs"] is not None
    checkpoints = Checkpoints(checkpoint_dir if saves and num_steps else None, context)
    if state := checkpoints.load():
        training.load_state_dict(state)
        best_weights.load_state_dict(state["keeper"])
        # For the runner, each attempt reports from the start.
        stopped = any(not channel.report(report) for report in training.totals.reports)
    totals, num_resumed_steps = training.totals, training.totals.num_steps
    for steps in training.batches.segments(range(num_resumed_steps, num_resumed_steps if stopped else num_steps)):
        first_step = totals.num_steps
        report = training.run_segment(steps, telemetry)
        best_weights.update(training.full_model, report)
        if not channel.report(report):
            stopped = totals.num_steps < num_steps
            break
        if saves and totals.num_steps < num_steps and training.ends_checkpoint_period(first_step):
            checkpoints.save(totals.num_steps, {**training.state_dict(), "keeper": best_weights.state_dict()})

    best_weights.save(training.full_model)
    traces_dir = artifact_dir / PROFILE_FOLDER if artifact_dir else None
    profile = training.profile(profiling.num_steps, traces_dir) if profiling.num_steps and not stopped else None
    checkpoints.remove()
    outcome = training.outcome(telemetry, num_resumed_steps)
    return replace(
        outcome,
        stopped=stopped,
        startup_s=warmup_start_s - start_s,
        warmup_s=warmup_s,
        profile=profile,
        data=fingerprint(workload, training.data, training.batches.num_samples) if context.rank == 0 else {},
        conditions=replace(
            outcome.conditions,
            checkpoint_s=checkpoints.time_s if saves else None,
            not_resumed=checkpoints.why_not or None,
        ),
    )


class Training:
    """Data, model, strategy and progress of one rank's training.

    Attributes:
        data: the workload's data.
        batches: this rank's share of the data.
        num_steps: steps of the complete training.
        data_time_s: seconds for loading the data.
        facts: facts of the model, from the first batch.
        full_model: the complete model with the weights after the last segment, on every rank.
        totals: sums over the segments so far.
        memory: peak memory of the training on this rank.
    """

    def __init__(self, workload: Workload, config: Config, seed: int, context: DistContext) -> None:
        assert workload.model is not None and workload.data is not None
        self._workload, self._config, self._seed, self._context = workload, config, seed, context
        self.memory = MemoryMonitor(context.device)
        self._numerics = numerics_of(config, context.device)
        data_start_s = time.monotonic()
        self.data = workload.data(config)
        self.data_time_s = time.monotonic() - data_start_s

        def build() -> Any:
            torch.manual_seed(seed)  # the same weights on every rank
            return workload.model(config)  # type: ignore[misc]

        with self.memory.building():
            checked = check_workload(workload, self.data, config, build, self._numerics, context)
            self._loss, feed = checked.loss, checked.feed
        with checkpoint.generators_kept(context.device):
            share = share_of(config, context)
            self.batches = TrainBatches(self.data, config, seed, share, self._numerics, feed)
            self.facts = self._facts_of(checked.model)
        with self.memory.building():
            self._evaluation = Evaluation(workload, self.data, config, self._numerics, context, self._loss, feed)
            sample = self._evaluation.sample()
            self._strategy = build_strategy(
                Task(workload, config, checked.model, sample, context, self.facts.gradients)
            )
        self.full_model: nn.Module = self._strategy.full_model()
        if config["compile"]:
            self._strategy.module = compiled(self._strategy.module)
        self.num_steps = self.batches.steps_per_epoch * config["epochs"]
        self.totals = TrainTotals()
        self._timer = StepTimer(context.device)

    def _facts_of(self, model: nn.Module) -> ModelFacts:
        context, num_workers = self._context, self._context.world_size
        facts, mistakes = model_facts(
            self._workload, self._config, model, self._loss, self.batches, self._numerics, context, num_workers
        )
        if mistakes:
            raise WorkloadError.of(self._workload.name, mistakes)
        return facts

    def warm_up(self) -> None:
        """Run steps that do one-time work (threads, kernels, buckets), and undo them.

        Restores weights and generators, and creates a new optimizer.
        """
        generators = checkpoint.generator_states(self._context.device)
        if self._config["num_warmup_steps"]:
            module, batches = self._strategy.module, self._warmup_batches()
            with self.memory.counting():
                stepper = self._new_stepper()
                initial = {key: value.clone() for key, value in checkpoint.local_weights(module).items()}
                self.memory.exclude(sum(value.nbytes for value in initial.values()))
                module.train()
                num_left = NUM_COUNTED_STEPS
                for batch in islice(batches, NUM_COUNTED_STEPS):
                    stepper.step(batch)
                    num_left -= 1
                for _ in range(num_left):  # if there is only one warm-up step, or the epoch has no more
                    stepper.step(batch)
            for batch in batches:
                stepper.step(batch)
            checkpoint.load_local_weights(module, initial)
            stepper.clear()
        checkpoint.set_generator_states(generators, self._context.device)
        self._stepper = self._new_stepper()

    def _warmup_batches(self) -> Iterator[Batch]:
        """Yield the batches of the warm-up steps, and repeat them until the device is warm on every rank."""
        context = self._context
        needs_short_batch = self._config["compile"] or self._strategy.depends_on_shape
        yield from self.batches.warm_up(with_short_batch=needs_short_batch)
        if least_s := MIN_WARMUP_S.get(context.device.type):
            wait_for_device(context.device)
            until_s = time.monotonic() + least_s
            while context.max([until_s - time.monotonic()])[0] > 0:  # ranks make the same number of steps
                yield from self.batches.warm_up(with_short_batch=False)
                wait_for_device(context.device)

    def run_segment(self, steps: Iterator[Batch], telemetry: Telemetry) -> dict[str, Any]:
        """Run steps, timed, then evaluate.

        Returns:
            The report; times in seconds, the slowest rank's.
        """
        context, totals, evaluation = self._context, self.totals, self._evaluation
        context.barrier()
        telemetry.start()
        self.memory.start()
        context.barrier()  # reading counters takes each rank another time
        timer, stepper = self._timer, self._stepper
        self._strategy.module.train()
        losses: list[Tensor] = []
        sizes: list[int] = []
        counts = int(self._strategy.counts_samples)
        timer.start()
        for batch in steps:
            losses.append(stepper.step(batch))
            sizes.append(batch.num_samples * counts)
            timer.lap()
        timer.stop()
        telemetry.stop()
        self.memory.stop()
        noted = torch.stack(losses).cpu().double()  # read once, after the clock

        self.full_model = self._strategy.full_model()
        scores, eval_time_s = self._evaluate()

        totals.step_times_s += timer.step_times_s()
        totals.train_time_s += timer.total_s
        totals.eval_time_s += eval_time_s
        totals.num_samples += sum(sizes)
        totals.num_steps += len(sizes)
        numerators, weights = self._loss.sums(noted, torch.tensor(sizes))
        if stepper.skips_overflows:  # the loss of a skipped step says nothing about the weights
            numerators, weights = numerators[numerators.isfinite()], weights[numerators.isfinite()]
        sums = [numerators.sum(), weights.sum(), sum(sizes)]
        loss_sum, loss_weight, count = context.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        if self._loss.kind is Kind.SUM:
            loss_weight = len(sizes)
        slowest_s, slowest_eval_s = context.max([timer.total_s, eval_time_s])
        epoch = totals.num_steps / self.batches.steps_per_epoch
        report = {
            "epoch": int(epoch) if epoch.is_integer() else epoch,
            "step": totals.num_steps,
            "train_loss": loss_sum / loss_weight if loss_weight else math.nan,
            **scores,
            "lr": self._stepper.lr,
            **self._stepper.take_grad_norm(),
            "train_time_s": slowest_s,
            "eval_time_s": slowest_eval_s,
            "throughput_samples_per_s": count / slowest_s,
            "eval_samples_per_s": evaluation.size / slowest_eval_s,
            "eval_steps_per_s": evaluation.num_steps / slowest_eval_s,
        }
        totals.reports.append(report)
        return report

    def _evaluate(self) -> tuple[dict[str, float], float]:
        """Return the scores of the complete model and the seconds; the device holds a copy only while this runs."""
        model = on_device(self.full_model, self._context.device)
        start_s = time.perf_counter()
        scores = self._evaluation(model)
        return scores, time.perf_counter() - start_s

    def profile(self, num_steps: int, folder: Path | None) -> RecordedSteps:
        """Run further steps under torch's profiler.

        Args:
            folder: folder for every rank's trace, written by rank 0; None: no traces.
        """
        context, numerics = self._context, self._numerics
        batches = self.batches.full(self._config["epochs"] + 1)
        steps = ProfiledSteps(lambda span: self._new_stepper(span).step, batches, context, self._strategy.module)
        full_model = self._strategy.full_model()
        recorded = steps.run(num_steps)
        if folder is not None:
            steps.write_traces(folder)
        context.barrier()
        dtype = numerics.mixed or numerics.dtype
        peak = peak_flops(context.device, dtype, self._config["num_threads"])
        if context.rank:
            return replace(recorded, peak_flops=peak)
        flop = flop_per_sample(on_device(full_model, context.device), self._evaluation.sample())
        return replace(recorded, peak_flops=peak, flop_per_sample=flop)

    def outcome(self, telemetry: Telemetry, num_resumed_steps: int) -> RankOutcome:
        """Return the measurements of the training, and of the timed steps if there were any.

        Args:
            num_resumed_steps: steps before the checkpoint that the training resumed from.
        """
        totals = self.totals
        conditions = RankConditions(**self.memory.summary(), **self.facts.conditions(self._config))
        if not totals.num_steps:
            return RankOutcome(data_time_s=self.data_time_s, conditions=conditions)
        conditions, counters = replace(conditions, **telemetry.summary()), telemetry.counters()
        if num_resumed_steps:
            conditions = replace(conditions, resumed_at_epoch=num_resumed_steps / self.batches.steps_per_epoch)
            counters = replace(counters, package_j=None, gpu_j=None, no_energy=(NO_ENERGY,))
        return RankOutcome(
            data_time_s=self.data_time_s,
            train_time_s=totals.train_time_s,
            eval_time_s=totals.eval_time_s,
            num_samples=totals.num_samples,
            step_times_s=tuple(totals.step_times_s),
            conditions=conditions,
            counters=counters,
        )

    def ends_checkpoint_period(self, first_step: int) -> bool:
        """Return whether the segment that began at `first_step` passed the end of ``checkpoint_every_epochs``."""
        num_steps = self._config["checkpoint_every_epochs"] * self.batches.steps_per_epoch
        return bool(self.totals.num_steps // num_steps > first_step // num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state of the training and the totals so far, for a checkpoint."""
        return {
            "weights": checkpoint.local_weights(self._strategy.module),
            "stepper": self._stepper.state_dict(),
            "generators": checkpoint.generator_states(self._context.device),
            "timed": asdict(self.totals),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another training's `state_dict`."""
        checkpoint.load_local_weights(self._strategy.module, state["weights"])
        self._stepper.load_state_dict(state["stepper"])
        checkpoint.set_generator_states(state["generators"], self._context.device)
        self.totals = TrainTotals(**state["timed"])

    def _new_stepper(self, span: Span = no_span) -> Stepper:
        # Every share of a batch has a separate random stream, for dropout for example.
        torch.manual_seed(self._seed * 7919 + self._strategy.share[0] + 1)
        self._strategy.reset_state()
        workload, config, num_steps = self._workload, self._config, self.num_steps
        return Stepper(self._strategy, self._numerics, self._loss, config, num_steps, span, workload=workload)
