"""How many epochs of MNIST are worth their time, on one worker?

Repeats the epoch sweep of "Final presentation on parallelising neural-network training", which reports a sweet spot
beyond which more epochs lower the accuracy. Expect the time to grow linearly and the accuracy to level off after about
ten epochs; the network is too small to overfit much.
"""

from raypar import Study, grid
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={"epochs": grid(1, 3, 5, 10, 20)},
    baseline={"epochs": 3},  # the reference point: SGD, learning rate 0.1
    num_repeats=3,
    config={"optimizer": "sgd", "lr": 0.1, "batch_size": 64},
)
