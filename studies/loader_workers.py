"""What do four processes that load and prepare MNIST's images bring, over none?

After the document "Final presentation on parallelising neural-network training", which calls this data parallelisation
and found four of them about 3 times as fast as none (batch sizes), or 4 times (learning rates). Loader processes run on
their worker's own cores: expect that with five or more, `--set cpus_per_worker=5`, and on two hardly a gain, as every
batch is carried from process to process. Images that stay in memory, prepared as batches, need no such process, and are
several times as fast as either: `--set loader=resident --set num_loader_workers=0`.
"""

from raypar import Study, grid
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={"num_loader_workers": grid(0, 4), "batch_size": grid(64, 512)},
    baseline={"num_loader_workers": 0},
    num_repeats=3,
    config={"loader": "dataloader", "cpus_per_worker": 2, "optimizer": "sgd", "lr": 0.1, "epochs": 3},
)
