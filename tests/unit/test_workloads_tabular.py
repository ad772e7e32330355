"""Iris flowers, clothes split in three, and the activations that networks can have."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raypar import Study, StudyError, Workload
from raypar.study.options import resolve
from raypar.study.workload import Data
from raypar.workloads import datasets, digits, fashion_mlp, iris, mnist_cnn, mnist_mlp
from raypar.workloads.activations import ACTIVATIONS, activation
from raypar.workloads.datasets import ImageSet, image_data, raw_dir
from raypar.workloads.iris import standardised

TINY = ImageSet("FashionMNIST", num_train=20, num_test=10)
NETWORKS = [digits, fashion_mlp, iris, mnist_cnn, mnist_mlp]


def network(workload: Workload, **chosen: Any) -> nn.Module:
    assert workload.model is not None
    return workload.model(resolve(workload, chosen))


def loaded(workload: Workload, **chosen: Any) -> Data:
    assert workload.data is not None
    return workload.data(resolve(workload, chosen))


def layers(model: nn.Module) -> list[Any]:
    return [
        (m.in_features, m.out_features) if isinstance(m, nn.Linear) else type(m).__name__
        for m in model.children()
        if not isinstance(m, nn.Flatten)
    ]


# Activations.


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_keeps_the_shape_and_lets_gradients_through(name: str) -> None:
    x = torch.linspace(0.1, 2, 12).reshape(3, 4).requires_grad_()
    y = activation(name)(x)
    y.sum().backward()
    assert y.shape == x.shape and x.grad is not None and bool((x.grad != 0).all())


@pytest.mark.parametrize("workload", NETWORKS, ids=lambda w: w.name)
def test_the_activation_of_a_network_is_an_option(workload: Workload) -> None:
    usual = {type(m).__name__ for m in network(workload)}  # type: ignore[attr-defined]
    other = {type(m).__name__ for m in network(workload, activation="tanh")}  # type: ignore[attr-defined]
    assert "Tanh" in other and not {"ReLU", "Sigmoid"} & other
    assert ("Sigmoid" if workload is fashion_mlp else "ReLU") in usual


@pytest.mark.parametrize("workload", NETWORKS, ids=lambda w: w.name)
def test_an_unknown_activation_is_told_before_anything_runs(workload: Workload) -> None:
    with pytest.raises(StudyError, match=r"activation.*unknown"):
        Study(workload=workload, config={"activation": "rellu"})


# Iris.


def test_the_iris_network_is_4_50_3() -> None:
    assert layers(network(iris)) == [(4, 50), "ReLU", (50, 3)]


def test_iris_is_split_in_every_class_alike_and_the_same_way_every_time() -> None:
    data, again = loaded(iris), loaded(iris)
    assert torch.equal(data.train.inputs, again.train.inputs) and torch.equal(data.val.inputs, again.val.inputs)
    assert data.train.inputs.shape == (120, 4) and data.train.inputs.dtype == torch.float32
    assert len(data.train) == iris.num_train_samples and len(data.val) == 30
    assert Counter(data.train.targets.tolist()) == {0: 40, 1: 40, 2: 40}
    assert Counter(data.val.targets.tolist()) == {0: 10, 1: 10, 2: 10}
    assert Counter(data.train.targets[:30].tolist()) == {0: 10, 1: 10, 2: 10}


def test_another_split_seed_holds_out_other_flowers() -> None:
    assert not torch.equal(loaded(iris).val.inputs, loaded(iris, split_seed=1).val.inputs)


def test_no_flower_is_both_trained_on_and_judged_by() -> None:
    from sklearn.datasets import load_iris

    data, table = loaded(iris), load_iris()
    both = torch.cat([data.train.inputs, data.val.inputs]).double().numpy()
    # Standardising is linear: the flowers come back by the mean and deviation of all, up to rounding.
    raw = (both - both.mean(0)) / both.std(0) * table.data.std(0) + table.data.mean(0)
    labels = torch.cat([data.train.targets, data.val.targets]).tolist()
    ours = Counter((label, *row) for label, row in zip(labels, raw.round(1).tolist(), strict=True))
    assert ours == Counter((int(t), *row) for t, row in zip(table.target, table.data.tolist(), strict=True))


def test_features_are_in_standard_deviations_of_the_training_flowers_alone() -> None:
    data = loaded(iris)
    assert torch.allclose(data.train.inputs.mean(0), torch.zeros(4), atol=1e-5)
    assert torch.allclose(data.train.inputs.std(0, correction=0), torch.ones(4), atol=1e-5)
    assert not torch.allclose(data.val.inputs.mean(0), torch.zeros(4), atol=1e-3)


@pytest.mark.parametrize("num_threads", [1, 3, 4, 200])
def test_threads_that_prepare_the_features_change_no_bit_of_them(num_threads: int) -> None:
    alone, shared = loaded(iris), loaded(iris, preprocess_threads=num_threads)
    assert torch.equal(alone.train.inputs, shared.train.inputs) and torch.equal(alone.val.inputs, shared.val.inputs)


def test_the_rows_are_shared_out_among_that_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    module = sys.modules["raypar.workloads.iris"]
    pool = module.ThreadPoolExecutor
    monkeypatch.setattr(module, "ThreadPoolExecutor", lambda n: asked.append(n) or pool(n))
    rows, mean, std = np.arange(12.0).reshape(6, 2), np.array([1.0, 2.0]), np.array([2.0, 4.0])
    assert np.array_equal(standardised(rows, mean, std, num_threads=3), (rows - mean) / std)
    assert np.array_equal(standardised(rows, mean, std, num_threads=0), (rows - mean) / std)
    assert asked == [3]


@pytest.mark.parametrize(("key", "value"), [("preprocess_threads", -1), ("split_seed", -1)])
def test_a_negative_number_of_threads_or_seed_is_told(key: str, value: int) -> None:
    with pytest.raises(StudyError, match=key):
        Study(workload=iris, config={key: value})


def accuracy(workload: Workload, seed: int, **chosen: Any) -> float:
    """On ``val``, after plain training at the workload's own settings."""
    from raypar.train.optim import build_optimizer

    config, data = resolve(workload, chosen), loaded(workload, **chosen)
    torch.manual_seed(seed)
    model = network(workload, **chosen)
    optimizer = build_optimizer(model.parameters(), config)
    for _ in range(config["epochs"]):
        for some in torch.randperm(len(data.train)).split(config["batch_size"]):
            loss = nn.functional.cross_entropy(model(data.train.inputs[some]), data.train.targets[some])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.inference_mode():
        return float((model(data.val.inputs).argmax(1) == data.val.targets).float().mean())


