"""Peak memory of a rank, by part, from two training steps on tensors without numbers.

Model, strategy and optimizer are the ones that a trial runs. torch's `FakeTensorMode` gives each tensor a shape and a
type but no memory, its "fake" backend is a process group of any size that sends nothing, and its `MemTracker` counts
what would be allocated. So this needs neither the memory nor the ranks, and no GPU.

Nothing is predicted for a model whose shapes depend on values: there are none.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed import device_mesh, pipelining
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType, _RefType
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from raypar.measure.allocations import allocations
from raypar.measure.memory import NUM_COUNTED_STEPS
from raypar.parallel import pipeline
from raypar.parallel.base import SplitModel, Strategy
from raypar.parallel.loss import Loss, part_of
from raypar.parallel.strategy import HOST, Batch, DistContext, Task, build_strategy, share_of
from raypar.parallel.tensor import plan_of
from raypar.predict.memory import NotPredictable, PeakMemory
from raypar.study.strategy import pipeline_size, tensor_size
from raypar.study.workload import Config, Data, Workload, first_tensor
from raypar.train.data import Feed, TrainBatches, evaluated, mapped
from raypar.train.loss_kind import own_loss
from raypar.train.precision import Numerics, numerics_of
from raypar.train.step import Stepper

T = TypeVar("T")
INDEX_BYTES = 8  # of a sample in the order of an epoch
# Parts by the names of MemTracker's categories. What it can't attribute is temporary.
PARTS: Mapping[str, str] = {
    "PARAM": "parameters",
    "BUFFER": "parameters",
    "GRAD": "gradients",
    "OPT": "optimizer",
    "ACT": "activations",
}
# What gloo may hold of messages that wait for a peer, as a share of the model's bytes. On a busy machine, up to 1.0 was
# measured with ddp, 0.5 with fsdp, and 0.3 with tensor.
IN_FLIGHT = 1.0
TOTAL = "Total"  # of MemTracker's categories
VALUES = "its shapes depend on values, and the prediction runs without any"


def predict_memory(workload: Workload, config: Config, seed: int = 0) -> PeakMemory:
    """Return the peak memory of a trial's ranks; of a pipeline, that of the stage which needs the most.

    The workload's data is loaded, for the shapes of a batch.

    Args:
        config: complete, from `raypar.study.options.resolve`.

    Raises:
        NotPredictable: the model's shapes depend on values, or the strategy can't run without other ranks.
    """
    assert workload.data is not None, "not for train loops"
    if config["strategy"] == "deepspeed":
        raise NotPredictable("strategy=deepspeed can't run without its other ranks")
    data = workload.data(config)
    # The first replica's first rank of each stage; the others have the same parts.
    ranks = [stage * tensor_size(config) for stage in range(pipeline_size(config))]
    peaks = [_of_rank(workload, config, seed, rank, data) for rank in ranks]
    return max(peaks, key=lambda peak: peak.total)


def _of_rank(workload: Workload, config: Config, seed: int, rank: int, data: Data) -> PeakMemory:
    context = Alone(rank, config["num_workers"], HOST)
    numerics, batches = numerics_and_batches(config, seed, context, data)
    batch = next(batches.full(1))
    with group(context), _no_values(workload), warnings.catch_warnings(action="ignore"):
        peak = _peak_of(workload, config, context, numerics, batch)
    return replace(peak, inputs=peak.inputs + _raw_bytes(data, batch) + INDEX_BYTES * batches.num_samples)


def numerics_and_batches(config: Config, seed: int, context: DistContext, data: Data) -> tuple[Numerics, TrainBatches]:
    """Return the numerics of a rank's steps, and its batches before they are converted to the model's arguments."""
    # Scaling a loss changes no memory. It skips steps whose gradients overflow, which can't be known.
    numerics = replace(numerics_of(config, context.device), needs_scaling=False)
    return numerics, TrainBatches(data, config, seed, share_of(config, context), _Unchanged(numerics))


def _raw_bytes(data: Data, batch: Batch) -> int:
    """Return the bytes of a batch's inputs before the data's transform, which are there as long as the batch is."""
    if data.train is None or data.transform is None:
        return 0
    return _bytes_of(part_of(data.train.inputs, slice(len(first_tensor(batch.targets)))))


class _Unchanged(Feed):
    """Inputs before the conversion to the model's arguments, which needs the model."""

    def __call__(self, inputs: Any) -> Any:
        return inputs


