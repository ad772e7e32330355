"""Activation checkpointing: which parts of a model are blocks, and that nothing but memory and time changes."""

import copy

import pytest
import torch
from torch import nn
from training import ALONE

from raypar import Data, Split, Workload
from raypar.parallel.recompute import NO_BLOCKS, Recomputation, blocks_of
from raypar.parallel.strategy import check_compatible
from raypar.predict.shapes import predict_memory
from raypar.study.options import conflicts, resolve
from raypar.train.training import Training

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Listed(nn.Module):
    def __init__(self, model_of_lists):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.stages = model_of_lists
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.first(x)
        if isinstance(self.stages, nn.Sequential):
            return self.last(self.stages(x))
        for stage in self.stages:
            x = stage(x)
        return self.last(x)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.head = Block(), Block(), nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(self.decoder(self.encoder(x)))


def layers(num=6):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num)))


def names(model):
    known = {id(module): name for name, module in model.named_modules()}
    return [[known[id(each)] for each in kind] for kind in blocks_of(model)]


def conv():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


CASES = {
    "blocks of a list": (lambda: Listed(nn.ModuleList([Block(), Block()])), [["stages.0", "stages.1"], []]),
    "blocks of nested sequences": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(), Block()), Block()),
        [["1.0", "1.1", "2"], []],
    ),
    "short sequences in a sequence": (lambda: nn.Sequential(conv(), conv(), nn.Linear(WIDTH, 2)), [["0", "1"], []]),
    "a row of layers": (layers, [[], [""]]),
    "a row in a model": (lambda: Listed(layers()), [[], ["stages"]]),
    "members without a container": (Plain, [["encoder", "decoder"], []]),
    "a single layer": (lambda: nn.Linear(WIDTH, 2), [[], []]),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_members_of_containers_and_rows_are_cut(case):
    make, expected = CASES[case]
    assert names(make()) == expected


@pytest.mark.parametrize("case", [case for case in CASES if case != "a single layer"])
def test_gradients_random_numbers_and_running_means_are_the_same_with_less_kept(case):
    torch.manual_seed(0)
    model = CASES[case][0]()
    x = torch.randn(16, WIDTH)
    results, kept = [], []
    for again in (False, True):
        this, bytes_kept = copy.deepcopy(model), [0]

        def pack(tensor, bytes_kept=bytes_kept):
            bytes_kept[0] += tensor.nbytes
            return tensor

        torch.manual_seed(1)
        recomputing = Recomputation(this)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if again:
                with recomputing():
                    loss = this(x).square().sum()
                    kept.append(bytes_kept[0])
                    loss.backward()
            else:
                loss = this(x).square().sum()
                kept.append(bytes_kept[0])
                loss.backward()
        assert not any("forward" in vars(module) for module in this.modules())  # it can be copied and saved
        results.append([loss.detach(), *(p.grad for p in this.parameters()), *this.buffers(), torch.rand(3)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert kept[1] < kept[0]


def test_a_model_without_blocks_is_refused_and_compile_as_well():
    workload = Workload(name="w", model=lambda _: nn.Linear(4, 2), data=lambda _: None)
    config = resolve(workload, {"activation_checkpointing": True})
    assert check_compatible(workload, config)[0] == NO_BLOCKS
    config = resolve(workload, {"activation_checkpointing": True, "compile": True})
    assert ("activation_checkpointing", "does not go with compile") in [
        each[:2] for each in conflicts(config, workload, None, ())
    ]


def test_training_and_prediction_take_less_memory():
    width, blocks, batch = 32, 6, 256

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            return x + self.layers(x)

    rows = Split(torch.zeros(batch, width), torch.zeros(batch, dtype=torch.long))
    workload = Workload(
        name="w", model=lambda _: nn.Sequential(*(Wide() for _ in range(blocks))), data=lambda _: Data(rows, rows)
    )
    peaks = {}
    for again in (False, True):
        config = resolve(workload, {"device": "cpu", "batch_size": batch, "activation_checkpointing": again})
        training = Training(workload, config, 0, ALONE)
        training.warm_up()
        peaks[again] = training.memory.peak_bytes, predict_memory(workload, config)
        low, high = peaks[again][1].range_bytes(1, on_gpu=False)
        assert low * 0.98 <= peaks[again][0] <= high * 1.02
    hidden = 2 * 4 * batch * 4 * width * (blocks - 1)  # before and after GELU, of all blocks but one
    assert peaks[False][1].total - peaks[True][1].total == pytest.approx(hidden, rel=0.15)
