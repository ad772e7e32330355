"""Batches are the same for any number of workers. A fingerprint identifies the data."""

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raypar.study.options import resolve
from raypar.study.workload import Data, Split, Workload
from raypar.train import data_identity
from raypar.train.data import Feed, TrainBatches, epoch_order, num_steps, paired, shares
from raypar.train.data_identity import fingerprint
from raypar.train.precision import Numerics, numerics_of

SIZES = {"num_samples": st.integers(1, 200), "batch_size": st.integers(1, 70), "num_shares": st.integers(1, 9)}
CASES = {**SIZES, "drop_last": st.booleans()}
NUMERICS = Numerics(torch.device("cpu"), torch.float64, None, needs_scaling=False, channels_last=False)


@given(**CASES)
def test_the_shares_of_a_step_are_the_global_batch_in_order_and_their_weighted_means_average_to_its_mean(
    num_samples, batch_size, num_shares, drop_last
):
    order = epoch_order(num_samples, 3, 1)
    values = torch.randn(num_samples, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ranks = [list(shares(order, batch_size, rank, num_shares, drop_last=drop_last)) for rank in range(num_shares)]
    steps = list(zip(*ranks, strict=True))
    expected = num_samples // batch_size if drop_last else len(range(0, num_samples, batch_size))
    assert len(steps) == num_steps(num_samples, batch_size, drop_last=drop_last) == expected
    for i, step in enumerate(steps):
        batch = order[i * batch_size : (i + 1) * batch_size]
        assert torch.cat([share.indices for share in step if share.weight]).tolist() == batch.tolist()
        sizes = [share.num_samples for share in step]
        assert max(sizes) - min(sizes) <= 1
        for share in step:
            assert share.num_samples == (len(share.indices) if share.weight else 0)
            if not share.weight:  # it still joins the collectives
                assert share.indices.tolist() == batch[:1].tolist()
        averaged = sum(float(values[share.indices].mean()) * share.weight for share in step) / num_shares
        assert averaged == pytest.approx(float(values[batch].mean()), rel=1e-9, abs=1e-12)


@given(num_samples=st.integers(1, 300), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 10_000))
def test_an_epochs_order_is_a_permutation_that_seed_and_epoch_alone_decide(num_samples, seed, epoch):
    torch.manual_seed(1)
    order, next_draw = epoch_order(num_samples, seed, epoch), torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == next_draw  # nothing is drawn from the global generator
    assert order.tolist() == epoch_order(num_samples, seed, epoch).tolist()
    assert sorted(order.tolist()) == list(range(num_samples))
    longer = [epoch_order(200, *at).tolist() for at in ((seed, epoch), (seed, epoch + 1), ((seed + 1) % 2**32, epoch))]
    assert longer[0] != longer[1] and longer[0] != longer[2]


def data_of(num_samples):
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randint(0, 256, (num_samples, 3, 2), dtype=torch.uint8, generator=generator)
    split = Split(inputs, torch.arange(num_samples))
    return Data(train=split, val=split, transform=lambda x: x.float().div(255).mul_(2))


def batches_of(data, share=(0, 1), seed=7, **config):
    loading = {"loader": "resident", "num_loader_workers": 0, "prefetch_factor": None, "pin_memory": None}
    steps = {"num_samples": None, "batch_size": 4, "drop_last": False, "num_warmup_steps": 2, "eval_every_steps": None}
    return TrainBatches(data, {**loading, **steps, **config}, seed, share, Feed(NUMERICS))


def targets(batches):
    return [batch.targets.tolist() for batch in batches]


@given(**CASES, rank=st.integers(0, 8))
def test_resident_and_dataloader_serve_the_same_batches_to_the_bit(
    num_samples, batch_size, num_shares, drop_last, rank
):
    batch_size = min(batch_size, num_samples)
    share, config = (rank % num_shares, num_shares), {"batch_size": batch_size, "drop_last": drop_last}
    served = []
    for loader in ("resident", "dataloader"):
        batches = batches_of(data_of(num_samples), share, loader=loader, **config)
        segments = batches.segments(range(2 * batches.steps_per_epoch))
        served.append([batch for epoch in segments for batch in epoch])
    assert len(served[0]) == len(served[1]) == 2 * num_steps(num_samples, batch_size, drop_last=drop_last)
    for a, b in zip(*served, strict=True):
        assert a.inputs.dtype == b.inputs.dtype == torch.float64
        assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
        assert (a.weight, a.num_samples) == (b.weight, b.num_samples)


def test_samples_of_a_data_set_are_not_transformed():
    data, samples = data_of(10), [(torch.full((2,), float(i)), i) for i in range(10)]
    data = Data(data.train, data.val, data.transform, train_dataset=samples)
    batches = batches_of(data, loader="dataloader")
    (epoch,) = batches.segments(range(batches.steps_per_epoch))
    assert [i for batch in epoch for i in batch.inputs[:, 0].tolist()] == epoch_order(10, 7, 1).tolist()


