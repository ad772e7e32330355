"""How should the learning rate grow with the batch: not at all, with its square root, or linearly?

Goyal et al. 2017 (arXiv:1706.02677) scale it linearly, Krizhevsky 2014 (arXiv:1404.5997) with the square root; the rate
is meant for 32 samples a step. Expect the linear rule to lead at 128 and to fail at 512, the square root to be beaten
at neither, and a constant rate to be too slow at both. Takes half a minute on two cores.
"""

from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"batch_size": grid(128, 512), "lr_scaling": grid("none", "sqrt", "linear")},
    baseline={"lr_scaling": "none"},
    num_repeats=6,
    config={"lr": 0.1, "lr_base_batch_size": 32, "optimizer": "sgd", "hidden_size": 128, "epochs": 30},
)
