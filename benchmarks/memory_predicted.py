"""Peak memory that `raypar model memory` predicts, against trials that count it; on the CPU.

Ten models, each alone, and on two workers with each strategy that can run it: the peak of a worker's training, as a
trial's `peak_memory_bytes` has it, and the one predicted from shapes. A prediction also has a range; a trial above it
would not fit where raypar says it fits. Models on MNIST take the data in RAYPAR_DATA_DIR; without it they are skipped.
About six minutes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from common import begin, local_trial, parser_for, print_bar, print_row, scratch, workload_named

from raypar import RayparError, Workload, units
from raypar.parallel.strategy import check_compatible
from raypar.predict.shapes import predict_memory
from raypar.study.options import resolve
from raypar.study.quantity import MEMORY

MAX_ERROR, MIN_WITHIN = 0.10, 0.9
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "1 worker": {"num_workers": 1},
    **{f"2 workers, {name}": {"num_workers": 2, "strategy": name} for name in ("ddp", "fsdp", "tensor", "pipeline")},
}
SMALL_IMAGES = {"source": "synthetic", "num_images": 128, "batch_size": 32}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "perceptron, Adam": ("digits", {"hidden_size": 1024, "optimizer": "adam"}),
    "perceptron, large batch": ("digits", {"hidden_size": 256, "batch_size": 768}),
    "wide perceptron": ("wide_mlp", {"batch_size": 512}),
    "transformer": ("transformer", {}),
    "transformer, longer": ("transformer", {"sequence_length": 64, "width": 128, "num_sequences": 512}),
    "ResNet-18": ("resnet", {**SMALL_IMAGES, "image_size": 64}),
    "ResNet-50": ("resnet", {**SMALL_IMAGES, "image_size": 64, "architecture": "resnet50"}),
    "VGG-11": ("resnet", {**SMALL_IMAGES, "image_size": 64, "architecture": "vgg11"}),
    "MobileNetV2, Adam": (
        "resnet",
        {**SMALL_IMAGES, "image_size": 64, "architecture": "mobilenet_v2", "optimizer": "adam"},
    ),
    "MNIST CNN": ("mnist_cnn", {"batch_size": 256, "num_samples": 2048}),
    "MNIST perceptron": ("mnist_mlp", {"batch_size": 512, "hidden_size": 1024, "num_samples": 2048}),
}
NEED_DATA = ("mnist_cnn", "mnist_mlp")


def can_run(workload: Workload, config: Mapping[str, Any]) -> bool:
    """Return whether a model can be split by the strategy of a config."""
    try:
        return check_compatible(workload, config) is None
    except RayparError:
        return False


def main() -> None:
    args = begin(parser_for(__doc__, has_data=True))
    models = {
        title: (name, config)
        for title, (name, config) in MODELS.items()
        if name not in NEED_DATA or os.environ.get("RAYPAR_DATA_DIR")
    }
    if args.quick:
        models = dict(list(models.items())[:2])
    errors: dict[str, float] = {}
    num_above = 0
    for title, (name, chosen) in models.items():
        for setting, of_setting in SETTINGS.items():
            config = {"device": "cpu", "epochs": 1, "num_warmup_steps": 2, **chosen, **of_setting}
            workload = workload_named(name)
            settled = resolve(workload, config)
            if not can_run(workload, settled):
                continue
            predicted = predict_memory(workload, settled)
            with scratch() as folder:
                measured = MEMORY.of(local_trial(name, config, folder))
            assert measured is not None
            errors[f"{title}, {setting}"] = error = predicted.total / measured - 1
            _, most = predicted.range_bytes(int(of_setting["num_workers"]), on_gpu=False)
            num_above += measured > most
            print_row(f"{title}, {setting}", f"predicted {error:+.1%} off; measured {units.size(measured)}")
    within = sum(abs(error) <= MAX_ERROR for error in errors.values()) / len(errors)
    exact = sum(abs(error) <= MAX_ERROR / 10 for error in errors.values()) / len(errors)
    print_row("predictions within 1 %", f"{units.percent(exact)} of {len(errors)}")
    print_bar("predictions within 10 %", within, units.percent, at_least=MIN_WITHIN)
    print_bar("trials above the predicted range", num_above, "{:.0f}".format, at_most=0)


if __name__ == "__main__":
    main()