@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 15), epochs=st.integers(1, 4), data=st.data())
def test_the_rest_of_a_training_is_the_end_of_the_full_one(num_samples, batch_size, epochs, data):
    batches = batches_of(data_of(num_samples), batch_size=batch_size)
    total = batches.steps_per_epoch * epochs
    done = data.draw(st.integers(0, total))

    def served(steps):
        return [batch for segment in batches.segments(steps) for batch in targets(segment)]

    full = served(range(total))
    assert len(full) == total and full[0] == epoch_order(num_samples, 7, 1)[:batch_size].tolist()
    assert served(range(done, total)) == full[done:]


@pytest.mark.parametrize(("every", "parts"), [(None, [3, 3, 3]), (2, [2, 2, 2, 2, 1]), (20, [9])])
def test_an_evaluation_follows_each_epoch_or_a_number_of_steps(every, parts):
    batches = batches_of(data_of(9), eval_every_steps=every)
    assert [len(list(segment)) for segment in batches.segments(range(9))] == parts


def test_full_batches_continue_from_epoch_to_epoch_without_end():
    fifth, sixth = epoch_order(10, 7, 5).tolist(), epoch_order(10, 7, 6).tolist()
    assert targets(islice(batches_of(data_of(10)).full(5), 4)) == [fifth[:4], fifth[4:8], sixth[:4], sixth[4:8]]
    assert targets(islice(batches_of(data_of(3)).full(5), 1)) == [epoch_order(3, 7, 5).tolist()]


def test_a_warm_up_has_its_own_order_and_optionally_a_short_batch():
    order = epoch_order(10, 7, 0).tolist()
    batches = batches_of(data_of(10))
    assert targets(batches.warm_up(with_short_batch=False)) == [order[:4], order[4:8]]
    assert targets(batches.warm_up(with_short_batch=True)) == [order[:4], order[4:8], order[:2]]
    assert targets(batches_of(data_of(10), drop_last=True).warm_up(with_short_batch=True)) == [order[:4], order[4:8]]
    assert targets(batches_of(data_of(10), num_warmup_steps=0).warm_up(with_short_batch=True)) == []


WORKLOAD = Workload(name="mine", data=data_of, dataset="Flowers, 8 + 2")


def split(size, start=0, dtype=torch.uint8):
    return Split((torch.arange(size * 3) + start).to(dtype).reshape(size, 3), torch.arange(size))


def digest(train, num_samples=8):
    return fingerprint(WORKLOAD, Data(train=train), num_samples)["splits"]["train"]["digest"]


def test_a_fingerprint_has_name_source_sizes_and_types():
    one = fingerprint(WORKLOAD, Data(train=split(8), val=split(2), test=split(3)), 6)
    assert (one["name"], one["source"]) == ("Flowers", f"{__name__}:data_of")
    assert {name: part["num_samples"] for name, part in one["splits"].items()} == {"train": 6, "val": 2, "test": 3}
    assert one["splits"]["train"]["inputs"] == {"dtype": "uint8", "shape": [3]}
    assert fingerprint(Workload(name="mine", data=data_of), Data(train=split(8)), 8)["name"] == "mine"
    images = torch.utils.data.TensorDataset(torch.zeros(5, 3))
    from_disk = fingerprint(WORKLOAD, Data(train_dataset=images, val_dataset=images), 4)
    assert from_disk["splits"] == {"train": {"num_samples": 4}, "val": {"num_samples": 5}}


def test_only_the_same_samples_have_the_same_digest():
    assert digest(split(8)) == digest(split(8)) == digest(split(9), 8) != digest(split(9), 9)
    others = [split(8, start=1), split(7), Split(split(8).inputs, torch.zeros(8))]
    others += [split(8, dtype=dtype) for dtype in (torch.int16, torch.bfloat16, torch.bool, torch.float64)]
    assert len({digest(part) for part in (split(8), *others)}) == 8


def test_the_digest_of_large_tensors_is_of_evenly_spread_samples(monkeypatch):
    monkeypatch.setattr(data_identity, "MAX_HASHED_BYTES", 12)
    unseen, seen = split(8), split(8)
    unseen.inputs[1], seen.inputs[4] = 99, 99  # of 24 bytes every second sample
    assert digest(unseen) == digest(split(8)) != digest(seen)


CPU, CPU_TENSOR, ANY = torch.device("cpu"), torch.ones(2), Workload(name="own")
PAIRS = Split({"a": torch.arange(20.0).reshape(10, 2), "b": torch.arange(10)}, (torch.arange(10), torch.ones(10, 3)))


