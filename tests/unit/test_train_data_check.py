"""Mistakes in a workload's data and model are named before anything is trained, all at once."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset, TensorDataset

from raypar import Data, Split, Workload
from raypar.errors import WorkloadError
from raypar.parallel.strategy import DistContext
from raypar.study.options import resolve
from raypar.study.trial import FailureKind
from raypar.train.loop import train
from raypar.train.worker import failure_kind

ALONE = DistContext(0, 1, torch.device("cpu"))
X, Y = torch.arange(32.0).reshape(8, 4), torch.arange(8) % 3
GOOD = Split(X, Y)
NAN_X = X.clone()
NAN_X[5, 1] = math.nan
SHORT, EMPTY = Split(X, Y[:5]), Split(X[:0], Y[:0])


class Net(nn.Linear):
    def __init__(self, config=None, num_outputs=3):
        super().__init__(4, num_outputs)


class Pairs(TensorDataset):
    """Samples that are no pairs."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def regression(**more):
    return {"model": lambda c: Net(num_outputs=1), "loss": functional.mse_loss, "metrics": {}, **more}


def values(y):
    return Data(train=Split(X, y), val=Split(X, y))


# What is wrong: data, the rest of the workload, and words of each mistake in order.
WRONG = {
    "no data": (None, {}, [("data(config) = None: is no raypar.Data", "return raypar.Data(train=Split(")]),
    "a tuple": ((X, Y), {}, [("data(config) = tuple of 2 (Tensor, Tensor): is no raypar.Data",)]),
    "a split": (GOOD, {}, [("data(config) = Split: is no raypar.Data",)]),
    "fewer targets": (
        Data(train=SHORT, val=GOOD),
        {},
        [("data.train = 8 inputs and 5 targets: the numbers differ", "give each input its target")],
    ),
    "no validation set": (Data(train=GOOD), {}, [("data.val = None: there are no samples", "or val_dataset")]),
    "no training set": (Data(val=GOOD), {}, [("data.train = None: there are no samples",)]),
    "an empty validation set": (Data(train=GOOD, val=EMPTY), {}, [("data.val = 0 samples: is empty",)]),
    "no test set": (Data(train=GOOD, val=GOOD), {"has_test": True}, [("data.test = None: there are no samples",)]),
    "a pair for a split": (
        Data(train=(X, Y), val=GOOD),
        {},
        [("data.train = tuple of 2 (Tensor, Tensor): is no raypar.Split",)],
    ),
    "an array": (
        Data(train=Split(np.zeros((8, 4)), Y), val=GOOD),
        {},
        [("data.train.inputs = ndarray of shape (8, 4): is no tensor", "torch.as_tensor")],
    ),
    "a number": (
        Data(train=Split(X, torch.tensor(1)), val=GOOD),
        {},
        [("data.train.targets = Tensor of shape (): is no tensor of samples",)],
    ),
    "an empty dataset": (
        Data(train=GOOD, val_dataset=TensorDataset(X[:0])),
        {},
        [("data.val_dataset = 0 samples: is empty",)],
    ),
    "a stream": (Data(train=GOOD, val_dataset=Stream()), {}, [("data.val_dataset = Stream: is no map-style dataset",)]),
    "samples without targets": (
        Data(train=GOOD, val_dataset=Pairs(X)),
        {},
        [("data.val_dataset[0] = Tensor of shape (4,): is no pair of input and target",)],
    ),
    "another number of samples one by one": (
        Data(train=GOOD, val=GOOD, train_dataset=TensorDataset(X[:5], Y[:5])),
        {},
        [("data.train_dataset = 5 samples: data.train has 8",)],
    ),
    "NaN in inputs": (
        Data(train=Split(NAN_X, Y), val=GOOD),
        {},
        [("data.train.inputs = 1 samples with NaN: make the model's outputs NaN", "drop these samples")],
    ),
    "NaN in targets": (values(NAN_X[:, 1:2]), regression(), [("data.train.targets = 1 NaN",), ("data.val.targets",)]),
    "no model": (
        None,
        {"model": lambda c: None},
        [("data(config)",), ("model(config) = None: is no torch.nn.Module",)],
    ),
    "a class": (
        Data(train=GOOD, val=GOOD),
        {"model": lambda c: Net},
        [("model(config) = class Net: is no instance", "return Net(…)")],
    ),
    "a function for a model": (Data(train=GOOD, val=GOOD), {"model": lambda c: len}, [("is no torch.nn.Module",)]),
    "classes beyond the outputs": (
        Data(train=GOOD, val=Split(X, Y + 1)),
        {},
        [("data.val.targets = 1 to 3: the model's 3 outputs are for the classes 0 to 2", "give the model 4 outputs")],
    ),
    "classes below 0": (
        Data(train=Split(X, Y - 1), val=GOOD),
        {"loss": functional.cross_entropy},
        [("data.train.targets = -1 to 1: the model's 3 outputs", "number the classes from 0")],
    ),
    "numbers for classes": (
        Data(train=Split(X, Y.float()), val=Split(X, Y.float())),
        {"loss": nn.CrossEntropyLoss()},
        [("data.train.targets = torch.float32: are no classes", "targets.long()", "mse_loss"), ("data.val.targets",)],
    ),
    "small whole numbers": (
        Data(train=Split(X, Y.int()), val=GOOD),
        {},
        [("data.train.targets = torch.int32: cross-entropy needs int64", "targets.long()")],
    ),
    "a column of classes": (
        Data(train=Split(X, Y[:, None]), val=GOOD),
        {},
        [("data.train.targets = shape (8, 1): cross-entropy needs (num_samples) for outputs of shape (batch, 3)",)],
    ),
    "targets that are broadcast": (
        values(X[:, 0]),
        regression(),
        [("outputs of shape (2, 1), targets of shape (2,): pairs each output with every target", "one shape")],
    ),
    "a loss for each sample": (
        values(X[:, :1]),
        regression(loss=lambda outputs, targets: (outputs - targets).square()),
        [("loss(outputs, targets) = shape (2, 1): is no single number", "mean")],
    ),
    "a metric of the batch": (
        Data(train=GOOD, val=GOOD),
        {"metrics": {"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()}},
        [("metrics['accuracy'] = Tensor of shape (): is no score for each of 2 samples", "shape (batch,)")],
    ),
    "a metric that is broadcast": (
        values(X[:, :1]),
        regression(metrics={"hits": lambda outputs, targets: (outputs == targets[:, 0]).float()}),
        [("metrics['hits'] = Tensor of shape (2, 2): is no score for each of 2 samples", "shape (batch,)")],
    ),
    "a metric that is broadcast and averaged": (
        values(X[:, 0]),
        regression(
            loss=lambda outputs, targets: functional.mse_loss(outputs[:, 0], targets),
            metrics={
                "hits": lambda outputs, targets: ((outputs > 0) == (targets > 0)).float().mean(1),
                "fine": lambda outputs, targets: ((outputs[:, 0] > 0) == (targets > 0)).float(),
            },
        ),
        [
            (
                "metrics['hits'] = outputs of shape (2, 1), targets of shape (2,): pairs each output with every",
                "one shape",
            )
        ],
    ),
    "accuracy of a regression": (
        values(X[:, :1]),
        regression(metrics=None, metric="accuracy"),
        [("metrics['accuracy'] = accuracy: accuracy needs scores of two classes or more, shape",)],
    ),
    "several": (
        Data(train=SHORT, val=EMPTY),
        {"model": lambda c: Net},
        [("data.train = 8 inputs and 5 targets",), ("data.val = 0 samples",), ("model(config) = class Net",)],
    ),
}
FINE = {
    "classes": (Data(train=GOOD, val=GOOD), {}),
    "bytes for classes": (Data(train=Split(X, Y.byte()), val=GOOD), {}),
    "ignored classes": (Data(train=Split(X, torch.where(Y == 1, -100, Y)), val=GOOD), {}),
    "probabilities": (values(torch.softmax(X[:, :3], 1)), {}),
    "a regression without a metric": (values(X[:, :1]), regression(metrics=None)),
    "a regression": (values(X[:, :1]), regression()),
    "a transform that fills": (Data(train=Split(NAN_X, Y), val=GOOD, transform=torch.nan_to_num), {}),
    "a lazy model": (Data(train=GOOD, val=GOOD), {"model": lambda c: nn.LazyLinear(3)}),
    "samples one by one": (Data(train_dataset=TensorDataset(X, Y), val_dataset=TensorDataset(X, Y)), {}),
    "one sample": (Data(train=GOOD, val=Split(X[:1], Y[:1])), {}),
}


class Channel(list):
    def report(self, metrics):
        self.append(metrics)
        return True


def trained(data, **rest):
    workload = Workload(**{"name": "mine", "model": Net, "data": lambda c: data, **rest})
    chosen = {"batch_size": 4, "num_warmup_steps": 0, "lr": 1e-4}
    if isinstance(data, Data) and data.train is None:
        chosen["loader"] = "dataloader"
    channel = Channel()
    train(workload, resolve(workload, chosen), 0, ALONE, channel, start_s=0.0)
    return channel


@pytest.mark.parametrize(("data", "rest", "expected"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_named_with_its_value_and_its_fix(data, rest, expected):
    with pytest.raises(WorkloadError) as caught:
        trained(data, **rest)
    head, *lines = str(caught.value).splitlines()
    count = "1 mistake" if len(expected) == 1 else f"{len(expected)} mistakes"
    assert head == f"workload mine: {count} in its data and model"
    mistakes = [" ".join(pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
    assert all(hint.startswith("      → ") for hint in lines[1::2])
    for mistake, words in zip(mistakes, expected, strict=True):
        assert all(word in mistake for word in words), (mistake, words)
    assert failure_kind(caught.value) is FailureKind.INVALID


@pytest.mark.parametrize(("data", "rest"), FINE.values(), ids=FINE)
def test_what_can_be_trained_on_passes(data, rest):
    assert len(trained(data, **rest)) == 1


def test_what_the_model_or_its_loss_raises_is_left_to_the_training():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trained(Data(train=Split(X[:, :2], Y), val=Split(X[:, :2], Y)))

    def model(config):
        raise ValueError("no such width")

    with pytest.raises(ValueError, match="no such width"):
        trained(Data(train=GOOD, val=GOOD), model=model)
    with pytest.raises(WorkloadError, match="5 targets"):  # which may be why
        trained(Data(train=SHORT, val=GOOD), model=model)


def test_looking_draws_no_random_numbers():
    drawn = []

    def noisy(x):
        drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
        return x

    def model(config):
        drawn.append("model")
        return nn.Sequential(nn.Dropout(0.5), Net())

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    trained(Data(train=GOOD, val=GOOD, transform=noisy), model=model)
    before, after = drawn[: drawn.index("model")], drawn[drawn.index("model") + 1 :]
    assert not before and after[0] == after[1]  # of the check, and then of the training
