"""How does a transformer scale, with the same batch for all workers (strong) and with as much for each (weak)?

The lecture "A case study on large-scale machine learning" scales a network of convolutions, as strong_scaling and
weak_scaling do. Strong: two workers against one, at either batch. Weak: two with 256 sequences against one with 128, in
samples/s. Expect a speedup above a wide MLP's (1.5, as found once): a transformer makes use of each weight once a
token, sixteen times a sample, so that a step computes much for the gradients it sends. And a somewhat higher one with
256 (1.7), since half as many gradients are sent. The losses of one worker and two are the same.

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
