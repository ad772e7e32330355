"""Networks of the small workloads are those documented, their data has the right shape, and they learn."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score
from torch import nn
from workload_parts import REAL_DATA, accuracy, loaded, needs, network, num_parameters, tiny_image_set, trained

from raypar import Study, StudyError
from raypar.errors import DataError, RayparError
from raypar.study.options import resolve
from raypar.train.flops import count_work
from raypar.workloads import digits, mnist_cnn, mnist_mlp, transformer, wide_mlp
from raypar.workloads.datasets import image_data, normalised
from raypar.workloads.metrics import accuracy as accuracies
from raypar.workloads.metrics import macro_f1, sum_and_weight
from workloads.fashion_mlp import fashion_mlp
from workloads.iris import iris
from workloads.lenet5 import QUADRUPLES, TRIPLES, lenet5
from workloads.tweets import tweets

SEQUENTIAL = [digits, fashion_mlp, iris, lenet5, mnist_cnn, mnist_mlp, wide_mlp]
WITH_ACTIVATION = [digits, fashion_mlp, iris, mnist_cnn, mnist_mlp]
needs_mnist = needs("MNIST/raw")
CNN = [(1, 32), "ReLU", "MaxPool2d", (32, 64), "ReLU", "MaxPool2d"]


def layers(model):
    return [
        (m.weight.shape[1], m.weight.shape[0]) if hasattr(m, "weight") else type(m).__name__
        for m in model.children()
        if not isinstance(m, nn.Flatten)
    ]


def is_balanced(targets, num_classes):
    counts = Counter(targets.tolist())
    return set(counts) == set(range(num_classes)) and max(counts.values()) - min(counts.values()) <= 2


# All of them.


def test_a_plan_of_usual_networks_and_embedded_data_import_no_heavy_module():
    code = (
        "import sys; from raypar import Study, grid; from raypar.workloads import resnet\n"
        "study = Study(workload=resnet, space={'architecture': grid('resnet18', 'resnet50')})\n"
        "resnet.prepare(study.trials()[0].config)\n"
        "print(*({'torch', 'torchvision', 'sklearn', 'ray', 'mlflow'} & set(sys.modules)))\n"
        "from raypar.workloads import digits\n"
        "digits.prepare({}); digits.data({})\n"
        "print(*({'sklearn', 'torchvision'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("workload", SEQUENTIAL, ids=lambda w: w.name)
def test_a_network_is_a_sequential_that_leaves_its_input_alone(workload):
    model = network(workload)
    assert workload.layers is None and isinstance(model, nn.Sequential)
    assert not any(getattr(module, "inplace", False) for module in model.modules())
    if workload in (mnist_mlp, mnist_cnn, fashion_mlp, lenet5):
        assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize(
    ("workload", "chosen", "expected"),
    [
        (mnist_mlp, {}, [(784, 128), "ReLU", (128, 10)]),
        (fashion_mlp, {}, [(784, 128), "Sigmoid", (128, 128), "Sigmoid", (128, 10)]),
        (mnist_cnn, {}, [*CNN, (3136, 128), "ReLU", (128, 64), "ReLU", (64, 10)]),
        (iris, {}, [(4, 50), "ReLU", (50, 3)]),
        (digits, {"hidden_size": 8}, [(64, 8), "ReLU", (8, 8), "ReLU", (8, 10)]),
    ],
)
def test_networks_have_the_documented_layers(workload, chosen, expected):
    assert layers(network(workload, **chosen)) == expected


@pytest.mark.parametrize("workload", [*WITH_ACTIVATION, lenet5], ids=lambda w: w.name)
def test_the_activation_is_an_option(workload):
    usual = {type(m).__name__ for m in network(workload)}
    other = {type(m).__name__ for m in network(workload, activation="gelu")}
    assert "GELU" in other and usual - other in ({"ReLU"}, {"Sigmoid"}, {"Tanh"})
    with pytest.raises(StudyError, match=r"activation.*unknown"):
        Study(workload=workload, config={"activation": "rellu"})


@pytest.mark.parametrize(
    ("workload", "name"), [(mnist_mlp, "MNIST"), (fashion_mlp, "FashionMNIST"), (tweets, "train_text.txt: no such")]
)
def test_missing_data_is_an_error_before_anything_runs(workload, name, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    with pytest.raises(DataError, match=name):
        workload.prepare({})


WIDE = {"num_features": 256, "num_points": 8192}


@pytest.mark.parametrize(
    ("workload", "num_steps", "chosen", "at_least"),
    [
        (digits, 96, {}, 0.9),
        pytest.param(mnist_mlp, 300, {}, 0.85, marks=needs_mnist),
        pytest.param(mnist_cnn, 120, {}, 0.85, marks=needs_mnist),
        (wide_mlp, 64, {"width": 512, "depth": 2, **WIDE}, 0.8),
        (wide_mlp, 64, {"width": 256, "depth": 12, **WIDE}, 0.4),
        (transformer, 3 * 64, {"width": 32, "num_blocks": 2, "sequence_length": 8, "num_sequences": 4096}, 0.9),
    ],
)
def test_a_short_training_learns(workload, num_steps, chosen, at_least, monkeypatch):
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(REAL_DATA))
    model, data, _ = trained(workload, num_steps, **chosen)
    assert accuracy(model, data) > at_least


# Digits.


def test_digits_are_a_fixed_stratified_split_of_all_digits():
    from sklearn.datasets import load_digits

    data, again = loaded(digits), loaded(digits)
    assert torch.equal(data.train.inputs, again.train.inputs) and torch.equal(data.val.targets, again.val.targets)
    assert data.train.inputs.shape == (1_536, 64) and data.train.inputs.dtype == torch.uint8
    assert data.train.targets.dtype == torch.int64
    assert len(data.train) == digits.num_train_samples and len(data.val) == 1_797 - 1_536
    assert is_balanced(data.val.targets, 10) and is_balanced(data.train.targets[:100], 10)
    rows = [bytes(row.tolist()) for part in (data.train, data.val) for row in part.inputs]
    assert Counter(rows) == Counter(bytes(int(v) for v in row) for row in load_digits().data)
    x = data.transform(data.train.inputs[:50])
    assert x.dtype == torch.float32 and x.min() == 0.0 and x.max() == 1.0


# Iris.


def test_iris_is_a_fixed_stratified_split_of_all_flowers_standardised_by_the_training_part():
    from sklearn.datasets import load_iris

    data, again, table = loaded(iris), loaded(iris), load_iris()
    assert torch.equal(data.train.inputs, again.train.inputs) and torch.equal(data.val.inputs, again.val.inputs)
    assert data.train.inputs.shape == (120, 4) and data.train.inputs.dtype == torch.float32
    assert len(data.train) == iris.num_train_samples and len(data.val) == 30
    assert Counter(data.train.targets.tolist()) == {0: 40, 1: 40, 2: 40}
    assert Counter(data.train.targets[:30].tolist()) == Counter(data.val.targets.tolist()) == {0: 10, 1: 10, 2: 10}
    assert torch.allclose(data.train.inputs.mean(0), torch.zeros(4), atol=1e-5)
    assert torch.allclose(data.train.inputs.std(0, correction=0), torch.ones(4), atol=1e-5)
    # Standardising is linear: the mean and deviation of all flowers restore them, up to rounding.
    both = torch.cat([data.train.inputs, data.val.inputs]).double().numpy()
    raw = (both - both.mean(0)) / both.std(0) * table.data.std(0) + table.data.mean(0)
    labels = torch.cat([data.train.targets, data.val.targets]).tolist()
    ours = Counter((label, *row) for label, row in zip(labels, raw.round(1).tolist(), strict=True))
    assert ours == Counter((int(t), *row) for t, row in zip(table.target, table.data.tolist(), strict=True))
    assert not torch.equal(data.val.inputs, loaded(iris, split_seed=1).val.inputs)


@pytest.mark.parametrize("num_threads", [1, 200])
def test_preprocessing_threads_share_the_rows_and_change_no_bit(num_threads, monkeypatch):
    pools, module = [], sys.modules["workloads.iris"]
    pool = module.ThreadPoolExecutor
    monkeypatch.setattr(module, "ThreadPoolExecutor", lambda n: pools.append(n) or pool(n))
    alone, shared = loaded(iris), loaded(iris, preprocess_threads=num_threads)
    assert pools == [num_threads]
    assert torch.equal(alone.train.inputs, shared.train.inputs) and torch.equal(alone.val.inputs, shared.val.inputs)


# Image sets.


def test_the_transform_keeps_the_bytes():
    pixels = torch.arange(256, dtype=torch.uint8)
    x = normalised(pixels, mean=0.1307, std=0.3081)
    assert x.dtype == torch.float32 and pixels.tolist() == list(range(256))
    expected = (torch.arange(256, dtype=torch.float64) / 255 - 0.1307) / 0.3081
    assert torch.allclose(x.double(), expected, atol=1e-6)


@pytest.mark.parametrize(("workload", "size"), [(mnist_mlp, 20), (fashion_mlp, 16)], ids=["mnist", "fashion"])
def test_torchs_loader_gets_the_same_training_samples_and_no_others(workload, size, tmp_path, monkeypatch):
    tiny_image_set("MNIST" if workload is mnist_mlp else "FashionMNIST", tmp_path, monkeypatch)
    monkeypatch.setattr(sys.modules["workloads.fashion_mlp"], "NUM_VAL", 4)
    data = loaded(workload, loader="dataloader")
    assert len(data.train_dataset) == size and data.train.inputs.shape == (size, 1, 28, 28)
    assert data.train.inputs.dtype == torch.uint8 and data.train.targets.dtype == torch.int64
    for index in (0, 7, size - 1):
        x, y = data.train_dataset[index]
        assert torch.allclose(x, data.transform(data.train.inputs[index]), atol=1e-5)
        assert y == data.train.targets[index]


def test_fashion_has_three_splits_and_keeps_models_for_its_test_split(tmp_path, monkeypatch):
    assert fashion_mlp.has_test and fashion_mlp.num_train_samples == 50_000
    assert resolve(fashion_mlp, {})["keep_model"] is True
    tiny_image_set("FashionMNIST", tmp_path, monkeypatch)
    monkeypatch.setattr(sys.modules["workloads.fashion_mlp"], "NUM_VAL", 4)
    data = loaded(fashion_mlp)
    assert [part.targets.tolist() for part in (data.train, data.val, data.test)] == [
        [i % 10 for i in range(16)],
        [i % 10 for i in range(16, 20)],
        [(i + 7) % 10 for i in range(10)],
    ]
    undivided = image_data("FashionMNIST", resolve(fashion_mlp, {}), mean=0.5, std=0.5)
    assert undivided.test is None and undivided.train_dataset is None
    assert torch.equal(undivided.val.inputs, data.test.inputs)
    assert torch.equal(undivided.train.inputs, torch.cat([data.train.inputs, data.val.inputs]))


@needs_mnist
def test_the_real_mnist_is_read_as_torchvision_reads_it(monkeypatch):
    from torchvision import datasets as torchvision_datasets

    monkeypatch.setenv("RAYPAR_DATA_DIR", str(REAL_DATA))
    data = loaded(mnist_mlp)
    theirs = torchvision_datasets.MNIST(REAL_DATA)
    assert torch.equal(data.train.inputs[:, 0], theirs.data) and torch.equal(data.train.targets, theirs.targets)
    assert len(data.train) == mnist_mlp.num_train_samples and len(data.val) == 10_000
    x = data.transform(data.train.inputs[:5000])
    assert abs(float(x.mean())) < 0.05 and abs(float(x.std()) - 1) < 0.05


# LeNet-5.


def test_the_published_lenet_has_the_papers_weights_and_connections():
    counts = [num_parameters(layer) for layer in network(lenet5) if num_parameters(layer)]
    assert counts == [156, 12, 1_516, 32, 48_120, 10_164, 840] and sum(counts[:-1]) == 60_000
    work = count_work(network(lenet5), torch.zeros(2, 1, 28, 28))
    pooling = 5 * (6 * 14 * 14 + 16 * 5 * 5)
    biases = 6 * 28 * 28 + 16 * 10 * 10 + 120 + 84
    assert work.macs_forward == 326_520 and work.macs_forward + pooling + biases == 340_908
    seen = Counter(number for group in (*TRIPLES, *QUADRUPLES, range(6)) for number in group)
    assert seen == dict.fromkeys(range(6), 10)
    assert len({frozenset(group) for group in (*TRIPLES, *QUADRUPLES)}) == 15
    usual = count_work(network(lenet5, connections="full"), torch.zeros(2, 1, 28, 28))
    assert usual.num_parameters == 61_706 and usual.macs_forward == 416_520


# The wide perceptron.

NARROW = {"width": 128, "depth": 2, "num_features": 64, "num_points": 2048}


@given(
    width=st.integers(1, 40), depth=st.integers(1, 6), num_features=st.integers(2, 30), num_classes=st.integers(2, 12)
)
def test_the_wide_perceptron_has_the_size_asked_for(width, depth, num_features, num_classes):
    model = network(wide_mlp, width=width, depth=depth, num_features=num_features, num_classes=num_classes)
    sizes = [num_features, *[width] * depth, num_classes]
    assert [layer for layer in layers(model) if layer != "ReLU"] == list(pairwise(sizes))
    assert model(torch.zeros(3, num_features)).shape == (3, num_classes)


def test_the_points_are_deterministic_distinct_and_around_the_same_centres():
    data, again = loaded(wide_mlp, **NARROW), loaded(wide_mlp, **NARROW)
    assert data.train.inputs.shape == (2048, 64) and data.train.inputs.dtype == torch.float32
    assert data.val.inputs.shape == (512, 64) and data.val.targets.dtype == torch.int64
    assert torch.equal(data.train.inputs, again.train.inputs) and torch.equal(data.val.inputs, again.val.inputs)
    means = [torch.stack([p.inputs[p.targets == c].mean(0) for c in range(10)]) for p in (data.train, data.val)]
    # A mean of 51 points is about a unit from its centre, two centres are nearly six apart.
    assert torch.cdist(*means).argmin(1).tolist() == list(range(10))
    flat = loaded(wide_mlp, **{**NARROW, "num_features": 2})
    assert len({tuple(row.tolist()) for part in (flat.train, flat.val) for row in part.inputs}) == 2560
    assert is_balanced(loaded(wide_mlp, **NARROW, num_classes=7).train.targets[:30], 7)

    few = {**NARROW, "num_points": 7}
    assert len(loaded(wide_mlp, **few).train) == wide_mlp.train_size(resolve(wide_mlp, few)) == 7
    assert len(loaded(wide_mlp, **few).val) == 2


# Metrics.


def macro_f1_of(outputs, targets, num_classes, batch_size):
    statistic = macro_f1(num_classes)
    batches = zip(outputs.split(batch_size), targets.split(batch_size), strict=True)
    return statistic.finish(torch.stack([statistic.collect(o, t) for o, t in batches]).sum(0).double())


@pytest.mark.parametrize(("batch_size", "num_unused"), [(1, 0), (33, 2), (500, 2)])
def test_metrics_are_scikit_learns_for_any_batches(batch_size, num_unused):
    random = torch.Generator().manual_seed(1)
    targets = (torch.rand(500, generator=random) ** 2 * 20).long()
    outputs = torch.randn(500, 20, generator=random)
    outputs[torch.arange(500), targets] += 1
    outputs = torch.cat([outputs, torch.full((500, num_unused), -100.0)], dim=1)
    expected = f1_score(targets, outputs.argmax(1), average="macro")
    assert macro_f1_of(outputs, targets, 20 + num_unused, batch_size) == pytest.approx(expected)
    scores = accuracies(outputs, targets)
    assert scores.shape == (500,)
    assert float(scores.mean()) == pytest.approx(accuracy_score(targets, outputs.argmax(1)))


CLASSES, POSITIONS = torch.eye(3), torch.eye(3)[None].repeat(2, 1, 1)  # (2, 3 classes, 3 positions)


@pytest.mark.parametrize(
    ("outputs", "targets", "right", "counted"),
    [
        (CLASSES, [0, 1, 1], 2, 3),
        (CLASSES, [0, -100, 1], 1, 2),
        (CLASSES, [-100, -100, -100], 0, 0),
        (CLASSES, CLASSES.roll(1, 0).tolist(), 0, 3),
        (POSITIONS, [[0, 1, 2], [0, 0, 0]], 4, 6),
        (POSITIONS, [[0, 1, -100], [-100, 0, 0]], 2, 4),
        (torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 5, dtype=torch.int64).tolist(), 40, 40),
    ],
    ids=["classes", "an ignored class", "nothing counted", "one-hot", "positions", "ignored positions", "an image"],
)
def test_accuracy_counts_samples_or_positions_without_those_that_are_ignored(outputs, targets, right, counted):
    pair = sum_and_weight(accuracies(outputs, torch.tensor(targets)), len(outputs))
    assert tuple(map(float, pair)) == (right, counted)


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(4, 1), torch.zeros(4, 1)),
        (torch.zeros(4), torch.zeros(4)),
        (torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.int64)),
        (torch.zeros(4, 3), torch.zeros(4)),
        (torch.zeros(4, 7, 3), torch.zeros(4, 7, dtype=torch.int64)),
    ],
    ids=["one logit", "flat", "a column of classes", "numbers", "classes last"],
)
def test_accuracy_of_outputs_that_are_not_classes_is_refused_never_broadcast(outputs, targets):
    with pytest.raises(RayparError, match=r"accuracy needs .* got outputs of shape .* and targets of shape"):
        accuracies(outputs, targets)


@pytest.mark.parametrize("scores", [torch.zeros(4, 4), torch.zeros(()), torch.zeros(3), 0.5, (torch.zeros(4), 4)])
def test_scores_that_are_not_of_each_sample_are_refused(scores):
    with pytest.raises(RayparError, match="is not a score for each of 4 samples"):
        sum_and_weight(scores, 4)
    assert float(sum_and_weight(torch.ones(4, 1), 4)[0]) == 4


def test_a_class_that_is_never_right_counts():
    assert macro_f1_of(torch.tensor([[1.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1]), 2, 2) == pytest.approx(3 / 7)
