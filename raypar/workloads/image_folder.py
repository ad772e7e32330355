"""A folder of images in the layout of torchvision's ImageFolder: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import DataError
from raypar.workloads.files import DATA_DIR_VARIABLE, data_dir
from raypar.workloads.image_transforms import augmented, centred, preparation

if TYPE_CHECKING:
    from torch.utils.data import Dataset

PARTS = ("train", "val")
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # torchvision's IMG_EXTENSIONS
ORDER_SEED = 0
_LAYOUT = "it has to hold train/CLASS/*.jpg and val/CLASS/*.jpg"


def image_folder(name: str) -> Path:
    """The folder of that name in the data folder; an absolute path stays what it is."""
    return data_dir() / name


def class_names(part: Path) -> list[str]:
    """As torchvision finds them: every folder in `part` is a class; in the order of their numbers."""
    return sorted(entry.name for entry in os.scandir(part) if entry.is_dir())


def check_image_folder(root: Path) -> None:
    """Make sure that both parts are there with the same classes, and that each has an image; looks into no image.

    Raises:
        DataError: naming the folder, what is wrong with it, and the way out.
    """
    where = f"name it with --set folder=NAME (below the data folder, see --data-dir or {DATA_DIR_VARIABLE}); {_LAYOUT}"
    if not root.is_dir():
        raise DataError(f"image folder {root}: no such folder", hint=where)
    for part in PARTS:
        folder = root / part
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder", hint=f"put the images for {part} there: {_LAYOUT}")
        names = class_names(folder)
        if len(names) < 2:
            what = f"only one class, {names[0]}" if names else "no class"
            raise DataError(
                f"{folder}: holds {what}", hint=f"at least 2 folders are needed, one for each class: {_LAYOUT}"
            )
        for name in names:
            if not _has_image(folder / name):
                hint = f"put images there ({', '.join(SUFFIXES)}), or remove the folder: each is a class"
                raise DataError(f"{folder / name}: holds no image", hint=hint)
    train, val = (set(class_names(root / part)) for part in PARTS)
    if train != val:
        odd = min(train ^ val)
        raise DataError(
            f"{root}: class {odd} is in {PARTS[odd in val]} only",
            hint="train and val need the same folders, or the classes' numbers would differ",
        )


def folder_datasets(root: Path, image_size: int, *, augment: bool) -> tuple[Dataset[Any], Dataset[Any]]:
    """The training and the validation images, each decoded and prepared when it is asked for.

    The training images are in one fixed random order: the first thousand of them hold every class in about its share,
    as the files in the order of their names don't.
    """
    import torch
    from torch.utils.data import Subset
    from torchvision.datasets import ImageFolder

    steps = augmented(image_size) if augment else centred(image_size)
    train = ImageFolder(root / "train", preparation(steps, is_decoded=False))
    val = ImageFolder(root / "val", preparation(centred(image_size), is_decoded=False))
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(ORDER_SEED))
    return Subset(train, order.tolist()), val


def _has_image(folder: Path) -> bool:
    # One is enough: to look at a million files before every trial would take seconds.
    return any(file.lower().endswith(SUFFIXES) for _, _, files in os.walk(folder, followlinks=True) for file in files)
