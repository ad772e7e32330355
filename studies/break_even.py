"""From which network width and training-set size does a second worker pay off on Fashion-MNIST?

"Parallelising deep networks with MPI and GPUs" reports that parallel training of a small network loses to its
communication cost, and wins once data and layers grow. Expect no speedup at 64 units and a rising one with the width:
compute per step grows faster than the gradients. More data only adds steps of the same kind, so the speedup of a step
hardly changes; what improves is the trial's total time, start-up included (`wall_s`).
"""

from raypar import Study, grid
from workloads.fashion_mlp import fashion_mlp

study = Study(
    workload=fashion_mlp,
    space={
        "hidden_size": grid(64, 256, 1024),
        "num_samples": grid(2_000, 10_000, 50_000),
        "num_workers": grid(1, 2),
    },
    baseline={"num_workers": 1},
    num_repeats=3,
    config={"batch_size": 500, "epochs": 2, "keep_model": False},
)
