"""Work of training a network: multiply-accumulates by layer type, and the machine's measured peak.

Operations are counted as torch dispatches them, so a functional ``relu`` counts like a layer. If possible, the network
is built on torch's meta device, which has shapes but no numbers. Even a large network is counted in about a second.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from raypar.errors import RayparError
from raypar.parallel.strategy import wait_for_device
from raypar.study.workload import Config, Workload
from raypar.train.data import first_samples

NUM_SAMPLES = 2  # batch normalisation in training needs more than one value per channel

T = TypeVar("T")


def sample_inputs(workload: Workload, config: Config) -> Tensor:
    """Return the model's inputs for `NUM_SAMPLES` samples of its data, shape ``(NUM_SAMPLES, ...)``.

    Raises:
        RayparError: the model takes more than one tensor.
    """
    assert workload.data is not None, "not for train loops"
    if config.get("source") == "synthetic":  # a few samples are enough
        config = {**config, **{key: NUM_SAMPLES for key in ("num_images", "num_classes") if key in config}}
    inputs, _ = first_samples(workload.data(config), NUM_SAMPLES)
    if not isinstance(inputs, Tensor):
        problem = f"workload {workload.name}: the model takes several inputs, but work can be counted only for one"
        raise RayparError(problem, hint="wrap the model in one that takes a single tensor")
    return inputs.float() if inputs.dtype == torch.uint8 else inputs


def run_on_shapes(workload: Workload, config: Config, sample: Tensor, inspect: Callable[[nn.Module, Tensor], T]) -> T:
    """Return ``inspect(network, sample)``, run on shapes alone if possible.

    Raises:
        RayparError: `inspect` raises it, or the network can't be built, or can't take the sample.
    """
    assert workload.model is not None, "not for train loops"
    # Some networks need real numbers while they are built, and some when they run: use the CPU for those.
    for built_on, run_on in (("meta", "meta"), ("cpu", "meta"), ("cpu", "cpu")):
        try:
            with torch.device(built_on):
                model = workload.model(config).to(run_on)
            with torch.device(run_on):
                return inspect(model, sample.to(run_on))
        except RayparError:
            raise
        except Exception as error:  # from the user's network; the last one is reported
            why = (str(error).splitlines() or [type(error).__name__])[0]
    raise RayparError(
        f"workload {workload.name}: the network can't be built, or can't take its samples: {why}",
        hint=f"`raypar model list {workload.name}` lists its options and their values",
    )


SIZES = {"cpu": (256, 512, 1024, 2048), "other": (2048, 4096, 8192)}  # rows and columns
BUDGET_S = 1.0  # for all sizes together
MIN_RUNS = 3


def peak_flops(device: torch.device, dtype: torch.dtype, num_threads: int) -> float:
    """Measure the peak FLOP/s of products of two square matrices: the best run of the best size, in about a second.

    A product of n x n matrices has 2 n^3 FLOP.

    Args:
        num_threads: torch's threads on a CPU; the setting is restored afterwards.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    best, left_s = 0.0, BUDGET_S
    sizes = SIZES["cpu" if device.type == "cpu" else "other"]
    for number, size in enumerate(sizes):
        flop = 2 * size**3
        if best and MIN_RUNS * flop / best > left_s:
            break
        share_s = left_s / (len(sizes) - number)
        begin_s = time.perf_counter()
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = a @ b  # not timed: the first run of a size picks its kernel
        wait_for_device(device)
        num_runs = 0
        while num_runs < MIN_RUNS or time.perf_counter() - begin_s < share_s:
            started_s = time.perf_counter()
            torch.mm(a, b, out=out)
            wait_for_device(device)
            best = max(best, flop / (time.perf_counter() - started_s))
            num_runs += 1
        left_s -= time.perf_counter() - begin_s
    torch.set_num_threads(before)
    return best


CONVOLUTION, FULLY_CONNECTED, ATTENTION = "convolution", "fully connected", "attention"
NORMALISATION, ACTIVATION, POOLING = "normalisation", "activation", "pooling"
KINDS = (CONVOLUTION, FULLY_CONNECTED, ATTENTION, NORMALISATION, ACTIVATION, POOLING)
OF_MACS = (CONVOLUTION, FULLY_CONNECTED, ATTENTION)
FLOP_PER_MAC = 2
_aten = torch.ops.aten


