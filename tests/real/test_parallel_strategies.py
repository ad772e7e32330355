"""Weights that ranks hold and gradients that they send, by strategy."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from loops import seeing
from ranks import on_ranks, reports_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from raypar import Workload
from raypar.parallel import ddp
from raypar.parallel.loss import Loss
from raypar.parallel.strategy import MIXED, Batch, ForwardBackward, Task, build_strategy
from raypar.study.options import resolve
from raypar.workloads.transformer import transformer

NUM_STEPS = 5
PASS = ForwardBackward(Loss(nn.functional.cross_entropy), contextlib.nullcontext, lambda loss: loss)


def _deep():
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def _built(context, **config):
    workload = Workload(name="own", model=lambda _: _deep(), data=lambda _: None)
    complete = resolve(workload, {"num_workers": context.world_size, **config})
    return build_strategy(Task(workload, complete, _deep(), torch.randn(2, 8, dtype=torch.float64), context))


def _batches(context):
    """Yield this rank's half of each batch; all strategies get the same batches."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(NUM_STEPS):
        inputs = torch.randn(2, 10, 8, generator=generator, dtype=torch.float64)
        targets = torch.randint(3, (2, 10), generator=generator)
        yield Batch(inputs[context.rank], targets[context.rank], 1.0, 10, 20)


def _step(strategy, batch, optimizer):
    optimizer.zero_grad()
    strategy.forward_backward(batch, PASS)
    strategy.sync_gradients()
    if strategy.runs_optimizer:
        optimizer.step()
    strategy.sync_weights()


def _held(strategy):
    """Return the number of weights that a rank holds and trains."""
    parameters = [p for group in strategy.parameter_groups() for p in group["params"]]
    return sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in parameters)


def _holdings(context):
    measured = {}
    for name in ("ddp", "fsdp", "tensor", "pipeline", "hybrid"):
        sizes = {"tensor_size": 2, "pipeline_size": 2} if name == "hybrid" else {}
        strategy = _built(context, strategy=name, **sizes)
        measured[name] = _held(strategy), sum(p.numel() for p in strategy.full_model().parameters())
        in_memory = sum(p.numel() for p in strategy.named_model.parameters() if not p.is_meta)
        assert name != "pipeline" or in_memory == _held(strategy), "other stages' weights are dropped"
    return measured


def test_ranks_hold_their_strategys_share_of_the_weights():
    every, last = 4 * (64 + 8) + 27, 27
    ranks = on_ranks(_holdings, 4)
    assert all(averaged == every for rank in ranks for _, averaged in rank.values())
    held = {name: [rank[name][0] for rank in ranks] for name in ranks[0]}
    assert held["ddp"] == [every] * 4
    assert sum(held["fsdp"]) == every and max(held["fsdp"]) < every / 2
    # Two pairs of layers are split in four. Every rank has the biases of row layers and the odd layer at the end.
    assert held["tensor"] == [2 * (16 + 2 + 16 + 8) + last] * 4
    assert sum(held["pipeline"]) == every and min(held["pipeline"]) > 0
    assert sum(held["hybrid"]) == 2 * 2 * (32 + 4 + 32 + 8) + 2 * last


def _sent(context):
    """Return the size of every bucket of one step."""
    sizes = []
    inner = ddp._Compression.__call__

    def spy(self, bucket):
        sizes.append(bucket.buffer().numel())
        return inner(self, bucket)

    ddp._Compression.__call__ = spy
    measured = {}
    for name, config in {
        "fused": {"overlap": False},
        "unfused": {"overlap": False, "bucket_mb": 0.0},
        "unfused, overlapping": {"compression": "fp16", "bucket_mb": 0.0},
    }.items():
        strategy = _built(context, **config)
        optimizer = torch.optim.SGD(strategy.parameter_groups(), lr=0.1)
        for batch in _batches(context):
            sizes.clear()
            _step(strategy, batch, optimizer)
        measured[name] = list(sizes)
    ddp._Compression.__call__ = inner
    return measured


def test_options_decide_the_fusion_of_gradients():
    for sizes in on_ranks(_sent, 2):
        assert sizes["fused"] == [315]
        assert sorted(sizes["unfused"]) == sorted([64, 8] * 4 + [24, 3])
        assert sizes["unfused"] == sizes["unfused, overlapping"]


def _local(context):
    """Return for each step whether this rank has rank 0's weights after it."""
    strategy = _built(context, strategy="local_sgd", sync_every=3)
    optimizer, equal = torch.optim.SGD(strategy.parameter_groups(), lr=0.1), []
    for batch in _batches(context):
        _step(strategy, batch, optimizer)
        weights = nn.utils.parameters_to_vector(strategy.module.parameters()).detach()
        first = weights.clone()
        dist.broadcast(first, src=0)
        equal.append(torch.equal(first, weights))
        mean = weights.clone()
        dist.all_reduce(mean)
        averaged = nn.utils.parameters_to_vector(strategy.full_model().parameters())
        torch.testing.assert_close(averaged, mean / 2)
    return equal


def test_local_sgd_averages_at_its_interval_and_evaluates_the_average():
    first, other = on_ranks(_local, 2)
    assert first == [True] * NUM_STEPS  # rank 0 is the reference
    assert other == [False, False, True, False, False]


SMALL = {
    "seeing": (seeing, {}),
    "transformer": (transformer, {"width": 16, "num_blocks": 2, "num_sequences": 40, "batch_size": 16, "epochs": 2}),
}


def _types(context, name, config):
    """Return the types of the weights that each kind of layer computes with, under fsdp."""
    workload, small = SMALL[name]
    complete = resolve(workload, {**small, **config, "strategy": "fsdp", "num_workers": context.world_size})
    model, data = workload.model(complete), workload.data(complete)
    inputs = data.val.inputs[:2]
    inputs = data.transform(inputs) if data.transform else inputs
    strategy, types = build_strategy(Task(workload, complete, model, inputs, context)), {}

    def note(layer, _):
        for name, parameter in layer.named_parameters(recurse=False):
            types.setdefault(f"{type(layer).__name__}.{name}".removeprefix("FSDP"), set()).add(parameter.dtype)

    for module in model.modules():
        module.register_forward_pre_hook(note)
    with torch.autocast("cpu", MIXED[config["precision"]]):
        strategy.module(inputs)
    return types


def _in_16_bits(context):
    return {
        (name, precision): (
            _types(context, name, {"precision": precision}),
            {
                strategy: reports_of(workload, {**config, "precision": precision, "strategy": strategy}, context)
                for strategy in ("ddp", "fsdp")
            },
        )
        for name, (workload, config) in SMALL.items()
        for precision in ("bf16", "fp16")
    }


@pytest.mark.skipif(not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"), reason="needs torch 2.15")
def test_fsdp_gathers_matrix_weights_in_16_bits_with_the_losses_of_ddp():
    kinds = {"seeing": ("Conv2d", "Linear"), "transformer": ("Linear",)}
    for rank in on_ranks(_in_16_bits, 2):
        for (name, precision), (types, reports) in rank.items():
            converted = {key for key, dtypes in types.items() if dtypes == {MIXED[precision]}}
            assert converted == {key for key in types if key.startswith(kinds[name])}, (name, types)
            assert all(types[key] == {torch.float32} for key in types.keys() - converted)
            for report, expected in zip(reports["fsdp"], reports["ddp"], strict=True):
                assert report["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-6), (name, precision)
                assert report["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6), (name, precision)
