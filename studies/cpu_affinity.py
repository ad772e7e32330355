"""What does it bring to pin the one training process to more cores? Tweets, a convolutional network over words.

After the document "Accelerating training by data parallelisation", which pinned a text network over 94,000 tweets to 1,
2, 4 or 8 processors of one node, three times each: 507 s, 1,004 s, 502 s and 583 s. With two torch threads throughout,
only the pinning differs: expect one core to be shared by both threads, and two cores to take clearly less time, not
half of it. That two processors were by far the slowest there is nothing to expect here. On a larger machine:
`--set cpu_affinity=1,2,4,8 --set num_threads=8`; more cores than the machine has are refused before anything runs.
"""

from raypar import Study, grid
from raypar.workloads import tweets

study = Study(
    workload=tweets,
    space={"cpu_affinity": grid(1, 2)},
    baseline={"cpu_affinity": 1},
    num_repeats=3,
    config={"num_threads": 2, "split": "large", "epochs": 1},
)
