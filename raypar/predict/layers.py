"""Layers of a workload's network: gradients in bytes, and shares of the work of a training step.

Shares are of multiply-accumulates, which are counted, not timed. Memory-bound layers (normalisation, activation) have
none, and their time is attributed to other layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from raypar.errors import RayparError
from raypar.predict.step_model import LayerCost, one_layer
from raypar.study.workload import Config, Workload
from raypar.train.flops import FLOP_PER_MAC, run_on_shapes, sample_inputs

FP64_BYTES = 8


def layer_costs(workload: Workload, config: Config) -> tuple[LayerCost, ...]:
    """Return the layers of a workload's network in the order of the forward pass.

    The workload must have a model function. If its data is missing, or the network does not run on a sample, all
    gradients are one layer (`is_one_layer`).

    Raises:
        RayparError: the network can't be built, or has nothing to train.
    """
    assert workload.model is not None
    with contextlib.suppress(Exception):  # missing data, or the network doesn't run on it
        sample = sample_inputs(workload, config)
        return run_on_shapes(workload, config, sample, partial(count_layers, config=config))
    try:
        model = workload.model(config)
    except RayparError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"workload {workload.name}: the network can't be built: {reason}"
        raise RayparError(message, hint="give its size: --parameters 25.6M") from None
    return one_layer(sum(size for _, size in _gradients(model, config)))


def is_one_layer(layers: tuple[LayerCost, ...]) -> bool:
    """Return True if only the total size of the layers is known."""
    return layers == one_layer(sum(layer.num_gradient_bytes for layer in layers))


def count_layers(model: nn.Module, inputs: Tensor, config: Config) -> tuple[LayerCost, ...]:
    """Return the layers of a network in the order in which the forward pass of `inputs` enters them.

    A layer is a module with weights, or one that multiplies in its own code, such as attention, which has twice as many
    multiply-accumulates backward. Backward, a layer with weights has as many as forward for the gradient by weights,
    and again for the gradient by inputs, which the first trained layer does not need. The gradient of shared weights is
    ready after the first layer that uses them, which is the last one backward.

    Args:
        inputs: shape ``(batch, ...)``, on the model's device, which may be torch's meta device.
        config: its `precision` determines the bytes of a gradient.

    Raises:
        RayparError: the network has nothing to train.
    """
    macs = _own_macs(model, inputs)
    gradients = _gradient_bytes(macs, config)
    if not any(map(sum, gradients)):
        raise RayparError("the model has no weight to train", hint="leave some weights trainable")
    backward = []
    is_after_trained = False
    for module, sizes in zip(macs, gradients, strict=True):
        has_weights = any(True for _ in module.parameters(recurse=False))
        needs_gradient = bool(sum(sizes)) if has_weights else is_after_trained
        backward.append(macs[module] * (needs_gradient + is_after_trained))
        is_after_trained = is_after_trained or bool(sum(sizes))
    total = sum(macs.values()) + sum(backward)
    if not total:
        return one_layer(sum(map(sum, gradients)))
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    return tuple(
        LayerCost(
            names[module], sum(sizes), back / total, macs[module] / total, max(1, len(sizes)), type(module).__name__
        )
        for module, sizes, back in zip(macs, gradients, backward, strict=True)
        if sizes or macs[module]
    )


def _own_macs(model: nn.Module, inputs: Tensor) -> dict[nn.Module, int]:
    """Return the multiply-accumulates of each module's own code in a forward pass, in calling order."""
    macs: dict[nn.Module, int] = {}
    within: list[nn.Module] = []
    counter = FlopCounterMode(display=False)
    total = 0

    def count() -> None:
        """Attribute the work since the last call to the running module."""
        nonlocal total
        before, total = total, counter.get_total_flops()
        if within:
            macs[within[-1]] += (total - before) // FLOP_PER_MAC

    def enter(module: nn.Module, _inputs: object) -> None:
        count()
        macs.setdefault(module, 0)
        within.append(module)

    def leave(_module: nn.Module, _inputs: object, _output: object) -> None:
        count()
        within.pop()

    hooks = [module.register_forward_pre_hook(enter) for module in model.modules()]
    hooks += [module.register_forward_hook(leave) for module in model.modules()]
    was_training = model.training
    model.train()
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            model(inputs)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return macs


def _gradient_bytes(called: Collection[nn.Module], config: Config) -> list[list[int]]:
    """Return the gradient sizes of each module, including submodules whose weights it uses without calling them."""
    seen = set()

    def uncalled(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if child not in called:
                yield from uncalled(child)

    layers = []
    for outer in called:
        sizes = []
        for module in uncalled(outer):
            for parameter, num_bytes in _gradients(module, config, recurse=False):
                if parameter not in seen:
                    seen.add(parameter)
                    sizes.append(num_bytes)
        layers.append(sizes)
    return layers


def _gradients(model: nn.Module, config: Config, *, recurse: bool = True) -> list[tuple[nn.Parameter, int]]:
    """Return the trained weights and the bytes of their gradients. Mixed precision doesn't change the weights' type."""
    is_double = config.get("precision") == "fp64"
    return [
        (p, p.numel() * (FP64_BYTES if is_double else p.element_size()))
        for p in model.parameters(recurse=recurse)
        if p.requires_grad
    ]
