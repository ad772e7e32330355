"""How does batch size trade runtime against accuracy on MNIST, on one worker and on two?

Repeats the batch-size sweep of "Final presentation on parallelising neural-network training", on one worker and on two;
its comparison of loader processes is `loader_workers.py`. Expect larger batches to run faster and, at a fixed learning
rate, to reach a lower accuracy. A second worker slows this small network down: a step takes a fraction of a
millisecond, less than exchanging its gradients. The larger the batch, the smaller the loss.
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
