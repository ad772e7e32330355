"""Work of training a network: multiply-accumulates by layer type, and the machine's measured peak.

Operations are counted as torch dispatches them, so a functional ``relu`` counts like a layer. If possible the network
is built on torch's meta device, which has shapes and no numbers: a large one is counted in about a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from raypar.errors import RayparError
from raypar.study.workload import Config, Data, Workload

# Batch normalisation in training needs more than one value per channel, which one 1 x 1 image does not have.
NUM_SAMPLES = 2

T = TypeVar("T")


def sample_inputs(workload: Workload, config: Config) -> Tensor:
    """Return inputs of `NUM_SAMPLES` samples, shape ``(NUM_SAMPLES, ...)``, as the model gets them from its data."""
    assert workload.data is not None, "a workload that is no train loop has data"
    return _sample(workload.data(_with_few_samples(config)))


def run_on_shapes(workload: Workload, config: Config, sample: Tensor, inspect: Callable[[nn.Module, Tensor], T]) -> T:
    """Return ``inspect(network, sample)``, run on shapes alone if possible.

    Raises:
        RayparError: `inspect` does, or the network can't be built, or can't take the sample.
    """
    assert workload.model is not None, "a workload that is no train loop has a model"
    ways: tuple[tuple[str, str, Tensor], ...] = (
        ("meta", "meta", torch.empty_like(sample, device="meta")),
        (
            "cpu",
            "meta",
            torch.empty_like(sample, device="meta"),
        ),  # for a network that looks at numbers when it is built
        ("cpu", "cpu", sample),  # or when it is run
    )
    for built_on, run_on, inputs in ways:
        try:
            with torch.device(built_on):
                model = workload.model(config).to(run_on)
            with torch.device(run_on):
                return inspect(model, inputs)
        except RayparError:
            raise
        except Exception as error:  # whatever a network may raise; the last is reported
            why = (str(error).splitlines() or [type(error).__name__])[0]
    raise RayparError(
        f"workload {workload.name}: the network can't be built, or can't take its samples: {why}",
        hint=f"`raypar workloads {workload.name}` shows what its options may be",
    )


def _with_few_samples(config: Config) -> Config:
    """Shrink a synthetic data set: it need not be generated in full to see the shape of a sample."""
    if config.get("source") != "synthetic":
        return config
    return {**config, **{key: NUM_SAMPLES for key in ("num_images", "num_classes") if key in config}}


def _sample(data: Data) -> Tensor:
    if data.train is not None:
        some = data.train.inputs[:NUM_SAMPLES]
        some = data.transform(some) if data.transform else some
        return some.float() if some.dtype == torch.uint8 else some
    assert data.train_dataset is not None, "a workload's data has train or train_dataset"
    return torch.stack([data.train_dataset[i][0] for i in range(NUM_SAMPLES)])


SIZES = {"cpu": (256, 512, 1024, 2048), "other": (2048, 4096, 8192)}  # rows and columns
BUDGET_S = 1.0  # for all sizes together
MIN_RUNS = 3


def peak_flops(device: torch.device, dtype: torch.dtype, num_threads: int) -> float:
    """Measure the most FLOP/s that products of two square matrices reach: the best run of the best size.

    A product of n x n matrices has 2 n^3 FLOP. The measurement takes about a second: sizes that would take longer are
    left out. Other load on the machine lowers the figure, which is why the best run counts.

    Args:
        num_threads: of torch on a CPU; torch's setting is restored afterwards.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return _peak(device, dtype, SIZES["cpu" if device.type == "cpu" else "other"])
    finally:
        torch.set_num_threads(before)


