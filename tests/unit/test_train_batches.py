"""Every step works on the same global batch, however many workers share it."""

from __future__ import annotations

from functools import partial
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypar.study.workload import Data, Split
from raypar.train.data import (
    Batch,
    Share,
    dataloader,
    epoch_order,
    full_batches,
    num_steps,
    orders,
    resident,
    segments,
    shares,
)

SEEDS = st.integers(0, 2**32 - 1)
CASES = {
    "num_samples": st.integers(1, 200),
    "batch_size": st.integers(1, 70),
    "num_shares": st.integers(1, 9),
    "drop_last": st.booleans(),
}


def all_shares(order: torch.Tensor, batch_size: int, num_shares: int, drop_last: bool) -> list[list[Share]]:
    """``[step][rank]``"""
    ranks = [list(shares(order, batch_size, rank, num_shares, drop_last=drop_last)) for rank in range(num_shares)]
    return [list(step) for step in zip(*ranks, strict=True)]


@given(**CASES)
def test_the_ranks_shares_of_a_step_are_the_global_batch_in_order(
    num_samples: int, batch_size: int, num_shares: int, drop_last: bool
) -> None:
    order = epoch_order(num_samples, 3, 1)
    steps = all_shares(order, batch_size, num_shares, drop_last)
    assert len(steps) == num_steps(num_samples, batch_size, drop_last=drop_last)
    for i, step in enumerate(steps):
        joined = torch.cat([share.indices for share in step if share.weight])
        assert joined.tolist() == order[i * batch_size : (i + 1) * batch_size].tolist()


@given(**CASES, other_num_shares=st.integers(1, 9))
def test_the_global_batches_do_not_depend_on_the_number_of_workers(
    num_samples: int, batch_size: int, num_shares: int, drop_last: bool, other_num_shares: int
) -> None:
    def batches(size: int) -> list[list[int]]:
        steps = all_shares(epoch_order(num_samples, 7, 2), batch_size, size, drop_last)
        return [[i for share in step if share.weight for i in share.indices.tolist()] for step in steps]

    assert batches(num_shares) == batches(other_num_shares)


