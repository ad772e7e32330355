"""How much sooner are two workers done with the same steps? ResNet-18 on 64x64 pixels, 64 images a step in all.

The lecture "A case study on large-scale machine learning" scales the other way, with 64 images for every GPU (see
weak_scaling). Expect a speedup below 2 and below weak_scaling's: each of two workers computes for 32 images a step, but
exchanges as many gradients as for 64. The lr stays what it is, and the loss does up to the batch norm, which takes its
means from a worker's own images. Takes a few minutes on two cores; after so few steps the accuracy says nothing. A
transformer scales otherwise: `raypar study studies/transformer_scaling.py`.
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
