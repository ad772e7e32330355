"""Optimizers, learning-rate scaling and schedules.

LARS and LAMB use the plain lr, without weight decay, for parameters of one dimension (biases, the scale and shift of a
normalisation). Nothing here waits for the device: the ratios stay tensors.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from raypar.errors import Mistake, Shown
from raypar.parallel.base import Strategy
from raypar.parallel.strategy import by_layout
from raypar.study.options import known_options
from raypar.study.workload import Config, Workload


def scaled_lr(config: Config) -> float:
    """Scale ``config["lr"]`` from ``lr_base_batch_size`` to ``batch_size``, by ``lr_scaling``.

    With ratio = batch_size / lr_base_batch_size:

    - none: lr
    - linear: lr * ratio (Goyal et al. 2017, arXiv:1706.02677): k samples more move the weights k times as far
    - sqrt: lr * sqrt(ratio) (Krizhevsky 2014, arXiv:1404.5997): keeps the variance of a step's gradient noise
    """
    lr = float(config["lr"])
    if config["lr_scaling"] == "none":
        return lr
    ratio = float(config["batch_size"] / config["lr_base_batch_size"])
    return lr * (ratio if config["lr_scaling"] == "linear" else math.sqrt(ratio))


def build_schedule(optimizer: Optimizer, config: Config, num_steps_total: int) -> LRScheduler | None:
    """Build the schedule that multiplies the optimizer's lr by `lr_factor` after every step; None for a constant lr.

    Args:
        num_steps_total: steps of the complete training, over all epochs, including the warm-up of the lr.
    """
    name, num_warmup = config["lr_schedule"], config["lr_warmup_steps"]
    if name == "constant" and not num_warmup:
        return None
    # Not every step of the schedule follows a step of this optimizer: another rank may run the update, and fp16's loss
    # scaling skips a step whose gradients overflow. torch warns about both.
    warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`")
    factor = partial(lr_factor, schedule=name, num_warmup_steps=num_warmup, num_steps_total=num_steps_total)
    return LambdaLR(optimizer, factor)


def lr_factor(step: int, *, schedule: str, num_warmup_steps: int, num_steps_total: int) -> float:
    """Return the factor of the lr at a step; steps count from 0.

    The n warm-up steps have (step + 1) / n, so that none of them has 0. After them, with the completed fraction
    t = (step - n) / (num_steps_total - n), the factor is

    - constant: 1
    - linear: 1 - t
    - cosine: (1 + cos(pi t)) / 2 (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts)

    The training's last step still moves the weights. A warm-up that is longer than the training is cut off.
    """
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - num_warmup_steps) / max(1, num_steps_total - num_warmup_steps))
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling: You, Gitman and Ginsburg 2017, arXiv:1708.03888, algorithm 1.

    For a layer's weights w and gradient g, with weight decay beta, momentum m and trust coefficient eta::

        ratio = eta |w| / (|g| + beta |w|)
        v = m v + lr ratio (g + beta w)
        w = w - v

    with ratio = 1 where |w| or |g| is 0, and ratio = 1, beta = 0 for parameters of one dimension. The norms are
    Euclidean, over all elements of a parameter tensor.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0, eta: float = 0.001
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in _with_gradient(group):
                update = weights.grad
                if weights.ndim > 1:
                    decay = group["weight_decay"]
                    w, g = weights.norm(), update.norm()
                    ratio = _trust_ratio(group["eta"] * w, g + decay * w, (w > 0) & (g > 0))
                    update = update.add(weights, alpha=decay).mul_(ratio)
                if not (state := self.state[weights]):
                    state["velocity"] = torch.zeros_like(weights)
                # The velocity includes the lr, as in the paper; in torch's SGD it doesn't.
                velocity = state["velocity"].mul_(group["momentum"]).add_(update, alpha=group["lr"])
                weights.sub_(velocity)


class LAMB(Optimizer):
    """Layer-wise adaptive moments for batch training: You et al. 2020, arXiv:1904.00962, algorithm 2.

    For a layer's weights w and gradient g at step t = 1, 2, …, with weight decay lambda::

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        w = w - lr |w| / |r + lambda w| (r + lambda w)

    The paper's phi, which bounds |w|, is the identity. The ratio is 1 where |w| or |r + lambda w| is 0; it is 1, and
    lambda = 0, for parameters of one dimension. The norms are Euclidean, over all elements of a parameter tensor.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-6, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weights in _with_gradient(group):
                if not (state := self.state[weights]):
                    state.update(step=0, mean=torch.zeros_like(weights), square=torch.zeros_like(weights))
                state["step"] += 1
                mean = state["mean"].mul_(beta1).add_(weights.grad, alpha=1 - beta1)
                square = state["square"].mul_(beta2).addcmul_(weights.grad, weights.grad, value=1 - beta2)
                root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                update = (mean / (1 - beta1 ** state["step"])).div_(root)
                if weights.ndim > 1:
                    update.add_(weights, alpha=group["weight_decay"])
                    w, u = weights.norm(), update.norm()
                    update.mul_(_trust_ratio(w, u, (w > 0) & (u > 0)))
                weights.sub_(update, alpha=group["lr"])


