"""What does an optimizer cost in time, and bring in accuracy, on MNIST at a large and a small learning rate?

After the document "Final presentation on parallelising neural-network training", which found accuracies that are alike,
and a GPU about 10 times as fast as the CPU with one optimizer and more than 6 times with another. Expect Adam
and RMSprop to take somewhat longer a step than SGD. At a rate of 0.1 these two fail, at 0.001 it is plain SGD that is
slow to learn; each at its own rate, all come to about 97 %. The document's GPU: `--set device=cuda`.
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
