"""Mistakes in a workload's data and model are named before anything is trained, all at once."""

import contextlib
import math
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset
from training import ALONE, trained

from raypar import Data, Split, Workload
from raypar.errors import WorkloadError
from raypar.parallel.strategy import DistContext
from raypar.study.options import resolve
from raypar.study.trial import FailureKind
from raypar.train.data_identity import identity_of
from raypar.train.precision import numerics_of
from raypar.train.worker import failure_kind
from raypar.train.workload_check import check_workload, mistakes_of_points

X, Y = torch.arange(32.0).reshape(8, 4), torch.arange(8) % 3
GOOD = Split(X, Y)
NAN_X = X.clone()
NAN_X[5, 1] = math.nan
SHORT, EMPTY = Split(X, Y[:5]), Split(X[:0], Y[:0])


class Net(nn.Linear):
    def __init__(self, config=None, num_outputs=3):
        super().__init__(4, num_outputs)


class Pairs(TensorDataset):
    """Samples without targets."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0]


class Sparse(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x.to_sparse(), y


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def regression(**more):
    return {"model": lambda c: Net(num_outputs=1), "loss": functional.mse_loss, "metrics": {}, **more}


def values(y):
    return Data(train=Split(X, y), val=Split(X, y))


# What is wrong: data, the rest of the workload, and words of each mistake in order.
WRONG = {
    "no data": (None, {}, [("data(config) = None: is not a raypar.Data", "return raypar.Data(train=Split(")]),
    "a tuple": ((X, Y), {}, [("data(config) = tuple of 2 (Tensor, Tensor): is not a raypar.Data",)]),
    "a split": (GOOD, {}, [("data(config) = Split: is not a raypar.Data",)]),
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
        [("data.train = tuple of 2 (Tensor, Tensor): is not a raypar.Split",)],
    ),
    "an array": (
        Data(train=Split(np.zeros((8, 4)), Y), val=GOOD),
        {},
        [("data.train.inputs = ndarray of shape (8, 4): is not a tensor", "torch.as_tensor")],
    ),
    "a number": (
        Data(train=Split(X, torch.tensor(1)), val=GOOD),
        {},
        [("data.train.targets = Tensor of shape (): is not a tensor of samples",)],
    ),
    "an empty dataset": (
        Data(train=GOOD, val_dataset=TensorDataset(X[:0])),
        {},
        [("data.val_dataset = 0 samples: is empty",)],
    ),
    "a stream": (
        Data(train=GOOD, val_dataset=Stream()),
        {},
        [("data.val_dataset = Stream: is not a map-style dataset",)],
    ),
    "samples without targets": (
        Data(train=GOOD, val_dataset=Pairs(X)),
        {},
        [("data.val_dataset[0] = Tensor of shape (4,): is not a pair of input and target",)],
    ),
    "another number of samples one by one": (
        Data(train=GOOD, val=GOOD, train_dataset=TensorDataset(X[:5], Y[:5])),
        {},
        [("data.train_dataset = 5 samples: data.train has 8",)],
    ),
    "NaN in inputs": (
        Data(train=Split(NAN_X, Y), val=GOOD),
        {},
        [("data.train.inputs = 1 sample with NaN: make the model's outputs NaN", "drop these samples")],
    ),
    "NaN in inputs of the validation set alone": (
        Data(train=GOOD, val=Split(NAN_X, Y)),
        {},
        [("data.val.inputs = 1 sample with NaN: make the model's outputs NaN", "drop these samples")],
    ),
    "NaN in inputs of the test set alone": (
        Data(train=GOOD, val=GOOD, test=Split(NAN_X, Y)),
        {"has_test": True},
        [("data.test.inputs = 1 sample with NaN",)],
    ),
    "sparse inputs": (
        Data(train=Split(X.to_sparse(), Y), val=Split(X.to_sparse(1), Y)),
        {},
        [
            ("data.train.inputs = tensor of layout torch.sparse_coo: can't be cut into samples", "inputs.to_dense()"),
            ("data.val.inputs = tensor of layout torch.sparse_coo",),
        ],
    ),
    "sparse samples one by one": (
        Data(train=GOOD, val_dataset=Sparse(X, Y)),
        {},
        [
            (
                "data.val_dataset[0] = tensors of layout torch.sparse_coo, torch.strided",
                "return input.to_dense(), target",
            )
        ],
    ),
    "NaN in targets": (
        values(NAN_X[:, 1:2]),
        regression(),
        [("data.train.targets = 1 sample with NaN: make the loss NaN",), ("data.val.targets",)],
    ),
    "no model": (
        None,
        {"model": lambda c: None},
        [("data(config)",), ("model(config) = None: is not a torch.nn.Module",)],
    ),
    "a class": (
        Data(train=GOOD, val=GOOD),
        {"model": lambda c: Net},
        [("model(config) = class Net: is not an instance", "return Net(…)")],
    ),
    "a function for a model": (Data(train=GOOD, val=GOOD), {"model": lambda c: len}, [("is not a torch.nn.Module",)]),
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
        [
            ("data.train.targets = torch.float32: are not class numbers", "targets.long()", "mse_loss"),
            ("data.val.targets",),
        ],
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
        [("outputs of shape (3, 1), targets of shape (3,): pairs each output with every target", "one shape")],
    ),
    "a loss for each sample": (
        values(X[:, :1]),
        regression(loss=lambda outputs, targets: (outputs - targets).square()),
        [("loss(outputs, targets) = shape (3, 1): is not a single number", "mean")],
    ),
    "a metric of the batch": (
        Data(train=GOOD, val=GOOD),
        {"metrics": {"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()}},
        [("metrics['accuracy'] = ", "shape () is not a score for each of 3 samples", "shape (batch,)")],
    ),
    "a metric that is broadcast": (
        values(X[:, :1]),
        regression(metrics={"hits": lambda outputs, targets: (outputs == targets[:, 0]).float()}),
        [("metrics['hits'] = ", "shape (3, 3) is not a score for each of 3 samples", "shape (batch,)")],
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
                "metrics['hits'] = outputs of shape (3, 1), targets of shape (3,): pairs each output with every",
                "one shape",
            )
        ],
    ),
    "accuracy of a regression": (
        values(X[:, :1]),
        regression(metrics=None, metric="accuracy"),
        [("metrics['accuracy'] = ", "accuracy needs scores of two classes or more, shape")],
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


def reports_of(data, **rest):
    workload = Workload(**{"name": "mine", "model": Net, "data": lambda c: data, **rest})
    return trained(workload, batch_size=4, num_warmup_steps=0, lr=1e-4)[1]


@pytest.mark.parametrize(("data", "rest", "expected"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_named_with_its_value_and_its_fix(data, rest, expected):
    with pytest.raises(WorkloadError) as caught:
        reports_of(data, **rest)
    head, *lines = str(caught.value).splitlines()
    count = "1 mistake" if len(expected) == 1 else f"{len(expected)} mistakes"
    assert head == f"workload mine: {count} in its data and model"
    mistakes = [" ".join(pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
    assert all(hint.startswith("      → ") for hint in lines[1::2])
    for mistake, words in zip(mistakes, expected, strict=True):
        assert all(word in mistake for word in words), (mistake, words)
    assert failure_kind(caught.value) is FailureKind.INVALID


@pytest.mark.parametrize(("data", "rest"), FINE.values(), ids=FINE)
def test_workloads_that_can_be_trained_pass(data, rest):
    assert len(reports_of(data, **rest)) == 1


def test_errors_of_the_model_are_left_to_the_training():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        reports_of(Data(train=Split(X[:, :2], Y), val=Split(X[:, :2], Y)))

    def model(config):
        raise ValueError("no such width")

    with pytest.raises(ValueError, match="no such width"):
        reports_of(Data(train=GOOD, val=GOOD), model=model)
    with pytest.raises(WorkloadError, match="5 targets"):  # which may be the cause
        reports_of(Data(train=SHORT, val=GOOD), model=model)


def inverse_frequency(outputs, targets):
    return functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 5.0, 25.0]))


def weighted(outputs, targets):
    weights = torch.tensor([1.0, 5.0, 25.0])[targets]
    return (functional.cross_entropy(outputs, targets, reduction="none") * weights).sum(), weights.sum()


def of_means(outputs, targets):
    return functional.cross_entropy(outputs, targets), len(targets)


def coupled(outputs, targets):
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def mistakes(loss, **chosen):
    workload = Workload(name="mine", model=Net, data=lambda _: Data(train=GOOD, val=GOOD), loss=loss, metrics={})
    config = resolve(workload, {"batch_size": 8, "epochs": 1, **chosen})
    return [str(mistake) for mistake in mistakes_of_points(workload, [("p", config)], 0)]


@pytest.mark.parametrize(
    ("chosen", "start"),
    [
        ({"num_samples": 9}, "num_samples = 9: is more than the 8 training samples"),
        ({"batch_size": 9, "drop_last": True}, "batch_size = 9: drop_last leaves no batch of 8 samples"),
    ],
)
def test_options_that_need_more_samples_are_refused(chosen, start):
    (mistake,) = mistakes(None, **chosen)
    assert mistake.startswith(start)


CUTS = ({"num_workers": 2}, {"accumulation_steps": 2}, {"num_workers": 2, "strategy": "gather_broadcast"})


@pytest.mark.parametrize("loss", [inverse_frequency, coupled, lambda o, t: functional.cross_entropy(o, t).sqrt()])
def test_a_loss_of_the_batch_as_a_whole_is_refused_where_batches_are_cut(loss):
    for chosen in CUTS:
        (mistake,) = mistakes(loss, **chosen)
        key, value = next(iter(chosen.items()))
        assert mistake.startswith(f"{key} = {value}: would train on another loss") and "(sum, weight)" in mistake
    assert mistakes(loss) == []
    assert mistakes(loss, num_workers=2, strategy="tensor") == []  # all workers take the same samples


@pytest.mark.parametrize(
    "loss",
    [weighted, None, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 25.0])), nn.CrossEntropyLoss(reduction="sum")],
)
def test_losses_that_add_up_are_taken_for_any_cut(loss):
    assert [mistakes(loss, **chosen) for chosen in CUTS] == [[], [], []]


class Rare(TensorDataset):
    """Samples of which one in 200 has a rare label."""

    def __init__(self, has_targets):
        targets = torch.zeros(2000, dtype=torch.int64)
        targets[100::200] = 2
        super().__init__(torch.randn(2000, 4), targets)
        if has_targets:
            self.targets = targets.tolist()


class Hidden(torch.utils.data.Dataset):
    """The same samples, which can only be read one by one."""

    def __init__(self):
        self._rare = Rare(has_targets=False)

    def __len__(self):
        return len(self._rare)

    def __getitem__(self, index):
        return self._rare[index]


@pytest.mark.parametrize(
    "dataset", [Rare(True), Subset(Rare(False), range(2000)), Hidden()], ids=["own", "part", "hidden"]
)
def test_a_weight_of_a_rare_class_in_a_data_set_is_found_before_training_or_in_the_first_evaluation(dataset):
    data = Data(train_dataset=dataset, val=Split(*dataset[:][:2]) if isinstance(dataset, Rare) else None)
    data = replace(data, val_dataset=None if data.val else dataset)
    workload = Workload(name="mine", model=Net, data=lambda _: data, loss=inverse_frequency, metrics={})
    with pytest.raises(WorkloadError, match="not the mean of its samples' losses"):
        trained(workload, accumulation_steps=2, batch_size=500, epochs=1, lr=0.01)


def test_targets_of_float64_are_trained_on_as_those_of_float32():
    reports = [reports_of(values(X[:, :1].to(dtype)), **regression()) for dtype in (torch.float32, torch.float64)]
    assert reports[0][0]["val_loss"] == reports[1][0]["val_loss"]


def test_a_pair_of_a_mean_and_a_number_is_refused():
    (mistake,) = mistakes(of_means)
    assert "the pairs of parts do not add up" in mistake and "return the sum" in mistake


def test_a_loss_whose_parameters_nothing_trains_is_refused():
    class Centers(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.zeros(3, 3))

        def forward(self, outputs, targets):
            return (outputs - self.centers[targets]).square().mean()

    (mistake,) = mistakes(Centers())
    assert "has parameters that nothing trains" in mistake


def unseeded(config):
    order = torch.from_numpy(np.random.default_rng().permutation(8))
    return Data(train=Split(X[order[:4]], Y[order[:4]]), val=Split(X[order[4:]], Y[order[4:]]))


def drawn_from_the_trials_generators(config):
    order = torch.from_numpy(np.random.permutation(8))
    return Data(train=Split(X[order[:4]], Y[order[:4]]), val=Split(X[order[4:]], Y[order[4:]]))


class Shuffled(TensorDataset):
    """Samples that differ at each read, with fixed targets."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + np.random.default_rng().normal(), y


