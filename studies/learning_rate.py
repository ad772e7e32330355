"""Which learning rate reaches the highest accuracy on MNIST in three epochs of SGD?

Repeats the learning-rate sweep of "Final presentation on parallelising neural-network training", which reports a GPU
more than 2x and four loader processes about 4x as fast as the CPU alone, at similar accuracies. Expect the same runtime
at every rate, and an accuracy that peaks around 0.1.
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
