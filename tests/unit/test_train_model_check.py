"""Checks of a model by its first batch: batch norm over single samples, unusable optimizers, types of inputs.

Parameters without a gradient need several ranks: `tests/real/test_strategies_and_models.py`.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypar import Data, Split, Workload
from raypar.errors import WorkloadError
from raypar.parallel.strategy import DistContext, share_of
from raypar.study.options import resolve
from raypar.train.data import shares
from raypar.train.evaluate import evaluate_test_split
from raypar.train.model_check import parts_per_batch
from raypar.train.precision import numerics_of
from raypar.train.saved_model import exported
from raypar.train.training import Training

CPU = torch.device("cpu")
ALONE = DistContext(0, 1, CPU)
IMAGES = torch.randint(255, (17, 12), generator=torch.Generator().manual_seed(0))
PIXELS = IMAGES.float()
CLASSES = IMAGES.sum(1) % 3


def normalised(_=None):
    return nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def seeing(_=None):
    """Return a model with batch norm over channels of which a single sample has several values."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(40, 3)
    )


class Functional(nn.Module):
    """Batch norm by torch's function instead of its module."""

    def __init__(self, _=None):
        super().__init__()
        self.layer = nn.Linear(12, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x):
        return functional.batch_norm(self.layer(x), self.mean, self.variance, training=self.training)


def training(model, inputs=PIXELS, context=ALONE, *, more=None, **config):
    data = Data(train=Split(inputs, CLASSES), val=Split(inputs, CLASSES))
    workload = Workload(name="own", model=model, data=lambda _: data, **(more or {}))
    return Training(workload, resolve(workload, config), 0, context)


@pytest.mark.parametrize("model", [normalised, Functional])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"batch_size": 16}, ("the last batch of an epoch has 1 sample", "drop_last=True, or num_samples=16")),
        (
            {"batch_size": 5, "accumulation_steps": 2},
            ("has 2 samples and goes through the model in 2 parts", "num_samples=15"),
        ),
        (
            {"batch_size": 3, "accumulation_steps": 2},
            ("batch_size = 3: a batch goes through the model in 2 parts", "at least 4"),
        ),
        (
            {"batch_size": 1},
            ("batch_size = 1: ", "batch norm can't normalise a single sample", "batch_size of at least 2"),
        ),
    ],
)
def test_batch_norm_over_a_single_sample_is_refused_with_the_fix(model, config, words):
    with pytest.raises(WorkloadError) as caught:
        training(model, **config)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (normalised, {"batch_size": 16, "drop_last": True}),
        (normalised, {"batch_size": 16, "num_samples": 16}),
        (normalised, {"batch_size": 15}),
        (seeing, {"batch_size": 16}),
        (seeing, {"batch_size": 1}),
        (lambda _: nn.Linear(12, 3), {"batch_size": 1}),
        (lambda _: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(3)), {"batch_size": 15}),
    ],
)
def test_single_samples_that_a_model_takes_are_not_refused(model, config):
    built = training(model, num_warmup_steps=0, **config)
    stepper = built.warm_up()
    for steps in built.batches.segments(range(built.num_steps)):
        for batch in steps:
            stepper.step(batch)


def test_the_check_leaves_the_model_and_the_generators_as_they_were():
    torch.manual_seed(0)  # as the training does before it builds the model
    expected = normalised().state_dict()
    built = training(normalised, batch_size=7)
    drawn = torch.rand(2)
    torch.manual_seed(0)
    normalised()
    assert torch.equal(drawn, torch.rand(2))
    model = built.full_model
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("chosen", "num_workers", "expected"),
    [
        ({}, 1, 1),
        ({"accumulation_steps": 3}, 1, 3),
        ({"strategy": "pipeline"}, 1, 1),
        ({}, 4, 4),
        ({"accumulation_steps": 3}, 4, 12),
        ({"strategy": "pipeline", "num_microbatches": 8}, 4, 8),
        ({"strategy": "tensor"}, 4, 1),
        ({"strategy": "hybrid", "tensor_size": 2}, 4, 2),
        ({"strategy": "hybrid", "pipeline_size": 2}, 4, 8),
    ],
)
def test_number_of_parts_in_which_a_batch_passes_through_the_model(chosen, num_workers, expected):
    config = resolve(Workload(name="own"), {**chosen, "num_workers": num_workers})
    assert parts_per_batch(config, num_workers) == expected


