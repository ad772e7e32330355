"""Does a second worker double the images a second, if each has 64 images a step? ResNet-18 on 64x64 pixels.

The lecture "A case study on large-scale machine learning" has 64 images a GPU and prints an efficiency of about 99.2 %
on 128 nodes of 8 GPUs: gradients are sent while others are still being computed, and a step takes hardly longer.
Expect less from two cores that share their memory, and more than in strong_scaling, since gradients are exchanged half
as often. The global batch grows with the workers, and the lr with it. Takes a few minutes on two cores; after so few
steps the accuracy says nothing. A transformer scales otherwise: `raypar study studies/transformer_scaling.py`.
"""

from raypar import Study, grid
from raypar.workloads import resnet

study = Study(
    workload=resnet,
    space={"num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=3,
    config={"per_worker_batch_size": 64, "lr_scaling": "linear", "lr_warmup_steps": 4},
)
