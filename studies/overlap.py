"""How much does overlapping communication with the backward pass gain, for an MLP of 8 wide layers on two workers?

"A case study on large-scale machine learning" compares this wait-free back-propagation with sending all gradients after
the backward pass (`overlap=False`). Here 29 MiB of gradients, about 4 MiB a layer, are sent in eight buckets, two, or
one, which can't leave before the last gradient is ready. Expect no difference with one bucket and a small gain
otherwise: each worker computes and sends on a single core, so overlap only hides the wait for the other worker. Where a
GPU computes and a network card sends, it hides up to the shorter of the two. The losses are identical.

Takes two to three minutes on two cores.
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
