"""Which learning rate, width and optimizer does Optuna find for MNIST?

Optuna's TPE learns from earlier trials which points to try, and ASHA prunes the poor ones. docs/searches.md has it in
plain Ray Tune. It needs `pip install 'raypar[search]'`.
"""

from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from raypar import Study, choice, loguniform, randint
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={"lr": loguniform(0.001, 1.0), "hidden_size": randint(32, 257), "optimizer": choice("sgd", "momentum")},
    num_trials=20,
    config={"batch_size": 256, "epochs": 8, "num_workers": 1},
    searcher=OptunaSearch(seed=0),
    scheduler=ASHAScheduler(max_t=8, grace_period=1, reduction_factor=4),
    max_concurrent_trials=2,
)
