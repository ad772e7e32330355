"""One training step, and what it leaves to be reported: all of it inside the timed region, so nothing waits here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from raypar.parallel.strategy import Strategy
from raypar.study.workload import Config
from raypar.train.batches import Batch
from raypar.train.numerics import Numerics
from raypar.train.optim import build_optimizer
from raypar.train.schedule import build_schedule


class Stepper:
    """Takes a model from step to step.

    Args:
        module: the strategy's, or that compiled.
        num_steps: of the whole training, for a schedule that ends with it.

    Attributes:
        lr: of the last step.
    """

    def __init__(
        self,
        strategy: Strategy,
        module: nn.Module,
        numerics: Numerics,
        loss_of: Callable[..., Tensor],
        config: Config,
        num_steps: int,
    ) -> None:
        self._strategy, self._numerics, self._loss_of = strategy, numerics, loss_of
        self._module = module
        self._parameters = list(module.parameters())
        self._optimizer = build_optimizer(self._parameters, config)
        self._schedule = build_schedule(self._optimizer, config, num_steps)
        self._max_norm = config["clip_grad_norm"]
        self._scaler = torch.amp.GradScaler(numerics.device.type) if numerics.needs_scaling else None
        self.lr = float(self._optimizer.param_groups[0]["lr"])
        self._grad_norms: list[Tensor] = []

    def step(self, batch: Batch) -> Tensor:
        """One update; returns this rank's mean loss, still on the device."""
        self._optimizer.zero_grad()
        with self._numerics.autocast():
            loss = self._loss_of(self._module(batch.inputs), batch.targets)
        weighted = loss if batch.weight == 1.0 else loss * batch.weight
        (self._scaler.scale(weighted) if self._scaler else weighted).backward()  # type: ignore[no-untyped-call]
        self._strategy.combine()
        if self._strategy.steps_here:
            self._update()
        self._strategy.spread()
        if self._schedule is not None:
            self.lr = float(self._optimizer.param_groups[0]["lr"])
            self._schedule.step()
        return loss.detach()

    def take_grad_norm(self) -> dict[str, float]:
        """``grad_norm``, the mean norm before clipping since the last call; empty where gradients are not clipped."""
        norms, self._grad_norms = self._grad_norms, []
        return {"grad_norm": float(torch.stack(norms).double().mean())} if norms else {}

    def clear(self) -> None:
        """Drop the gradients, so that the next stepper starts as from new."""
        self._optimizer.zero_grad()

    def _update(self) -> None:
        if self._max_norm is not None:
            if self._scaler:
                self._scaler.unscale_(self._optimizer)
            self._grad_norms.append(clip_grad_norm_(self._parameters, self._max_norm))
        if self._scaler:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        else:
            self._optimizer.step()


def compiled(module: nn.Module) -> nn.Module:
    """torch.compile, in this process: a pool of compiling processes would sit on cores that are not this rank's."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    return torch.compile(module)  # type: ignore[return-value]
