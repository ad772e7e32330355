"""Evaluations load their samples as the training does, and leave no model on a GPU."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raypar import Data, Split, Workload
from raypar.parallel.loss import Kind, Loss
from raypar.parallel.strategy import DistContext, copied
from raypar.study.options import resolve
from raypar.train import data, evaluate
from raypar.train.data import Feed, TrainBatches
from raypar.train.evaluate import Evaluation
from raypar.train.loop import train
from raypar.train.loss_kind import as_ratio
from raypar.train.precision import numerics_of

SPLIT = Split(torch.randn(8, 3), torch.zeros(8, dtype=torch.int64))
IN_MEMORY = Data(train=SPLIT, val=SPLIT)
SAMPLES = TensorDataset(SPLIT.inputs, SPLIT.targets)
ONE_BY_ONE = Data(train_dataset=SAMPLES, val_dataset=SAMPLES)
WORKLOAD = Workload(name="own", model=lambda _: nn.Linear(3, 2), data=lambda _: IN_MEMORY, num_train_samples=8)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("pin_memory", [None, False, True])
def test_loaders_of_training_and_evaluation_pin_memory_for_a_gpu_unless_the_config_says_otherwise(
    monkeypatch, device, pin_memory
):
    made = []
    for module in (data, evaluate):
        monkeypatch.setattr(module, "DataLoader", lambda *_, pin_memory, **__: made.append(pin_memory))
    config = resolve(WORKLOAD, {"loader": "dataloader", "pin_memory": pin_memory, "batch_size": 4})
    numerics = numerics_of(config, torch.device(device))
    TrainBatches(ONE_BY_ONE, config, 0, (0, 1), Feed(numerics))
    Evaluation(WORKLOAD, ONE_BY_ONE, config, DistContext(0, 1, numerics.device), Loss(cross_entropy), Feed(numerics))
    assert made == 2 * [device == "cuda" if pin_memory is None else pin_memory]


def test_scores_of_a_device_without_float64_are_added_up_on_the_cpu():
    on_mps = SimpleNamespace(device=torch.device("mps"), cpu=lambda: torch.ones(2))
    assert evaluate._in_double(on_mps).dtype == torch.float64


class Channel(list):
    """Notes with every report whether the model that was evaluated for it still exists."""

    def __init__(self, evaluated):
        self._evaluated = evaluated

    def report(self, metrics):
        gc.collect()
        self.append(self._evaluated[-1]() is not None)
        return True


def test_an_evaluation_gets_a_copy_of_a_model_in_host_memory_and_keeps_none(monkeypatch):
    evaluated, real = [], Evaluation.__call__

    def noted(evaluation, model):
        evaluated.append(weakref.ref(model))
        return real(evaluation, model)

    monkeypatch.setattr(Evaluation, "__call__", noted)
    monkeypatch.setattr("raypar.train.loop.on_device", copied)  # as if the trial ran on a GPU
    config, context = resolve(WORKLOAD, {"epochs": 2, "batch_size": 4}), DistContext(0, 1, torch.device("cpu"))
    channel = Channel(evaluated)
    train(WORKLOAD, config, 0, context, channel, start_s=0.0)
    assert channel == [False, False]


@pytest.mark.parametrize("eval_batch_size", [1, 3, 8])
@pytest.mark.parametrize("world_size", [1, 3])
def test_positions_are_counted_over_all_batches_and_ranks_without_the_ignored_ones(eval_batch_size, world_size):
    targets = torch.arange(8)[:, None] % 3 * torch.ones(1, 4, dtype=torch.int64)
    targets[0, 1:], targets[5] = -100, -100
    samples = Data(val=Split(torch.eye(3)[torch.arange(8) % 2], targets))
    workload = Workload(name="own", model=lambda _: nn.Identity(), data=lambda _: samples)
    config = resolve(workload, {"eval_batch_size": eval_batch_size})
    numerics, sums = numerics_of(config, torch.device("cpu")), []

    class Rank(DistContext):
        """A rank whose sums are collected, as they would be added up."""

        def sum(self, local):
            sums[-1].append(local)
            return local

    def positions(x):
        return x[:, :, None].expand(-1, -1, 4)

    class Positions(nn.Module):
        def forward(self, x):
            return positions(x)

    for rank in range(world_size):
        sums.append([])
        context = Rank(rank, world_size, numerics.device)
        Evaluation(workload, samples, config, context, Loss(as_ratio(None), Kind.RATIO), Feed(numerics))(Positions())
    _, accuracy = (sum(parts) for parts in zip(*sums, strict=True))
    counted = targets != -100
    right = (positions(samples.val.inputs).argmax(1) == targets) & counted
    assert accuracy.tolist() == [int(right.sum()), int(counted.sum())] and 0 < right.sum() < counted.sum()
