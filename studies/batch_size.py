"""How batch size trades runtime against accuracy on MNIST, on one worker and on two.

After the document "Final presentation on parallelising neural-network training", which found four loader processes
about 3 times as fast as none in this sweep, and accuracies that are alike (`loader_workers.py` asks that). Expect the
runtime to fall with the batch size and accuracy with it, at a learning rate that stays the same. A second
worker costs this small network more than it brings: gradients are exchanged after every step, and a step takes a
fraction of a millisecond. The loss shrinks as the batch grows.
"""

from raypar import Study, grid
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={"batch_size": grid(32, 64, 128, 256, 512), "num_workers": grid(1, 2)},
    baseline={"num_workers": 1},  # speedup: against the point that differs only in these
    num_repeats=3,
    config={"epochs": 3, "lr": 0.1},
)