@given(num_samples=CASES["num_samples"], batch_size=CASES["batch_size"], num_shares=CASES["num_shares"])
def test_an_epoch_visits_every_sample_once_or_drops_the_short_batch(
    num_samples: int, batch_size: int, num_shares: int
) -> None:
    order = epoch_order(num_samples, 0, 1)

    def visited(drop_last: bool) -> list[int]:
        steps = all_shares(order, batch_size, num_shares, drop_last)
        return [i for step in steps for share in step if share.weight for i in share.indices.tolist()]

    assert sorted(visited(False)) == list(range(num_samples))
    assert visited(True) == order[: num_samples // batch_size * batch_size].tolist()


@given(**CASES)
def test_the_average_of_the_ranks_weighted_means_is_the_mean_over_the_batch(
    num_samples: int, batch_size: int, num_shares: int, drop_last: bool
) -> None:
    order = epoch_order(num_samples, 5, 1)
    values = torch.randn(num_samples, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for i, step in enumerate(all_shares(order, batch_size, num_shares, drop_last)):
        averaged = sum(float(values[share.indices].mean()) * share.weight for share in step) / num_shares
        batch = order[i * batch_size : (i + 1) * batch_size]
        assert averaged == pytest.approx(float(values[batch].mean()), rel=1e-9, abs=1e-12)


@given(**CASES)
def test_parts_differ_by_one_sample_at_most_and_a_rank_without_samples_weighs_nothing(
    num_samples: int, batch_size: int, num_shares: int, drop_last: bool
) -> None:
    order = epoch_order(num_samples, 5, 1)
    for i, step in enumerate(all_shares(order, batch_size, num_shares, drop_last)):
        batch = order[i * batch_size : (i + 1) * batch_size]
        sizes = [len(share.indices) if share.weight else 0 for share in step]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) == len(batch)
        for share in step:
            assert len(share.indices) >= 1  # it joins the collectives all the same
            if not share.weight:
                assert share.indices.tolist() == batch[:1].tolist()
        assert sum(share.weight for share in step) == pytest.approx(num_shares)


def test_a_last_batch_smaller_than_the_gang_leaves_ranks_without_samples() -> None:
    last = all_shares(torch.arange(10), 4, 4, False)[-1]
    assert [share.weight for share in last] == [0.0, 2.0, 0.0, 2.0]
    assert [share.indices.tolist() for share in last] == [[8], [8], [8], [9]]


@given(num_samples=st.integers(1, 300), seed=SEEDS, epoch=st.integers(0, 10_000))
def test_an_epochs_order_is_a_permutation_that_seed_and_epoch_alone_decide(
    num_samples: int, seed: int, epoch: int
) -> None:
    torch.manual_seed(1)
    order = epoch_order(num_samples, seed, epoch)
    left_alone = torch.rand(1)
    torch.manual_seed(2)
    again = epoch_order(num_samples, seed, epoch)
    torch.manual_seed(1)
    assert sorted(order.tolist()) == list(range(num_samples))
    assert order.tolist() == again.tolist()
    assert torch.rand(1) == left_alone  # and it draws nothing from the global generator


@given(seed=SEEDS, epoch=st.integers(0, 10_000))
def test_epochs_and_seeds_have_orders_of_their_own(seed: int, epoch: int) -> None:
    order = epoch_order(200, seed, epoch).tolist()
    assert order != epoch_order(200, seed, epoch + 1).tolist()
    assert order != epoch_order(200, (seed + 1) % 2**32, epoch).tolist()


IN_PROCESS = {"num_loader_workers": 0, "prefetch_factor": None, "pin_memory": None}


def _data(num_samples: int) -> Data:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randint(0, 256, (num_samples, 3, 2), dtype=torch.uint8, generator=generator)
    split = Split(inputs, torch.arange(num_samples))
    return Data(train=split, val=split, transform=lambda x: x.float().div(255).mul_(2))


@given(**CASES, rank=st.integers(0, 8))
def test_resident_and_dataloader_serve_the_same_batches_to_the_bit(
    num_samples: int, batch_size: int, num_shares: int, drop_last: bool, rank: int
) -> None:
    data = _data(num_samples)
    split_order = partial(
        shares, batch_size=batch_size, rank=rank % num_shares, num_shares=num_shares, drop_last=drop_last
    )
    cpu = torch.device("cpu")
    one = resident(data, num_samples, torch.Tensor.double, cpu, split_order)
    other = dataloader(data, torch.Tensor.double, cpu, split_order, IN_PROCESS)
    for epoch in (1, 2):
        order = epoch_order(num_samples, 0, epoch)
        pairs: list[tuple[Batch, Batch]] = list(zip(one(order), other(order), strict=True))
        assert len(pairs) == num_steps(num_samples, batch_size, drop_last=drop_last)
        for a, b in pairs:
            assert a.inputs.dtype == b.inputs.dtype == torch.float64
            assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
            assert (a.weight, a.num_samples) == (b.weight, b.num_samples)
            assert a.num_samples == (len(a.targets) if a.weight else 0)


def test_a_dataset_of_ones_own_gets_no_transform_on_top() -> None:
    data = _data(10)
    own = [(torch.full((2,), float(i)), i) for i in range(10)]
    with_own = Data(data.train, data.val, data.transform, train_dataset=own)  # type: ignore[arg-type]
    split_order = partial(shares, batch_size=4, rank=0, num_shares=1, drop_last=False)
    served = dataloader(with_own, lambda x: x, torch.device("cpu"), split_order, IN_PROCESS)(torch.arange(10).flip(0))
    assert [batch.inputs[:, 0].tolist() for batch in served] == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]


@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 15), epochs=st.integers(1, 4), data=st.data())
def test_what_is_left_of_a_training_is_the_end_of_the_whole_one(
    num_samples: int, batch_size: int, epochs: int, data: st.DataObject
) -> None:
    per_epoch = num_steps(num_samples, batch_size, drop_last=False)
    total = per_epoch * epochs
    done = data.draw(st.integers(0, total))

    def batches_of(steps: range) -> list[list[int]]:
        every = orders(partial(epoch_order, num_samples, 7), steps, per_epoch, batch_size)
        return [batch.tolist() for order in every for batch in order.split(batch_size) if len(batch)]

    whole = batches_of(range(total))
    assert len(whole) == total
    assert batches_of(range(done, total)) == whole[done:]


def served(sizes: list[int]) -> list[Batch]:
    return [Batch(None, i, 1.0, size) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(("every", "parts"), [(None, [3, 3, 3]), (2, [2, 2, 2, 2, 1]), (9, [9]), (20, [9])])
def test_an_evaluation_follows_each_epoch_or_every_so_many_steps(every: int | None, parts: list[int]) -> None:
    epochs = (iter(served([4, 4, 1])) for _ in range(3))
    assert [len(list(part)) for part in segments(epochs, 9, every)] == parts


def test_batches_without_end_are_all_full_and_of_epoch_after_epoch() -> None:
    def stream(order: torch.Tensor) -> list[Batch]:
        return [Batch(part.tolist(), None, 1.0, len(part)) for part in order.split(4)]

    found = list(islice(full_batches(partial(epoch_order, 10, 3), 5, lambda order: iter(stream(order)), 4), 4))
    assert [batch.num_samples for batch in found] == [4, 4, 4, 4]
    fifth, sixth = epoch_order(10, 3, 5).tolist(), epoch_order(10, 3, 6).tolist()
    assert [batch.inputs for batch in found] == [fifth[:4], fifth[4:8], sixth[:4], sixth[4:8]]
