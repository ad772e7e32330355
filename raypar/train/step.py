"""One training step. It runs inside the timed region, so nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from raypar.parallel.base import Strategy
from raypar.parallel.loss import Kind, Loss
from raypar.parallel.recompute import Recomputation
from raypar.parallel.strategy import Batch, ForwardBackward, Span, no_span
from raypar.study.workload import Config, Workload
from raypar.train.checkpoint import optimizer_state, set_optimizer_state
from raypar.train.optim import build_schedule, optimizer_of
from raypar.train.precision import Numerics


class Stepper:
    """Optimizer, schedule and loss scaling of a training.

    Args:
        num_steps: steps of the complete training, for the schedule.
        workload: may have its own optimizer.
        span: marks the parts of a step, for a profile.

    Attributes:
        lr: learning rate of the last step.
        skips_overflows: a step whose gradients overflow changes only the scale of later losses.
    """

    def __init__(
        self,
        strategy: Strategy,
        numerics: Numerics,
        loss: Loss,
        config: Config,
        num_steps: int,
        span: Span = no_span,
        *,
        workload: Workload,
    ) -> None:
        self._strategy, self._span = strategy, span
        optimizer = self._bare_optimizer = optimizer_of(strategy, workload, config)
        self._schedule = build_schedule(optimizer, config, num_steps)
        self._optimizer = strategy.wrap_optimizer(optimizer)
        self._max_norm = config["clip_grad_norm"]
        self._scaler = torch.amp.GradScaler(numerics.device.type) if numerics.needs_scaling else None
        self.skips_overflows = self._scaler is not None
        scaled = self._scaler.scale if self._scaler else lambda loss: loss
        self._pass = ForwardBackward(loss, numerics.autocast, scaled, span)
        self._recomputing: Callable[[], AbstractContextManager[None]] = nullcontext
        if config["activation_checkpointing"]:
            self._recomputing = Recomputation(strategy.module)
        self._is_ratio = loss.kind is Kind.RATIO
        self.lr = float(self._optimizer.param_groups[0]["lr"])
        self._grad_norms: list[Tensor] = []

    def step(self, batch: Batch) -> Tensor:
        """Update the weights; return this rank's loss in the form of `Loss.noted`, still on the device."""
        self._optimizer.zero_grad()
        with self._recomputing():
            loss = self._strategy.forward_backward(batch, self._pass)
        with self._span("combine"):
            self._strategy.sync_gradients()
            if self._is_ratio:
                weight = loss[1] * (batch.num_samples > 0)  # without samples, the rank has run one of another rank
                self._strategy.scale_gradients(self._strategy.gradient_factor(batch, weight))
        if self._strategy.runs_optimizer:
            with self._span("optimizer"):
                self._update()
        with self._span("spread"):
            self._strategy.sync_weights()
        if self._schedule is not None:
            self.lr = float(self._optimizer.param_groups[0]["lr"])
            self._schedule.step()
        return loss

    def take_grad_norm(self) -> dict[str, float]:
        """Return ``grad_norm``, the mean norm before clipping since the last call; empty without clipping.

        Skipped steps, whose norm is not finite, do not count.
        """
        if not self._grad_norms:
            return {}
        norms, self._grad_norms = torch.stack(self._grad_norms).cpu().double(), []
        if self.skips_overflows:
            norms = norms[norms.isfinite()]
        return {"grad_norm": float(norms.mean())} if len(norms) else {}

    def state_dict(self) -> dict[str, Any]:
        """Return all state of the steps so far except the weights, for a checkpoint."""
        return {
            "optimizer": optimizer_state(self._bare_optimizer),
            "schedule": self._schedule.state_dict() if self._schedule else {},
            "scaler": self._scaler.state_dict() if self._scaler else {},
            "strategy": self._strategy.state_dict(),
            "lr": self.lr,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from another stepper's `state_dict`."""
        set_optimizer_state(self._bare_optimizer, state["optimizer"])
        if self._schedule:
            self._schedule.load_state_dict(state["schedule"])
        if self._scaler:
            self._scaler.load_state_dict(state["scaler"])
        self._strategy.load_state_dict(state["strategy"])
        self.lr = state["lr"]

    def clear(self) -> None:
        """Drop the gradients, so that the next stepper starts without any."""
        self._optimizer.zero_grad()

    def _update(self) -> None:
        if self._max_norm is not None:
            if self._scaler:
                self._scaler.unscale_(self._optimizer)  # type: ignore[arg-type]
            self._grad_norms.append(self._strategy.clip(self._max_norm))
        if self._scaler:
            self._scaler.step(self._optimizer)  # type: ignore[arg-type]
            self._scaler.update()
        else:
            self._optimizer.step()


def compiled(module: nn.Module) -> nn.Module:
    """Compile a model in this process, because torch's pool of compile workers would use other ranks' cores."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    return torch.compile(module)  # type: ignore[return-value]