@dataclass(frozen=True)
class LayerWork:
    """Work of the layers of one type, for one sample.

    Attributes:
        kind: one of `KINDS`. "attention" is every product of two activations.
        forward: multiply-accumulates (MACs), or plain operations if `kind` is not in `OF_MACS`.
        by_weights: the same for the gradient with respect to weights and biases.
        by_inputs: the same for the gradient with respect to the layer's inputs; the first layer needs none.
    """

    kind: str
    forward: int
    by_weights: int
    by_inputs: int

    @property
    def is_of_macs(self) -> bool:
        return self.kind in OF_MACS


@dataclass(frozen=True)
class Work:
    """Work of training on one sample.

    Attributes:
        num_parameters: trained weights and biases.
        input_shape: of the sample, without the batch: ``(3, 224, 224)`` for an image.
        layers: by type, in the order of `KINDS`, without types that the network lacks.
    """

    num_parameters: int
    input_shape: tuple[int, ...]
    layers: tuple[LayerWork, ...]

    @property
    def macs_forward(self) -> int:
        return sum(layer.forward for layer in self.layers if layer.is_of_macs)

    @property
    def macs(self) -> int:
        """Forward and backward."""
        return sum(of.forward + of.by_weights + of.by_inputs for of in self.layers if of.is_of_macs)

    @property
    def flop(self) -> int:
        """Forward and backward, 2 FLOP per MAC. Other operations are left out, because memory bounds them."""
        return FLOP_PER_MAC * self.macs


