"""What does it bring to pin the one training process to more cores? Tweets, a convolutional network over words.

After the document "Accelerating training by data parallelisation", which pinned a text network over 94,000 tweets to 1,
2, 4 or 8 processors of one node, three times each: 507 s, 1,004 s, 502 s and 583 s. Here torch has a thread for each
core: expect two cores to be about 1.6 times as fast as one; nothing here lets expect the document's slow second one.
More threads than cores are another matter, and may be what slowed the document's runs: two threads on one core wait for
each other in a loop that keeps the other from running, 38 times as slow as on two when measured once
(`--set num_threads=2`, best with `--set num_samples=6400`).

On a larger machine: `--set cpu_affinity=1,2,4,8`. More cores than there are, are refused before anything runs.
"""

from raypar import Study, grid
from raypar.workloads import tweets

study = Study(
    workload=tweets,
    space={"cpu_affinity": grid(1, 2)},
    baseline={"cpu_affinity": 1},
    num_repeats=3,
    config={"split": "large", "epochs": 1},
)
