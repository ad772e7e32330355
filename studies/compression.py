"""What does it bring to send gradients with fewer bits, or as factors of low rank, and what does it cost in accuracy?

The lecture "A case study on large-scale machine learning" computes in half precision; here it is the gradients that are
sent so, 13.7 MB a step. fp16 and bf16 send half of that, PowerSGD (of rank 1) less than a hundredth. Within one machine
expect no gain: memory is a fast network, and the conversion takes time of the very core that computes. Sending less
pays between machines, the more the slower their network is. Expect no loss of accuracy with any of them that could be
told from the spread between seeds, about two points: PowerSGD adds what it left out to the next step's
gradients. `--set powersgd_rank=4` sends four times as much, and leaves out less.

Takes two or three minutes on two cores.
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
