"""Peak memory that `raypar model memory` predicts, against trials that count it; on the CPU.

Ten models, each alone, and on two workers with each strategy that can run it: the peak of a worker's training, as a
trial's `peak_memory_bytes` has it, and the one predicted from shapes. A prediction also has a range; a trial above it
would not fit where raypar says it fits. Models on MNIST take the data in RAYPAR_DATA_DIR; without it they are skipped.
About six minutes.

``--scripts`` judges scripts instead: those of benchmarks/foreign_scripts.py in the checkouts of ``--repositories
FOLDER``, and some plain ones. The truth is what torch allocates in the script until its third step, without the data
that are there before the first forward pass (script_memory.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    FOLDER,
    begin,
    local_trial,
    parser_for,
    print_bar,
    print_row,
    scratch,
    workload_named,
)
from foreign_scripts import SCRIPTS, copied

from raypar import RayparError, Workload, units
from raypar.parallel.strategy import check_compatible
from raypar.predict.memory import NotPredictable, PeakMemory
from raypar.predict.script_shapes import predict_script_memory
from raypar.predict.shapes import predict_memory
from raypar.study.command import Command
from raypar.study.options import resolve
from raypar.study.quantity import MEMORY

MIN_BYTES = 1e6  # of a script that is judged
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
LOOP = """
import torch
from torch import nn

{model}
data = torch.randn(2000, {shape})
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.01)
for indices in torch.randperm(2000).split({batch_size}):
    optimizer.zero_grad()
    loss = model(data[indices]).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
WIDE = "model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(4)))"
CONVOLUTIONS = "model = nn.Sequential(*(nn.Conv2d(3 if i == 0 else 32, 32, 3) for i in range(4)), nn.Flatten())"
PLAIN = {
    "plain perceptron, Adam": LOOP.format(model=WIDE, shape="1000", optimizer="Adam", batch_size=64),
    "plain perceptron, large batch": LOOP.format(model=WIDE, shape="1000", optimizer="SGD", batch_size=500),
    "plain convolutions": LOOP.format(model=CONVOLUTIONS, shape="3, 32, 32", optimizer="AdamW", batch_size=100),
}
NEED_DATA = ("mnist_cnn", "mnist_mlp")


def can_run(workload: Workload, config: Mapping[str, Any]) -> bool:
    """Return whether a model can be split by the strategy of a config."""
    try:
        return check_compatible(workload, config) is None
    except RayparError:
        return False


def models(*, quick: bool) -> Iterator[tuple[str, PeakMemory, float, int]]:
    """Yield the title of each trial, the prediction, the measured peak in bytes, and the number of workers."""
    chosen_models = {
        title: (name, config)
        for title, (name, config) in MODELS.items()
        if name not in NEED_DATA or os.environ.get("RAYPAR_DATA_DIR")
    }
    for title, (name, chosen) in list(chosen_models.items())[: 2 if quick else None]:
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
            yield f"{title}, {setting}", predicted, measured, of_setting["num_workers"]


def scripts(repositories: Path | None, *, quick: bool) -> Iterator[tuple[str, PeakMemory, float, int]]:
    """Yield the title of each script, the prediction, the measured peak in bytes, and 1."""
    for title, text in PLAIN.items():
        with scratch() as folder:
            (folder / "train.py").write_text(text)
            yield title, *peaks_of(folder, ["train.py"]), 1
    for title, script in list(SCRIPTS.items())[: 1 if quick else None]:
        if repositories is None or not (source := repositories.resolve() / script.repository).is_dir():
            print_row(title, "skipped: no checkout")
            continue
        inherited = os.environ.get("PYTHONPATH", "")
        try:
            with copied(script, source) as (folder, environment):
                os.environ["PYTHONPATH"] = environment["PYTHONPATH"]
                yield title, *peaks_of(folder, shlex.split(script.command)), 1
        except (NotPredictable, NotMeasured) as error:
            print_row(title, f"skipped: {error}")
        finally:
            os.environ["PYTHONPATH"] = inherited


class NotMeasured(Exception):
    """Script that fails, or makes no third step."""


def peaks_of(folder: Path, words: Sequence[str]) -> tuple[PeakMemory, float]:
    """Return the predicted peak of a script and the measured one, in bytes."""
    with scratch() as results:
        command = [sys.executable, FOLDER / "script_memory.py", results / "peak.json", *words]
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if not (results / "peak.json").is_file():
            _, failed, lines = done.stderr.decode(errors="replace").partition("Traceback")
            last = [line for line in lines.splitlines() if re.match(r"[\w.]+(Error|Exit|Exception)\b", line)]
            raise NotMeasured(last[-1] if failed and last else "no third step of an optimizer")
        measured = json.loads((results / "peak.json").read_text())["peak"]
    template = tuple(word.replace("{", "{{").replace("}", "}}") for word in ("python", *words))
    if measured < MIN_BYTES:
        raise NotMeasured(f"allocates {units.size(measured)} only")
    return predict_script_memory(Command(template), {"num_workers": 1}, 0, folder), measured


def judge(trials: Iterable[tuple[str, PeakMemory, float, int]]) -> None:
    """Print each trial's error, the share of small errors, and the number of trials above their range."""
    errors: dict[str, float] = {}
    num_above = 0
    for title, predicted, measured, num_workers in trials:
        errors[title] = error = predicted.total / measured - 1
        least, most = predicted.range_bytes(num_workers, on_gpu=False)
        num_above += measured > most
        bounds = f"{units.size(least)} to {units.size(most)}"
        print_row(title, f"predicted {error:+.1%} off, {bounds}; measured {units.size(measured)}")
    within = sum(abs(error) <= MAX_ERROR for error in errors.values()) / len(errors)
    exact = sum(abs(error) <= MAX_ERROR / 10 for error in errors.values()) / len(errors)
    print_row("predictions within 1 %", f"{units.percent(exact)} of {len(errors)}")
    print_bar("predictions within 10 %", within, units.percent, at_least=MIN_WITHIN)
    print_bar("trials above the predicted range", num_above, "{:.0f}".format, at_most=0)


def main() -> None:
    parser = parser_for(__doc__, has_data=True)
    parser.add_argument("--scripts", action="store_true", help="judge scripts instead of raypar's models")
    parser.add_argument("--repositories", type=Path, metavar="FOLDER", help="with --scripts: folder of the checkouts")
    args = begin(parser)
    if args.scripts:
        judge(scripts(args.repositories, quick=args.quick))
    else:
        judge(models(quick=args.quick))


if __name__ == "__main__":
    main()
