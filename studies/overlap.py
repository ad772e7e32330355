"""What does it bring to send gradients while others are still being computed? An MLP of 8 wide layers, two workers.

The lecture "A case study on large-scale machine learning" sets this, wait-free back-propagation, against the naive
order, which sends after the backward pass: overlap=False. Here are 29 MiB of gradients, about 4 MiB a layer: in eight
buckets, in two, and in one, which can't be sent before the last gradient is there. With one bucket expect no
difference, and otherwise a small gain: a worker's one core computes and sends, so that only its waiting for the other
is hidden. Where a GPU computes and a network card sends, it is up to the shorter of the two. The losses are the same.

Takes two or three minutes on two cores.
"""

from raypar import Study, grid
from raypar.workloads import wide_mlp

study = Study(
    workload=wide_mlp,
    space={"bucket_mb": grid(4.0, 16.0, 100.0), "overlap": grid(False, True)},
    baseline={"overlap": False},
    num_repeats=5,
    config={"num_workers": 2, "depth": 8, "num_points": 4096},
)
