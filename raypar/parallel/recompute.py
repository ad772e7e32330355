"""Activation checkpointing: the backward pass computes a block's activations again, instead of keeping them.

A block keeps only its inputs, and runs forward once more in the backward pass (Chen et al. 2016,
https://arxiv.org/abs/1604.06174). Random numbers are repeated, so weights and losses are the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

NO_BLOCKS = "has nothing to compute again: this model has no blocks, such as the members of an nn.ModuleList"
NO_BLOCKS_HINT = "leave out activation_checkpointing"


class Recomputation:
    """Blocks of a model whose activations are computed again.

    The model is changed only while `recomputing` is entered, so that it can be copied and saved.

    Args:
        model: as this rank runs it, which may be a part of the model.

    Attributes:
        num_blocks: blocks and segments of layers that keep only their inputs.
    """

    def __init__(self, model: nn.Module) -> None:
        blocks, rows = blocks_of(model)
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = [
            *((block, partial(_recomputed, block, block.forward)) for block in blocks),
            *((row, partial(_in_segments, row, row.forward)) for row in rows),
        ]
        self.num_blocks = len(blocks) + sum(_num_segments(row) - 1 for row in rows)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Recompute activations of forward passes in this context; their backward passes have to be in it as well."""
        for module, forward in self._forwards:
            module.forward = forward
        try:
            yield
        finally:
            for module, _ in self._forwards:
                del module.forward


def blocks_of(model: nn.Module) -> tuple[list[nn.Module], list[nn.Sequential]]:
    """Return the blocks of a model, and its rows of plain layers.

    Blocks are the members of containers that consist of layers themselves, such as those of a transformer or a ResNet.
    A sequence of plain layers is a row, which has no blocks but can be cut into segments. In a model without
    containers, blocks are the layers of layers that it consists of.
    """
    from torch import nn

    blocks: list[nn.Module] = []
    rows: list[nn.Sequential] = []
    others: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            members = list(module)
            if isinstance(module, nn.Sequential) and len(members) > 2 and all(map(_is_plain, members)):
                rows.append(module)
                return
            for member in members:
                if isinstance(member, (nn.Sequential, nn.ModuleList)) and not all(map(_is_plain, member)):
                    look(member)
                elif not _is_plain(member) and _has_parameters(member):
                    blocks.append(member)
            return
        others.extend(child for child in module.children() if not _is_plain(child))
        for child in module.children():
            look(child)

    look(model)
    if not blocks and not rows:
        # The outermost ones, but not one that holds everything, such as a wrapper of the model.
        inner = others
        while len(inner) == 1:
            inner = [child for child in inner[0].children() if not _is_plain(child)]
        outermost = [m for m in inner if not any(m is not o and m in set(o.modules()) for o in inner)]
        blocks = outermost if len(outermost) > 1 else []
    return blocks, rows


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is a single layer."""
    return not any(True for _ in module.children())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _num_segments(row: Sequence[object] | nn.Sequential) -> int:
    """Return the number of segments that keeps the least: about the square root of the number of layers."""
    return max(2, round(math.sqrt(len(row))))


def _recomputed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward pass of a block without keeping its activations."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    contexts = partial(_contexts, [block])
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _in_segments(row: nn.Sequential, forward: Callable[..., Any], x: Any) -> Any:
    """Run a row of layers in segments that keep only their inputs. The last one, which is needed first, keeps all."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if not torch.is_grad_enabled():
        return forward(x)
    layers, num = list(row), _num_segments(row)
    size = math.ceil(len(layers) / num)
    segments = [layers[start : start + size] for start in range(0, len(layers), size)]
    for segment in segments[:-1]:
        x = checkpoint(_run, segment, x, use_reentrant=False, context_fn=partial(_contexts, segment))
    return _run(segments[-1], x)


def _run(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _contexts(
    modules: Sequence[nn.Module],
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return the contexts of a forward pass and of its repetition, as torch's ``context_fn``."""
    return contextlib.nullcontext(), _buffers_kept(modules)


@contextlib.contextmanager
def _buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Work on copies of the modules' buffers: a batch norm counts a batch once."""
    owned = [
        (part, name, buffer)
        for module in modules
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    for part, name, buffer in owned:
        part._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for part, name, buffer in owned:
            part._buffers[name] = buffer
