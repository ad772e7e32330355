"""scikit-learn's embedded 150 iris flowers, with a network of 4-50-3."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from raypar.study.workload import Config, Data, Split, Workload, one_of, whole_number
from raypar.workloads.activations import ACTIVATIONS, perceptron
from raypar.workloads.digits import embedded_csv

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

NUM_FEATURES, NUM_CLASSES = 4, 3
NUM_PER_CLASS, NUM_TRAIN_PER_CLASS = 50, 40
SPLIT_SEED = 0


def build(config: Config) -> nn.Module:
    """Build a perceptron of 4-hidden-3."""
    return perceptron([NUM_FEATURES, config["hidden_size"], NUM_CLASSES], config["activation"])


def data(config: Config) -> Data:
    """Return inputs of shape ``(num_samples, 4)``, float32, standardised by the training split.

    A stratified split into 120 training and 30 validation flowers, drawn by `split_seed`.
    """
    import numpy as np
    import torch

    table = np.loadtxt(embedded_csv("iris.csv"), delimiter=",", skiprows=1)
    features, labels = table[:, :NUM_FEATURES], table[:, NUM_FEATURES].astype(np.int64)
    random = np.random.RandomState(config["split_seed"])  # its stream is frozen, unlike default_rng's
    shuffled = [random.permutation(np.flatnonzero(labels == label)) for label in range(NUM_CLASSES)]
    # One flower of each class in turn: every prefix is stratified.
    order = np.stack(shuffled, axis=1).reshape(-1)
    num_train = NUM_TRAIN_PER_CLASS * NUM_CLASSES
    train = features[order[:num_train]]
    mean, std = train.mean(axis=0), train.std(axis=0)
    scaled = standardised(features[order], mean, std, num_threads=config["preprocess_threads"])
    inputs, targets = torch.from_numpy(scaled.astype(np.float32)), torch.from_numpy(labels[order])
    return Data(Split(inputs[:num_train], targets[:num_train]), Split(inputs[num_train:], targets[num_train:]))


def standardised(
    features: NDArray[np.float64], mean: NDArray[np.float64], std: NDArray[np.float64], *, num_threads: int
) -> NDArray[np.float64]:
    """Standardise rows of shape ``(num_samples, num_features)``, on `num_threads` threads (0: on the caller's)."""
    import numpy as np

    if not num_threads:
        return (features - mean) / std
    with ThreadPoolExecutor(num_threads) as pool:
        return np.concatenate(list(pool.map(lambda rows: (rows - mean) / std, np.array_split(features, num_threads))))


iris = Workload(
    name="iris",
    model=build,
    data=data,
    num_train_samples=NUM_TRAIN_PER_CLASS * NUM_CLASSES,
    options={
        "hidden_size": 50,
        "activation": one_of("relu", ACTIVATIONS),
        "preprocess_threads": whole_number(0, "threads that standardise the features; 0: the worker's own", at_least=0),
        "split_seed": whole_number(SPLIT_SEED, "which flowers are held out", at_least=0),
    },
    defaults={"optimizer": "adam", "lr": 0.01, "batch_size": 24, "epochs": 100},
    prepare=lambda _: embedded_csv("iris.csv"),
    description="150 iris flowers, embedded, with a multi-layer perceptron, 4-50-3",
    dataset="scikit-learn's iris, 120 + 30, embedded",
)
