"""Training of one trial on one rank: a warm-up, then timed segments with an evaluation after each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypar.measure.memory import limit_on_gpu
from raypar.measure.steps import StepTimer
from raypar.measure.telemetry import Telemetry
from raypar.parallel.loss import Kind
from raypar.parallel.strategy import Batch, DistContext, on_device
from raypar.study.conditions import RankConditions
from raypar.study.gradient_noise import NOISE_SCALE, Moments, in_blocks, moments_of, noise_scale
from raypar.study.options import memory_limit_bytes
from raypar.study.workload import Config, Workload
from raypar.trace import mark
from raypar.train import checkpoint
from raypar.train.checkpoint import Checkpoints
from raypar.train.data_identity import fingerprint
from raypar.train.evaluate import Evaluation
from raypar.train.generators import generator_states, set_generator_states
from raypar.train.job import MODEL_FOLDER, NO_PROFILING, PROFILE_FOLDER, Channel, Profiling, RankOutcome
from raypar.train.saved_model import BestWeights
from raypar.train.shared_data import SharedData
from raypar.train.step import Stepper
from raypar.train.training import Training

NO_ENERGY = "the training resumed from a checkpoint, and the energy before that is unknown"


@dataclass
class TrainTotals:
    """Sums over this rank's timed steps; times in seconds."""

    train_time_s: float = 0.0
    eval_time_s: float = 0.0
    num_samples: int = 0
    num_steps: int = 0
    step_times_s: list[float] = field(default_factory=list)
    gradient_noise: list[tuple[float, ...]] = field(default_factory=list)
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
    shared: SharedData | None = None,
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
        shared: data sets of the study on this machine.

    Raises:
        WorkloadError: mistakes in the workload's data and model.
        DoesNotFit: a rank needs more memory than ``max_memory``.
    """
    limit_bytes = memory_limit_bytes(config)
    if limit_bytes is not None and context.device.type == "cuda":
        limit_on_gpu(context.device, limit_bytes)
    training, stopped = Training(workload, config, seed, context, shared), False
    mark("rank: first step")
    warmup_start_s = time.monotonic()
    stepper = training.warm_up()
    warmup_s = time.monotonic() - warmup_start_s
    if limit_bytes is not None:
        training.memory.check(limit_bytes, context.max([training.memory.peak_bytes or 0])[0])  # on all ranks, or none

    num_steps = 0 if profiling.instead_of_training else training.num_steps
    keeps_model = context.rank == 0 and config["keep_model"]
    best_weights = BestWeights(workload, config, artifact_dir / MODEL_FOLDER if artifact_dir and keeps_model else None)
    timed = TimedTraining(training, stepper, Telemetry(cores, context.device))
    saves = config["checkpoint_every_epochs"] is not None
    checkpoints = Checkpoints(checkpoint_dir if saves and num_steps else None, context)
    if state := checkpoints.load():
        timed.load_state_dict(state)
        best_weights.load_state_dict(state["keeper"])
        # For the runner, each attempt reports from the start.
        stopped = any(not channel.report(report) for report in timed.totals.reports)
    done, before = timed.num_resumed_steps, replace(timed.totals)
    loop_start_s = time.monotonic()
    for steps in training.batches.segments(range(done, done if stopped else num_steps)):
        first_step = timed.totals.num_steps
        report = timed.run_segment(steps)
        best_weights.update(training.full_model, report)
        is_last = timed.totals.num_steps == num_steps
        if not channel.report(report):
            stopped = not is_last
            break
        if saves and not is_last and timed.ends_checkpoint_period(first_step):
            checkpoints.save(timed.totals.num_steps, {**timed.state_dict(), "keeper": best_weights.state_dict()})
    worked_s = timed.totals.train_time_s + timed.totals.eval_time_s - before.train_time_s - before.eval_time_s
    save_start_s = time.monotonic()
    best_weights.save(training.full_model)
    profile_start_s = time.monotonic()
    traces_dir = artifact_dir / PROFILE_FOLDER if artifact_dir else None
    profile = training.profile(profiling.num_steps, traces_dir) if profiling.num_steps and not stopped else None
    profile_s = time.monotonic() - profile_start_s
    checkpoints.remove()
    outcome = timed.outcome()
    return replace(
        outcome,
        stopped=stopped,
        startup_s=warmup_start_s - start_s,
        warmup_s=warmup_s,
        profile=profile,
        data=fingerprint(workload, training.data, training.batches.num_samples, training.digests)
        if context.rank == 0
        else {},
        conditions=replace(
            outcome.conditions,
            checkpoint_s=checkpoints.time_s if saves else None,
            report_s=max(0.0, save_start_s - loop_start_s - worked_s - checkpoints.time_s),
            saving_s=profile_start_s - save_start_s + checkpoints.time_s,
            profile_s=profile_s if profile else None,
            not_resumed=checkpoints.why_not or None,
            is_untrained=True if profiling.instead_of_training else None,
        ),
    )


class TimedTraining:
    """Timed steps of a training, segment by segment, with an evaluation after each.

    Attributes:
        totals: sums over the segments so far.
        num_resumed_steps: steps before the checkpoint that the training resumed from.
    """

    def __init__(self, training: Training, stepper: Stepper, telemetry: Telemetry) -> None:
        self._training, self._stepper, self._telemetry = training, stepper, telemetry
        self._timer = StepTimer(training.context.device)
        self.totals = TrainTotals()
        self.num_resumed_steps = 0

    def run_segment(self, steps: Iterator[Batch]) -> dict[str, Any]:
        """Run steps, timed, then evaluate.

        Returns:
            The report; times in seconds, the slowest rank's.
        """
        training, totals, telemetry = self._training, self.totals, self._telemetry
        context, strategy, evaluation = training.context, training.strategy, training.evaluation
        context.barrier()
        telemetry.start()
        training.memory.start()
        context.barrier()  # ranks take different times to read their counters
        timer, stepper = self._timer, self._stepper
        strategy.module.train()
        losses: list[Tensor] = []
        sizes: list[int] = []
        counts = int(strategy.counts_samples)
        timer.start()
        for batch in steps:
            losses.append(stepper.step(batch))
            sizes.append(batch.num_samples * counts)
            timer.lap()
        timer.stop()
        telemetry.stop()
        training.memory.stop()
        noted = torch.stack(losses).cpu().double()  # read once, after the clock

        training.full_model = strategy.full_model()
        scores, eval_time_s = _evaluated(evaluation, training.full_model, context.device)
        mark("rank: evaluated")

        totals.step_times_s += timer.step_times_s()
        totals.train_time_s += timer.total_s
        totals.eval_time_s += eval_time_s
        totals.num_samples += sum(sizes)
        totals.num_steps += len(sizes)
        numerators, weights = training.loss.sums(noted, torch.tensor(sizes))
        is_sum = training.loss.kind is Kind.SUM
        if is_sum:  # the report has the mean over the steps
            weights = torch.full_like(numerators, counts)
        if stepper.skips_overflows:  # the loss of a skipped step says nothing about the weights
            numerators, weights = numerators[numerators.isfinite()], weights[numerators.isfinite()]
        sums = [numerators.sum(), weights.sum(), sum(sizes)]
        loss_sum, loss_weight, count = context.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        if is_sum:
            loss_weight /= strategy.share[1]  # every share counts each step
        noise = _moments(strategy.gradient_norms.take(), context) if strategy.gradient_norms else []
        totals.gradient_noise += map(tuple, noise)  # torch reloads no named tuples
        slowest_s, slowest_eval_s = context.max([timer.total_s, eval_time_s])
        epoch = totals.num_steps / training.batches.steps_per_epoch
        report = {
            "epoch": int(epoch) if epoch.is_integer() else epoch,
            "step": totals.num_steps,
            "train_loss": loss_sum / loss_weight if loss_weight else math.nan,
            **scores,
            "lr": stepper.lr,
            **stepper.take_grad_norm(),
            **({NOISE_SCALE: scale} if (scale := noise_scale(in_blocks(noise))) else {}),
            "train_time_s": slowest_s,
            "eval_time_s": slowest_eval_s,
            "throughput_samples_per_s": count / slowest_s,
            "eval_samples_per_s": evaluation.size / slowest_eval_s,
            "eval_steps_per_s": evaluation.num_steps / slowest_eval_s,
        }
        totals.reports.append(report)
        return report

    def outcome(self) -> RankOutcome:
        """Return the measurements of the training, and of the timed steps if there were any."""
        totals, training = self.totals, self._training
        conditions = RankConditions(**training.memory.summary(), **training.facts.conditions(training.config))
        if not totals.num_steps:
            return RankOutcome(data_time_s=training.data_time_s, conditions=conditions)
        conditions, counters = replace(conditions, **self._telemetry.summary()), self._telemetry.counters()
        if totals.gradient_noise and training.context.rank == 0:
            steps = [Moments(*step) for step in totals.gradient_noise]
            conditions = replace(conditions, gradient_noise=in_blocks(steps))
        if self.num_resumed_steps:
            conditions = replace(conditions, resumed_at_epoch=self.num_resumed_steps / training.batches.steps_per_epoch)
            counters = replace(counters, package_j=None, gpu_j=None, no_energy=(NO_ENERGY,))
        return RankOutcome(
            data_time_s=training.data_time_s,
            train_time_s=totals.train_time_s,
            eval_time_s=totals.eval_time_s,
            num_samples=totals.num_samples,
            step_times_s=tuple(totals.step_times_s),
            conditions=conditions,
            counters=counters,
        )

    def ends_checkpoint_period(self, first_step: int) -> bool:
        """Return whether the segment that began at `first_step` passed the end of ``checkpoint_every_epochs``."""
        num_steps = self._training.config["checkpoint_every_epochs"] * self._training.batches.steps_per_epoch
        return bool(self.totals.num_steps // num_steps > first_step // num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state of the training and the totals so far, for a checkpoint."""
        return {
            "weights": checkpoint.local_weights(self._training.strategy.module),
            "stepper": self._stepper.state_dict(),
            "generators": generator_states(self._training.context.device),
            "timed": asdict(self.totals),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another training's `state_dict`."""
        checkpoint.load_local_weights(self._training.strategy.module, state["weights"])
        self._stepper.load_state_dict(state["stepper"])
        set_generator_states(state["generators"], self._training.context.device)
        self.totals = TrainTotals(**state["timed"])
        self.num_resumed_steps = self.totals.num_steps


def _moments(norms: Tensor, context: DistContext) -> list[Moments]:
    """Return the moments of each step from the norms on every rank; a step whose gradients overflowed has none."""
    means = context.sum(norms) / context.world_size
    return [moments_of(*step) for step in means[means.isfinite().all(1)].tolist()]


def _evaluated(evaluation: Evaluation, model: nn.Module, device: torch.device) -> tuple[dict[str, float], float]:
    """Return the scores of the complete model and the seconds; the device holds a copy only while this runs."""
    model = on_device(model, device)
    start_s = time.perf_counter()
    scores = evaluation(model)
    return scores, time.perf_counter() - start_s
