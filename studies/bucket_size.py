"""How much does fusing gradients into buckets speed up a deep, narrow network: 66 gradients of at most 16 KiB?

"A case study on large-scale machine learning" calls this tensor fusion: every all-reduce pays its latency, however
small the message. `bucket_mb=0.0` sends each gradient separately, 66 messages a step; 0.05 MiB holds the gradients of
three layers, 0.25 MiB half the network and 25 MiB all of it. Expect most of the gain from the first few fused layers
(6x in one run), another factor of two from half the network, and no more from a single bucket, which overlaps with
nothing. The losses are identical.

Takes two to three minutes on two cores.
"""

from raypar import Study, grid
from raypar.workloads import wide_mlp

study = Study(
    workload=wide_mlp,
    space={"bucket_mb": grid(0.0, 0.05, 0.25, 25.0)},
    baseline={"bucket_mb": 0.0},
    num_repeats=5,
    config={
        "num_workers": 2,
        "width": 64,
        "depth": 32,
        "num_features": 64,
        "batch_size": 64,
        "num_points": 4096,
        "epochs": 3,
    },
)