def _peak(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> float:
    best = 0.0
    left_s = BUDGET_S
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
    return best


def wait_for_device(device: torch.device) -> None:
    """Wait until an accelerator has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


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
        forward: multiply-accumulates (MACs), or plain operations where `kind` is not in `OF_MACS`.
        by_weights: the same for the gradient by weights and biases.
        by_inputs: the same for the gradient by the layer's inputs, which the first layer does not need.
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
        layers: by type, in the order of `KINDS`; types that the network lacks are left out.
    """

    num_parameters: int
    layers: tuple[LayerWork, ...]

    @property
    def macs_forward(self) -> int:
        return sum(layer.forward for layer in self.layers if layer.is_of_macs)

    @property
    def macs_by_weights(self) -> int:
        return sum(layer.by_weights for layer in self.layers if layer.is_of_macs)

    @property
    def macs_by_inputs(self) -> int:
        return sum(layer.by_inputs for layer in self.layers if layer.is_of_macs)

    @property
    def macs(self) -> int:
        """Forward and backward."""
        return self.macs_forward + self.macs_by_weights + self.macs_by_inputs

    @property
    def flop(self) -> int:
        """Forward and backward, 2 a multiply-accumulate. Other operations are left out: memory bounds them."""
        return FLOP_PER_MAC * self.macs

    def min_time_s(self, num_samples: int, peak_flops: float) -> float:
        """Return the least seconds that training on so many samples takes: all of its FLOP at the peak (FLOP/s)."""
        return self.flop * num_samples / peak_flops


def count_work(model: nn.Module, inputs: Tensor) -> Work:
    """Count the work of one sample in training mode.

    One forward pass and three backward passes are made: by weights and the network's input (`both`), by the input
    alone, by weights alone (as in training). The gradient by weights is `both` less the input's; the gradient by
    inputs is the rest of training's, so that the first layer has none.

    Multiply-accumulates, per sample (torch.utils.flop_counter, 2 FLOP each; biases are not counted):

    - convolution: C_out x C_in/groups x K_x x K_y x H' x W', where H' x W' is the output; the same for each gradient
    - fully connected: inputs x outputs; the same for each gradient
    - attention: queries x keys x width for each of its two products; twice that by inputs

    Plain operations, where an addition, a multiplication, a multiply-accumulate or a comparison is one each:

    - activation: 1 per element, both ways (the function's value counts as one); softmax 3: exponential, sum, division
    - pooling: K_x x K_y per output; backward as many for a mean, 1 for a maximum. Over the full image: 1 per input
      (backward only copies, which is not counted)
    - normalisation by batch or layer: 4 per element (mean; difference and variance; scale and shift); by weights 3
      (normalised input; its sum with the gradient; the gradient's sum); by inputs 2 (gradient, less the two sums)

    Dropout, residual sums, embeddings and the loss are not counted.

    Args:
        model: its running statistics, if any, move by one batch.
        inputs: shape ``(batch, ...)``, floats or (where an ``nn.Embedding`` takes them) integers; on the model's
            device, which may be torch's meta device. Work that a batch needs once is shared out among its samples.

    Raises:
        RayparError: the model returns no tensor, or its output depends on no weight.
    """
    entries: list[Tensor] = []

    def enter(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        entries.append(output if output.requires_grad else output.requires_grad_())

    hooks = [] if inputs.is_floating_point() else _embeddings_hooked(model, enter)
    if inputs.is_floating_point():
        entries.append(inputs.detach().clone().requires_grad_())
    was_training = model.training
    model.train()
    try:
        # Not a leaf: a first layer may work in place.
        inputs = entries[0] * 1 if entries else inputs
        # The plain formula of attention: fused kernels compute a product twice, which is no work of the network.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), _counter() as forward:
            outputs = model(inputs)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    weights = [p for p in model.parameters() if p.requires_grad]
    if not isinstance(outputs, Tensor):
        raise RayparError(f"the model returns a {type(outputs).__name__}: only a tensor can be counted")
    if not weights or not outputs.requires_grad:
        raise RayparError("the model has no weight that its output depends on: there is nothing to train")
    both, by_entry, trained = (_backward(outputs, wrt) for wrt in ([*weights, *entries], entries, weights))
    layers = []
    ahead = _by_kind(forward)
    for kind in KINDS:
        by_weights = both[kind] - by_entry[kind]
        counts = (ahead[kind], by_weights, trained[kind] - by_weights)
        if any(counts):
            layers.append(LayerWork(kind, *(round(count / len(inputs)) for count in counts)))
    return Work(sum(p.numel() for p in weights), tuple(layers))


def work_of(workload: Workload, config: Config) -> Work:
    """Count the work of a sample of a workload under a complete config; its data is loaded to see a sample's shape.

    Raises:
        DataError: the data (or a tokenizer) is missing, or does not fit the network.
        RayparError: the network can't be built or can't take its data.
    """
    workload.prepare(config)
    return run_on_shapes(workload, config, sample_inputs(workload, config), count_work)


def _embeddings_hooked(model: nn.Module, hook: Callable[..., None]) -> list[Any]:
    return [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, nn.Embedding)]


def _backward(outputs: Tensor, wrt: Sequence[Tensor]) -> Mapping[str, int]:
    if not wrt:
        return dict.fromkeys(KINDS, 0)
    with sdpa_kernel(SDPBackend.MATH), _counter() as counter:
        torch.autograd.grad(outputs, wrt, torch.ones_like(outputs), retain_graph=True, allow_unused=True)
    return _by_kind(counter)


def _counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=dict(_FORMULAS))


