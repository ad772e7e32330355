"""Image classification with torchvision's networks, on synthetic images or a folder of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from raypar.errors import DataError, RayparError, suggest
from raypar.study.workload import Config, Data, Option, Split, Workload, one_of, whole_number
from raypar.workloads.datasets import DATA_DIR_VARIABLE, data_dir, first_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.utils.data import Dataset

# Of ImageNet's training pixels by channel, as fractions of 255, as in torchvision.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHORT_SIDE = 256 / 224  # of the crop, as in torchvision's evaluation


def normalised_rgb(pixels: Tensor) -> Tensor:
    """Normalise bytes of shape ``(batch, 3, height, width)`` to float32 of zero mean and unit variance."""
    import torch

    x = pixels.to(torch.float32)
    # Scalars, not a tensor of three, which would have to be moved to the device.
    for channel, (mean, std) in enumerate(zip(MEAN, STD, strict=True)):
        x[:, channel].mul_(1 / (255 * std)).sub_(mean / std)
    return x


def preparation(image_size: int, *, augment: bool, is_decoded: bool) -> Callable[[Any], Tensor]:
    """Compose the preparation of one image: a random crop and mirroring or a centre crop of 7/8, then normalisation.

    Args:
        augment: random, after Szegedy et al. 2015 (arXiv:1409.4842).
        is_decoded: images are uint8 tensors of shape ``(3, image_size, image_size)``, which need no centre crop,
            instead of PIL images.
    """
    import torch
    from torchvision import transforms

    steps: list[Any] = []
    if augment:
        steps = [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()]
    elif not is_decoded:
        steps = [transforms.Resize(round(image_size * SHORT_SIDE)), transforms.CenterCrop(image_size)]
    decode = [] if is_decoded else [transforms.PILToTensor()]
    scale = [transforms.ConvertImageDtype(torch.float32), transforms.Normalize(MEAN, STD)]
    prepare: Callable[[Any], Tensor] = transforms.Compose([*steps, *decode, *scale])
    return prepare


@dataclass(frozen=True)
class PreparedSplit:
    """A data set that prepares a Split's samples on access, as work for a DataLoader's processes."""

    # Not a subclass of Dataset, which would import torch with this module.
    split: Split
    prepare: Callable[[Any], Tensor]

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.prepare(self.split.inputs[index]), self.split.targets[index]


PATTERN_SEED = 0
PATTERN_SIDE = 4
HALF = 128  # pattern and noise are 0 to 127 each: their sum is a byte


def synthetic_images(num_images: int, num_classes: int, image_size: int, *, seed: int) -> Split:
    """Return noise over a coarse 4 x 4 pattern per class, which a network can learn.

    Args:
        image_size: height and width, pixels.
        seed: of the noise; patterns are fixed.

    Returns:
        Inputs of shape ``(num_images, 3, image_size, image_size)``, uint8; classes alternate.
    """
    import torch
    from torch.nn.functional import interpolate

    of_patterns, of_noise = (torch.Generator().manual_seed(s) for s in (PATTERN_SEED, seed))
    coarse = torch.randint(HALF, (num_classes, 3, PATTERN_SIDE, PATTERN_SIDE), generator=of_patterns)
    patterns = interpolate(coarse.float(), size=(image_size, image_size), mode="nearest").to(torch.uint8)
    targets = torch.arange(num_images) % num_classes
    shape = (num_images, 3, image_size, image_size)
    inputs = torch.randint(HALF, shape, dtype=torch.uint8, generator=of_noise).add_(patterns[targets])
    return Split(inputs, targets)


PARTS = ("train", "val")
ORDER_SEED = 0
_LAYOUT = "it must contain train/CLASS/*.jpg and val/CLASS/*.jpg"


def class_names(part: Path) -> list[str]:
    """Return the classes as torchvision numbers them: the folders in `part`, sorted."""
    return sorted(entry.name for entry in os.scandir(part) if entry.is_dir())


def check_image_folder(root: Path) -> None:
    """Check that both parts have the same classes, without looking for images.

    Raises:
        DataError: a folder is missing, has fewer than two classes, or the parts differ.
    """
    hint = f"name it with --set folder=NAME (below the data folder, see --data-dir or {DATA_DIR_VARIABLE}); {_LAYOUT}"
    for folder in (root, *(root / part for part in PARTS)):
        if not folder.is_dir():
            raise DataError(f"image folder {folder}: no such folder", hint=hint)
    train, val = (set(class_names(root / part)) for part in PARTS)
    if train != val:
        odd = min(train ^ val)
        problem = f"class {odd} is in {PARTS[odd in val]} only"
        raise DataError(f"{root}: {problem}", hint="both need the same class folders")
    if len(train) < 2:
        raise DataError(f"{root / 'train'}: needs at least 2 classes, contains {len(train)}", hint=_LAYOUT)


RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
TRAIN_SEED, VAL_SEED = 1, 2
USE_DATALOADER = 'use torch\'s loader: --set loader=dataloader, or loader="dataloader" in the study'


def build(config: Config) -> nn.Module:
    """Build torchvision's network for the number of classes, without pretrained weights."""
    from torchvision import models

    name, num_classes = config["architecture"], config["num_classes"]
    if config["source"] == "folder":
        num_classes = len(class_names(data_dir() / config["folder"] / "train"))
    extra: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):  # in training they return several outputs by default
        extra = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        extra = {"image_size": config["image_size"]}
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **extra)
    return model


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a ResNet, ResNeXt or Wide ResNet in order.

    Raises:
        RayparError: for any other network, since torchvision's have no common order of layers.
    """
    from torch import nn
    from torchvision.models import ResNet

    if not isinstance(model, ResNet):
        raise RayparError(
            f"torchvision's {type(model).__name__} can't be partitioned into layers: only a ResNet can",
            hint="use --set architecture=resnet18, or another that begins with resnet, resnext or wide_resnet",
        )
    stages = (model.layer1, model.layer2, model.layer3, model.layer4)
    blocks = (block for stage in stages for block in stage)
    relu = nn.ReLU()  # the model's works in place, which fails on a tensor from another worker
    return [model.conv1, model.bn1, relu, model.maxpool, *blocks, model.avgpool, nn.Flatten(), model.fc]


def data(config: Config) -> Data:
    """Return images of shape ``(3, image_size, image_size)``.

    Synthetic images are uint8 in memory, with a quarter as many for ``val``. Images of a folder are decoded by loader
    processes; its training images are in a fixed random order, so that every prefix is about stratified.
    """
    _check_loader(config)
    size, augment = config["image_size"], config["augment"]
    if config["source"] == "folder":
        import torch
        from torch.utils.data import Subset
        from torchvision.datasets import ImageFolder

        root = data_dir() / config["folder"]
        images = ImageFolder(root / "train", preparation(size, augment=augment, is_decoded=False))
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(ORDER_SEED))
        val_images = ImageFolder(root / "val", preparation(size, augment=False, is_decoded=False))
        return Data(train_dataset=Subset(images, order.tolist()), val_dataset=val_images)
    num_images, num_classes = config["num_images"], config["num_classes"]
    train = synthetic_images(num_images, num_classes, size, seed=TRAIN_SEED)
    one_by_one = None
    if config["loader"] == "dataloader":
        one_by_one = PreparedSplit(train, preparation(size, augment=augment, is_decoded=True))
    return Data(
        train=train,
        val=synthetic_images(-(-num_images // 4), num_classes, size, seed=VAL_SEED),
        transform=normalised_rgb,
        train_dataset=cast("Dataset[Any] | None", one_by_one),
    )


def prepare(config: Config) -> None:
    _check_loader(config)
    if config["source"] == "folder":
        check_image_folder(data_dir() / config["folder"])
    if config["architecture"] in RESNETS:
        return
    import torch

    size = config["image_size"]
    try:  # some networks accept only certain image sizes
        with torch.device("meta"):
            build(config)(torch.empty(2, 3, size, size))
    except NotImplementedError:  # needs values while it is built
        return
    except (AssertionError, RuntimeError, ValueError) as error:
        raise DataError(
            f"{config['architecture']} can't take images of {size}x{size} pixels: {first_line(error)}",
            hint="use --set image_size=224, which every architecture of torchvision accepts",
        ) from None


def _check_loader(config: Config) -> None:
    if config["loader"] == "dataloader":
        return
    if config["source"] == "folder":
        raise DataError(f'source="folder" is incompatible with loader="{config["loader"]}"', hint=USE_DATALOADER)
    if config["augment"]:
        raise DataError(f'augment=True has no effect with loader="{config["loader"]}"', hint=USE_DATALOADER)


def _architecture_problem(name: object) -> str | None:
    if name in RESNETS:  # without importing torchvision, which takes seconds
        return None
    from torchvision import models

    names = models.list_models(module=models)
    return None if name in names else f"unknown, {suggest(str(name), names)}"


resnet = Workload(
    name="resnet",
    model=build,
    data=data,
    # A folder's files are not counted.
    num_train_samples=lambda config: config["num_images"] if config["source"] == "synthetic" else None,
    options={
        "architecture": Option("resnet18", str, "a classification network of torchvision", _architecture_problem),
        "source": one_of("synthetic", ("synthetic", "folder"), "synthetic images, or a folder of files"),
        "image_size": whole_number(64, "height and width, pixels; 224 is usual for ImageNet", at_least=8),
        "num_images": whole_number(1024, "for training, with source=synthetic"),
        "num_classes": whole_number(10, "with source=synthetic; a folder has one per folder in train/", at_least=2),
        "folder": Option("images", str, "with source=folder: contains train/ and val/; relative to the data folder"),
        "augment": Option(False, bool, "random crops and mirroring of training images, with loader=dataloader"),
    },
    # lr 0.1 for 256 images (Goyal et al. 2017, arXiv:1706.02677), scaled to 64; momentum and weight decay as there.
    defaults={
        "optimizer": "momentum",
        "lr": 0.025,
        "weight_decay": 1e-4,
        "batch_size": 64,
        "epochs": 1,
        "eval_batch_size": 100,  # a thousand images of 224 x 224 need gigabytes
        "num_warmup_steps": 3,  # a step takes most of a second on one core
    },
    prepare=prepare,
    preload=("torchvision",),
    layers=layers,
    description="torchvision's classification networks (ResNet-18 …) on synthetic images or a folder of images",
    dataset="synthetic images, or a folder of images",
)
