"""Every strategy trains like plain torch in cases that raypar's own workloads don't have.

These are layers without a gradient, always or in some steps, sparse gradients, buffers that differ by rank, and own
parameter groups.
"""

import pytest
import torch
from ranks import on_ranks, reports_of
from torch import nn
from torch.nn.functional import cross_entropy

from raypar import Data, Split, Workload
from raypar.measure.telemetry import Telemetry
from raypar.study.options import resolve
from raypar.train.data import epoch_order
from raypar.train.loop import TimedTraining
from raypar.train.training import Training

NUM_RANKS, BATCH_SIZE, EPOCHS = 2, 48, 2
NUM_SAMPLES = 104  # the last batch has 8
CONFIG = {"batch_size": BATCH_SIZE, "epochs": EPOCHS, "precision": "fp64", "num_warmup_steps": 2, "lr": 0.1}


def samples():
    inputs = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, inputs[:, :3].argmax(1)


def data(config):
    inputs, targets = samples()
    return Data(train=Split(inputs, targets), val=Split(inputs[:40], targets[:40]))


class Net(nn.Module):
    """One layer is never used, another only by batches whose first feature has a positive mean."""

    def __init__(self, uses_extra):
        super().__init__()
        self.uses_extra = uses_extra
        self.first, self.extra, self.unused, self.last = (nn.Linear(*size) for size in ((6, 8), (8, 8), (2, 2), (8, 3)))

    def forward(self, x):
        hidden = self.first(x).relu()
        if self.uses_extra and x[:, 0].mean() > 0:
            hidden = hidden + self.extra(hidden)
        return self.last(hidden)


def plain(build, optimizer_of, *, num_ranks=NUM_RANKS, num_parts=1):
    """Return the validation loss after each epoch of training in plain torch, with each rank's batch in parts."""
    torch.manual_seed(0)
    model, (inputs, targets), losses = build().double(), samples(), []
    optimizer = optimizer_of(model)
    for epoch in range(1, EPOCHS + 1):
        for batch in epoch_order(NUM_SAMPLES, 0, epoch).split(BATCH_SIZE):
            optimizer.zero_grad()
            for share in batch.tensor_split(num_ranks):
                for part in share.tensor_split(num_parts):
                    loss = cross_entropy(model(inputs[part]), targets[part]) * len(part) / len(batch)
                    loss.backward()
            optimizer.step()
        with torch.no_grad():
            # Each rank evaluates a part of the split.
            parts = [(model(inputs[i : i + 20]), targets[i : i + 20]) for i in (0, 20)]
            losses.append(sum(float(cross_entropy(*part)) for part in parts) / 2)
    return losses


def on(num_ranks, workload, cases):
    """Return each case's validation losses on every rank."""

    def of_rank(context):
        return {
            name: [report["val_loss"] for report in reports_of(workload, {**CONFIG, **extra}, context)]
            for name, extra in cases.items()
        }

    ranks = on_ranks(of_rank, num_ranks)
    return {name: [rank[name] for rank in ranks] for name in cases}


DATA_PARALLEL = {
    "ddp": {},
    "ddp, gradients accumulated": {"accumulation_steps": 2},
    "ddp, sent after the backward pass": {"overlap": False},
    "ddp, no fused gradients": {"bucket_mb": 0.0},
    "gather_broadcast": {"strategy": "gather_broadcast"},
    "hybrid": {"strategy": "hybrid"},
    "hybrid, no fused gradients": {"strategy": "hybrid", "bucket_mb": 0.0},
}
# They require the same layers in every step, or on every rank.
SAME_LAYERS = {"ddp, static graph": {"static_graph": True}, "fsdp": {"strategy": "fsdp"}}


@pytest.mark.parametrize("uses_extra", [False, True], ids=["never", "in some steps"])
def test_layers_without_a_gradient_stay_as_in_plain_torch(uses_extra):
    """With momentum and weight decay, a gradient of zeros would move a weight; no gradient does not."""
    optimizer = {"optimizer": "momentum", "weight_decay": 0.01}
    workload = Workload(name="w", model=lambda _: Net(uses_extra), data=data, defaults=optimizer)
    cases = DATA_PARALLEL if uses_extra else {**DATA_PARALLEL, **SAME_LAYERS}
    for name, ranks in on(NUM_RANKS, workload, cases).items():
        num_parts = cases[name].get("accumulation_steps", 1)
        expected = plain(
            lambda: Net(uses_extra),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
            num_parts=num_parts,
        )
        for losses in ranks:
            assert losses == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize("case", SAME_LAYERS)
def test_layers_with_a_gradient_in_some_steps_are_refused_by_strategies_that_need_it_in_all(case):
    workload = Workload(name="w", model=lambda _: Net(True), data=data)
    with pytest.raises(Exception, match=r"WorkloadError[\s\S]*needs the same parameters[\s\S]*extra\.weight"):
        on(NUM_RANKS, workload, {case: SAME_LAYERS[case]})


class Late(Net):
    """Its extra layer is only used by the first passes: the check and the warm-up."""

    def __init__(self):
        super().__init__(True)
        self.num_passes = 0

    def forward(self, x):
        self.num_passes += self.training
        hidden = self.first(x).relu()
        return self.last(hidden + self.extra(hidden) if self.num_passes < 8 else hidden)


