"""scikit-learn's embedded 1,797 handwritten digits of 8x8 pixels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import DataError
from raypar.study.workload import Config, Data, Split, Workload, one_of
from raypar.workloads.activations import ACTIVATIONS, perceptron

if TYPE_CHECKING:
    from torch import Tensor, nn

NUM_TRAIN = 1_536  # 24 batches of 64, 2 of 768: no short last batch for the usual sizes
NUM_PIXELS = 64
SPLIT_SEED = 0


def build(config: Config) -> nn.Module:
    """Build a perceptron of 64-hidden-hidden-10."""
    return perceptron([NUM_PIXELS, config["hidden_size"], config["hidden_size"], 10], config["activation"])


def data(_: Config) -> Data:
    """Return inputs of shape ``(num_samples, 64)``, uint8 from 0 to 16, in a fixed stratified split."""
    import gzip

    import numpy as np
    import torch

    with gzip.open(embedded_csv("digits.csv.gz"), "rt") as stream:
        table = np.loadtxt(stream, delimiter=",", dtype=np.uint8)
    labels = table[:, NUM_PIXELS].astype(np.int64)
    # Each class is shuffled, then the classes are interleaved evenly: every prefix is stratified.
    random = np.random.RandomState(SPLIT_SEED)  # its stream is frozen, unlike default_rng's
    position = np.empty(len(labels))
    for label in range(10):
        members = random.permutation(np.flatnonzero(labels == label))
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    order = np.argsort(position, kind="stable")
    inputs, targets = torch.from_numpy(table[order, :NUM_PIXELS]), torch.from_numpy(labels[order])
    return Data(
        train=Split(inputs[:NUM_TRAIN], targets[:NUM_TRAIN]),
        val=Split(inputs[NUM_TRAIN:], targets[NUM_TRAIN:]),
        transform=scaled,
    )


def scaled(pixels: Tensor) -> Tensor:
    """Scale 0 … 16 to float32 0 … 1."""
    import torch

    return pixels.to(torch.float32).div_(16)


def embedded_csv(name: str) -> Path:
    """Return the path of a data file of scikit-learn without importing it: that costs every trial a second."""
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "datasets", "data", name)
        if path.is_file():
            return path
    raise DataError(f"scikit-learn's {name} is not installed", hint="pip install scikit-learn")


digits = Workload(
    name="digits",
    model=build,
    data=data,
    num_train_samples=NUM_TRAIN,
    options={"hidden_size": 1024, "activation": one_of("relu", ACTIVATIONS)},
    defaults={"optimizer": "momentum", "lr": 0.1, "batch_size": 64, "epochs": 8},
    prepare=lambda _: embedded_csv("digits.csv.gz"),
    description="multi-layer perceptron of two hidden layers, 64-1024-1024-10",
    dataset="scikit-learn's 8x8 digits, 1,536 + 261, embedded",
)
