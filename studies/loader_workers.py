"""How much faster do four loader processes make training on MNIST?

"Final presentation on parallelising neural-network training" calls this data parallelisation and reports four loader
processes about 3x as fast as none in its batch-size sweep, and 4x in its learning-rate sweep. Loader processes share
the cores of their worker: expect the same with five cores or more (`--set cpus_per_worker=5`), and hardly a gain on
two, since every batch crosses a process border. Images kept in memory need no loader and are several times as fast as
either: `--set loader=resident --set num_loader_workers=0`.
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
