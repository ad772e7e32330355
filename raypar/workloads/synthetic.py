"""Images made of numbers, for studies of speed that want neither a download nor a disk."""

from __future__ import annotations

from raypar.study.workload import Split

PATTERN_SEED = 0
PATTERN_SIDE = 4
HALF = 128  # pattern and noise are from 0 to 127 each, so that their sum is a byte


def synthetic_images(num_images: int, num_classes: int, image_size: int, *, seed: int) -> Split:
    """Noise over a coarse pattern of 4 x 4 patches, one for each class, so that a network has something to learn.

    Args:
        image_size: height and width, pixels.
        seed: of the noise; the classes' patterns are always the same, so that two sets are of one kind.

    Returns:
        Inputs of shape ``(num_images, 3, image_size, image_size)``, uint8 from 0 to 254; the classes take turns.
    """
    import torch
    from torch.nn.functional import interpolate

    fixed, own = torch.Generator().manual_seed(PATTERN_SEED), torch.Generator().manual_seed(seed)
    coarse = torch.randint(HALF, (num_classes, 3, PATTERN_SIDE, PATTERN_SIDE), generator=fixed)
    patterns = interpolate(coarse.float(), size=(image_size, image_size), mode="nearest").to(torch.uint8)
    targets = torch.arange(num_images) % num_classes
    shape = (num_images, 3, image_size, image_size)
    inputs = torch.randint(HALF, shape, dtype=torch.uint8, generator=own).add_(patterns[targets])
    return Split(inputs, targets)
