"""What does gradient compression (fp16, bf16, PowerSGD) gain in speed, and what does it cost in accuracy?

"A case study on large-scale machine learning" computes in half precision; here only the gradients are compressed,
13.7 MB a step. fp16 and bf16 halve them, PowerSGD (rank 1) sends less than a hundredth. Expect no speedup within one
machine, where memory is a fast network and the conversion takes time on the cores that compute; it pays off between
machines, the more the slower the network. Expect no significant difference in accuracy (seeds differ by about two
points): PowerSGD adds its error to the next step's gradients. `--set powersgd_rank=4` sends four times as much and
drops less.

Takes two to three minutes on two cores.
"""

from raypar import Study, grid
from raypar.workloads import wide_mlp

study = Study(
    workload=wide_mlp,
    space={"compression": grid("none", "fp16", "bf16", "powersgd")},
    baseline={"compression": "none"},
    num_repeats=6,
    config={"num_workers": 2},
)