def test_iris_is_learned_at_the_default_settings_over_five_seeds() -> None:
    assert np.mean([accuracy(iris, seed) for seed in range(5)]) >= 0.96


# Clothes.


@pytest.fixture
def tiny_fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = raw_dir(tmp_path, TINY)
    folder.mkdir(parents=True)
    for file in TINY.files:
        size = file.num_bytes - len(file.header)
        first = 0 if file.name.startswith("train") else 7
        body = bytes((i + first) % (251 if file.is_images else 10) for i in range(size))
        (folder / file.name).write_bytes(file.header + body)
    for module in (datasets, sys.modules["raypar.workloads.datasets"]):
        monkeypatch.setattr(module, "IMAGE_SETS", {"FashionMNIST": TINY})
    monkeypatch.setattr(sys.modules["raypar.workloads.fashion_mlp"], "NUM_VAL", 4)
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    return tmp_path


def test_the_fashion_network_has_two_hidden_layers_of_sigmoids() -> None:
    assert layers(network(fashion_mlp)) == [(784, 128), "Sigmoid", (128, 128), "Sigmoid", (128, 10)]
    assert layers(network(fashion_mlp, hidden_size=16))[2] == (16, 16)
    assert network(fashion_mlp)(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_fashion_keeps_the_models_that_its_test_images_are_for() -> None:
    assert fashion_mlp.has_test and fashion_mlp.num_train_samples == 50_000
    assert resolve(fashion_mlp, {})["keep_model"] is True


def test_clothes_are_split_in_three_and_the_test_images_are_the_sets_own(tiny_fashion: Path) -> None:
    data = loaded(fashion_mlp)
    assert data.test is not None
    assert [len(part) for part in (data.train, data.val, data.test)] == [16, 4, 10]
    assert data.train.targets.tolist() == [i % 10 for i in range(16)]
    assert data.val.targets.tolist() == [i % 10 for i in range(16, 20)]
    assert data.test.targets.tolist() == [(i + 7) % 10 for i in range(10)]
    whole = image_data("FashionMNIST", resolve(fashion_mlp, {}), mean=0.5, std=0.5)
    assert whole.test is None and torch.equal(whole.val.inputs, data.test.inputs)
    assert torch.equal(whole.train.inputs, torch.cat([data.train.inputs, data.val.inputs]))


def test_torchs_loader_never_gets_to_see_the_validation_images(tiny_fashion: Path) -> None:
    data = loaded(fashion_mlp, loader="dataloader")
    assert data.train_dataset is not None and data.transform is not None
    assert len(data.train_dataset) == 16  # type: ignore[arg-type]
    for index in (0, 9, 15):
        x, y = data.train_dataset[index]
        assert torch.allclose(x, data.transform(data.train.inputs[index]), atol=1e-5)
        assert y == data.train.targets[index]
    whole = image_data("FashionMNIST", resolve(fashion_mlp, {"loader": "dataloader"}), mean=0.5, std=0.5)
    assert len(whole.train_dataset) == 20  # type: ignore[arg-type]


def test_missing_clothes_are_told_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raypar.errors import DataError

    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    with pytest.raises(DataError, match="FashionMNIST"):
        fashion_mlp.prepare({})