@dataclass(frozen=True)
class Alone(DistContext):
    """A rank whose peers have the same values."""

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        return values * self.world_size if operation == dist.ReduceOp.SUM else values


@contextlib.contextmanager
def group(context: DistContext) -> Iterator[None]:
    """Make this process a rank of a group that exists in name only."""
    if context.world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=context.rank, world_size=context.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # its entries name this group, and the next has others


@contextlib.contextmanager
def _no_values(workload: Workload) -> Iterator[None]:
    """Raise `NotPredictable` where values are needed."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise NotPredictable(f"workload {workload.name}: {VALUES} ({error})") from error


_aten = torch.ops.aten


class Shapes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors without numbers; a fraction that is read is 1, because optimizers read the number of their step.

    Attributes:
        scratch_bytes: what oneDNN needs to run the backward pass of a recurrent layer.
    """

    scratch_bytes = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0
        result: Any = super().dispatch(func, types, args, kwargs or {})
        if func is _aten.mkldnn_rnn_layer.default:  # torch does not know the size of what oneDNN keeps of an LSTM
            num_bytes, scratch_bytes = _of_recurrent_layer(args)
            self.scratch_bytes = max(self.scratch_bytes, scratch_bytes)
            with self:
                return (*result[:3], torch.empty(num_bytes, dtype=torch.uint8))
        return result


def _of_recurrent_layer(args: Any) -> tuple[int, int]:
    """Return the bytes that oneDNN keeps of a recurrent layer for its backward pass, and the scratch memory of that.

    They are proportional to steps and samples, so a few of them are run.

    Args:
        args: of torch's ``mkldnn_rnn_layer``: the inputs, shape ``(steps, samples, features)``, four weights, the two
            states, shape ``(…, samples, features)``, and settings.
    """
    num_steps, num_samples = args[0].shape[:2]
    few_steps, few_samples = min(num_steps, 16), min(num_samples, 16)
    with unset_fake_temporarily(), _disable_current_modes():
        inputs = torch.zeros(few_steps, few_samples, args[0].shape[2])
        weights = [torch.zeros(each.shape) for each in args[1:5]]
        states = [torch.zeros(*each.shape[:-2], few_samples, each.shape[-1]) for each in args[5:7]]
        *results, workspace = _aten.mkldnn_rnn_layer(inputs, *weights, *states, *args[7:])
        if workspace is None:  # in evaluation
            return 0, 0
        reverse, batch_sizes, *kind, is_bidirectional, is_batch_first, is_trained = args[7:]
        settings = reverse, *kind, is_trained, is_bidirectional, batch_sizes, is_batch_first
        gradients = map(torch.zeros_like, results)
        with allocations(of_all_threads=False) as changes:
            _aten.mkldnn_rnn_layer_backward(inputs, *weights, *states, *results, *gradients, *settings, workspace)
    factor = num_steps * num_samples / (few_steps * few_samples)
    return int(workspace.nbytes * factor), int(max(changes or [0]) * factor)


def _peak_of(workload: Workload, config: Config, context: DistContext, numerics: Numerics, batch: Batch) -> PeakMemory:
    mode, tracker = Shapes(allow_non_fake_inputs=True), Tracker()
    shapes_of = partial(mapped, mode.from_tensor)
    with mode, replacements(), tracker, prepared_step(workload, config, context, numerics, batch, shapes_of) as made:
        strategy, stepper, of_batch, model_bytes = made
        host_copy = model_bytes if isinstance(strategy, SplitModel) else 0
        tracker.track_external(strategy.module)
        strategy.module.train()
        tracker.forget_peak()  # of building the model, which a trial does not count either
        for _ in range(NUM_COUNTED_STEPS):
            stepper.step(of_batch)
        input_bytes = _bytes_of(of_batch.inputs)
        in_step = _parts(tracker, "peak", input_bytes, host_copy)
        in_step = replace(in_step, temporary=in_step.temporary + mode.scratch_bytes)
        # The next batch is made while the last one, and its gradients, are still there.
        between = _parts(tracker, "current", input_bytes, host_copy)
    between = replace(between, inputs=2 * input_bytes)
    peak = max(in_step, between, key=lambda peak: peak.total)
    uncertain = round(IN_FLIGHT * model_bytes) if context.world_size > 1 else 0
    return replace(peak, inputs=peak.inputs + _bytes_of(of_batch.targets), uncertain=uncertain)


