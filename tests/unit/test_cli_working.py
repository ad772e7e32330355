"""``raypar model work``: weights, operations and the least time, and refusals."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from command import joined, raypar, refused

from raypar import gpus

PEAK = " --peak-tflops 1"
STUDIES = Path(__file__).parents[2] / "studies"


# 64-1024-1024-10: 1,124,352 MACs forward and by weights, less 65,536 of the first layer by inputs.
# The lecture's 6.7 h for ImageNet are of the first ResNet-50, 3.9 GMAC; torchvision's has its strides elsewhere.
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "digits" + PEAK,
            "digits: 1,126,410 weights; input of one sample: 64|fully connected 1.12M 1.12M 1.06M|"
            "activation 2.05k 0 2.05k|3.31 MMAC = 6.62 MFLOP per sample, "
            "2.94 times the forward pass|peak: 1.00 TFLOP/s (as given)|an iteration of 64 samples|"
            "training, 8 epochs of 1,536 samples",
        ),
        (
            "resnet --set architecture=resnet50 --set image_size=224 --set num_classes=1000 --epochs 90 "
            "--samples 1281167 --peak-tflops 112",
            "25,557,032 weights; input of one sample: 3 × 224 × 224|4.09G|training, 90 epochs of 1,281,167 samples: "
            "2.80 EFLOP, at least 6 h 57 min",
        ),
        ("digits --set epochs=2 --set num_samples=100" + PEAK, "training, 2 epochs of 100 samples"),
        (
            "digits --epochs 3 --samples 5000 --batch-size 4096" + PEAK,
            "an iteration of 4,096 samples|training, 3 epochs of 5,000 samples",
        ),
        (f"{STUDIES}/iris_threads.py" + PEAK, "iris: 403 weights; input of one sample: 4|training, 100 epochs of 120"),
    ],
    ids=["digits", "imagenet", "settings", "flags", "study file"],
)
@pytest.mark.usefixtures("modules_as_they_were")
def test_the_work_of_a_network_and_its_training_is_shown(arguments, words):
    code, out, _ = raypar("model", "work", *arguments.split())
    assert code == 0 and [word for word in words.split("|") if word not in joined(out)] == []


def test_the_peak_is_measured_with_the_threads_of_the_config(monkeypatch):
    peak_flops = Mock(return_value=2e11)
    monkeypatch.setattr("raypar.train.flops.peak_flops", peak_flops)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = "--set=num_threads=3", "--set=num_workers=2", "--set=precision=bf16"
    code, out, _ = raypar("model", "work", "digits", *flags)
    assert code == 0 and peak_flops.mock_calls == [call(torch.device("cpu"), torch.bfloat16, 6)]
    assert "peak: 200 GFLOP/s (measured: matrix products, bf16, cpu, 6 threads)" in out


@pytest.mark.parametrize(
    ("more", "problem", "device"),
    [
        ([], None, "cuda"),
        (["--set=num_workers=2"], None, "cpu"),  # as `raypar study` does
        ([], "the installed torch is too old", "cpu"),
        (["--set=device=cpu"], None, "cpu"),
    ],
)
def test_the_peak_is_that_of_the_studys_device(more, problem, device, monkeypatch):
    peak_flops = Mock(return_value=2e11)
    monkeypatch.setattr("raypar.train.flops.peak_flops", peak_flops)
    monkeypatch.setattr(gpus, "all_gpus", lambda: (gpus.Gpu(0, "GPU-0", "a GPU", ""),))  # stands in for NVML
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setattr(gpus, "torch_problem", lambda _: problem)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "raypar.train.precision.numerics_of", lambda *_: SimpleNamespace(mixed=None, dtype=torch.float32)
    )
    code, out, _ = raypar("model", "work", "digits", *more)
    assert code == 0 and peak_flops.mock_calls[0].args[0] == torch.device(device) and f" {device}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("digits --set hidden=3", "unknown option"),
        ("digits --set hidden_size=-3", "negative dimension"),
        ("digits --set device=cuda", "this machine has no cuda → use --set device=cpu, or give a peak: --peak-tflops"),
        ("resnet --set architecture=alexnet --set image_size=32" + PEAK, "can't take images"),
        ("resnet --set architecture=resnet5" + PEAK, "did you mean"),
        ("resnet --set source=folder --set loader=dataloader", "no such folder"),
    ],
)
def test_a_mistake_is_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(message, "model", "work", *arguments.split())
