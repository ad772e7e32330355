"""How far does fine-tuning bring GPT-2's loss on programming problems down, and does a second worker shorten it?

After the "Report on parallelising neural networks", which fine-tuned GPT-2 on statements joined with their solutions:
evaluation loss 0.82 at step 350 and 0.74 at step 650, at 13.68 samples/s and 3.44 steps/s in evaluation. The data
differ (MBPP, 974 problems), so expect the shape, not the figures: a loss that falls steeply at first, then ever less,
the same with two workers but for dropout. Two workers save time on a GPU each; on CPU cores expect little: 124 million
gradients are exchanged after every step.

Where the weights can't be downloaded, or without a GPU, train a small new model instead:
`--set init=scratch --set size=tiny --set lr=0.001`. In the end: `raypar generate gpt2_finetune --prompt "Write a …"`.
"""

from raypar import Study, grid
from raypar.workloads import gpt2_code

study = Study(
    workload=gpt2_code,
    space={"num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=3,
    config={"epochs": 3, "batch_size": 8, "eval_every_steps": 50},
)
