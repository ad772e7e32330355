"""Two ways to share 60 steps of full gradient descent on Fashion-MNIST among workers: which is faster, and by how much?

After the document "Parallelising deep networks with MPI and GPUs", whose processes gather the gradients at one of them
and broadcast the weights: about 50 % faster with two on a CPU, more on a GPU. Expect that or better of both, as a step
is the whole training set, and gather_broadcast a little behind ddp, whose exchange runs while gradients are computed.
The accuracy says nothing: at the document's rate of 0.01, plain gradient descent hardly learns in 60 steps through two
layers of sigmoids. `--set optimizer=adam` makes 60 steps of the same length that do.
"""

from raypar import Study, grid
from raypar.workloads import fashion_mlp

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