@pytest.mark.parametrize("loader", ["resident", "dataloader"])
def test_trees_of_tensors_are_cut_like_tensors(loader):
    config = resolve(ANY, {"loader": loader, "batch_size": 4})
    batches = TrainBatches(Data(train=PAIRS), config, 7, (1, 2), Feed(numerics_of(config, CPU)))
    order = epoch_order(10, 7, 1)
    (epoch,) = batches.segments(range(batches.steps_per_epoch))
    for batch, whole in zip(epoch, order.split(4), strict=True):
        mine = whole[len(whole) // 2 :]
        assert torch.equal(batch.inputs["a"], PAIRS.inputs["a"][mine]) and torch.equal(batch.inputs["b"], mine)
        assert torch.equal(batch.targets[0], mine) and batch.targets[1].shape == (len(mine), 3)
        assert (batch.num_samples, batch.num_global) == (len(mine), len(whole))


class ByName(nn.Module):
    def forward(self, a, b): ...


class AsOne(nn.Module):
    def forward(self, inputs): ...


@pytest.mark.parametrize(
    ("model", "inputs", "given"),
    [
        (ByName(), {"a": CPU_TENSOR, "b": CPU_TENSOR}, {"a": CPU_TENSOR, "b": CPU_TENSOR}),
        (ByName(), (CPU_TENSOR, CPU_TENSOR), (CPU_TENSOR, CPU_TENSOR)),
        (ByName(), [CPU_TENSOR, CPU_TENSOR], (CPU_TENSOR, CPU_TENSOR)),
        (AsOne(), {"a": CPU_TENSOR}, ({"a": CPU_TENSOR},)),
        (AsOne(), (CPU_TENSOR, CPU_TENSOR), ((CPU_TENSOR, CPU_TENSOR),)),
        (AsOne(), CPU_TENSOR, CPU_TENSOR),
    ],
)
def test_a_model_gets_the_arguments_of_its_forward(model, inputs, given):
    fed = Feed(numerics_of(resolve(ANY, {}), CPU), model, inputs)(inputs)
    assert type(fed) is type(given) and str(fed) == str(given)


@pytest.mark.parametrize(
    ("sample", "pair"), [((1, 2), (1, 2)), ([1, 2, 3], ((1, 2), 3)), ({"x": 1}, ({"x": 1}, {"x": 1}))]
)
def test_a_sample_is_inputs_and_a_target(sample, pair):
    assert paired(sample) == pair


@pytest.mark.parametrize("sample", [(1,), 3, "text"])
def test_a_sample_without_a_target_is_refused(sample):
    with pytest.raises(TypeError, match="pair of input and target"):
        paired(sample)


def test_samples_of_a_data_set_are_collated_with_the_workloads_function():
    texts = [([1, 2, 3], 0), ([4], 1), ([5, 6], 0)]

    def collate(samples):
        width = max(len(tokens) for tokens, _ in samples)
        rows = [tokens + [0] * (width - len(tokens)) for tokens, _ in samples]
        return torch.tensor(rows), torch.tensor([target for _, target in samples])

    config = resolve(ANY, {"batch_size": 3})
    batches = TrainBatches(
        Data(train_dataset=texts, collate=collate), config, 0, (0, 1), Feed(numerics_of(config, CPU))
    )
    ((batch,),) = ([*epoch] for epoch in batches.segments(range(1)))
    assert sorted(batch.inputs.tolist()) == [[1, 2, 3], [4, 0, 0], [5, 6, 0]] and sorted(batch.targets.tolist()) == [
        0,
        0,
        1,
    ]


def own_loader(sizes, epochs):
    """A loader of one rank, whose batches have these sizes."""

    class Loader(list):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    return Loader((torch.zeros(size, 2), torch.zeros(size)) for size in sizes)


def test_batches_of_the_workloads_loader_are_weighted_by_their_sizes():
    epochs, asked = [], []

    def train_loader(*share):
        asked.append(share)
        return own_loader((4, 4, 2), epochs)

    config = resolve(ANY, {"batch_size": 8, "epochs": 2})
    batches = TrainBatches(Data(train_loader=train_loader), config, 0, (1, 2), Feed(numerics_of(config, CPU)))
    assert asked == [(1, 2, 4)] and batches.steps_per_epoch == 3
    parts = [[(b.weight, b.num_samples, b.num_global) for b in epoch] for epoch in batches.segments(range(6))]
    assert parts == 2 * [[(1.0, 4, 8), (1.0, 4, 8), (0.5, 2, 8)]] and epochs == [1, 2]
    (rest,) = batches.segments(range(4, 6))  # after a checkpoint
    assert [b.num_samples for b in rest] == [4, 2]


def test_a_loader_that_ends_before_its_length_is_reported():
    class Short(list):
        def __len__(self):
            return 5

    config = resolve(ANY, {"batch_size": 4})
    data = Data(train_loader=lambda *_: Short(own_loader((4, 4), [])))
    batches = TrainBatches(data, config, 0, (0, 1), Feed(numerics_of(config, CPU)))
    (epoch,) = batches.segments(range(5))
    with pytest.raises(ValueError, match="gave 2 batches, but its length is 5: ranks with uneven numbers"):
        list(epoch)
