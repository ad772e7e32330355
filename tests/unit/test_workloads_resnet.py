"""torchvision's networks train on synthetic images or a folder, and mistakes are reported before anything runs."""

from collections import Counter

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from workload_parts import trained

from raypar import Study, grid
from raypar.errors import DataError, RayparError, StudyError
from raypar.study.options import resolve
from raypar.workloads.resnet import MEAN, STD, resnet, synthetic_images

COLOURS = {"ant": (250, 0, 0), "bee": (0, 0, 250), "cow": (0, 250, 0)}


def config(**chosen):
    return resolve(resnet, {"image_size": 32, "num_images": 64, **chosen})


def loaded(**chosen):
    return resnet.data(config(**chosen))


def network(**chosen):
    return resnet.model(config(**chosen))


def from_folder(**chosen):
    return {"source": "folder", "folder": "pictures", "loader": "dataloader", **chosen}


def write_images(root, counts):
    """Write JPEG files of one colour per class and of different widths; `counts`: ``PART/CLASS`` to their number."""
    for place, count in counts.items():
        folder = root / place
        folder.mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (50 + i, 40), COLOURS[folder.name]).save(folder / f"{i:03}.jpg")


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    counts = {"train/ant": 4, "train/bee": 4, "train/cow": 4, "val/ant": 2, "val/bee": 1, "val/cow": 1}
    write_images(tmp_path / "pictures", counts)
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    return tmp_path / "pictures"


def test_synthetic_images_are_bytes_and_the_same_every_time():
    data, again = loaded(), loaded()
    assert data.train.inputs.shape == (64, 3, 32, 32) and data.train.inputs.dtype == torch.uint8
    assert data.val.inputs.shape == (16, 3, 32, 32) and data.train_dataset is None
    assert torch.equal(data.train.inputs, again.train.inputs)
    assert not torch.equal(data.train.inputs[:16], data.val.inputs)
    counts = Counter(synthetic_images(64, 7, 8, seed=0).targets[:30].tolist())  # any beginning has all classes alike
    assert set(counts) == set(range(7)) and set(counts.values()) <= {4, 5}


def test_synthetic_images_are_closest_to_the_mean_of_their_class_in_another_set():
    train, val = synthetic_images(60, 3, 16, seed=1), synthetic_images(30, 3, 16, seed=2)
    means = torch.stack([train.inputs[train.targets == c].float().mean(0) for c in range(3)])
    distances = (val.inputs.float()[:, None] - means).square().sum((2, 3, 4))
    assert torch.equal(distances.argmin(1), val.targets)


def test_torchs_loader_gets_the_same_synthetic_samples_and_normalising_keeps_the_bytes():
    data = loaded(loader="dataloader")
    x, y = next(iter(DataLoader(data.train_dataset, batch_size=8)))
    before = data.train.inputs[:8].clone()
    assert torch.allclose(x, data.transform(data.train.inputs[:8]), atol=1e-5)
    assert torch.equal(y, data.train.targets[:8]) and torch.equal(data.train.inputs[:8], before)


@pytest.mark.parametrize("source", ["synthetic", "folder"])
def test_augmented_images_differ_from_epoch_to_epoch_and_depend_on_the_seed(source, pictures):
    stripes = Image.new("RGB", (50, 40))
    stripes.putdata([(5 * (i % 50), 200, 0) for i in range(50 * 40)])
    stripes.save(pictures / "train" / "ant" / "000.jpg")
    data = loaded(source=source, folder="pictures", loader="dataloader", augment=True)

    def epoch(seed):
        torch.manual_seed(seed)
        return torch.cat([x for x, _ in DataLoader(data.train_dataset, batch_size=4)])[:12]

    first = epoch(0)
    assert first.shape == (12, 3, 32, 32) and first.dtype == torch.float32
    assert torch.equal(first, epoch(0)) and not torch.equal(first, epoch(1))


