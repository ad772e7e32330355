"""Does a second worker pay off? A small network on 8x8 digits, with a small and a large batch.

Expect two workers to be slower than one with batch_size=96, where exchanging gradients takes longer than computing
them, and a speedup of about 1.5 with 768, at the cost of a few points of accuracy. Each point is repeated until that is
settled, for 90 seconds at most; about a minute on two quiet cores. Nothing is downloaded.
"""

from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=digits,
    space={"batch_size": grid(96, 768), "num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    until="settled",
    max_repeats=10,
    budget="90s",
    config={"epochs": 15, "device": "cpu"},
)
