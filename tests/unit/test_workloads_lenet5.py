"""LeNet-5 has the weights and connections that the paper gives, and as it is usually drawn the usual ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from raypar.study.options import resolve
from raypar.train.flops import count_work
from raypar.workloads.lenet5 import QUADRUPLES, TRIPLES, lenet5


def network(**chosen: Any) -> nn.Module:
    assert lenet5.model is not None
    return lenet5.model(resolve(lenet5, chosen))


def num_weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_published_network_has_60000_weights_besides_its_last_layer() -> None:
    layers = [num_weights(layer) for layer in network() if num_weights(layer)]  # type: ignore[attr-defined]
    assert layers == [156, 12, 1_516, 32, 48_120, 10_164, 840]
    assert sum(layers[:-1]) == 60_000


def test_the_published_connections_are_the_macs_with_pooling_and_biases() -> None:
    work = count_work(network(), torch.zeros(2, 1, 28, 28))
    pooling = 5 * (6 * 14 * 14 + 16 * 5 * 5)
    biases = 6 * 28 * 28 + 16 * 10 * 10 + 120 + 84
    assert work.macs_forward == 326_520
    assert work.macs_forward + pooling + biases == 340_908


def test_the_usual_drawing_has_its_usual_figures() -> None:
    work = count_work(network(connections="full"), torch.zeros(2, 1, 28, 28))
    assert work.num_parameters == 61_706 and work.macs_forward == 416_520


def test_the_connections_of_the_third_layer_are_the_papers() -> None:
    seen = Counter(number for group in (*TRIPLES, *QUADRUPLES, range(6)) for number in group)
    assert seen == dict.fromkeys(range(6), 10)
    assert len({frozenset(group) for group in (*TRIPLES, *QUADRUPLES)}) == 15


def test_a_map_of_the_third_layer_depends_on_its_own_maps_only() -> None:
    layer = network()[5]  # type: ignore[index]
    maps = torch.randn(1, 6, 14, 14, requires_grad=True)
    found = layer(maps)
    assert found.shape == (1, 16, 10, 10)
    for number, group in enumerate((*TRIPLES, *QUADRUPLES, tuple(range(6)))):
        (grad,) = torch.autograd.grad(found[0, number].sum(), maps, retain_graph=True)
        assert {i for i in range(6) if grad[0, i].abs().sum() > 0} == set(group)


@pytest.mark.parametrize("connections", ["partial", "full"])
def test_it_gives_ten_scores_an_image_and_can_learn(connections: str) -> None:
    torch.manual_seed(0)
    model, x, y = network(connections=connections), torch.randn(16, 1, 28, 28), torch.arange(16) % 10
    assert model(x).shape == (16, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_another_activation_can_be_had() -> None:
    kinds = Counter(type(layer) for layer in network(activation="relu", connections="full"))  # type: ignore[attr-defined]
    assert kinds[nn.ReLU] == 4 and nn.Tanh not in kinds
