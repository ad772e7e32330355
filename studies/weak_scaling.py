"""Do two workers double the throughput of ResNet-18 with 64 images of 64x64 pixels each (weak scaling)?

"A case study on large-scale machine learning" uses 64 images per GPU and prints an efficiency of about 99.2 % on 128
nodes of 8 GPUs: gradients are sent during the backward pass, and a step hardly takes longer. Expect less from two cores
that share their memory, and more than in `strong_scaling.py`, since gradients are exchanged half as often. The global
batch grows with the workers, and the learning rate with it. Takes a few minutes on two cores; after so few steps the
accuracy is meaningless. For a transformer: `raypar study studies/transformer_scaling.py`.
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