@pytest.mark.parametrize(
    "sizes", [{}, {"tensor_size": 2}, {"pipeline_size": 2}, {"pipeline_size": 2, "tensor_size": 2}]
)
def test_the_shares_of_the_ranks_are_the_batch(sizes):
    strategy = "hybrid" if sizes else "ddp"
    config = resolve(Workload(name="own"), {"num_workers": 4, "strategy": strategy, **sizes})
    every = [share_of(config, DistContext(rank, 4, CPU)) for rank in range(4)]
    num_alike = 4 // every[0][1]
    assert [share for share, _ in every] == [rank // num_alike for rank in range(4)]
    taken = [
        i
        for share in every[::num_alike]
        for part in shares(torch.arange(9), 9, *share, drop_last=False)
        for i in part.indices.tolist()
    ]
    assert taken == list(range(9))


def test_conditions_have_the_parts_of_a_batch_for_models_with_batch_norm():
    assert training(normalised, batch_size=8, num_samples=16, accumulation_steps=4).facts.conditions({}) == {
        "batch_norm_parts": 4
    }
    assert training(lambda _: nn.Linear(12, 3), batch_size=7).facts.conditions({}) == {}


# ---- a workload's own optimizer

UNREAD = "has no effect: the workload's optimizer= does not read config["
REFUSED = {
    "one that needs a closure": (lambda m, c: torch.optim.LBFGS(m.parameters()), {}, ("LBFGS: needs a closure",)),
    "a list of groups": (lambda m, c: [{"params": m.parameters()}], {}, ("list: is not a torch.optim.Optimizer",)),
    "nothing": (lambda m, c: None, {}, ("NoneType: is not a torch.optim.Optimizer", "return torch.optim.AdamW(")),
    "a class": (lambda m, c: torch.optim.Adam, {}, ("class Adam: is not a torch.optim.Optimizer",)),
    "another model's": (
        lambda m, c: torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=c["lr"]),
        {},
        ("Adam: has none of the model's parameters",),
    ),
    "settings that it does not read": (
        lambda m, c: torch.optim.Adam(m.parameters()),
        {"lr": 0.3, "weight_decay": 0.1},
        ("lr = 0.3: " + UNREAD, "weight_decay = 0.1: " + UNREAD),
    ),
    "a scaling of an lr that it does not read": (
        lambda m, c: torch.optim.Adam(m.parameters()),
        {"lr_scaling": "linear"},
        ("lr_scaling = 'linear': " + UNREAD + "'lr']",),
    ),
}


@pytest.mark.parametrize(("make", "config", "words"), REFUSED.values(), ids=REFUSED)
def test_an_unusable_optimizer_is_refused(make, config, words):
    with pytest.raises(WorkloadError) as caught:
        training(normalised, more={"optimizer": make}, batch_size=7, **config)
    assert all(word in str(caught.value) for word in words), str(caught.value)


READS = {
    "by key": lambda m, c: torch.optim.AdamW(m.parameters(), lr=c["lr"], weight_decay=c["weight_decay"]),
    "by get": lambda m, c: torch.optim.AdamW(m.parameters(), lr=c.get("lr"), weight_decay=c.get("weight_decay", 0)),
    "by pop": lambda m, c: torch.optim.AdamW(m.parameters(), lr=c.pop("lr"), weight_decay=c.pop("weight_decay", 0)),
    "a copy": lambda m, c: torch.optim.AdamW(
        m.parameters(), copy.deepcopy(c)["lr"], weight_decay=(c | {})["weight_decay"]
    ),
    "all of it": lambda m, c: torch.optim.AdamW(
        m.parameters(), **{key: value for key, value in dict(c).items() if key in ("lr", "weight_decay")}
    ),
}


@pytest.mark.parametrize("make", READS.values(), ids=READS)
def test_an_optimizer_may_read_raypars_settings(make):
    built = training(
        normalised,
        more={"optimizer": make},
        batch_size=15,
        lr=0.5,
        weight_decay=0.25,
        lr_scaling="linear",
        lr_base_batch_size=5,
    )
    (group,) = built.warm_up()._bare_optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (1.5, 0.25) and built.config["optimizer"] == "own"


# ---- integer inputs


def reading(_=None):
    return nn.Sequential(nn.Embedding(256, 4), nn.Flatten(), nn.Linear(48, 3))


class Both(nn.Module):
    """Model of one-hot vectors, whose function takes only int64."""

    def __init__(self, _=None):
        super().__init__()
        self.layer = nn.Linear(12 * 256, 3)

    def forward(self, x):
        return self.layer(functional.one_hot(x, 256).flatten(1).to(self.layer.weight.dtype))


@pytest.mark.parametrize("model", [normalised, reading, Both], ids=["numbers", "an embedding", "one-hot"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_are_cast_to_the_type_that_the_model_takes(model, dtype, tmp_path):
    """Pixels become floats and tokens become int64, whatever their type is."""
    inputs = IMAGES % 100  # fit into int8
    config = {"batch_size": 7, "num_warmup_steps": 1, "channels_last": False}
    built = training(model, inputs.to(dtype), **config)
    built.warm_up()
    reported = built.evaluation(built.full_model)
    expected = training(model, inputs.float() if model is normalised else inputs.long(), **config)
    expected.warm_up()
    assert reported == expected.evaluation(expected.full_model)

    split = Split(inputs.to(dtype), CLASSES)
    workload = Workload(name="own", model=model, data=lambda _: Data(train=split, val=split, test=split))
    config = resolve(workload, config)
    torch.save(built.full_model.state_dict(), tmp_path / "weights.pt")
    assert evaluate_test_split(workload, config, tmp_path)["loss"] == pytest.approx(reported["val_loss"])
    _, _, outputs = exported(workload, config, tmp_path)
    assert outputs.shape == (4, 3)


def test_inputs_are_cast_by_their_type_without_a_model():
    numerics = numerics_of({"precision": "fp64", "channels_last": False}, CPU)
    for dtype in (torch.float16, torch.float32, torch.uint8):
        assert numerics.cast(torch.ones(2, dtype=dtype)).dtype == torch.float64
    for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64):
        assert numerics.cast(torch.ones(2, dtype=dtype)).dtype == dtype