def test_a_folders_images_are_decoded_at_the_size_with_the_classes_of_its_folders(pictures):
    data = loaded(**from_folder())
    assert data.train is None and data.val is None
    for dataset, size in ((data.train_dataset, 12), (data.val_dataset, 4)):
        assert len(dataset) == size
        for i in range(size):
            x, y = dataset[i]
            assert x.shape == (3, 32, 32) and x.dtype == torch.float32
            red, green, blue = (x * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)).mean((1, 2))
            assert y == [red, blue, green].index(max(red, blue, green))
    assert network(**from_folder())(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert [len(y) for _, y in DataLoader(data.train_dataset, batch_size=6, num_workers=1)] == [6, 6]
    resnet.prepare(config(**from_folder()))
    again = loaded(**from_folder()).train_dataset
    order, order_again = ([dataset[i][1] for i in range(12)] for dataset in (data.train_dataset, again))
    assert order == order_again and Counter(order) == {0: 4, 1: 4, 2: 4} and len(set(order[:4])) > 1


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ({}, "no such folder"),
        ({"train/ant": 1, "train/bee": 1}, "val: no such folder"),
        ({"train/ant": 1, "val/ant": 1}, "train: needs at least 2 classes, contains 1"),
        ({"train/ant": 1, "train/bee": 1, "val/ant": 1, "val/cow": 1}, "class bee is in train only"),
        ({"train/ant": 1, "train/bee": 1, "val/ant": 1, "val/bee": 1, "val/cow": 1}, "class cow is in val only"),
    ],
)
def test_an_incomplete_folder_is_reported_with_a_fix(counts, problem, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    write_images(tmp_path / "pictures", counts)
    with pytest.raises(DataError, match=problem) as error:
        resnet.prepare(config(**from_folder()))
    assert error.value.hint and str(tmp_path / "pictures") in error.value.message


@pytest.mark.parametrize("chosen", [from_folder(loader="resident"), {"augment": True}], ids=["folder", "augment"])
def test_what_needs_torchs_loader_says_so_before_anything_runs_and_in_a_worker(chosen, pictures):
    for ask in (resnet.prepare, resnet.data):
        with pytest.raises(DataError) as error:
            ask(config(**chosen))
        assert "--set loader=dataloader" in str(error.value)


@pytest.mark.parametrize("name", ["googlenet", "vit_b_16", "squeezenet1_0"])
def test_other_architectures_give_one_score_per_class_in_training(name):
    with torch.device("meta"):
        model = network(architecture=name, image_size=64, num_classes=7).train()
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 7)


def test_an_architecture_that_torchvision_lacks_is_a_mistake_of_the_study():
    with pytest.raises(StudyError, match="did you mean 'mobilenet_v2'"):
        Study(workload=resnet, config={"architecture": "mobilenetv2"})
    Study(workload=resnet, space={"architecture": grid("resnet50", "vgg11", "vit_b_16")})


@pytest.mark.parametrize(("name", "size"), [("alexnet", 32), ("vit_b_16", 60)])
def test_images_that_an_architecture_cannot_take_are_refused_before_anything_runs(name, size):
    with pytest.raises(DataError, match=f"{name} can't take images of {size}x{size} pixels") as error:
        resnet.prepare(config(architecture=name, image_size=size))
    assert "image_size=224" in str(error.value)
    for fine in (name, "regnet_x_400mf"):
        resnet.prepare(config(architecture=fine, image_size=224))


def test_the_loss_falls_on_synthetic_images():
    _, _, losses = trained(resnet, num_steps=5, image_size=32, num_classes=4, num_images=32, batch_size=32)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("architecture", ["resnet18", "resnet50"])
def test_the_layers_of_a_resnet_in_order_compute_what_it_computes(architecture):
    torch.manual_seed(0)
    model = network(architecture=architecture)
    layers = nn.Sequential(*resnet.layers(model))
    images = torch.randn(4, 3, 32, 32)
    for mode in (True, False):
        model.train(mode), layers.train(mode)
        torch.testing.assert_close(layers(images), model(images), rtol=0, atol=0)
    assert [id(p) for p in layers.parameters()] == [id(p) for p in model.parameters()]


def test_no_layer_of_a_resnet_changes_its_input():
    activations = torch.randn(2, 3, 32, 32)
    for layer in resnet.layers(network()):
        # An input from another worker is a leaf, which torch refuses to change in place.
        received = activations.detach().requires_grad_()
        before = received.detach().clone()
        activations = layer(received)
        assert torch.equal(received, before)


def test_other_networks_cannot_be_partitioned():
    with pytest.raises(RayparError, match="SqueezeNet can't be partitioned"):
        resnet.layers(network(architecture="squeezenet1_1"))