def _by_kind(counter: FlopCounterMode) -> Mapping[str, int]:
    """Return MACs, or operations, of a batch by kind."""
    counts = dict.fromkeys(KINDS, 0)
    for operation, count in counter.get_flop_counts().get("Global", {}).items():
        kind = _KIND_OF.get(operation)
        if kind is not None:
            counts[kind] += count // FLOP_PER_MAC if kind in OF_MACS else count
    return counts


# Formulas take an operation's arguments with shapes for tensors, and the shape of its result as `out_shape`.


def _conv_backward(*args: Any, **_: Any) -> int:
    """Return the FLOP of the gradients in the output mask; torch's formula forgets the groups of that by weights."""
    (grad, x, w), transposed, output_mask = args[:3], args[7], args[-1]
    return int(sum(output_mask[:2]) * conv_flop_count(x, w, grad, transposed))


def _per_element(num: int) -> Callable[..., int]:
    return lambda *args, **_: num * math.prod(args[0])


def _normalisation_backward(*args: Any, **_: Any) -> int:
    by_inputs, *by_weights = args[-1]
    return int(math.prod(args[0]) * (2 * by_inputs + 3 * any(by_weights)))


def _pool(*args: Any, out_shape: Any, **_: Any) -> int:
    """Return the operations of a pooling; a maximum returns its index as well: two results of one shape."""
    shape = out_shape if isinstance(out_shape, torch.Size) else out_shape[0]
    return int(math.prod(shape) * _window(args[1]))


def _mean_pool_backward(*args: Any, **_: Any) -> int:
    return int(math.prod(args[0]) * _window(args[2]))


def _window(kernel: Sequence[int]) -> int:
    return int(kernel[0] ** 2 if len(kernel) == 1 else math.prod(kernel))


# The operations that torchvision's, transformers' and torch.nn's activations dispatch; in-place ones end in "_".
_ACTIVATIONS = (
    *("relu", "relu_", "threshold_backward", "leaky_relu", "leaky_relu_", "leaky_relu_backward", "elu", "elu_"),
    *("elu_backward", "gelu", "gelu_", "gelu_backward", "silu", "silu_", "silu_backward", "sigmoid", "sigmoid_"),
    *("sigmoid_backward", "tanh", "tanh_", "tanh_backward", "hardtanh", "hardtanh_", "hardtanh_backward"),
    *("hardswish", "hardswish_", "hardswish_backward", "hardsigmoid", "hardsigmoid_", "hardsigmoid_backward"),
)
_SOFTMAXES = ("_softmax", "_safe_softmax", "_softmax_backward_data")
_NORMALISATIONS: Mapping[str, Callable[..., int]] = {
    "native_batch_norm": _per_element(4),
    "native_batch_norm_backward": _normalisation_backward,
    "native_layer_norm": _per_element(4),
    "native_layer_norm_backward": _normalisation_backward,
}
_POOLINGS: Mapping[str, Callable[..., int]] = {
    "max_pool2d_with_indices": _pool,
    "max_pool2d_with_indices_backward": _per_element(1),
    "avg_pool2d": _pool,
    "avg_pool2d_backward": _mean_pool_backward,
    "_adaptive_avg_pool2d": _per_element(1),
    "mean": _per_element(1),
    "amax": _per_element(1),
}
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    _aten.convolution_backward: _conv_backward,
    **{getattr(_aten, name): _per_element(1) for name in _ACTIVATIONS},
    **{getattr(_aten, name): _per_element(3) for name in _SOFTMAXES},
    **{getattr(_aten, name): formula for name, formula in {**_NORMALISATIONS, **_POOLINGS}.items()},
}
_KIND_OF: Mapping[Any, str] = {
    **dict.fromkeys((_aten.convolution, _aten.convolution_backward), CONVOLUTION),
    **dict.fromkeys((_aten.mm, _aten.addmm), FULLY_CONNECTED),
    **dict.fromkeys((_aten.bmm, _aten.baddbmm), ATTENTION),
    **{getattr(_aten, name): NORMALISATION for name in _NORMALISATIONS},
    **{getattr(_aten, name): ACTIVATION for name in (*_ACTIVATIONS, *_SOFTMAXES)},
    **{getattr(_aten, name): POOLING for name in _POOLINGS},
}