@contextlib.contextmanager
def prepared_step(
    workload: Workload,
    config: Config,
    context: DistContext,
    numerics: Numerics,
    batch: Batch,
    moved: Callable[[Any], Any],
) -> Iterator[tuple[Strategy, Stepper, Batch, int]]:
    """Build the strategy and the step of a rank without its peers.

    Args:
        moved: returns inputs or targets of the batch as the steps take them.

    Yields:
        The strategy, its step, the batch for the step, and the bytes of the complete model.
    """
    assert workload.model is not None
    with contextlib.ExitStack() as stack:
        model = numerics.convert(workload.model(config))
        inputs = moved(batch.inputs)
        few = mapped(Tensor.clone, part_of(inputs, slice(2)))
        feed = Feed(numerics, model, few)
        of_batch = batch._replace(inputs=mapped(Tensor.clone, feed(inputs)), targets=feed.targets(moved(batch.targets)))
        del inputs  # counted because of its view
        sample = feed(few)
        loss = workload.loss or functional.cross_entropy
        is_own = workload.loss is None and own_loss(evaluated(model, sample, feed.numerics), None) is not None
        model_bytes = _bytes_of((list(model.parameters()), list(model.buffers())))
        if pipeline_size(config) > 1:
            stack.enter_context(_stages(workload, config, feed.numerics, model, sample, len(of_batch.targets)))
        strategy = build_strategy(Task(workload, config, model, sample, context))
        of_loss = Loss(own_loss, is_own=True) if is_own else Loss(loss)
        stepper = Stepper(strategy, feed.numerics, of_loss, config, NUM_COUNTED_STEPS, workload=workload)
        yield strategy, stepper, of_batch, model_bytes


def _parts(tracker: MemTracker, when: str, input_bytes: int, host_copy: int) -> PeakMemory:
    """Return a snapshot of a tracker by part. Made outside of the model, its inputs and copy are temporary to it."""
    parts = parts_of_snapshot(tracker.get_tracker_snapshot(when))
    parts["temporary"] -= input_bytes + host_copy
    return PeakMemory(**parts, inputs=input_bytes, host_copy=host_copy)


def parts_of_snapshot(snapshot: Mapping[Any, Mapping[Any, int]]) -> dict[str, int]:
    """Return the bytes of a tracker's snapshot by the names of `PeakMemory`."""
    parts: dict[str, int] = defaultdict(int)
    for category, num_bytes in snapshot[HOST].items():
        if category != TOTAL:
            parts[PARTS.get(category.name, "temporary")] += num_bytes
    return parts


class Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """Tracker of any number of forward passes. Its figures by module, which are not used, are of the last one."""

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if not self._mod_tracker.is_bw and self.is_outermost(module):
            self.reset_mod_stats()
        super()._pre_fw_hook(module, inputs)

    def _pre_bw_hook(self, module: nn.Module, gradients: Any) -> None:
        if module in self.memory_tracking:  # else it is the backward pass of an earlier micro-batch
            super()._pre_bw_hook(module, gradients)

    def _post_bw_hook(self, module: nn.Module, gradients: Any) -> None:
        if module in self.memory_tracking:
            super()._post_bw_hook(module, gradients)

    def _track(self, kind: _RefType, tensor: Tensor) -> None:
        """Track a new tensor. Outside of the model it is not one of its activations: a message, or part of the loss."""
        is_outside = kind is _MemRefType.ACT and self._mod_tracker.parents == {"Global"}
        super()._track(_MemRefType.TEMP if is_outside else kind, tensor)

    def is_outermost(self, module: nn.Module) -> bool:
        """Return whether a module whose forward pass begins is in no other one's."""
        name = self._mod_tracker.get_known_fqn(module)  # type: ignore[no-untyped-call]
        return self._mod_tracker.parents <= {"Global", name}

    def forget_peak(self) -> None:
        """Count the peak from now on."""
        self._peak_mem_snap = self.get_tracker_snapshot()
        self._peak_mem = {device: sizes[TOTAL] for device, sizes in self._peak_mem_snap.items()}


