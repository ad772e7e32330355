"""Image classification with the networks of torchvision, on images that are made up or lie in a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raypar.errors import DataError, RayparError, suggest
from raypar.study.workload import Config, Data, Option, Workload, one_of, whole_number
from raypar.workloads.image_folder import check_image_folder, class_names, folder_datasets, image_folder
from raypar.workloads.image_transforms import augmented, normalised_rgb, preparation, prepared_one_by_one
from raypar.workloads.synthetic import synthetic_images

if TYPE_CHECKING:
    from torch import nn

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
TRAIN_SEED, VAL_SEED = 1, 2
USE_DATALOADER = 'use torch\'s loader: --set loader=dataloader, or loader="dataloader" in the study'


def build(config: Config) -> nn.Module:
    """torchvision's network as it is, but for the number of classes; no pretrained weights."""
    from torchvision import models

    name = config["architecture"]
    extra: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):  # in training they would return three or two outputs
        extra = {"aux_logits": False, "init_weights": True}
    elif name.startswith("vit_"):
        extra = {"image_size": config["image_size"]}
    model: nn.Module = models.get_model(name, weights=None, num_classes=_num_classes(config), **extra)
    return model


def layers(model: nn.Module) -> list[nn.Module]:
    """A ResNet's (also a ResNeXt's, a Wide ResNet's) convolution at the entry, its blocks, its classifier.

    Raises:
        RayparError: it is another network: torchvision's have no common order of layers.
    """
    from torch import nn
    from torchvision.models import ResNet

    if not isinstance(model, ResNet):
        raise RayparError(
            f"torchvision's {type(model).__name__} can't be cut into layers: only a ResNet can",
            hint="say --set architecture=resnet18, or another that begins with resnet, resnext or wide_resnet",
        )
    stages = (model.layer1, model.layer2, model.layer3, model.layer4)
    return [
        model.conv1,
        model.bn1,
        nn.ReLU(),  # the model's own works in place, which a tensor that has come from another worker can't bear
        model.maxpool,
        *(block for stage in stages for block in stage),
        model.avgpool,
        nn.Flatten(),
        model.fc,
    ]


def data(config: Config) -> Data:
    """Synthetic: uint8 in memory, a quarter as many for ``val``; a folder: decoded by the loader's processes.

    Images have the shape ``(3, image_size, image_size)``.
    """
    _check_loader(config)
    size, augment = config["image_size"], config["augment"]
    if config["source"] == "folder":
        train_dataset, val_dataset = folder_datasets(image_folder(config["folder"]), size, augment=augment)
        return Data(train_dataset=train_dataset, val_dataset=val_dataset)
    num_images, num_classes = config["num_images"], config["num_classes"]
    train = synthetic_images(num_images, num_classes, size, seed=TRAIN_SEED)
    one_by_one = None
    if config["loader"] == "dataloader":
        one_by_one = prepared_one_by_one(train, preparation(augmented(size) if augment else [], is_decoded=True))
    return Data(
        train=train,
        val=synthetic_images(-(-num_images // 4), num_classes, size, seed=VAL_SEED),
        transform=normalised_rgb,
        train_dataset=one_by_one,
    )


def prepare(config: Config) -> None:
    _check_loader(config)
    if config["source"] == "folder":
        check_image_folder(image_folder(config["folder"]))
    if config["architecture"] not in RESNETS:
        _check_image_size(config)


def num_train_images(config: Config) -> int | None:
    """Unknown for a folder: to count its files takes a while."""
    return int(config["num_images"]) if config["source"] == "synthetic" else None


def _num_classes(config: Config) -> int:
    if config["source"] == "folder":
        return len(class_names(image_folder(config["folder"]) / "train"))
    return int(config["num_classes"])


def _check_loader(config: Config) -> None:
    if config["loader"] == "dataloader":
        return
    if config["source"] == "folder":
        raise DataError(f'source="folder" can\'t be had with loader="{config["loader"]}"', hint=USE_DATALOADER)
    if config["augment"]:
        raise DataError(f'augment=True has no effect with loader="{config["loader"]}"', hint=USE_DATALOADER)


def _check_image_size(config: Config) -> None:
    """Let the network see shapes without numbers: some take images of certain sizes only."""
    import torch

    size = config["image_size"]
    try:
        with torch.device("meta"):
            build(config)(torch.empty(2, 3, size, size))
    except NotImplementedError:  # a network that looks at numbers when it is built
        return
    except (AssertionError, RuntimeError, ValueError) as error:
        raise DataError(
            f"{config['architecture']} can't take images of {size}x{size} pixels: {str(error).splitlines()[0]}",
            hint="say --set image_size=224, which every architecture of torchvision can take",
        ) from None


def _architecture_problem(name: object) -> str | None:
    if name in RESNETS:  # torchvision takes seconds to import, which a plan would have to wait for
        return None
    from torchvision import models

    known = models.list_models(module=models)
    return None if name in known else f"unknown, {suggest(str(name), known)}"


resnet = Workload(
    name="resnet",
    model=build,
    data=data,
    num_train_samples=num_train_images,
    options={
        "architecture": Option("resnet18", str, "a classification network of torchvision", _architecture_problem),
        "source": one_of("synthetic", ("synthetic", "folder"), "images that are made up, or a folder of files"),
        "image_size": whole_number(64, "height and width, pixels; 224 is usual for ImageNet", at_least=8),
        "num_images": whole_number(1024, "for training, with source=synthetic"),
        "num_classes": whole_number(
            10, "with source=synthetic; a folder has as many as train/ has folders", at_least=2
        ),
        "folder": Option("images", str, "with source=folder: holds train/ and val/; below the data folder"),
        "augment": Option(False, bool, "random crops and mirroring of training images, for loader=dataloader"),
    },
    # lr: 0.1 for 256 images (Goyal et al. 2017, arXiv:1706.02677), as 64 want it; so are momentum and weight decay.
    defaults={
        "optimizer": "momentum",
        "lr": 0.025,
        "weight_decay": 1e-4,
        "batch_size": 64,
        "epochs": 1,
        "eval_batch_size": 100,  # a thousand images of 224 x 224 would need gigabytes
        "num_warmup_steps": 3,  # a step takes most of a second on a core
    },
    prepare=prepare,
    preload=("torchvision",),
    layers=layers,
    description="torchvision's classification networks (ResNet-18 …) on synthetic images or a folder of images",
    dataset="synthetic images, or a folder of images",
)
