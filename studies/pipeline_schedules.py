"""Which schedule, and how many micro-batches, keep a two-worker pipeline busy, for a small transformer?

"A case study on large-scale machine learning" splits a model between layers. With m micro-batches on p workers, the
bubble is (p - 1) / (m + p - 1) of a step: a third with 2 micro-batches, a fifth with 4, a ninth with 8. So expect 8 to
be 1.33x as fast as 2, as one run showed; with `--set batch_size=128` the gain disappears, since messages take as long
and there is less to compute between them. gpipe and 1f1b have the same bubble (1f1b stores fewer activations, which
saves memory, not time); interleaved runs two stages per worker, halves the bubble and sends three times as many
messages. The losses are identical. For data parallelism, compare `raypar study studies/transformer_scaling.py`.

Takes three to four minutes on two cores.
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
