"""What ships to be trained: networks as documented, data of the right shape, and an import that costs little."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raypar import Workload
from raypar.errors import DataError, RayparError
from raypar.study.options import resolve
from raypar.workloads import datasets, digits, fashion_mlp, iris, lenet5, mnist_cnn, mnist_mlp, resnet, wide_mlp
from raypar.workloads.datasets import ImageSet, normalised, raw_dir

ALL = [digits, mnist_mlp, mnist_cnn]
IN_A_ROW = [digits, fashion_mlp, iris, lenet5, mnist_cnn, mnist_mlp, wide_mlp]
TINY = ImageSet("MNIST", num_train=20, num_test=10)
REAL_DATA = Path(os.environ.get("RAYPAR_DATA_DIR") or Path(__file__).parents[3] / "shared" / "data")
needs_mnist = pytest.mark.skipif(
    not (REAL_DATA / "MNIST" / "raw").is_dir(), reason="MNIST is not here: set RAYPAR_DATA_DIR"
)


def config(workload: Workload, **chosen: Any) -> dict[str, Any]:
    return resolve(workload, chosen)


def network(workload: Workload, **chosen: Any) -> nn.Module:
    assert workload.model is not None
    return workload.model(config(workload, **chosen))


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.fixture
def tiny_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = raw_dir(tmp_path, TINY)
    folder.mkdir(parents=True)
    for file in TINY.files:
        body = bytes(i % (256 if file.is_images else 10) for i in range(file.num_bytes - len(file.header)))
        (folder / file.name).write_bytes(file.header + body)
    for module in (datasets, sys.modules["raypar.workloads.datasets"]):
        monkeypatch.setattr(module, "IMAGE_SETS", {"MNIST": TINY})
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    return tmp_path


def test_importing_the_workloads_brings_no_heavy_module() -> None:
    code = (
        "import sys, raypar.workloads; "
        "print(*({'torch', 'torchvision', 'sklearn', 'numpy', 'ray', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("workload", ALL, ids=lambda w: w.name)
def test_a_workload_has_what_a_study_and_a_plan_need(workload: Workload) -> None:
    assert workload.num_train_samples and workload.description and workload.model and workload.data


def test_the_multi_layer_perceptron_is_784_128_10() -> None:
    layers = [(type(m), tuple(m.weight.shape) if isinstance(m, nn.Linear) else ()) for m in network(mnist_mlp)]  # type: ignore[attr-defined]
    assert layers == [(nn.Flatten, ()), (nn.Linear, (128, 784)), (nn.ReLU, ()), (nn.Linear, (10, 128))]
    assert num_parameters(network(mnist_mlp)) == 784 * 128 + 128 + 128 * 10 + 10


def test_the_convolutional_network_has_exactly_the_documented_layers() -> None:
    assert [str(layer) for layer in network(mnist_cnn)] == [  # type: ignore[attr-defined]
        "Conv2d(1, 32, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))",
        "ReLU()",
        "MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)",
        "Conv2d(32, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))",
        "ReLU()",
        "MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)",
        "Flatten(start_dim=1, end_dim=-1)",
        "Linear(in_features=3136, out_features=128, bias=True)",
        "ReLU()",
        "Linear(in_features=128, out_features=64, bias=True)",
        "ReLU()",
        "Linear(in_features=64, out_features=10, bias=True)",
    ]
    assert num_parameters(network(mnist_cnn)) == 320 + 18_496 + 401_536 + 8_256 + 650


@pytest.mark.parametrize("workload", [mnist_mlp, mnist_cnn], ids=lambda w: w.name)
def test_an_image_network_gives_ten_scores_an_image(workload: Workload) -> None:
    assert network(workload)(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize("workload", IN_A_ROW, ids=lambda w: w.name)
def test_a_network_of_layers_in_a_row_is_a_sequential_that_leaves_its_input_alone(workload: Workload) -> None:
    model = network(workload)
    assert workload.layers is None and isinstance(model, nn.Sequential)
    assert not any(getattr(module, "inplace", False) for module in model.modules())


@pytest.mark.parametrize("architecture", ["resnet18", "resnet50"])
def test_a_resnets_layers_in_a_row_compute_what_it_computes(architecture: str) -> None:
    assert resnet.layers is not None
    torch.manual_seed(0)
    model = network(resnet, architecture=architecture, image_size=32)
    layers = nn.Sequential(*resnet.layers(model))
    images = torch.randn(4, 3, 32, 32)
    for mode in (True, False):
        model.train(mode), layers.train(mode)
        torch.testing.assert_close(layers(images), model(images), rtol=0, atol=0)
    assert [id(p) for p in layers.parameters()] == [id(p) for p in model.parameters()]


def test_no_layer_of_a_resnet_changes_its_input() -> None:
    assert resnet.layers is not None
    activations = torch.randn(2, 3, 32, 32)
    for layer in resnet.layers(network(resnet)):
        # What came from another worker is a leaf, and torch refuses to change one in place.
        arrived = activations.detach().requires_grad_()
        before = arrived.detach().clone()
        activations = layer(arrived)
        assert torch.equal(arrived, before)


def test_other_networks_of_torchvision_say_that_they_cant_be_cut() -> None:
    assert resnet.layers is not None
    with pytest.raises(RayparError, match="SqueezeNet can't be cut"):
        resnet.layers(network(resnet, architecture="squeezenet1_1"))


@pytest.mark.parametrize(("workload", "hidden"), [(mnist_mlp, 16), (digits, 16)], ids=["mnist_mlp", "digits"])
def test_hidden_size_is_an_option(workload: Workload, hidden: int) -> None:
    narrow, wide = network(workload, hidden_size=hidden), network(workload)
    assert num_parameters(narrow) < num_parameters(wide)


def test_digits_are_split_the_same_way_every_time_and_in_every_class_alike() -> None:
    assert digits.data is not None
    data, again = digits.data({}), digits.data({})
    assert torch.equal(data.train.inputs, again.train.inputs) and torch.equal(data.val.targets, again.val.targets)
    assert len(data.train) == digits.num_train_samples == 1_536 and len(data.val) == 1_797 - 1_536
    counts = Counter(data.val.targets.tolist())
    assert set(counts) == set(range(10)) and max(counts.values()) - min(counts.values()) <= 2


def test_any_beginning_of_the_digits_holds_every_class_in_its_share() -> None:
    assert digits.data is not None
    counts = Counter(digits.data({}).train.targets[:100].tolist())
    assert all(9 <= counts[label] <= 11 for label in range(10))


def test_no_digit_is_both_trained_on_and_judged_by() -> None:
    from sklearn.datasets import load_digits

    assert digits.data is not None
    data = digits.data({})
    rows = [bytes(row.tolist()) for part in (data.train, data.val) for row in part.inputs]
    assert Counter(rows) == Counter(bytes(int(v) for v in row) for row in load_digits().data)


def test_digits_are_bytes_that_become_floats_from_0_to_1() -> None:
    assert digits.data is not None
    data = digits.data({})
    assert data.train.inputs.dtype == torch.uint8 and data.train.targets.dtype == torch.int64
    assert data.train.inputs.shape == (1_536, 64) and data.transform is not None
    x = data.transform(data.train.inputs[:50])
    assert x.dtype == torch.float32 and x.min() == 0.0 and x.max() == 1.0
    assert network(digits)(x).shape == (50, 10)


@pytest.mark.parametrize("workload", [mnist_mlp, mnist_cnn], ids=lambda w: w.name)
def test_images_stay_bytes_in_memory(workload: Workload, tiny_mnist: Path) -> None:
    assert workload.data is not None
    data = workload.data(config(workload))
    assert data.train.inputs.shape == (20, 1, 28, 28) and data.val.inputs.shape == (10, 1, 28, 28)
    assert data.train.inputs.dtype == torch.uint8 and data.train.targets.dtype == torch.int64
    assert data.train.targets.tolist() == [i % 10 for i in range(20)]
    assert data.train_dataset is None


def test_the_transform_leaves_the_bytes_alone_and_heeds_no_default_dtype() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    before = pixels.clone()
    torch.set_default_dtype(torch.float64)
    try:
        x = normalised(pixels, mean=0.1307, std=0.3081)
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.dtype == torch.float32 and torch.equal(pixels, before)
    expected = (torch.arange(256, dtype=torch.float64) / 255 - 0.1307) / 0.3081
    assert torch.allclose(x.double(), expected, atol=1e-6)


def test_torchs_loader_gets_the_same_samples_from_torchvision(tiny_mnist: Path) -> None:
    assert mnist_mlp.data is not None
    data = mnist_mlp.data(config(mnist_mlp, loader="dataloader"))
    assert data.train_dataset is not None and data.transform is not None
    for index in (0, 7, 19):
        x, y = data.train_dataset[index]
        assert torch.allclose(x, data.transform(data.train.inputs[index]), atol=1e-5)
        assert y == data.train.targets[index]


def test_preparing_says_what_is_missing_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    for workload in (mnist_mlp, mnist_cnn):
        with pytest.raises(DataError, match="MNIST"):
            workload.prepare({})
    digits.prepare({})


def test_embedded_data_needs_neither_sklearn_nor_torchvision_to_be_imported() -> None:
    code = (
        "import sys; from raypar.study.options import resolve; from raypar.workloads import digits, iris; "
        "digits.data({}); iris.prepare({}); iris.data(resolve(iris, {})); "
        "print({'sklearn', 'torchvision'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@needs_mnist
def test_the_real_mnist_is_read_as_torchvision_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets as torchvision_datasets

    monkeypatch.setenv("RAYPAR_DATA_DIR", str(REAL_DATA))
    assert mnist_mlp.data is not None
    data = mnist_mlp.data(config(mnist_mlp))
    theirs = torchvision_datasets.MNIST(REAL_DATA)
    assert torch.equal(data.train.inputs[:, 0], theirs.data) and torch.equal(data.train.targets, theirs.targets)
    assert len(data.train) == mnist_mlp.num_train_samples and len(data.val) == 10_000
    assert data.transform is not None
    x = data.transform(data.train.inputs[:5000])
    assert abs(float(x.mean())) < 0.05 and abs(float(x.std()) - 1) < 0.05


def trained(workload: Workload, num_steps: int) -> float:
    """Accuracy after some steps of plain training at the workload's own settings."""
    from raypar.train.optim import build_optimizer

    assert workload.data is not None
    settings = config(workload)
    data = workload.data(settings)
    assert data.transform is not None
    torch.manual_seed(0)
    model = network(workload)
    optimizer = build_optimizer(model.parameters(), settings)
    for _ in range(num_steps):
        some = torch.randint(len(data.train), (settings["batch_size"],))
        loss = nn.functional.cross_entropy(model(data.transform(data.train.inputs[some])), data.train.targets[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        x, y = data.transform(data.val.inputs[:2000]), data.val.targets[:2000]
        return float((model(x).argmax(1) == y).float().mean())


def test_digits_are_learned_at_the_default_settings() -> None:
    assert trained(digits, num_steps=96) > 0.9


@needs_mnist
@pytest.mark.parametrize(("workload", "num_steps"), [(mnist_mlp, 300), (mnist_cnn, 120)], ids=["mlp", "cnn"])
def test_mnist_is_learned_at_the_default_settings(
    workload: Workload, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(REAL_DATA))
    assert trained(workload, num_steps) > 0.85
