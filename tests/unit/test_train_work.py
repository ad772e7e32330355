"""The work of a network is as computed by hand, layer by layer, and as published of well-known networks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raypar.errors import RayparError
from raypar.study.options import resolve
from raypar.train.flops import LayerWork, Work, count_work, peak_flops, work_of
from raypar.workloads import digits, resnet, tweets

sizes = st.integers(1, 9)


def counted(model: nn.Module, *shape: int) -> dict[str, tuple[int, int, int]]:
    """Forward, by weights and by inputs of each type of layer, for inputs of a sample's shape."""
    layers = count_work(model, torch.zeros(2, *shape)).layers
    return {layer.kind: (layer.forward, layer.by_weights, layer.by_inputs) for layer in layers}


def of_network(architecture: str, image_size: int = 224) -> Work:
    return work_of(resnet, resolve(resnet, {"architecture": architecture, "image_size": image_size, **THOUSAND}))


THOUSAND: dict[str, Any] = {"num_classes": 1000}


@given(sizes, sizes, sizes)
def test_a_fully_connected_layer_takes_inputs_times_outputs_for_each_gradient(a: int, b: int, c: int) -> None:
    assert counted(nn.Linear(a, b), a) == {"fully connected": (a * b, a * b, 0)}
    second = (a * b + b * c, a * b + b * c, b * c)  # the first layer needs no gradient by inputs
    assert counted(nn.Sequential(nn.Linear(a, b), nn.Linear(b, c)), a) == {"fully connected": second}


@given(sizes, sizes, st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
def test_a_convolution_takes_filters_times_outputs(
    c_in: int, c_out: int, kernel: int, stride: int, groups: int
) -> None:
    c_in, c_out, side = c_in * groups, c_out * groups, 7
    after = (side - kernel) // stride + 1
    macs = c_out * (c_in // groups) * kernel**2 * after**2
    layer = nn.Conv2d(c_in, c_out, kernel, stride=stride, groups=groups)
    assert counted(layer, c_in, side, side) == {"convolution": (macs, macs, 0)}
    second = nn.Sequential(nn.Conv2d(1, c_in, 1), layer)
    first = c_in * side**2
    assert counted(second, 1, side, side) == {"convolution": (first + macs, first + macs, macs)}


def test_the_convolution_that_everyone_reckons_by_hand() -> None:
    # 3 x 3 filters from 64 to 128 maps of 56 x 56, padded
    macs = 128 * 64 * 3 * 3 * 56 * 56
    model = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(inplace=True))
    elements = 128 * 56 * 56
    assert counted(model, 64, 56, 56) == {"convolution": (macs, macs, 0), "activation": (elements, 0, elements)}


@pytest.mark.parametrize(
    ("pool", "forward", "backward"),
    [
        (nn.MaxPool2d(3, stride=2), 4 * 3 * 3 * 9, 4 * 3 * 3),
        (nn.MaxPool2d((2, 4)), 4 * 4 * 2 * 8, 4 * 4 * 2),
        (nn.AvgPool2d(2), 4 * 4 * 4 * 4, 4 * 4 * 4 * 4),
        (nn.AdaptiveAvgPool2d(1), 4 * 8 * 8, 0),
    ],
)
def test_pooling_takes_its_window_per_output(pool: nn.Module, forward: int, backward: int) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), pool)
    assert counted(model, 1, 8, 8)["pooling"] == (forward, 0, backward)


@pytest.mark.parametrize("name", ["BatchNorm2d", "LayerNorm"])
def test_normalisation_takes_nine_operations_per_element(name: str) -> None:
    norm = nn.BatchNorm2d(4) if name == "BatchNorm2d" else nn.LayerNorm((4, 5, 5))
    n = 4 * 5 * 5
    model = nn.Sequential(nn.Conv2d(1, 4, 1), norm)
    assert counted(model, 1, 5, 5)["normalisation"] == (4 * n, 3 * n, 2 * n)
    assert counted(norm, 4, 5, 5) == {"normalisation": (4 * n, 3 * n, 0)}


class Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


