"""How many gradients should be sent as one? A deep, narrow network: 33 layers, 66 gradients of at most 16 KiB.

The lecture "A case study on large-scale machine learning" calls it tensor fusion. An all-reduce costs its latency
however little is sent. With 0 each gradient is sent by itself, 66 times a step; 0.05 MiB hold those of three layers,
0.25 MiB those of half of the network and 25 MiB all. Expect most of the gain from the first few fused layers (6 times
as fast, as found once), twice that from fusing half of the network, and nothing more from one bucket for all: it is
sent last, when nothing is left to be computed meanwhile. The losses are the same.

Takes two or three minutes on two cores.
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