def _bytes_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


@contextlib.contextmanager
def replacements() -> Iterator[None]:
    """Replace what torch does with values, or in C++, beneath its fake tensors."""
    with (
        mock.patch.object(nn.Module, "_apply", _apply),
        mock.patch.object(device_mesh, "init_device_mesh", _real(device_mesh.init_device_mesh)),
        mock.patch.object(torch.nn.parallel, "DistributedDataParallel", Buckets),
        # MemTracker does not count what split tensors do to find shapes, if they do it in a mode of their own.
        mock.patch.object(_sharding_prop, "detect_fake_mode", return_value=None),
    ):
        yield


def _real(function: Callable[..., T]) -> Callable[..., T]:
    def with_values(*args: Any, **kwargs: Any) -> T:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return with_values


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert a module's tensors, as `torch.nn.Module.to` does. torch's own version can't exchange fake ones."""
    converted: dict[int, nn.Parameter] = {}  # shared weights stay shared
    for part in module.modules() if recurse else (module,):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    new = function(parameter)
                if new is not parameter:
                    new = converted.setdefault(id(parameter), nn.Parameter(new, parameter.requires_grad))
                    part._parameters[name] = new
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = function(buffer)
    return module


@contextlib.contextmanager
def _stages(
    workload: Workload, config: Config, numerics: Numerics, model: nn.Module, sample: Tensor, num_samples: int
) -> Iterator[None]:
    """Give the stages of a pipeline the shapes that they would otherwise learn from the ranks before them."""
    num = pipeline.micro_batches_for(num_samples, config["num_microbatches"], pipeline_size(config))
    layers = pipeline.layers_of(workload, model)
    assert layers is not None, "planning refuses models that don't split"
    passed = [sample]  # the inputs of each layer, and the outputs of the last one
    model.eval()  # or a batch norm would take its other path
    with torch.no_grad(), numerics.autocast():
        for layer in layers:
            passed.append(layer(passed[-1]))
    kinds = [(each.shape[1:], each.dtype) for each in passed]
    if (num_splits := tensor_size(config)) > 1:  # between a pair of split layers, a rank has part of the features
        plan, is_part = plan_of(workload, model), False
        for i, name in enumerate(pipeline.names_of(model, layers), start=1):
            is_part = plan[name] == "column" if name in plan else is_part
            if is_part:
                shape, dtype = kinds[i]
                kinds[i] = torch.Size((*shape[:-1], shape[-1] // num_splits)), dtype
    ranges: list[range] = []
    make: Any = pipelining.PipelineStage
    cut = pipeline.partition

    def example(end: int) -> Tensor:
        shape, dtype = kinds[end]
        has_gradient = bool(end) and dtype.is_floating_point
        return torch.empty(num_samples // num, *shape, dtype=dtype, requires_grad=has_gradient)

    def stage(module: nn.Module, number: int, *args: Any, **kwargs: Any) -> Any:
        inputs, outputs = (example(end) for end in (ranges[number].start, ranges[number].stop))
        return make(module, number, *args, input_args=inputs, output_args=outputs, **kwargs)

    def noted_cut(*args: Any) -> list[range]:
        ranges[:] = cut(*args)
        return ranges

    with mock.patch.object(pipelining, "PipelineStage", stage), mock.patch.object(pipeline, "partition", noted_cut):
        yield


class Buckets(nn.Module):
    """Memory of torch's DistributedDataParallel with ``gradient_as_bucket_view``: gradients that are always there."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module
        self._gradients = [(p, torch.zeros_like(p)) for p in module.parameters() if p.requires_grad]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def register_comm_hook(self, *_: Any) -> None:
        pass

    def _check_reducer_finalized(self) -> None:
        pass
