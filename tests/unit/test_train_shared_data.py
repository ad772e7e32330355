"""Data that one rank loads and others map: what is shared, what is not, and that it changes no trial."""

import contextlib
import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from raypar.parallel.strategy import DistContext
from raypar.run.ranks import ForkServer
from raypar.run.shared_files import SharedFiles
from raypar.study.workload import Data, Split, Workload
from raypar.train import shared_data
from raypar.train.shared_data import NotedConfig, SharedData

ALONE = DistContext(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(ForkServer(base_preload=())) as server:
        yield server


@pytest.fixture(autouse=True)
def _any_load_counts(monkeypatch):
    monkeypatch.setattr(shared_data, "MIN_LOAD_S", 0.0)


def normalised(x):
    return x / 255


class Rows(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], 0


def data(config):
    x = torch.arange(1000.0).view(100, 10) * config["scale"]
    return Data(Split(x, torch.arange(100)), Split(x[:20], torch.arange(20)), transform=normalised, val_dataset=Rows(x))


def with_noise(config):
    return Data(Split(torch.randn(50, 2) + config["scale"], torch.from_numpy(np.random.rand(50))))


def load(server, function, *, scope, seed=0, share_data=True, **config):
    workload = Workload(name="w", data=function, model=None, share_data=share_data)
    return SharedData(scope, server.address).load(workload, {"lr": 0.1, "scale": 1, **config}, seed, ALONE)


def is_mapped(loaded):
    """Return whether the training inputs are mapped from a file in memory."""
    start = loaded.data.train.inputs.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(text, 16) for text in line.split()[0].split("-"))
        if low <= start < high:
            return "raypar-data" in line
    return False


def test_data_are_mapped_once_they_were_loaded_twice(server):
    loaded = [load(server, data, scope="twice") for _ in range(4)]
    assert [is_mapped(each) for each in loaded] == [False, False, True, True]
    for each in loaded:
        assert torch.equal(each.data.train.inputs, loaded[0].data.train.inputs)
        assert torch.equal(each.data.val.targets, loaded[0].data.val.targets)
        assert each.data.transform is normalised and type(each.data.val_dataset) is Rows
    assert loaded[2].digests == loaded[1].digests and loaded[2].digests.keys() == {("train", 100), ("val", 20)}


def test_tensors_that_share_memory_still_do(server):
    *_, loaded = (load(server, data, scope="views").data for _ in range(3))
    loaded.train.inputs[0] = -1
    assert (loaded.val.inputs[0] == -1).all() and (loaded.val_dataset.x[0] == -1).all()


def test_a_change_in_place_changes_no_other_trials_data(server):
    *_, first = (load(server, data, scope="in place").data for _ in range(3))
    first.train.inputs.zero_()
    second = load(server, data, scope="in place").data
    assert second.train.inputs.abs().sum() > 0


def test_the_key_is_what_the_function_reads(server):
    for lr in (0.1, 0.2):
        assert not is_mapped(load(server, data, scope="key", lr=lr))
    assert is_mapped(load(server, data, scope="key", lr=0.3, seed=5))
    other = load(server, data, scope="key", scale=2)
    assert not is_mapped(other) and other.data.train.inputs[0, 1] == 2
    assert not is_mapped(load(server, data, scope="of another study"))


def test_the_seed_counts_only_if_random_numbers_were_drawn(server):
    def seeded(seed):
        shared_data.seed_generators(seed)
        return load(server, with_noise, scope="noise", seed=seed)

    first, second, third = seeded(1), seeded(1), seeded(1)
    assert not is_mapped(second) and is_mapped(third) and not is_mapped(seeded(2))
    assert torch.equal(first.data.train.inputs, third.data.train.inputs)
    assert torch.equal(first.data.train.targets, third.data.train.targets)


@pytest.mark.parametrize("function", [data, with_noise])
def test_generators_are_the_same_after_data_whether_mapped_or_loaded(server, function):
    drawn = []
    for _ in range(4):
        shared_data.seed_generators(3)
        load(server, function, scope="generators", seed=3)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert len(set(drawn)) == 1


