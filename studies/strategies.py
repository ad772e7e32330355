"""Which way to share a step between two workers is the fastest, for a small batch and for a large one? A wide MLP.

The lecture "A case study on large-scale machine learning" names data parallelism and, for models, the split between
layers and within a layer. Here are 3.4 million weights, 13.7 MB of gradients. ddp sends these once a step whatever the
batch, fsdp its weights as well, gather_broadcast all of them through one worker, and local_sgd the weights every eighth
step only. tensor and pipeline send what passes between layers instead, which grows with the batch, and each worker
updates half of the weights. So with 64 samples expect tensor ahead (2 times ddp, when tried once on a busy machine),
then pipeline and local_sgd, with gather_broadcast and fsdp behind; with 512 the first of them lose their lead. The loss
is the same with every strategy but local_sgd, whose workers' weights differ between two averages.

One worker has no strategy: `--set strategy=ddp --set num_workers=1` times it. Takes a few minutes on two cores.
"""

from raypar import Study, grid
from raypar.workloads import wide_mlp

study = Study(
    workload=wide_mlp,
    space={
        "strategy": grid("ddp", "fsdp", "tensor", "pipeline", "local_sgd", "gather_broadcast"),
        "batch_size": grid(64, 512),
    },
    baseline={"strategy": "ddp"},
    num_repeats=3,
    config={"num_workers": 2, "num_warmup_steps": 4},
)
