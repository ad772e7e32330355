"""Losses of parts of a batch combine into the loss of the batch; losses that don't combine are recognised."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plainlab import KINDS, NUM_TRAIN, largest_difference, rows
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training import ALONE, trained

from raypar import Data, Split, Workload
from raypar.parallel.base import Strategy
from raypar.parallel.loss import Kind, Loss
from raypar.parallel.strategy import Batch, ForwardBackward, Task
from raypar.study.options import resolve
from raypar.train import loss_kind
from raypar.train.data import Feed, shares
from raypar.train.loss_kind import find_kind, loss_of
from raypar.train.precision import numerics_of
from raypar.train.workload_check import mistakes_of_points

CUT = {name: kind for name, kind in KINDS.items() if kind.cuts}
FOUND = {
    **dict.fromkeys(KINDS, Kind.RATIO),
    **dict.fromkeys(["mean", "mean of sums", "several tasks", "the model's own"], Kind.MEAN),
    **dict.fromkeys([name for name in KINDS if name not in CUT], Kind.WHOLE),
    "sum": Kind.SUM,
}
TRAINING = {"batch_size": 24, "epochs": 2, "num_warmup_steps": 1, "device": "cpu"}


def recognised(workload, **config):
    """Return the loss that a workload is trained with."""
    numerics = numerics_of(resolve(workload, config), ALONE.device)
    data, model = workload.data({}), numerics.convert(workload.model({}))
    inputs = data.train.inputs if data.train is not None else None
    return loss_of(workload, data, model, numerics, Feed(numerics, model, inputs))


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_loss_is_found_by_comparing_a_batch_with_parts_of_it(name, precision):
    assert recognised(KINDS[name].workload, precision=precision).kind is FOUND[name]


@pytest.mark.parametrize("name", ["sum", "contrastive"])
def test_the_kind_of_a_loss_is_found_on_a_device_without_float64(monkeypatch, name):
    def unavailable(tree):
        raise TypeError("the MPS framework doesn't support float64")

    monkeypatch.setattr(loss_kind, "_in_double", unavailable)
    assert recognised(KINDS[name].workload).kind is FOUND[name]


def reports_of(kind, **config):
    return trained(kind.workload, **{**TRAINING, "lr": kind.lr, **config})[1]


@pytest.mark.parametrize("name", KINDS)
def test_a_training_gives_the_losses_of_plain_torch_for_any_evaluation_batch(name):
    kind = KINDS[name]
    right = kind.plain.train(kind.workload, {**TRAINING, "lr": kind.lr}).reports
    assert right[1] != right[0]  # it learns
    for eval_batch_size in (1, 7, 50):
        assert largest_difference(reports_of(kind, eval_batch_size=eval_batch_size), right) < 1e-6, eval_batch_size


@pytest.mark.parametrize("name", KINDS)
def test_in_double_precision_the_losses_equal_those_of_plain_torch_to_the_last_digits(name):
    kind = KINDS[name]
    plain = replace(kind.plain, dtype=torch.float64)
    right = plain.train(kind.workload, {**TRAINING, "lr": kind.lr}).reports
    assert largest_difference(reports_of(kind, precision="fp64", eval_batch_size=7), right) < 1e-12


@pytest.mark.parametrize("num_parts", [2, 3, 24])
@pytest.mark.parametrize("name", CUT)
def test_accumulated_gradients_are_those_of_the_batch(name, num_parts):
    kind = CUT[name]
    right = kind.plain.train(kind.workload, {**TRAINING, "lr": kind.lr}).reports
    assert largest_difference(reports_of(kind, accumulation_steps=num_parts), right) < 1e-6


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.has_one_tensor])
def test_a_short_last_batch_of_the_workloads_loader_counts_by_its_size(name, num_parts):
    kind = KINDS[name]
    if num_parts > 1 and not kind.cuts:
        return
    data = kind.workload.data({})
    samples = TensorDataset(data.train.inputs, data.train.targets)
    own = Data(train_loader=lambda rank, num_ranks, batch_size: DataLoader(samples, batch_size), val=data.val)
    workload = replace(kind.workload, data=lambda config: own)
    plain = replace(
        kind.plain,
        batches=lambda *_: [samples[at : at + 24] for at in range(0, NUM_TRAIN, 24)],
        samples=lambda *_: (data.val.inputs, data.val.targets),
    )
    right = plain.train(workload, {**TRAINING, "lr": kind.lr}).reports
    assert largest_difference(reports_of(replace(kind, workload=workload), accumulation_steps=num_parts), right) < 1e-6


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_loss_of_a_whole_batch_is_refused_where_evaluation_batches_can_not_be_joined(is_padded):
    texts = [torch.arange(1, 2 + (at % 3 if is_padded else 2)) for at in range(12)]
    samples = [(text, text % 2) for text in texts]

    def padded(some):
        return tuple(nn.utils.rnn.pad_sequence(column, batch_first=True) for column in zip(*some, strict=True))

    def model(config):
        return nn.Sequential(nn.Embedding(4, 1), nn.Flatten())

    def loss(outputs, targets):
        return F.mse_loss(outputs, targets.float()).sqrt()

    data = Data(train_dataset=samples, val_dataset=samples, collate=padded)
    workload = Workload(name="own", model=model, data=lambda _: data, loss=loss, metrics={}, metric="val_loss")
    for eval_batch_size, fields in ((5, ["eval_batch_size"] if is_padded else []), (12, [])):
        config = resolve(workload, {**TRAINING, "eval_batch_size": eval_batch_size})
        assert [each.field for each in mistakes_of_points(workload, [("", config)], 0)] == fields


@pytest.mark.parametrize("name", [name for name in KINDS if name not in CUT])
@pytest.mark.parametrize("config", [{"num_workers": 2}, {"accumulation_steps": 2}])
def test_a_loss_of_a_whole_batch_is_refused_where_the_batch_is_cut(name, config):
    workload = KINDS[name].workload
    mistakes = mistakes_of_points(workload, [("", resolve(workload, {**TRAINING, **config}))], 0)
    assert [each.field for each in mistakes] == list(config)
    assert "(sum, weight)" in mistakes[0].hint


@given(
    name=st.sampled_from(sorted(CUT)),
    indices=st.lists(st.integers(0, NUM_TRAIN - 1), min_size=1, max_size=20, unique=True),
    num_ranks=st.integers(1, 5),
    num_parts=st.integers(1, 4),
)
def test_gradients_and_losses_of_all_parts_are_those_of_the_batch(name, indices, num_ranks, num_parts):
    kind = CUT[name]
    loss, data = recognised(kind.workload), kind.workload.data({})
    torch.manual_seed(0)
    model = kind.workload.model({})
    index = torch.tensor(indices)
    plain = copy.deepcopy(model)
    outputs, targets = kind.plain.call(plain, rows(data.train.inputs, index)), rows(data.train.targets, index)
    if not torch.isfinite(right := kind.plain.objective.loss(outputs, targets)):
        return  # all targets are ignored, so the mean is undefined
    right.backward()

    do = ForwardBackward(loss, numerics_of(resolve(kind.workload, {}), ALONE.device).autocast, lambda value: value)
    noted, sizes = [], []
    for rank in range(num_ranks):
        for share in shares(index, len(index), rank, num_ranks, drop_last=False):
            x, y = rows(data.train.inputs, share.indices), rows(data.train.targets, share.indices)
            noted.append(do.run_in_parts(model, Batch(x, y, *share[1:]), num_parts))
            sizes.append(share.num_samples)
    numerators, weights = loss.sums(torch.stack(noted), torch.tensor(sizes))
    weight = weights.sum() if loss.kind is not Kind.SUM else 1.0
    assert float(numerators.sum() / weight) == pytest.approx(right.item(), rel=1e-5)
    factor = len(index) / weight if loss.kind is Kind.RATIO else 1.0
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose((one.grad / num_ranks * factor).to(other.grad), other.grad, rtol=1e-4, atol=1e-6)


VALUES = st.lists(st.floats(-100, 100).map(lambda value: round(value, 3)), min_size=2, max_size=12)


@given(VALUES)
def test_means_and_sums_are_told_apart(values):
    x = torch.tensor(values, dtype=torch.float64)
    kinds = {Kind.MEAN: lambda part: x[part].mean(), Kind.SUM: lambda part: x[part].sum()}
    if float(x.abs().max()) < 0.1 or abs(float(x.mean())) < 1e-3 * float(x.abs().max()):
        return  # mean and sum of tiny values are the same
    for kind, loss in kinds.items():
        assert find_kind(loss, len(x)) is kind
    assert find_kind(lambda part: (x[part].sum(), len(x[part])), len(x)) is Kind.RATIO


@given(VALUES, st.integers(0, 11), st.floats(1.1, 50))
def test_a_weighted_mean_is_not_a_mean_even_with_a_single_different_weight(values, place, weight):
    x = torch.tensor(values, dtype=torch.float64).abs() + 0.1
    weights = torch.ones_like(x)
    weights[place % len(x)] = weight
    others = torch.cat([x[: place % len(x)], x[place % len(x) + 1 :]])
    if float((others - x[place % len(x)]).abs().max()) < 0.1:
        return  # all means of equal values are the same
    assert find_kind(lambda part: (x * weights)[part].sum() / weights[part].sum(), len(x)) is Kind.WHOLE


def of_targets(loss, y):
    """Return the kind of a loss with these targets in the training set."""
    x = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(0))
    data = Data(train=Split(x, y), val=Split(x[:5], y[:5]))
    return recognised(Workload(name="own", model=lambda _: nn.Linear(4, 3), data=lambda _: data, loss=loss)).kind


@pytest.mark.parametrize("place", [0, 1, 777, 1999, 60_000])
def test_one_weighted_sample_among_many_is_found(place):
    classes = torch.arange(max(2000, place + 1000)) % 2
    assert of_targets(lambda o, y: F.cross_entropy(o, y, ignore_index=2), classes) is Kind.MEAN
    classes[place] = 2
    assert of_targets(lambda o, y: F.cross_entropy(o, y, ignore_index=2), classes) is Kind.WHOLE
    weight = torch.tensor([1.0, 1.0, 9.0])
    assert of_targets(lambda o, y: F.cross_entropy(o, y, weight=weight), classes) is Kind.WHOLE
    values = torch.randn(len(classes), 3, generator=torch.Generator().manual_seed(1))
    values[place, 1] = float("nan")

    def there(o, y):
        return F.mse_loss(o[~y.isnan()], y[~y.isnan()])

    assert of_targets(there, values) is Kind.WHOLE


class ZeroHead(nn.Linear):
    """Model with zero outputs before training, so all its losses are equal."""

    def reset_parameters(self):
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class WeightedByInput(ZeroHead):
    def forward(self, x, labels, weights):
        losses = F.cross_entropy(super().forward(x), labels, reduction="none")
        return {"loss": (losses * weights).sum() / weights.sum()}


def rare(common, other, place=777):
    values = torch.full((2000,), common)
    values[place] = other
    return values


def of_data(model, inputs, targets, loss=None):
    data = Data(train=Split(inputs, targets), val=Split(inputs, targets))
    workload = Workload(
        name="own", model=lambda _: model, data=lambda _: data, loss=loss, metrics={}, metric="val_loss"
    )
    return recognised(workload).kind


def weighted_by_target(outputs, targets):
    losses = F.cross_entropy(outputs, targets["labels"], reduction="none")
    return (losses * targets["weights"]).sum() / targets["weights"].sum()


def test_a_rare_weight_is_found_even_if_all_losses_are_equal_at_first():
    x, y = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0)), torch.arange(2000) % 3
    weight = torch.tensor([1.0, 1.0, 9.0])
    model = ZeroHead(4, 3)
    assert of_data(model, x, y, lambda o, y: F.cross_entropy(o, y, weight=weight)) is Kind.WHOLE
    assert of_data(model, x, y, F.cross_entropy) is Kind.MEAN
    assert of_data(model, x, y, nn.CrossEntropyLoss(reduction="sum")) is Kind.SUM
    assert not model.weight.any() and not model.bias.any()
    weights = rare(1.0, 20.0)
    others = {name: torch.arange(2000).remainder(7).reshape(-1, 4).repeat(4, 1) for name in "abc"}
    assert of_data(nn.Linear(4, 3), x, {**others, "labels": y, "weights": weights}, weighted_by_target) is Kind.WHOLE
    assert of_data(nn.Linear(4, 3), x, {"labels": y, "weights": weights * 0 + 2}, weighted_by_target) is Kind.MEAN
    assert of_data(WeightedByInput(4, 3), {"x": x, "labels": y, "weights": weights}, y) is Kind.WHOLE
    assert of_data(WeightedByInput(4, 3), {"x": x, "labels": y, "weights": weights * 0 + 2}, y) is Kind.MEAN


def test_finding_the_kind_leaves_model_and_generators_as_they_were():
    workload = KINDS["contrastive"].workload
    numerics = numerics_of(resolve(workload, {}), ALONE.device)
    data, model = workload.data({}), workload.model({})
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    loss_of(workload, data, model, numerics, Feed(numerics))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_pair_without_samples_does_not_count():
    pair = Loss(lambda o, y: (o.sum(), (y != 0).sum()), Kind.RATIO)
    value = pair(torch.ones(3, requires_grad=True), torch.zeros(3))
    numerators, weights = pair.sums(torch.stack([pair.noted(value), pair.noted(value, 0.0)]), torch.tensor([3, 0]))
    assert numerators.tolist() == [3.0, 0.0]
    assert weights.tolist() == [0.0, 0.0]


def test_a_stage_without_parameters_has_no_gradients_to_scale():
    workload = KINDS["mean"].workload
    strategy = Strategy(Task(workload, resolve(workload, {}), nn.Tanh(), None, ALONE))
    strategy.scale_gradients(torch.tensor(2.0))
