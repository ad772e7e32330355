"""How batch size trades runtime against accuracy on MNIST, on one worker and on two.

Expect the runtime to fall with the batch size and accuracy with it, at a learning rate that stays the same. Larger
batches exchange gradients less often, so that the second worker pays off from some batch size on.
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
