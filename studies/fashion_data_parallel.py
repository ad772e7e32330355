"""Is all-reduce faster than gather and broadcast, for 60 steps of full gradient descent on Fashion-MNIST?

In "Parallelising deep networks with MPI and GPUs" one process gathers the gradients and broadcasts the weights; two
processes are about 50 % faster on a CPU, more on a GPU. Expect that or better from both strategies, since a step is the
whole training set, with gather_broadcast slightly behind ddp, which overlaps communication with the backward pass. The
accuracy is meaningless here: at the document's learning rate of 0.01, plain gradient descent hardly learns in 60 steps
through two sigmoid layers. `--set optimizer=adam` learns, in steps that take as long.
"""

from raypar import Study, grid
from workloads.fashion_mlp import fashion_mlp

study = Study(
    workload=fashion_mlp,
    space={"strategy": grid("ddp", "gather_broadcast"), "num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    num_repeats=3,
    config={
        "batch_size": 50_000,  # all of the training set: a step is an epoch
        "epochs": 60,
        "optimizer": "sgd",
        "lr": 0.01,
        "num_warmup_steps": 1,
        "eval_every_steps": 20,
    },
)
