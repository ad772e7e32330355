"""Work of a network, compared with counts by hand for each layer and published counts of well-known networks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raypar.errors import RayparError
from raypar.study.options import resolve
from raypar.train.flops import LayerWork, count_work, peak_flops, work_of
from raypar.workloads import digits, resnet

sizes = st.integers(1, 9)


def counted(model, *shape):
    """Forward, by weights and by inputs of each type of layer, for inputs of a sample's shape."""
    layers = count_work(model, torch.zeros(2, *shape)).layers
    return {layer.kind: (layer.forward, layer.by_weights, layer.by_inputs) for layer in layers}


@given(sizes, sizes, sizes)
def test_a_fully_connected_layer_takes_inputs_times_outputs_for_each_gradient(a, b, c):
    assert counted(nn.Linear(a, b), a) == {"fully connected": (a * b, a * b, 0)}
    second = (a * b + b * c, a * b + b * c, b * c)  # the first layer needs no gradient by inputs
    assert counted(nn.Sequential(nn.Linear(a, b), nn.Linear(b, c)), a) == {"fully connected": second}


@given(sizes, sizes, st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
def test_a_convolution_takes_filters_times_outputs(c_in, c_out, kernel, stride, groups):
    c_in, c_out, side = c_in * groups, c_out * groups, 7
    after = (side - kernel) // stride + 1
    macs = c_out * (c_in // groups) * kernel**2 * after**2
    layer = nn.Conv2d(c_in, c_out, kernel, stride=stride, groups=groups)
    assert counted(layer, c_in, side, side) == {"convolution": (macs, macs, 0)}
    second = nn.Sequential(nn.Conv2d(1, c_in, 1), layer)
    first = c_in * side**2
    assert counted(second, 1, side, side) == {"convolution": (first + macs, first + macs, macs)}


N = 4 * 8 * 8  # elements that the layers below get
LAYERS = {
    "pooling": [
        (nn.MaxPool2d(3, stride=2), 4 * 3 * 3 * 9, 0, 4 * 3 * 3),
        (nn.MaxPool2d((2, 4)), 4 * 4 * 2 * 8, 0, 4 * 4 * 2),
        (nn.AvgPool2d(2), N, 0, N),
        (nn.AdaptiveAvgPool2d(1), N, 0, 0),
    ],
    "normalisation": [(nn.BatchNorm2d(4), 4 * N, 3 * N, 2 * N), (nn.LayerNorm((4, 8, 8)), 4 * N, 3 * N, 2 * N)],
    "activation": [
        *((layer(), N, 0, N) for layer in (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh)),
        *((layer, N, 0, N) for layer in (nn.Hardswish(), nn.ReLU6(), nn.ReLU(inplace=True))),
    ],
}


@pytest.mark.parametrize(
    ("kind", "layer", "counts"),
    [(kind, layer, counts) for kind, rows in LAYERS.items() for layer, *counts in rows],
    ids=str,
)
def test_other_layers_take_operations_per_element(kind, layer, counts):
    assert counted(nn.Sequential(nn.Conv2d(1, 4, 1), layer), 1, 8, 8)[kind] == tuple(counts)


def test_the_layer_after_an_embedding_needs_a_gradient_by_inputs_and_frozen_weights_need_none():
    model = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(24, 3))
    work = count_work(model, torch.zeros(2, 4, dtype=torch.int64))
    assert work.layers == (LayerWork("fully connected", 72, 72, 72),) and work.num_parameters == 60 + 75
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    work = count_work(model, torch.zeros(2, 3))
    assert work.layers == (LayerWork("fully connected", 32, 20, 0),) and work.num_parameters == 25


def test_counts_are_per_sample_and_leave_mode_and_gradients_of_the_model_unchanged():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval()
    assert count_work(model, torch.zeros(2, 3, 8, 8)) == count_work(model, torch.zeros(7, 3, 8, 8))
    assert not model.training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("architecture", "millions", "least", "most"),
    [("alexnet", 61.0, 714e6, 724e6), ("vit_b_32", 88.2, 4.3e9, 4.5e9)],  # resnet50: test_cli_working
)
def test_published_networks_have_the_published_work(architecture, millions, least, most):
    config = resolve(resnet, {"architecture": architecture, "image_size": 224, "num_classes": 1000})
    work = work_of(resnet, config)
    assert work.num_parameters == pytest.approx(millions * 1e6, rel=0.005)
    assert least <= work.macs_forward <= most
    assert 2.9 < work.macs / work.macs_forward < 3 and work.flop == 2 * work.macs


def test_a_network_that_reads_values_is_counted_on_the_cpu():
    class Looking(nn.Linear):
        def forward(self, x):
            assert float(x.detach().sum()) >= 0
            return super().forward(x)

    looking = replace(digits, model=lambda config: Looking(64, 10))
    assert work_of(looking, resolve(looking, {})).macs_forward == 640


@pytest.mark.parametrize("layer", [nn.LSTM(64, 4), nn.ReLU(), nn.Linear(63, 10)], ids=["tuple", "no weight", "size"])
def test_a_network_that_can_not_be_counted_or_take_its_samples_is_reported(layer):
    wrong = replace(digits, model=lambda config: layer)
    message = "can't be built, or can't take its samples" if isinstance(layer, nn.Linear) else None
    with pytest.raises(RayparError, match=message):
        work_of(wrong, resolve(wrong, {}))


def test_the_peak_is_measured_and_torchs_threads_are_left_as_they_were(monkeypatch):
    monkeypatch.setattr("raypar.train.flops.BUDGET_S", 0.05)
    before = torch.get_num_threads()
    assert 1e8 < peak_flops(torch.device("cpu"), torch.float32, before + 1) < 1e14
    assert torch.get_num_threads() == before
