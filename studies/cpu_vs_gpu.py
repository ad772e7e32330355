"""Is a GPU faster than a CPU for a small network on MNIST, with four processes that load the images for either?

After the document "Final presentation on parallelising neural-network training": 48 s on a CPU (Xeon 2.20 GHz), 16 s on
a GPU (RTX 3070), up to 8 times as fast in its sweeps, at the same accuracy. Expect less: the network has hardly work
for a GPU, and both wait for the loader. From a larger batch it gains more. Needs a GPU; both have two cores, for the
loader too: give them more with `--set cpus_per_worker=8`.
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