def _with_gradient(group: dict[str, Any]) -> list[Any]:
    return [p for p in group["params"] if p.grad is not None]


def _trust_ratio(above: Tensor, below: Tensor, usable: Tensor) -> Tensor:
    """Return the quotient of two scalars; 1 where it would be 0 or undefined, so that the layer moves."""
    return torch.where(usable, above / below, torch.ones_like(above))


# The names are study.options.OPTIMIZERS; momentum and nesterov are SGD with the usual 0.9.
_MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "lars": LARS,
    "lamb": LAMB,
}


def build_optimizer(parameters: Iterable[Any], config: Config) -> Optimizer:
    """Build the optimizer ``config["optimizer"]`` with the config's scaled lr and weight_decay."""
    return _MAKERS[config["optimizer"]](parameters, lr=scaled_lr(config), weight_decay=config["weight_decay"])


def optimizer_of(strategy: Strategy, workload: Workload, config: Config) -> Optimizer:
    """Build the workload's own optimizer, or else the one that the config names."""
    if workload.optimizer is None:
        return build_optimizer(strategy.parameter_groups(), config)
    optimizer = workload.optimizer(strategy.named_model, _Read(config))
    # torch's fused loops take tensors that are split among ranks and others in separate groups.
    optimizer.param_groups[:] = [
        {**group, "params": part} for group in optimizer.param_groups for part in by_layout(group["params"]) or [[]]
    ]
    return optimizer


class _Read(dict[str, Any]):
    """Config for a workload's own optimizer, with the scaled lr; records which of `SETTINGS` are read."""

    def __init__(self, config: Config) -> None:
        super().__init__({**config, "lr": scaled_lr(config)})
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.read.add(key)
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[str]:  # also of dict(config) and **config: all of it may be used
        self.read.update(SETTINGS)
        return super().__iter__()

    def keys(self) -> Any:
        self.read.update(SETTINGS)
        return super().keys()

    def items(self) -> Any:
        self.read.update(SETTINGS)
        return super().items()

    def __or__(self, other: Any) -> Any:
        self.read.update(SETTINGS)
        return super().__or__(other)

    def copy(self) -> Any:
        self.read.update(SETTINGS)
        return super().copy()


# Options that affect a workload's own optimizer only if it reads them, and the key that it reads.
SETTINGS: Mapping[str, str] = {"lr": "lr", "lr_scaling": "lr", "weight_decay": "weight_decay"}
RETURN_OPTIMIZER = 'return torch.optim.AdamW(model.parameters(), lr=config["lr"]), for example'


def own_optimizer_mistakes(workload: Workload, config: Config, model: nn.Module) -> Iterator[Mistake]:
    """Yield the mistakes of a workload's own optimizer, and the settings that it does not use."""
    if workload.optimizer is None:
        return
    where, read = "optimizer(model, config)", _Read(config)
    optimizer: Any = workload.optimizer(model, read)
    if not isinstance(optimizer, Optimizer):
        shown = Shown(f"class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__)
        yield Mistake(where, shown, "is not a torch.optim.Optimizer", RETURN_OPTIMIZER)
        return
    shown, groups = Shown(type(optimizer).__name__), optimizer.param_groups
    if needs_closure(optimizer):
        problem = "needs a closure that computes the loss several times in a step"
        yield Mistake(where, shown, problem, "use one that steps with the gradients of one backward pass")
        return
    if not all("lr" in group for group in groups):
        yield Mistake(where, shown, "has parameter groups without an lr", "give each group an lr")
    parameters = {id(p) for p in model.parameters()}
    if not any(id(p) in parameters and p.requires_grad for group in groups for p in group["params"]):
        problem = "has none of the model's parameters that are trained"
        yield Mistake(where, shown, problem, "pass it the parameters of its argument `model`")
        return
    defaults = known_options(workload)
    for key, carrier in SETTINGS.items():
        if carrier not in read.read and config[key] != defaults[key].default:
            problem = f"has no effect: the workload's optimizer= does not read config[{carrier!r}]"
            yield Mistake(key, config[key], problem, f"leave it out, or read config[{carrier!r}] there")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step asks for a function that computes the loss, as LBFGS does."""
    step = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters
    closure = step.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
