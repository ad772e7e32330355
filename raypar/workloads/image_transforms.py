"""From an RGB image to what a network for ImageNet takes, one by one or a batch at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from raypar.study.workload import Split

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.utils.data import Dataset

# Of ImageNet's training pixels, red, green and blue, as fractions of 255: torchvision's models are trained with them.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHORT_SIDE = 256 / 224  # of the crop: what torchvision's models are evaluated with


def normalised_rgb(pixels: Tensor) -> Tensor:
    """A batch of bytes, shape ``(batch, 3, height, width)``, as float32 of about zero mean and unit variance."""
    import torch

    x = pixels.to(torch.float32)
    # Numbers, not a tensor of three: that one would have to be brought to the device, or kept there.
    for channel, (mean, std) in enumerate(zip(MEAN, STD, strict=True)):
        x[:, channel].mul_(1 / (255 * std)).sub_(mean / std)
    return x


def augmented(image_size: int) -> list[Any]:
    """A random part of the image, stretched to the size, and mirrored half of the time (Szegedy et al. 2015,
    arXiv:1409.4842)."""
    from torchvision import transforms

    return [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()]


def centred(image_size: int) -> list[Any]:
    """The middle of the image, of which the crop takes 7/8."""
    from torchvision import transforms

    return [transforms.Resize(round(image_size * SHORT_SIDE)), transforms.CenterCrop(image_size)]


def preparation(steps: list[Any], *, is_decoded: bool) -> Callable[[Any], Tensor]:
    """The steps, then what `normalised_rgb` does, for one image.

    Args:
        is_decoded: the images come as uint8 tensors of shape ``(3, height, width)``, and not as PIL has them.
    """
    import torch
    from torchvision import transforms

    decode = [] if is_decoded else [transforms.PILToTensor()]
    scale = [transforms.ConvertImageDtype(torch.float32), transforms.Normalize(MEAN, STD)]
    prepare: Callable[[Any], Tensor] = transforms.Compose([*steps, *decode, *scale])
    return prepare


@dataclass(frozen=True)
class _Prepared:
    """The samples of a Split, each prepared when it is asked for."""

    split: Split
    prepare: Callable[[Any], Tensor]

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.prepare(self.split.inputs[index]), self.split.targets[index]


def prepared_one_by_one(split: Split, prepare: Callable[[Any], Tensor]) -> Dataset[Any]:
    """A data set of a Split's samples, for the processes of a DataLoader to have their work."""
    # No subclass of Dataset, for which torch would have to be imported with this module: it adds nothing to the two.
    return cast("Dataset[Any]", _Prepared(split, prepare))
