"""Which strategy is fastest on two workers, with a small batch and with a large one, for a wide MLP?

"A case study on large-scale machine learning" names data parallelism and, for large models, splits between and within
layers. The MLP has 3.4 million weights, 13.7 MB of gradients. Per step ddp sends these, whatever the batch, fsdp the
weights as well, gather_broadcast everything through one worker; local_sgd sends the weights every eighth step. tensor
and pipeline send activations, which grow with the batch, and each worker updates only half the weights. So expect
tensor to lead with 64 samples (2x ddp in one run on a busy machine), followed by pipeline and local_sgd, then
gather_broadcast and fsdp; with 512 the lead disappears. The losses are identical except for local_sgd, whose workers
diverge between two averages.

A single worker has no strategy: `--set strategy=ddp --set num_workers=1` times it. Takes a few minutes on two cores.
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
