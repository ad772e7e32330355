"""How is a pipeline of two workers kept busy: by which schedule, and by how many micro-batches? A small transformer.

The lecture "A case study on large-scale machine learning" splits a model between layers. With m micro-batches and p
workers a worker has nothing to do for (p - 1) / (m + p - 1) of a step: here a third with 2 of them, a fifth with 4, a
ninth with 8. So expect 8 to be 1.33 times as fast as 2, as was found once; with `--set batch_size=128` the gain is
gone, since messages take as long and there is less to compute between them. gpipe and 1f1b idle alike (1f1b holds fewer
activations, which shows in memory and not in time); interleaved has two stages a worker, which idle half as long and
send three times as many messages. The losses are the same. To set against it, data parallelism:
`raypar study studies/transformer_scaling.py`.

Takes three or four minutes on two cores.
"""

from raypar import Study, grid
from raypar.workloads import transformer

study = Study(
    workload=transformer,
    space={"pipeline_schedule": grid("gpipe", "1f1b", "interleaved"), "num_microbatches": grid(2, 4, 8)},
    baseline={"pipeline_schedule": "gpipe", "num_microbatches": 2},
    num_repeats=3,
    config={
        "num_workers": 2,
        "strategy": "pipeline",
        "batch_size": 512,
        "width": 128,
        "num_sequences": 4096,
        "epochs": 1,
        "num_warmup_steps": 4,
    },
)