@pytest.mark.parametrize(
    "layer",
    [
        Functional(),
        nn.ReLU(),
        nn.LeakyReLU(),
        nn.ELU(),
        nn.GELU(),
        nn.SiLU(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.Hardswish(),
        nn.ReLU6(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_an_activation_takes_one_operation_per_element(layer: nn.Module) -> None:
    assert counted(nn.Sequential(nn.Linear(3, 7), layer), 3)["activation"] == (7, 0, 7)


def test_attention_is_two_products_of_activations_and_four_backward() -> None:
    width, length = 8, 5
    layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=16, batch_first=True, dropout=0.0)
    work = counted(nn.Sequential(nn.Linear(3, width), layer), length, 3)
    product = length * length * width
    dense = length * (3 * width * width + width * width + 2 * width * 16)
    first = length * 3 * width
    assert work["attention"] == (2 * product, 0, 4 * product)
    assert work["fully connected"] == (dense + first, dense + first, dense)


def test_words_come_in_as_numbers_and_the_layer_behind_them_needs_its_gradient_by_inputs() -> None:
    model = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(24, 3))
    work = count_work(model, torch.zeros(2, 4, dtype=torch.int64))
    assert work.layers == (LayerWork("fully connected", 72, 72, 72),) and work.num_parameters == 60 + 75


def test_frozen_weights_take_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    work = count_work(model, torch.zeros(2, 3))
    assert work.layers == (LayerWork("fully connected", 32, 20, 0),) and work.num_parameters == 25


def test_the_counts_are_of_a_sample_however_many_there_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    assert count_work(model, torch.zeros(2, 3, 8, 8)) == count_work(model, torch.zeros(7, 3, 8, 8))


def test_a_model_stays_in_its_mode_and_gets_no_gradients() -> None:
    model = nn.Linear(3, 4).eval()
    count_work(model, torch.zeros(2, 3))
    assert not model.training and model.weight.grad is None


@pytest.mark.parametrize("layer", [nn.LSTM(3, 4), nn.ReLU()], ids=["tuple", "no weight"])
def test_what_can_not_be_counted_is_told(layer: nn.Module) -> None:
    with pytest.raises(RayparError):
        count_work(layer, torch.zeros(2, 5, 3))


@pytest.mark.parametrize(
    ("architecture", "millions", "least", "most"),
    [("resnet50", 25.5, 3.9e9, 4.1e9), ("alexnet", 61.0, 714e6, 724e6)],
)
def test_published_networks_have_the_published_work(
    architecture: str, millions: float, least: float, most: float
) -> None:
    work = of_network(architecture)
    assert work.num_parameters == pytest.approx(millions * 1e6, rel=0.005)
    assert least <= work.macs_forward <= most
    assert work.macs_by_weights == work.macs_forward
    assert 1.9 < (work.macs_by_weights + work.macs_by_inputs) / work.macs_forward < 2


@pytest.mark.parametrize("architecture", ["vit_b_32", "mnasnet0_5", "regnet_x_400mf", "googlenet"])
def test_other_architectures_are_counted_too(architecture: str) -> None:
    work = of_network(architecture)
    assert work.macs_forward > 3e7 and work.macs < 3.1 * work.macs_forward


def test_a_network_that_looks_at_numbers_is_counted_on_the_cpu() -> None:
    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert float(x.detach().sum()) >= 0
            return super().forward(x)

    looking = replace(digits, model=lambda config: Looking(64, 10))
    assert work_of(looking, resolve(looking, {})).macs_forward == 640


def test_a_network_that_can_not_take_its_samples_is_told() -> None:
    wrong = replace(digits, model=lambda config: nn.Linear(63, 10))
    with pytest.raises(RayparError, match="digits: the network can't be built, or can't take its samples"):
        work_of(wrong, resolve(wrong, {}))


def test_a_network_over_words_has_its_convolutions_counted() -> None:
    assert tweets.model is not None
    words = torch.zeros(2, 32, dtype=torch.int64)
    work = count_work(tweets.model(resolve(tweets, {"vocabulary_size": 100})), words)
    macs = sum(128 * 128 * width * (33 - width) for width in (3, 4, 5))
    assert work.layers[0] == LayerWork("convolution", macs, macs, macs)


def test_the_least_time_is_that_of_the_lecture() -> None:
    # 11.7 GMAC forward and backward, 90 epochs of 1.28 million images at 112 TFLOP/s: 6.7 hours
    layers = LayerWork("convolution", 3_900_000_000, 3_900_000_000, 3_900_000_000), LayerWork("activation", 5, 0, 5)
    work = Work(25_500_000, layers)
    assert work.min_time_s(90 * 1_280_000, 112e12) / 3600 == pytest.approx(6.7, abs=0.05)
    assert work.flop == 2 * 11_700_000_000  # other operations than multiply-accumulates don't count


def test_the_peak_is_measured_and_torchs_threads_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypar.train.flops.BUDGET_S", 0.05)
    before = torch.get_num_threads()
    assert 1e8 < peak_flops(torch.device("cpu"), torch.float32, before + 1) < 1e14
    assert torch.get_num_threads() == before
