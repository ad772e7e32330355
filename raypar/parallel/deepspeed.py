"""DeepSpeed's ZeRO: optimizer state, gradients and weights divided among the ranks, as its stage says.

Stage 0 divides nothing (an all-reduce after the backward pass), 1 the optimizer's state, 2 the gradients too, 3 the
weights too (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054). It works on the trial's own process group.
Gradients are averaged over the ranks, as in DDP. Batch norm's running means are each rank's own until an evaluation.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator
from functools import reduce
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from raypar.parallel.base import DataParallelism
from raypar.study.strategy import Conflict, Exchange, StrategyTraits
from raypar.study.workload import Config, Option, Workload

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from raypar.parallel.strategy import Batch, ForwardBackward, StepOptimizer, Task

ZERO_STAGE = Option(
    2,
    int,
    "what DeepSpeed divides among workers: nothing (0), optimizer state (1), gradients too (2), weights too (3)",
    lambda value: None if value in (0, 1, 2, 3) else "must be 0, 1, 2 or 3",
)


def conflicts(config: Config, _swept: Collection[str]) -> Iterator[Conflict]:
    """Yield the conflicts with DeepSpeed's engine."""
    if config["num_workers"] == 1:
        return
    if config["optimizer"] in ("lars", "lamb") and config["zero_stage"]:
        hint = 'use zero_stage=0, strategy="ddp", or another optimizer'
        yield "optimizer", "needs the norms of whole layers, which ZeRO cuts into flat parts", hint
    if config["precision"] == "fp64":
        yield "precision", "does not go with deepspeed, which keeps float32 weights", 'use precision="fp32"'
    if config["checkpoint_every_epochs"]:
        problem = "does not go with deepspeed, whose engine keeps its own weights"
        yield "checkpoint_every_epochs", problem, 'leave it out, or use strategy="fsdp", which divides as much'


class DeepSpeed(DataParallelism):
    """DeepSpeed's engine around the model, with raypar's optimizer in it."""

    def __init__(self, task: Task) -> None:
        from raypar.parallel import strategy

        super().__init__(task)
        self._context, self._config = task.context, task.config
        self._stage: int = task.config["zero_stage"]
        # An engine takes its model's parameters apart and keeps its own weights: a restart needs a new one.
        self._initial = strategy.copied(task.model, strategy.HOST)
        self._complete = strategy.copied(task.model, strategy.HOST)
        self._engine: Any = None

    def reset_state(self) -> None:
        """Put the first weights back as well: what is written into an engine's module does not reach its own copy."""
        if self._engine is not None:
            from raypar.parallel import strategy

            self._engine.destroy()
            self._engine = None
            self._model = strategy.copied(self._initial, self._context.device)
            self.module = self._model

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": [p for p in self._model.parameters() if p.requires_grad]}]

    def wrap_optimizer(self, optimizer: Optimizer) -> StepOptimizer:
        """Start the engine. It gives the optimizer its own flat parameters; the lr stays the schedule's."""
        deepspeed = _package(self._context.device)
        self._engine, *_ = deepspeed.initialize(
            model=self._model, optimizer=optimizer, config=engine_config(self._config, self._context.world_size)
        )
        self.module = self._engine
        return EngineOptimizer(self._engine, optimizer, self._note_norm)

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        import torch

        from raypar.parallel import strategy

        losses = []
        for i, (part, share) in enumerate(strategy.parts_of(batch, self._num_parts)):
            if i:
                self._engine.step()  # between parts it only counts
            with do.span("forward"), do.autocast():
                value = do.loss(strategy.call(self.module, part.inputs), part.targets)
            with do.span("backward"):
                # The weights of the parts add up to one.
                objective = do.loss.objective(value, part.weight, part.num_samples, part.num_global)
                self._engine.backward(objective, scale_wrt_gas=False)
            losses.append(do.loss.noted(value, share))
        return reduce(torch.add, losses)

    def clip(self, max_norm: float) -> Tensor:
        """At stages 1 to 3 the engine clips in its step: the norm is in the tensor after it."""
        import torch

        if not self._stage:
            return super().clip(max_norm)
        self._norm = torch.zeros((), device=self._context.device)
        return self._norm

    def full_model(self) -> nn.Module:
        import torch

        from raypar.parallel import strategy

        gathered: Any = contextlib.nullcontext
        if self._stage == 3 and self._engine is not None:
            gathered = _package(self._context.device).zero.GatheredParameters
        with torch.no_grad():
            for part, full in zip(self._model.parameters(), self._complete.parameters(), strict=True):
                with gathered([part]):  # one at a time: together they would take the memory of one more model
                    full.copy_(part)
            for buffer, full_buffer in zip(self._model.buffers(), self._complete.buffers(), strict=True):
                full_buffer.copy_(buffer)
        return strategy.broadcast_buffers(self._complete, self._context.device)

    def _note_norm(self) -> None:
        if self._stage and self._config["clip_grad_norm"] is not None:
            import torch

            self._norm.copy_(torch.as_tensor(self._engine.get_global_grad_norm()))


class EngineOptimizer:
    """`StepOptimizer` that leaves its step to the engine."""

    def __init__(self, engine: Any, optimizer: Optimizer, after: Callable[[], None]) -> None:
        self._engine, self._after = engine, after
        self.param_groups = optimizer.param_groups

    def zero_grad(self) -> None:
        """The engine's step did it."""

    def step(self) -> None:
        self._engine.step()
        self._after()


def engine_config(config: Config, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Its batch sizes only have to be consistent, since raypar cuts the batches."""
    num_parts, stage, max_norm = config["accumulation_steps"], config["zero_stage"], config["clip_grad_norm"]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": num_parts,
        "train_batch_size": num_parts * world_size,
        # At stage 0 it would clip and not report the norm.
        "gradient_clipping": max_norm if stage and max_norm is not None else 0.0,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            # Else parameters below 100,000 elements are not split at stage 3, and torch's own linear() is exchanged.
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
        },
        "zero_allow_untested_optimizer": True,  # it lists only torch's Adam, AdamW and Adagrad
        # Else its forward pass switches autocast off on CUDA.
        "torch_autocast": {"enabled": config["precision"] == "bf16", "dtype": "bfloat16"},
        "steps_per_print": sys.maxsize,
    }


def _package(device: torch.device) -> Any:
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # it insists on having one
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # it writes to the standard output
    if device.type == "cpu":
        # Else each first use compiles an extension (a minute or more), for inference only.
        deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def check_compatible(_workload: Workload, _config: Config) -> tuple[str, str] | None:
    """Return the problem and the fix if DeepSpeed is not installed."""
    if find_spec("deepspeed") is None:
        hint = "pip install 'raypar[deepspeed]' on every machine that runs workers"
        return "needs the package deepspeed, which is not installed", hint
    return None


STRATEGY = StrategyTraits(
    build=DeepSpeed,
    splits="by ZeRO stage: optimizer state, gradients, weights",
    built_on="DeepSpeed, `pip install 'raypar[deepspeed]'`",
    exchange=Exchange.SHARDED,
    options={"zero_stage": ZERO_STAGE},
    conflicts=conflicts,
    check=check_compatible,
    takes_loss_pairs=False,
    recomputes=False,
    needs_same_parameters=True,
)
