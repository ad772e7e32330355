"""What does each optimizer cost in time, and gain in accuracy, on MNIST at a large and a small learning rate?

Repeats the optimizer sweep of "Final presentation on parallelising neural-network training", which reports similar
accuracies and a GPU 6 to 10 times as fast as the CPU, depending on the optimizer. Expect Adam and RMSprop to take
slightly longer per step than SGD. At a learning rate of 0.1 these two fail; at 0.001 plain SGD learns slowly. Each at
its best rate, all reach about 97 %. With the document's GPU: `--set device=cuda`.
"""

from raypar import Study, grid
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={"optimizer": grid("sgd", "momentum", "adagrad", "rmsprop", "adam"), "lr": grid(0.1, 0.001)},
    baseline={"optimizer": "sgd"},  # the reference, at the same learning rate
    num_repeats=3,
    config={"batch_size": 64, "epochs": 3},
)
