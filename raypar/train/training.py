"""Data, model and strategy of one rank's training, and its warm-up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from raypar.errors import WorkloadError
from raypar.measure.memory import NUM_COUNTED_STEPS, MemoryMonitor, stored_bytes
from raypar.measure.profile import ProfiledSteps
from raypar.measure.spans import RecordedSteps
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
from raypar.study.workload import Config, Workload
from raypar.train import checkpoint
from raypar.train.data import TrainBatches, mapped
from raypar.train.data_identity import NO_DIGESTS
from raypar.train.evaluate import Evaluation
from raypar.train.flops import flop_per_sample, peak_flops
from raypar.train.generators import generator_states, generators_kept, seed_torch, set_generator_states
from raypar.train.model_check import model_facts
from raypar.train.precision import numerics_of
from raypar.train.shared_data import SharedData
from raypar.train.step import Stepper, compiled
from raypar.train.workload_check import check_workload

# Seconds of warm-up beyond ``num_warmup_steps``, by type of device: a GPU needs them to raise its clock.
MIN_WARMUP_S = {"cuda": 1.0}


class Training:
    """Data, model and strategy of one rank's training.

    Args:
        shared: data sets of the study on this machine; None: the data are loaded here.

    Attributes:
        data: the workload's data.
        digests: of its splits, as far as they are known.
        batches: this rank's share of the data.
        num_steps: steps of the complete training.
        data_time_s: seconds for loading the data.
        facts: facts of the model, from the first batch.
        full_model: the complete model with the weights after the last segment, on every rank.
        memory: peak memory of the training on this rank.
    """

    def __init__(
        self, workload: Workload, config: Config, seed: int, context: DistContext, shared: SharedData | None = None
    ) -> None:
        assert workload.model is not None and workload.data is not None
        self.workload, self.config, self._seed, self.context = workload, config, seed, context
        self.memory = MemoryMonitor(context.device, is_alone=context.world_size == 1)
        self.numerics = numerics_of(config, context.device)
        loaded = (shared or SharedData("", address="")).load(workload, config, seed, context)
        self.data, self.data_time_s, self.digests = loaded.data, loaded.load_s, loaded.digests

        built_bytes = 0

        def build() -> Any:
            nonlocal built_bytes
            seed_torch(seed, context.device.type)  # the same weights on every rank
            with self.memory.building():
                model = workload.model(config)  # type: ignore[misc]
            if isinstance(model, nn.Module):
                built_bytes = stored_bytes(model)
            return model

        of_all = self.digests if loaded.is_mapped else NO_DIGESTS
        checked = check_workload(workload, self.data, config, build, self.numerics, context, of_all)
        model, self.loss, feed = checked.model, checked.loss, checked.feed
        self.memory.note_change(stored_bytes(model) - built_bytes)  # converted, or initialised by its first batch
        with generators_kept(context.device):
            self.batches = TrainBatches(self.data, config, seed, share_of(config, context), feed)
            self.facts, mistakes = model_facts(workload, config, checked, self.batches, context, context.world_size)
            if mistakes:
                raise WorkloadError.of(workload.name, mistakes)
        with self.memory.building():
            self.evaluation = Evaluation(workload, self.data, config, context, self.loss, feed)
            sample = self.evaluation.sample()
            self.strategy = build_strategy(Task(workload, config, model, sample, context, self.facts.gradients))
        self.full_model: nn.Module = self.strategy.full_model()
        if config["compile"]:
            self.strategy.module = compiled(self.strategy.module)
        self.num_steps = self.batches.steps_per_epoch * config["epochs"]

    def warm_up(self) -> Stepper:
        """Run steps that do one-time work (threads, kernels, buckets), and undo them.

        Restores weights and generators.

        Returns:
            The steps of the training, with a new optimizer.
        """
        generators = generator_states(self.context.device)
        if self.config["num_warmup_steps"]:
            module, batches = self.strategy.module, self._warmup_batches()
            with self.memory.counting():
                stepper = self.new_stepper()
                initial = mapped(Tensor.clone, checkpoint.local_weights(module))
                self.memory.exclude(sum(each.nbytes for each in initial.values() if isinstance(each, Tensor)))
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
        set_generator_states(generators, self.context.device)
        return self.new_stepper()

    def _warmup_batches(self) -> Iterator[Batch]:
        """Yield the batches of the warm-up steps, and repeat them until the device is warm on every rank."""
        context = self.context
        needs_short_batch = self.config["compile"] or self.strategy.depends_on_shape
        yield from self.batches.warm_up(with_short_batch=needs_short_batch)
        if least_s := MIN_WARMUP_S.get(context.device.type):
            wait_for_device(context.device)
            until_s = time.monotonic() + least_s
            while context.max([until_s - time.monotonic()])[0] > 0:  # ranks make the same number of steps
                yield from self.batches.warm_up(with_short_batch=False)
                wait_for_device(context.device)

    def profile(self, num_steps: int, folder: Path | None) -> RecordedSteps:
        """Run further steps under torch's profiler.

        Args:
            folder: folder for every rank's trace, written by rank 0; None: no traces.
        """
        context, numerics = self.context, self.numerics
        batches = self.batches.full(self.config["epochs"] + 1)
        steps = ProfiledSteps(lambda span: self.new_stepper(span).step, batches, context, self.strategy.module)
        full_model = self.strategy.full_model()
        recorded = steps.run(num_steps)
        if folder is not None:
            steps.write_traces(folder)
        context.barrier()
        dtype = numerics.mixed or numerics.dtype
        peak = peak_flops(context.device, dtype, self.config["num_threads"])
        if context.rank:
            return replace(recorded, peak_flops=peak)
        flop = flop_per_sample(on_device(full_model, context.device), self.evaluation.sample())
        return replace(recorded, peak_flops=peak, flop_per_sample=flop)

    def new_stepper(self, span: Span = no_span) -> Stepper:
        """Return new steps, with a new optimizer and the random streams of the start."""
        # Every share of a batch has a separate random stream, for dropout for example.
        seed_torch(self._seed * 7919 + self.strategy.share[0] + 1, self.context.device.type)
        self.strategy.reset_state()
        if self.strategy.gradient_norms is not None:
            self.strategy.gradient_norms.clear()
        workload, config, num_steps = self.workload, self.config, self.num_steps
        return Stepper(self.strategy, self.numerics, self.loss, config, num_steps, span, workload=workload)
