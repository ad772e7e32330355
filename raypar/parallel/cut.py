"""Where a model is cut into stages of layers that follow one another: the costliest stage is as cheap as can be."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from raypar.study.workload import Workload

NUM_TIMED = 3
# What a layer without multiply-accumulates costs, by element of its output: enough to break ties.
COST_PER_ELEMENT = 1


def layers_of(workload: Workload, model: nn.Module) -> list[nn.Module] | None:
    """The model's layers in the order of the forward pass; None where it isn't known to be a row of layers."""
    if workload.layers is not None:
        return list(workload.layers(model))
    return list(model) if isinstance(model, nn.Sequential) else None


def names_of(model: nn.Module, layers: Sequence[nn.Module]) -> list[str]:
    """What the layers are called in the model; a layer that the model doesn't hold itself (a reshape) has no name."""
    known = {id(module): name for name, module in model.named_modules()}
    return [known.get(id(layer), "") for layer in layers]


def cut(
    model: nn.Module, layers: Sequence[nn.Module], sample: Tensor, num_stages: int, how: str | tuple[str, ...]
) -> list[range]:
    """Which layers each stage has.

    Args:
        sample: what the first layer takes.
        how: "counted" (multiply-accumulates), "measured" (seconds), or the names of the layers that begin a stage,
            but for the first.
    """
    if isinstance(how, tuple):
        names = names_of(model, layers)
        starts = [0, *sorted(names.index(name) for name in how), len(layers)]
        return [range(a, b) for a, b in itertools.pairwise(starts)]
    costs = _counted(layers, sample) if how == "counted" else _measured(layers, sample)
    return balanced(costs, num_stages)


def balanced(costs: Sequence[float], num_parts: int) -> list[range]:
    """Cut a row into parts, none of them empty, so that the largest sum is as small as can be.

    The linear partition problem, by dynamic programming over the prefixes (Skiena, "The Algorithm Design Manual",
    section 10.7).
    """
    num = len(costs)
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    best = np.full((num_parts + 1, num + 1), np.inf)
    at = np.zeros((num_parts + 1, num + 1), dtype=int)
    best[0, 0] = 0.0
    for parts in range(1, num_parts + 1):
        for end in range(parts, num + 1):
            starts = np.arange(parts - 1, end)
            largest = np.maximum(best[parts - 1, starts], sums[end] - sums[starts])
            first = int(np.argmin(largest))
            best[parts, end], at[parts, end] = largest[first], starts[first]
    ends = [num]
    for parts in range(num_parts, 0, -1):
        ends.append(int(at[parts, ends[-1]]))
    ends.reverse()
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def _counted(layers: Sequence[nn.Module], sample: Tensor) -> list[float]:
    costs: list[float] = []

    def count(layer: nn.Module, x: Tensor) -> Tensor:
        with FlopCounterMode(display=False) as counter:
            out: Tensor = layer(x)
        costs.append(counter.get_total_flops() + COST_PER_ELEMENT * out.numel())
        return out

    _through(layers, sample, count)
    return costs


def _measured(layers: Sequence[nn.Module], sample: Tensor) -> list[float]:
    """Seconds forward and backward, the least of a few; the first rank's, so that all ranks cut alike."""
    costs: list[float] = []

    def measure(layer: nn.Module, x: Tensor) -> Tensor:
        took: list[float] = []
        for _ in range(NUM_TIMED + 1):  # the first one is not like the others
            with torch.enable_grad():
                leaf = x.detach().requires_grad_(x.is_floating_point())
                start_s = time.perf_counter()
                out: Tensor = layer(leaf)
                if out.requires_grad:
                    out.sum().backward()  # type: ignore[no-untyped-call]
                if out.device.type == "cuda":
                    torch.cuda.synchronize(out.device)
            took.append(time.perf_counter() - start_s)
        costs.append(min(took[1:]))
        return out.detach()

    _through(layers, sample, measure)
    for layer in layers:
        layer.zero_grad()
    shared = torch.tensor(costs, dtype=torch.float64, device=sample.device)
    dist.broadcast(shared, src=0)
    seconds: list[float] = shared.tolist()
    return seconds


def _through(layers: Sequence[nn.Module], x: Tensor, do: Callable[[nn.Module, Tensor], Tensor]) -> None:
    modes = [layer.training for layer in layers]
    with torch.no_grad():
        for layer in layers:
            x = do(layer.eval(), x)  # in training mode, a batch norm would count the sample in
    for layer, mode in zip(layers, modes, strict=True):
        layer.train(mode)
