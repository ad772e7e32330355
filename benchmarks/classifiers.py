"""The work of every classifier of torchvision, counted: weights, and multiply-accumulates of one image forward.

Each network is built for 1,000 classes and images of 224 pixels (299 for Inception), as `raypar work` counts it.
Nothing is timed. Takes a few minutes; --quick counts the networks of the lecture's table only.
"""

from __future__ import annotations

import warnings

from common import begin, parser_for, tell

from raypar import units
from raypar.report.listings import scaled
from raypar.study.options import resolve
from raypar.train.flops import work_of
from raypar.workloads import resnet

LECTURE = ("alexnet", "resnet50")


def main() -> None:
    args = begin(parser_for(__doc__))
    warnings.filterwarnings("ignore")  # some say that they will draw other weights one day
    import torchvision

    names = LECTURE if args.quick else torchvision.models.list_models(module=torchvision.models)
    for name in names:
        config = {"architecture": name, "image_size": 299 if name == "inception_v3" else 224, "num_classes": 1000}
        counted = work_of(resnet, resolve(resnet, {**config, "num_images": 1_250}))
        tell(name, f"{units.compact(counted.num_parameters)} weights, {scaled(counted.macs_forward, 'MAC')}")
    tell("networks counted", str(len(names)))


if __name__ == "__main__":
    main()
