"""Layers of a network: gradients in bytes, shares of the counted work, and their order."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from raypar import workloads
from raypar.errors import DataError, RayparError
from raypar.predict.layers import count_layers, is_one_layer, layer_costs
from raypar.predict.step_model import one_layer
from raypar.study.options import resolve
from raypar.train.flops import count_work


def counted(model, *shape, **config):
    return count_layers(model, torch.zeros(2, *shape), config)


def test_the_first_layer_needs_no_gradient_by_inputs():
    # 4 x 10 and 10 x 3 MACs: forward 70, backward 40 + 2 x 30.
    first, last = counted(nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 3)), 4)
    assert (first.name, last.name) == ("0", "2")
    assert (first.num_gradient_bytes, last.num_gradient_bytes) == (4 * 50, 4 * 33)
    assert (first.num_gradients, last.num_gradients) == (2, 2)
    assert [first.forward_share, first.backward_share] == pytest.approx([40 / 170, 40 / 170])
    assert [last.forward_share, last.backward_share] == pytest.approx([30 / 170, 60 / 170])


@pytest.mark.parametrize(("precision", "num_bytes"), [("fp32", 4), ("bf16", 4), ("fp64", 8)])
def test_normalisation_has_gradients_and_no_counted_work(precision, num_bytes):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))
    _, norm, _ = counted(model, 3, 9, 9, precision=precision)
    assert (norm.num_gradient_bytes, norm.forward_share, norm.backward_share) == (num_bytes * 16, 0, 0)
    with pytest.raises(RayparError, match="no weight to train"):
        counted(nn.ReLU(), 4)


class Backwards(nn.Module):
    """Layers that are used in another order than they are defined."""

    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Linear(5, 2), nn.Linear(3, 5)

    def forward(self, x):
        return self.second(self.first(x))


def test_layers_are_in_running_order_and_the_model_is_unchanged():
    model = nn.Sequential(Backwards(), nn.Dropout(0.5)).eval()
    assert [layer.name for layer in counted(model, 3)] == ["0.first", "0.second"]
    assert not model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_shared_weights_are_ready_with_their_first_layer():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert [layer.num_gradient_bytes for layer in counted(model, 4)] == [4 * 20, 4 * 4]


def test_frozen_layers_send_nothing_and_stop_the_backward_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    first, last = counted(model, 4)
    assert (first.num_gradient_bytes, first.backward_share) == (0, 0)
    assert last.backward_share == pytest.approx(1 / 3)


def test_attention_has_the_weights_that_it_does_not_call():
    model = nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0))
    layers = counted(model, 5, 3)
    assert sum(c.num_gradient_bytes for c in layers) == sum(4 * p.numel() for p in model.parameters())
    work = count_work(model, torch.zeros(2, 5, 3))
    assert sum(c.forward_share for c in layers) == pytest.approx(work.macs_forward / work.macs, rel=0.02)


def test_shares_add_up_to_the_counted_work_of_a_resnet():
    config = resolve(workloads.resnet, {"image_size": 32})
    layers = layer_costs(workloads.resnet, config)
    assert sum(c.forward_share + c.backward_share for c in layers) == pytest.approx(1)
    assert layers[0].name == "conv1" and layers[-1].name == "fc"
    with torch.device("meta"):
        work = count_work(workloads.resnet.model(config), torch.zeros(2, 3, 32, 32))
    assert sum(c.num_gradient_bytes for c in layers) == 4 * work.num_parameters
    assert sum(c.forward_share for c in layers) == pytest.approx(work.macs_forward / work.macs)


def test_without_data_only_the_size_is_known():
    def absent(_):
        raise DataError("no data here")

    layers = layer_costs(replace(workloads.digits, data=absent), resolve(workloads.digits, {"hidden_size": 16}))
    assert is_one_layer(layers)
    assert layers == one_layer(4 * (64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10))
    assert not is_one_layer(layer_costs(workloads.digits, resolve(workloads.digits, {})))


def test_a_network_that_can_not_be_built_is_refused():
    def broken(_):
        raise ValueError("no such width")

    with pytest.raises(RayparError, match="can't be built: no such width") as caught:
        layer_costs(replace(workloads.digits, model=broken), {})
    assert caught.value.hint and "--parameters" in caught.value.hint
