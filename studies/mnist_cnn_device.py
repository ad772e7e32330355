"""How much faster do NVIDIA and Apple GPUs train a convolutional network on MNIST than a CPU?

"Report on parallelising neural networks" measured 316 s and 99.09 % on the CPU, 73 s (or 64 s) and 99.12 % with MPS,
149 s and 98.05 % with CUDA. Expect either GPU to be several times as fast, and about 99 % on all three. No machine has
all of them; on a Mac use `--set device=cpu,mps`.
"""

from raypar import Study, grid
from raypar.workloads import mnist_cnn

study = Study(
    workload=mnist_cnn,
    space={"device": grid("cpu", "cuda")},
    baseline={"device": "cpu"},
    num_repeats=3,
    config={
        "optimizer": "adam",
        "lr": 0.001,
        "batch_size": 64,
        "epochs": 10,
        "loader": "dataloader",
        "num_loader_workers": 4,
        "cpus_per_worker": 2,
    },
)
