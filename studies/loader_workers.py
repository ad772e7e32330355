"""What do four processes that load and prepare MNIST's images bring, over none?

After the document "Final presentation on parallelising neural-network training", which calls this data parallelisation
and found four of them about 3 times as fast as none (batch sizes), or 4 times (learning rates). Expect that where there
are at least five cores; on two, less than 2. Images that stay in memory, prepared as batches, need no such process, and
are faster than either: `--set loader=resident --set num_loader_workers=0`.
"""

from raypar import Study, grid
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={"num_loader_workers": grid(0, 4), "batch_size": grid(64, 512)},
    baseline={"num_loader_workers": 0},
    num_repeats=3,
    config={"loader": "dataloader", "optimizer": "sgd", "lr": 0.1, "epochs": 3},
)
