"""Which learning rate and batch size reach 97 % on MNIST in the least training time?

A trial ends once it reaches the target. Trials run one at a time, so that none slows another down. ASHA compares their
accuracies after equal training times, and Optuna looks for the point that takes the least time to the target. It needs
`pip install 'raypar[search]'`.
"""

from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from raypar import Study, choice, loguniform
from raypar.workloads import mnist_mlp

study = Study(
    workload=mnist_mlp,
    space={"lr": loguniform(0.01, 1.0), "batch_size": choice(32, 64, 128, 256, 512)},
    num_trials=20,
    config={"optimizer": "sgd", "epochs": 20, "num_workers": 1},
    target=0.97,
    searcher=OptunaSearch(seed=0),
    scheduler=ASHAScheduler(time_attr="trained_s", max_t=120, grace_period=2, reduction_factor=3),
)
