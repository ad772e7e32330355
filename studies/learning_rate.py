"""Which learning rate learns most on MNIST in three epochs of SGD?

After the document "Final presentation on parallelising neural-network training", which found a GPU more than 2 times as
fast as the CPU here, four loader processes about 4 times as fast as none, and accuracies that are alike. Expect the
same time at every rate, as it changes no work, and an accuracy that rises up to 0.1 and falls off on either side.
"""

from raypar import Study, grid
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={"lr": grid(0.001, 0.01, 0.05, 0.1, 0.5, 1.0)},
    baseline={"lr": 0.1},
    num_repeats=3,
    config={"optimizer": "sgd", "batch_size": 64, "epochs": 3},
)
