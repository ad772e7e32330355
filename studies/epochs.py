"""How many passes over MNIST are worth their time, on one worker?

After the document "Final presentation on parallelising neural-network training", which found that past a sweet spot
more epochs do more harm than good. Expect the time to grow with the epochs in proportion, and the accuracy to level off
after about ten of them: the network is too small to lose much by more.
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
