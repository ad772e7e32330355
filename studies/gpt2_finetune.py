"""How far does fine-tuning lower GPT-2's loss on programming problems, and does a second worker shorten it?

"Report on parallelising neural networks" fine-tuned GPT-2 on problem statements joined with their solutions: evaluation
loss 0.82 at step 350 and 0.74 at step 650, 13.68 samples/s and 3.44 steps/s in evaluation. The data set differs here
(MBPP, 974 problems), so expect the shape, not the figures: a loss that falls steeply at first and then levels off, and
is the same with two workers except for dropout. Two workers save time on a GPU each; expect little on CPU cores, since
every step exchanges 124 million gradients.

Without a GPU, or where the weights can't be downloaded, train a small model from scratch:
`--set init=scratch --set size=tiny --set lr=0.001`. Afterwards let the model write:
`raypar model generate gpt2_finetune --prompt "Write a …"`.
"""

from raypar import Study, grid
from workloads.gpt2_code import gpt2_code

study = Study(
    workload=gpt2_code,
    space={"num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=3,
    config={"epochs": 3, "batch_size": 8, "eval_every_steps": 50},
)
