"""Is a GPU faster than a CPU for a small network on MNIST, with four loader processes for either?

"Final presentation on parallelising neural-network training" measured 48 s on a CPU (Xeon 2.20 GHz) and 16 s on a GPU
(RTX 3070), up to 8x in its sweeps, at the same accuracy. Expect less: the network is too small to keep a GPU busy, and
both wait for the loader. Larger batches gain more. Needs a GPU. Both devices get two cores, shared with the loader;
`--set cpus_per_worker=8` gives them more.
"""

from raypar import Study, grid
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={"device": grid("cpu", "cuda"), "batch_size": grid(64, 512)},
    baseline={"device": "cpu"},
    num_repeats=3,
    config={
        "loader": "dataloader",
        "num_loader_workers": 4,
        "cpus_per_worker": 2,
        "optimizer": "sgd",
        "lr": 0.1,
        "epochs": 3,
    },
)
