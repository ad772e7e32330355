"""Up to which batch size does MNIST converge in five epochs, with momentum SGD and with LARS?

"A case study on large-scale machine learning" uses LARS "so that large batches converge". The learning rate grows
linearly with the batch (from 64), after 20 warm-up steps; three base rates are tried, since the two optimizers need
different ones: LARS multiplies its rate by each layer's ratio of weights to gradients and learns little at 0.01,
momentum fails at 1. Expect, with the best rate of each, about 97.5 % at 64 and 512 with either (LARS 98 % at
512), 96 % (momentum) and 97.5 % (LARS) at 2,048, and 73-91 % depending on the seed (momentum) and 92 % (LARS) at 8,192:
LARS tolerates a batch four times as large. The best rate at 64 is too high at 8,192, for LARS too.

The speedup shows the cost of LARS's norms. The global batch doesn't depend on the number of workers:
`--set num_workers=2`. Takes three to four minutes on two cores.
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
