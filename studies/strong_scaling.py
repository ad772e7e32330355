"""How much faster do two workers train ResNet-18 on 64x64 pixels with the same global batch (strong scaling)?

"A case study on large-scale machine learning" scales the other way, with 64 images per GPU (`weak_scaling.py`); here
the global batch is 64. Expect a speedup below 2 and below weak scaling's: each of two workers computes 32 images a step
but exchanges as many gradients as for 64. The learning rate stays the same, and so does the loss, except for batch
norm, whose statistics come from each worker's images. Takes a few minutes on two cores; after so few steps the accuracy
is meaningless. For a transformer: `raypar study studies/transformer_scaling.py`.
"""

from raypar import Study, grid
from raypar.workloads import resnet

study = Study(
    workload=resnet,
    space={"num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=3,
    config={"batch_size": 64},
)