VOCABULARY: list[str] = []
SIZE = 0


def fills_a_global(config):
    VOCABULARY.append("word")
    return data(config)


def sets_a_global(config):
    global SIZE
    SIZE = 100
    return data(config)


def changes_the_config(config):
    config["num_classes"] = 10
    return data(config)


def with_a_closure(config):
    return Data(data(config).train, transform=lambda x: x * config["lr"])


def with_gradients(config):
    made = data(config)
    made.train.inputs.requires_grad_()
    return made


def with_a_loader(config):
    return Data(train_loader=lambda rank, num_ranks, batch_size: None)


@pytest.mark.parametrize(
    "function", [fills_a_global, changes_the_config, with_a_closure, with_gradients, with_a_loader]
)
def test_a_function_that_does_more_than_return_tensors_runs_in_every_trial(server, function):
    loaded = [load(server, function, scope=function.__name__) for _ in range(4)]
    assert not any(each.data.train is not None and is_mapped(each) for each in loaded)


def test_a_function_that_sets_a_global_for_the_first_time_is_not_shared(server):
    global SIZE
    for _ in range(4):
        SIZE = 0  # as in a new process
        assert not is_mapped(load(server, sets_a_global, scope="sets"))


def test_a_function_may_change_the_config_for_the_model(server):
    workload, config = Workload(name="w", data=changes_the_config, model=None), {"scale": 1}
    SharedData("change", server.address).load(workload, config, 0, ALONE)
    assert config == {"scale": 1, "num_classes": 10}


def test_sharing_can_be_turned_off_and_needs_a_server(server):
    assert not any(is_mapped(load(server, data, scope="off", share_data=False)) for _ in range(4))

    @dataclass
    class Gone:
        address: str = "/nowhere/fork"

    assert not any(is_mapped(load(Gone(), data, scope="gone")) for _ in range(4))


def test_data_that_load_fast_are_not_shared(server, monkeypatch):
    monkeypatch.setattr(shared_data, "MIN_LOAD_S", 1e9)
    assert not any(is_mapped(load(server, data, scope="fast")) for _ in range(4))


@pytest.mark.parametrize(
    "read",
    [
        dict,
        list,
        lambda c: {**c},
        lambda c: c | {},
        lambda c: c.copy(),
        repr,
        lambda c: c == {},
        lambda c: [*c.items()],
    ],
)
def test_code_that_goes_through_the_config_reads_all_of_it(read):
    config = NotedConfig({"a": 1, "b": 2})
    read(config)
    assert config.read == {"a", "b"}


def test_only_what_is_read_is_noted():
    config = NotedConfig({"a": 1, "b": 2, "c": 3})
    assert config["a"] == 1 and config.get("b") == 2 and "d" not in config and config.get("e", 5) == 5
    assert config.read == {"a", "b", "d", "e"} and not config.is_changed


def test_the_least_recently_used_file_goes_first(tmp_path):
    files = SharedFiles(max_bytes=250)

    def made(name):
        fd = os.memfd_create(name)
        os.truncate(fd, 100)
        return fd

    assert not files.accepts("s", {"a": "1"}, 100) and files.accepts("s", {"a": "1"}, 100)
    assert not files.accepts("s", {"a": "1"}, 100)  # somebody makes it already
    files.keep("s", {"a": "1"}, made("1"))
    files.keep("s", {"a": "2"}, made("2"))
    assert files.find("s", {"a": "1", "b": "0"}) is not None
    files.keep("s", {"a": "3"}, made("3"))
    assert files.find("s", {"a": "2"}) is None and files.find("s", {"a": "1"}) is not None
    assert files.find("other", {"a": "1"}) is None and len(files.descriptors) == 2
    assert not files.accepts("s", {"a": "4"}, 1000) and not files.accepts("s", {"a": "4"}, 1000)