class Masked(TensorDataset):
    """Samples whose targets differ at each read, like those of a masked language model."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, (y + np.random.default_rng().integers(3)) % 3


@pytest.mark.parametrize(
    ("data", "num"),
    [
        (lambda c: Data(train_dataset=Masked(X, Y), val=GOOD), 0),
        (unseeded, 1),
        (lambda c: Data(train_dataset=TensorDataset(*vars(unseeded(c).train).values()), val=GOOD), 1),
        (drawn_from_the_trials_generators, 0),
        (lambda c: Data(train_dataset=Shuffled(X, Y), val=GOOD), 0),
    ],
)
def test_data_that_differs_from_call_to_call_is_refused(data, num):
    workload = Workload(name="mine", model=Net, data=data)
    found = mistakes_of_points(workload, [("p", resolve(workload, {"batch_size": 4, "epochs": 1}))], 0)
    assert len(found) == num
    assert all("different samples each time" in str(each) and "default_rng(0)" in str(each) for each in found)


@dataclass(frozen=True)
class TwoRanks(DistContext):
    """One rank, with the largest values of another."""

    other: float | None = 0.0  # None: the same

    def max(self, values):
        other = values[0] if self.other is None else self.other
        return [max(value, sign * other) for value, sign in zip(values, (1, -1), strict=True)]


def test_ranks_with_different_samples_are_refused():
    workload = Workload(name="mine", model=Net, data=lambda _: Data(train=GOOD, val=GOOD))
    config, numerics = resolve(workload, {"epochs": 1}), numerics_of(resolve(workload, {}), ALONE.device)
    data = Data(train=GOOD, val=GOOD)
    mine = float(int(identity_of(data, config)[:12], 16))
    for other, is_same in ((mine, True), (mine + 1, False)):
        context = TwoRanks(0, 2, ALONE.device, other)
        raises = contextlib.nullcontext() if is_same else pytest.raises(WorkloadError, match="on different ranks")
        with raises:
            check_workload(workload, data, config, Net, numerics, context)


@pytest.mark.parametrize(
    ("sampler", "other", "words"),
    [
        (None, None, "all ranks read the same samples"),  # in one order
        ("random", 1.0, "all ranks read the same samples"),  # in different orders
        ("distributed", 7.0, "2 to 7 batches"),
    ],
)
def test_loaders_that_do_not_share_out_the_samples_are_refused(sampler, other, words):
    dataset = TensorDataset(X, Y)

    def train_loader(rank, num_ranks, batch_size):
        of_rank = DistributedSampler(dataset, num_ranks, rank) if sampler == "distributed" else None
        return DataLoader(dataset, batch_size, sampler=of_rank, shuffle=sampler == "random")

    workload = Workload(name="mine", model=Net, data=lambda _: Data(train_loader=train_loader, val=GOOD))
    config = resolve(workload, {"batch_size": 4, "num_workers": 2})
    context = TwoRanks(0, 2, ALONE.device, 4.0 if sampler == "random" else other)
    with pytest.raises(WorkloadError, match=words):
        check_workload(workload, workload.data(config), config, Net, numerics_of(config, ALONE.device), context)


MANY = {
    "targets and metric": (
        Data(train=Split(X, Y + 1), val=GOOD),
        {"metrics": {"f1": lambda outputs, targets: 0.5}},
        ["data.train.targets = 1 to 3", "metrics['f1']"],
    ),
    "both functions raise": (
        None,
        {"data": lambda _: {}["x"], "model": lambda _: nn.Linear(4, "3")},
        ["data(config) = no value: raises KeyError", "model(config) = no value: raises TypeError"],
    ),
    "inputs, targets, metric": (
        Data(train=Split(X[:, :2], Y.float()), val=Split(X[:, :2], Y.float())),
        {"metrics": {"ok": lambda o, t: (o.argmax(1) == t).float(), "none": lambda o, t: None}},
        [
            "data.train.targets = torch.float32",
            "data.val.targets = torch.float32",
            "model(inputs) = inputs of shape (3, 2)",
        ],
    ),
    "loss and two metrics": (
        Data(train=GOOD, val=GOOD),
        {
            "loss": lambda o, t: functional.mse_loss(o, t, reduction="none"),
            "metrics": {"a": lambda o, t: o.mean(), "b": lambda o, t: o.no_such()},
        },
        ["loss(outputs, targets) = outputs of shape (3, 3)", "metrics['a']", "metrics['b']"],
    ),
}


@pytest.mark.parametrize(("data", "rest", "expected"), MANY.values(), ids=MANY)
def test_all_mistakes_of_data_and_model_are_named_at_once(data, rest, expected):
    workload = Workload(**{"name": "mine", "model": Net, "data": lambda _: data, **rest})
    config = resolve(workload, {"batch_size": 8, "epochs": 1})
    texts = [str(mistake) for mistake in mistakes_of_points(workload, [("p", config)], 0)]
    assert len(texts) == len(expected), texts
    assert all(any(words in text for text in texts) for words in expected), texts
    assert all("→" in text for text in texts)


def test_a_mistake_of_some_points_names_them():
    workload = Workload(
        name="mine", model=lambda c: Net(num_outputs=c["width"]), data=lambda _: Data(train=GOOD, val=GOOD)
    )
    workload = replace(workload, options={"width": 3})
    points = [(f"width={width}", resolve(workload, {"width": width})) for width in (2, 3, 4)]
    (train, val) = mistakes_of_points(workload, points, 0)
    assert train.field == "data.train.targets at width=2" and val.field == "data.val.targets at width=2"


def test_the_check_draws_no_random_numbers():
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
    reports_of(Data(train=GOOD, val=GOOD, transform=noisy), model=model)
    before, after = drawn[: drawn.index("model")], drawn[drawn.index("model") + 1 :]
    assert not before and after.count(after[0]) > 1  # of the checks, and then of the training
