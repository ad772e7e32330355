"""``raypar work``: weights, work by type of layer and the least time, or one clear sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from raypar.cli.app import app
from raypar.report.listings import scaled

PEAK = ("--peak-tflops", "1")


def told(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    done = CliRunner().invoke(app, ["work", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_work_of_a_small_network_is_shown() -> None:
    # 64-1024-1024-10: 1,124,352 MACs forward and by weights, less 65,536 of the first layer by inputs
    code, out, _ = told("digits", *PEAK)
    rows = [line.split() for line in out.splitlines()]
    assert code == 0 and "digits: 1,126,410 weights" in out
    assert ["fully", "connected", "1.12M", "1.12M", "1.06M"] in rows
    assert ["activation", "2.05k", "0", "2.05k"] in rows
    assert "3.31 MMAC = 6.62 MFLOP a sample, 2.94 times the forward pass" in out
    assert "peak: 1.00 TFLOP/s (as given)" in out


def test_the_lectures_estimate_for_imagenet_is_a_night() -> None:
    # The lecture's 6.7 h are of the first ResNet-50, 3.9 GMAC; torchvision's has its strides elsewhere, 4.09 GMAC.
    options = ("--set", "architecture=resnet50", "--set", "image_size=224", "--set", "num_classes=1000")
    code, out, _ = told("resnet", *options, "--epochs", "90", "--samples", "1281167", "--peak-tflops", "112")
    assert code == 0 and "25,557,032 weights" in out and "4.09G" in out
    assert "training, 90 epochs of 1,281,167 samples: 2.80 EFLOP, at least 6 h 57 min" in out


def test_epochs_samples_and_batch_are_the_workloads_unless_given() -> None:
    out = told("digits", *PEAK)[1]
    assert "an iteration of 64 samples" in out and "training, 8 epochs of 1,536 samples" in out
    out = told("digits", *PEAK, "--set", "epochs=2", "--set", "num_samples=100")[1]
    assert "training, 2 epochs of 100 samples" in out
    out = told("digits", *PEAK, "--epochs", "3", "--samples", "5000", "--batch-size", "4096")[1]
    assert "an iteration of 4,096 samples" in out and "training, 3 epochs of 5,000 samples" in out


def test_the_peak_is_measured_with_the_threads_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(device: torch.device, dtype: torch.dtype, num_threads: int) -> float:
        asked.append((device.type, dtype, num_threads))
        return 2e11

    monkeypatch.setattr("raypar.train.flops.peak_flops", measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, _ = told("digits", "--set", "num_threads=3", "--set", "num_workers=2", "--set", "precision=bf16")
    assert code == 0 and asked == [("cpu", torch.bfloat16, 6)]
    assert "peak: 200 GFLOP/s (measured: matrix products, bf16, cpu, 6 threads)" in out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("digit",), "did you mean 'digits'"),
        (("digits", "--set", "hidden=3"), "unknown option"),
        (("digits", "--set", "hidden_size=3,4"), "several values of hidden_size"),
        (("digits", "--set", "hidden_size=-3"), "negative dimension"),
        (("digits", "--peak-tflops", "0"), "must be greater than 0"),
        (("digits", "--peak-tflops", "nan"), "must be greater than 0"),
        (("digits", "--epochs", "0"), "--epochs"),
        (("resnet", "--set", "architecture=alexnet", "--set", "image_size=32", *PEAK), "can't take images"),
        (("resnet", "--set", "architecture=resnet5", *PEAK), "did you mean"),
    ],
)
def test_a_mistake_is_told_with_exit_code_2(arguments: tuple[str, ...], why: str) -> None:
    code, out, err = told(*arguments)
    assert code == 2 and why in err and not out and "Traceback" not in err


def test_data_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path))
    code, _, err = told("resnet", "--set", "source=folder", "--set", "loader=dataloader")
    assert code == 2 and "no such folder" in err


def test_a_device_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = told("digits", "--set", "device=cuda")
    assert code == 2 and "this machine has no cuda" in err and "--peak-tflops" in err


@pytest.mark.parametrize(
    ("value", "text"),
    [(5, "5.00 MAC"), (1500, "1.50 kMAC"), (4.09e9, "4.09 GMAC"), (112e12, "112 TMAC"), (2.8e18, "2.80 EMAC")],
)
def test_large_numbers_have_a_prefix(value: float, text: str) -> None:
    assert scaled(value, "MAC") == text
