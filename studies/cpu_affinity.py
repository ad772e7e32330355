"""What does pinning a single training process to more cores gain, for a convolutional network over tweets?

"Accelerating training by data parallelisation" pinned a text network over 94,000 tweets to 1, 2, 4 and 8 processors of
one node, three times each: 507 s, 1,004 s, 502 s and 583 s. Here torch runs one thread per core. Expect two cores to be
about 1.6x as fast as one; nothing here explains the document's slow run on two. More threads than cores might: two
threads on one core spin waiting for each other and were 38x slower than on two cores in one run
(`--set num_threads=2`, best with `--set num_samples=6400`).

On a larger machine: `--set cpu_affinity=1,2,4,8`. More cores than the machine has are rejected before anything runs.
"""

from raypar import Study, grid
from workloads.tweets import tweets

study = Study(
    workload=tweets,
    space={"cpu_affinity": grid(1, 2)},
    baseline={"cpu_affinity": 1},
    num_repeats=3,
    config={"split": "large", "epochs": 1, "device": "cpu"},
)
