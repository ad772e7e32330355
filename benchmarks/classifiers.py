"""Weights and forward multiply-accumulates of every torchvision classifier, as `raypar model work` counts them.

Each network has 1,000 classes and takes images of 224 pixels (Inception 299). Nothing is timed. Takes a few minutes;
--quick counts AlexNet and ResNet-50 only.
"""

from __future__ import annotations

import warnings

from common import begin, parser_for, print_row

from raypar import units
from raypar.reporting.listings import scaled
from raypar.study.options import resolve
from raypar.train.flops import work_of
from raypar.workloads import resnet

QUICK = ("alexnet", "resnet50")


def main() -> None:
    args = begin(parser_for(__doc__))
    warnings.filterwarnings("ignore")  # of a future change of torchvision's initial weights
    import torchvision

    names = QUICK if args.quick else torchvision.models.list_models(module=torchvision.models)
    for name in names:
        config = {"architecture": name, "image_size": 299 if name == "inception_v3" else 224, "num_classes": 1000}
        work = work_of(resnet, resolve(resnet, {**config, "num_images": 1_250}))
        print_row(name, f"{units.compact(work.num_parameters)} weights, {scaled(work.macs_forward, 'MAC')}")
    print_row("networks counted", str(len(names)))


if __name__ == "__main__":
    main()
