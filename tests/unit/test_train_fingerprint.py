"""What tells one trial's data from another's."""

from __future__ import annotations

import pytest
import torch

from raypar import Data, Split, Workload
from raypar.train import data as module
from raypar.train.data import fingerprint


def source(_config: object) -> Data:
    raise NotImplementedError


WORKLOAD = Workload(name="mine", data=source, dataset="Flowers, 8 + 2")


def split(size: int, start: int = 0, dtype: torch.dtype = torch.uint8) -> Split:
    return Split((torch.arange(size * 3) + start).to(dtype).reshape(size, 3), torch.arange(size))


def digests(data: Data, num_samples: int = 8) -> dict[str, str | None]:
    return {name: part.get("digest") for name, part in fingerprint(WORKLOAD, data, num_samples)["splits"].items()}


def test_name_source_sizes_and_types_are_told() -> None:
    found = fingerprint(WORKLOAD, Data(train=split(8), val=split(2), test=split(3)), 6)
    assert (found["name"], found["source"]) == ("Flowers", f"{__name__}:source")
    assert {name: part["num_samples"] for name, part in found["splits"].items()} == {"train": 6, "val": 2, "test": 3}
    assert found["splits"]["train"]["inputs"] == {"dtype": "uint8", "shape": [3]}
    assert fingerprint(Workload(name="mine", data=source), Data(train=split(8)), 8)["name"] == "mine"


def test_the_same_samples_have_the_same_digest_and_any_others_another() -> None:
    same = digests(Data(train=split(8), val=split(2)))
    assert digests(Data(train=split(8), val=split(2))) == same
    assert same["train"] != same["val"]
    others = [split(8, start=1), split(8, dtype=torch.int16), split(7), Split(split(8).inputs, torch.zeros(8))]
    assert len({digests(Data(train=other))["train"] for other in others} | {same["train"]}) == 5


def test_only_the_samples_that_were_trained_on_count() -> None:
    longer = Split(torch.cat([split(8).inputs, split(1).inputs]), torch.cat([split(8).targets, split(1).targets]))
    assert digests(Data(train=longer), 8) == digests(Data(train=split(8)), 8)
    assert digests(Data(train=longer), 9) != digests(Data(train=split(8)), 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float64])
def test_every_type_has_a_digest(dtype: torch.dtype) -> None:
    assert digests(Data(train=split(8, dtype=dtype)))["train"]


def test_samples_that_are_read_one_by_one_have_none() -> None:
    images = torch.utils.data.TensorDataset(torch.zeros(5, 3))
    data = Data(train_dataset=images, val_dataset=images)
    assert fingerprint(WORKLOAD, data, 4)["splits"] == {"train": {"num_samples": 4}, "val": {"num_samples": 5}}


def test_of_large_tensors_evenly_spread_samples_make_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HASHED_BYTES", 12)
    whole = split(8)
    unseen, seen = (Split(whole.inputs.clone(), whole.targets) for _ in range(2))
    unseen.inputs[1], seen.inputs[4] = 99, 99  # of 24 bytes every second sample
    assert digests(Data(train=unseen)) == digests(Data(train=whole)) != digests(Data(train=seen))
