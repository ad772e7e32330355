"""Does a second worker pay off? A small network on 8x8 digits, with a small and a large batch.

Expect two workers to be slower than one with batch_size=96, where exchanging gradients takes longer than computing
them, and a speedup of about 1.5 with 768, at the cost of a few points of accuracy. Takes 45 seconds on two cores and
downloads nothing.
"""

from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"batch_size": grid(96, 768), "num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=3,
    config={"epochs": 15},
)
