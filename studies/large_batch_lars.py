"""Up to which batch does MNIST still converge in five epochs, with momentum SGD and with LARS, each at its own rate?

The lecture "A case study on large-scale machine learning" takes LARS "so that large batches converge". The rate grows
with the batch (linear, from 64), after 20 steps of warm-up. Expect, as found with the best of the three rates: at 64
and 512 about 97.5 % with either (LARS 98 % at 512), at 2,048 momentum 96 % and LARS 97.5 %, at 8,192 momentum between
73 and 91 %, by the seed, and LARS 92 %. So LARS bears a batch four times as large. The rates are not of one kind:
LARS multiplies its own with a layer's ratio of weights to gradients and learns little at 0.01; momentum fails at 1.
What is best at 64 is too high for 8,192 with LARS too.

The speedup is what LARS's norms cost in time. A batch is the same on any number of workers: `--set num_workers=2`.
Takes three or four minutes on two cores.
"""

from raypar import Study, grid
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={
        "batch_size": grid(64, 512, 2048, 8192),
        "lr": grid(0.01, 0.1, 1.0),
        "optimizer": grid("momentum", "lars"),
    },
    baseline={"optimizer": "momentum"},
    num_repeats=3,
    config={"epochs": 5, "lr_scaling": "linear", "lr_warmup_steps": 20, "lr_schedule": "linear"},
)