def test_a_layer_that_loses_its_gradient_late_ends_the_trial_with_a_hint():
    class Whole(Late):
        def __init__(self):
            super().__init__()
            del self.unused

    workload = Workload(name="w", model=lambda _: Whole(), data=data)
    with pytest.raises(Exception, match=r"WorkloadError[\s\S]*got no gradient[\s\S]*find_unused_parameters=True"):
        on(NUM_RANKS, workload, {"ddp": {}})
    (losses, _) = on(NUM_RANKS, workload, {"ddp": {"find_unused_parameters": True}})["ddp"]
    assert len(losses) == EPOCHS


def deep(_=None):
    sizes = ((6, 8), (8, 8), (8, 8), (8, 8), (8, 3))  # two pairs that tensor parallelism splits, and one more
    return nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())))[:-1]


def grouped(model, config):
    """Biases have no weight decay, and twice the lr."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert len(weights) == len(biases) == 5
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 2 * config["lr"]}],
        lr=config["lr"],
        weight_decay=0.0,
        foreach=True,  # the default on a GPU
    )


GROUPED = {
    **DATA_PARALLEL,
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"strategy": "tensor"},
    "pipeline": {"strategy": "pipeline"},
    "pipeline, two stages a worker": {"strategy": "pipeline", "pipeline_schedule": "interleaved"},
    "hybrid of tensor": {"strategy": "hybrid", "tensor_size": 2},
    "hybrid of pipeline": {"strategy": "hybrid", "pipeline_size": 2},
}


def test_every_strategy_accepts_the_workloads_own_parameter_groups():
    workload = Workload(name="w", model=deep, data=data, optimizer=grouped, defaults={"lr_schedule": "cosine"})
    num_steps = EPOCHS * -(-NUM_SAMPLES // BATCH_SIZE)

    def scheduled(model):
        optimizer = grouped(model, {"lr": 0.1})
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    expected = plain(deep, scheduled, num_ranks=1)
    for name, ranks in on(NUM_RANKS, workload, GROUPED).items():
        for losses in ranks:
            assert losses == pytest.approx(expected, rel=1e-9), name


class Normalised(nn.Module):
    """Batch norm, and a buffer outside of the state that is replaced in each step."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("level", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.level = 0.5 * self.level + x.detach().mean()
        return self.layers(x) * (1 + self.level)


def row(_=None):
    first = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()
    return nn.Sequential(*first, nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


BUFFERS = {
    name: extra for name, extra in GROUPED.items() if "hybrid" not in name or "pipeline" in name or name == "hybrid"
} | {"local_sgd": {"strategy": "local_sgd", "sync_every": 3}}


def _models(context, cases, build):
    """Return the reported loss and the complete model's state on this rank, after an epoch."""
    found = {}
    for name, extra in cases.items():
        workload = Workload(name="w", model=lambda _: build(), data=data)
        config = resolve(workload, {**CONFIG, **extra, "num_workers": NUM_RANKS})
        training = Training(workload, config, 0, context)
        timed = TimedTraining(training, training.warm_up(), Telemetry((), context.device))
        report = timed.run_segment(next(iter(training.batches.segments(range(training.num_steps)))))
        tensors = {**dict(training.full_model.named_parameters()), **dict(training.full_model.named_buffers())}
        found[name] = report["val_loss"], {key: value.detach().clone() for key, value in tensors.items()}
    return found


@pytest.mark.parametrize("build", [row, Normalised], ids=["batch norm", "own buffer"])
def test_every_strategys_loss_is_that_of_the_complete_model_which_is_equal_on_all_ranks(build):
    needs_row = ("tensor", "pipeline")
    cases = {n: e for n, e in BUFFERS.items() if build is row or not any(word in n for word in needs_row)}
    first, other = on_ranks(lambda context: _models(context, cases, build), NUM_RANKS)
    inputs, targets = samples()
    for name, (reported, state) in first.items():
        assert reported == other[name][0]
        for key, value in state.items():
            assert torch.equal(value, other[name][1][key]), (name, key)
        model = build().double().eval()
        with torch.no_grad():
            for key, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.copy_(state[key])
            value = float(cross_entropy(model(inputs[:40]), targets[:40]))
        assert reported == pytest.approx(value, rel=1e-12), name


class Sparse(nn.Module):
    """An embedding whose gradient is a sparse tensor."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.embedding(x).mean(1))


def tokens(_=None):
    numbers = torch.randint(9, (NUM_SAMPLES, 5), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    split = Split(numbers, numbers[:, 0].long() % 3)
    return Data(train=split, val=split)


def test_ddp_accepts_sparse_gradients_and_strategies_that_flatten_them_do_not():
    workload = Workload(name="w", model=lambda _: Sparse(), data=tokens)
    one = on(1, workload, {"one": {}})["one"][0]
    for ranks in on(NUM_RANKS, workload, {"ddp": {}, "ddp, late": {"overlap": False}}).values():
        assert ranks[0] == pytest.approx(one, rel=1e-12)
    for strategy in ("gather_broadcast", "hybrid", "fsdp"):
        with pytest.raises(Exception, match=r"WorkloadError[\s\S]*does not take sparse gradients"):
            on(NUM_RANKS, workload, {strategy: {"strategy": strategy}})
