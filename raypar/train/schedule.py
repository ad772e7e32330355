"""What the learning rate is: for a batch of another size than it was found for, and from step to step."""

from __future__ import annotations

import math
import warnings
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from raypar.study.workload import Config


def scaled_lr(config: Config) -> float:
    """``config["lr"]``, which is meant for ``lr_base_batch_size``, as ``lr_scaling`` has it for ``batch_size``.

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
    """The optimizer's lr as the start of what `lr_factor` makes of it; to be stepped once after every step.

    Args:
        num_steps_total: of the whole training, over all epochs, the warm-up of the lr included.

    Returns:
        None where the lr never changes, so that no step pays for it.
    """
    name, num_warmup = config["lr_schedule"], config["lr_warmup_steps"]
    if name == "constant" and not num_warmup:
        return None
    # Not every step of the schedule follows one of this optimizer: a rank may leave the update to another one, and
    # fp16's loss scaling leaves out a step whose gradients overflow. torch takes either for a mistake and says so.
    warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`")
    return LambdaLR(
        optimizer, partial(lr_factor, schedule=name, num_warmup_steps=num_warmup, num_steps_total=num_steps_total)
    )


def lr_factor(step: int, *, schedule: str, num_warmup_steps: int, num_steps_total: int) -> float:
    """What the lr is multiplied with at a step; steps count from 0.

    The n warm-up steps have (step + 1) / n, so that none of them has 0. Of what follows, the fraction that is done is
    t = (step - n) / (num_steps_total - n), and the factor is

    - constant: 1
    - linear: 1 - t
    - cosine: (1 + cos(pi t)) / 2 (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts)

    so that the training's last step still moves the weights, and the step after it would not. A warm-up that is
    longer than the training is cut off.
    """
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - num_warmup_steps) / max(1, num_steps_total - num_warmup_steps))
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
