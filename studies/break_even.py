"""From which width of the network, and how much data, does a second worker start to pay on Fashion-MNIST?

After the document "Parallelising deep networks with MPI and GPUs", where a small network loses by what moving data
costs, and the ratio turns as data and layers grow. Expect no gain at 64 units and a speedup that rises with the width:
the work of a step grows faster than the gradients that are exchanged after it. More data alone means more steps of the
same kind, so the speedup hardly moves with it: what it turns is the trial's whole time, start-up included (`wall_s`).
"""

from raypar import Study, grid
from raypar.workloads import fashion_mlp

study = Study(
    workload=fashion_mlp,
    space={
        "hidden_size": grid(64, 256, 1024),
        "num_samples": grid(2_000, 10_000, 50_000),
        "num_workers": grid(1, 2),
    },
    baseline={"num_workers": 1},
    num_repeats=3,
    config={"batch_size": 500, "epochs": 2, "keep_model": False},
)
