"""Which learning rate, width and optimizer does a random search with early stopping find for MNIST?

20 points are drawn at random. ASHA stops three of four trials after one epoch, and three of four of the rest after four
(L. Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020). docs/searches.md has the same
search in plain Ray Tune.
"""

from ray.tune.schedulers import ASHAScheduler

from raypar import Study, choice, loguniform, randint
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={"lr": loguniform(0.001, 1.0), "hidden_size": randint(32, 257), "optimizer": choice("sgd", "momentum")},
    num_trials=20,
    config={"batch_size": 256, "epochs": 8, "num_workers": 1},
    scheduler=ASHAScheduler(max_t=8, grace_period=1, reduction_factor=4),
    max_concurrent_trials=2,
)