def count_work(model: nn.Module, inputs: Tensor) -> Work:
    """Count the work of one sample in training mode, by the formulas of `_OPERATIONS`.

    Runs one forward pass and three backward passes, for the gradients with respect to the weights and the network's
    input, to the input alone, and to the weights alone (as in training). The work of the weights' gradients is the
    first minus the second; that of the layers' inputs is the rest of the third. Dropout, residual sums, embeddings,
    biases and the loss are not counted.

    Args:
        model: its running statistics, if any, move by one batch.
        inputs: shape ``(batch, ...)``, floats, or integers for an ``nn.Embedding``, on the model's device, which may be
            torch's meta device. Work done once per batch is divided among its samples.

    Raises:
        RayparError: the model does not return a tensor, or its output depends on no weight.
    """
    entries: list[Tensor] = []

    def enter(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        entries.append(output if output.requires_grad else output.requires_grad_())

    was_training = model.training
    model.train()
    # Use the plain formula of attention: fused kernels compute a product twice, which is not work of the network.
    with contextlib.ExitStack() as stack, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        stack.callback(model.train, was_training)
        if inputs.is_floating_point():
            entries.append(inputs.detach().clone().requires_grad_())
            inputs = entries[0] * 1  # not a leaf: a first layer may work in place
        else:
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    stack.enter_context(module.register_forward_hook(enter))
        outputs, forward = _counted(lambda: model(inputs))
        weights = [p for p in model.parameters() if p.requires_grad]
        if not isinstance(outputs, Tensor):
            raise RayparError(f"the model returns a {type(outputs).__name__}: only a tensor can be counted")
        if not weights or not outputs.requires_grad:
            raise RayparError("the model has no weight that its output depends on: there is nothing to train")
        ones = torch.ones_like(outputs)
        gradients = partial(torch.autograd.grad, outputs, grad_outputs=ones, retain_graph=True, allow_unused=True)
        passes = [*weights, *entries], entries, weights
        both, by_entry, trained = (_counted(partial(gradients, wrt) if wrt else tuple)[1] for wrt in passes)
    counts = {}
    for kind, ahead in forward.items():
        by_weights = both[kind] - by_entry[kind]
        counts[kind] = ahead, by_weights, trained[kind] - by_weights
    layers = [LayerWork(kind, *(round(n / len(inputs)) for n in of)) for kind, of in counts.items() if any(of)]
    return Work(sum(p.numel() for p in weights), tuple(inputs.shape[1:]), tuple(layers))


def flop_per_sample(full_model: nn.Module, sample: Tensor) -> int | None:
    """Return the FLOP of a sample, forward and backward, of a copy of the model; None if they can't be counted."""
    model = copy.deepcopy(full_model)
    model.zero_grad()
    try:
        return count_work(model, sample).flop
    except Exception:  # from the user's network: the profile is useful without it
        return None


def work_of(workload: Workload, config: Config) -> Work:
    """Count the work of a sample of a workload under a complete config; loads its data for the shape of a sample.

    Raises:
        DataError: the data (or a tokenizer) is missing, or does not fit the network.
        RayparError: the network can't be built or can't take its data.
    """
    workload.prepare(config)
    return run_on_shapes(workload, config, sample_inputs(workload, config), count_work)


def _counted(run: Callable[[], T]) -> tuple[T, dict[str, int]]:
    """Return a call's result and its MACs, or operations, by kind."""
    counts = dict.fromkeys(KINDS, 0)
    with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
        result = run()
    for operation, count in counter.get_flop_counts().get("Global", {}).items():
        if kind := _KIND_OF.get(operation):
            counts[kind] += count // FLOP_PER_MAC if kind in OF_MACS else count
    return result, counts


# Formulas take an operation's arguments with shapes for tensors, and the shape of its result as `out_shape`.


def _conv_backward(*args: Any, **_: Any) -> int:
    """Return the FLOP of the gradients in the output mask; torch's formula for the weights ignores groups."""
    (grad, x, w), transposed, output_mask = args[:3], args[7], args[-1]
    return int(sum(output_mask[:2]) * conv_flop_count(x, w, grad, transposed))


def _per_element(num: int) -> Callable[..., int]:
    return lambda *args, **_: num * math.prod(args[0])


def _normalisation_backward(*args: Any, **_: Any) -> int:
    by_inputs, *by_weights = args[-1]
    return int(math.prod(args[0]) * (2 * by_inputs + 3 * any(by_weights)))


def _pool(*args: Any, out_shape: Any, **_: Any) -> int:
    """Return the operations of a pooling; a maximum also returns its index, so it has two results of one shape."""
    return _window(out_shape if isinstance(out_shape, torch.Size) else out_shape[0], args[1])


def _mean_pool_backward(*args: Any, **_: Any) -> int:
    return _window(args[0], args[2])


def _window(shape: Sequence[int], kernel: Sequence[int]) -> int:
    return int(math.prod(shape) * (kernel[0] ** 2 if len(kernel) == 1 else math.prod(kernel)))


# Type of layer; formula, or None for torch's (2 FLOP per multiply-accumulate, no biases); operations that layers of
# torchvision, transformers and torch.nn dispatch (in-place ones end in "_"). Outside `OF_MACS`, an addition, a
# multiplication, a multiply-accumulate and a comparison each count as one operation.
_OPERATIONS: tuple[tuple[str, Callable[..., int] | None, str], ...] = (
    # C_out x C_in/groups x K_x x K_y x H' x W', where H' x W' is the output; the same for each gradient
    (CONVOLUTION, None, "convolution"),
    (CONVOLUTION, _conv_backward, "convolution_backward"),
    # inputs x outputs; the same for each gradient
    (FULLY_CONNECTED, None, "mm addmm"),
    # queries x keys x width for each of its two products; twice that by inputs
    (ATTENTION, None, "bmm baddbmm"),
    # mean; difference and variance; scale and shift
    (NORMALISATION, _per_element(4), "native_batch_norm native_layer_norm"),
    # by weights 3 (normalised input; its sum with the gradient; the gradient's sum); by inputs 2 (less the two sums)
    (NORMALISATION, _normalisation_backward, "native_batch_norm_backward native_layer_norm_backward"),
    # the function's value counts as one
    (ACTIVATION, _per_element(1), "relu relu_ threshold_backward leaky_relu leaky_relu_ leaky_relu_backward"),
    (ACTIVATION, _per_element(1), "elu elu_ elu_backward gelu gelu_ gelu_backward silu silu_ silu_backward"),
    (ACTIVATION, _per_element(1), "sigmoid sigmoid_ sigmoid_backward tanh tanh_ tanh_backward"),
    (ACTIVATION, _per_element(1), "hardtanh hardtanh_ hardtanh_backward hardswish hardswish_ hardswish_backward"),
    (ACTIVATION, _per_element(1), "hardsigmoid hardsigmoid_ hardsigmoid_backward"),
    # exponential, sum, division
    (ACTIVATION, _per_element(3), "_softmax _safe_softmax _softmax_backward_data"),
    # K_x x K_y per output; backward as many for a mean, 1 for a maximum
    (POOLING, _pool, "max_pool2d_with_indices avg_pool2d"),
    (POOLING, _mean_pool_backward, "avg_pool2d_backward"),
    # over the full image 1 per input; backward only copies
    (POOLING, _per_element(1), "max_pool2d_with_indices_backward _adaptive_avg_pool2d mean amax"),
)
_FORMULAS = {getattr(_aten, name): formula for _, formula, names in _OPERATIONS if formula for name in names.split()}
# By overload as well: torch up to 2.14 decomposes operations that it doesn't find by overload.
_FORMULAS |= {getattr(each, overload): formula for each, formula in _FORMULAS.items() for overload in each.overloads()}
_KIND_OF = {getattr(_aten, name): kind for kind, _, names in _OPERATIONS for name in names.split()}
