"""How does a transformer scale to two workers, with a fixed global batch (strong) and a fixed batch per worker (weak)?

"A case study on large-scale machine learning" scales a convolutional network, as strong_scaling and weak_scaling do.
Strong: two workers against one, at either batch. Weak: two workers with 256 sequences against one with 128, in
samples/s. Expect a higher speedup than a wide MLP's (1.5 in one run): a transformer uses each weight once per token,
sixteen times per sample, so it computes more per gradient it sends. Expect more with 256 (1.7), which sends half as
many gradients. One worker and two have the same losses.

Takes two minutes on two cores.
"""

from raypar import Study, grid
from raypar.workloads import transformer

study = Study(
    workload=transformer,
    space={"batch_size": grid(128, 256), "num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=3,
    config={"width": 128, "epochs": 1},
)
