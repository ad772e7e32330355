"""The search of `searches.py` without raypar: by Ray Tune, or by Optuna in this process.

Both train `mnist_mlp` with a hand-written loop on one core per trial, and keep the tensors of their process in memory.
Ray Tune has its defaults, or keeps its actors too. Prints start and end of each trial, and its epochs.
"""

import argparse
import json
import time

import torch
from torch.nn.functional import cross_entropy

from raypar.workloads import mnist_mlp

MAX_EPOCHS, REDUCTION = 4, 4
_tensors = []


def train(lr, hidden_size, config, report):
    """Train; `report(epoch, accuracy)` returns whether to stop."""
    torch.manual_seed(0)
    if not _tensors:
        data = mnist_mlp.data(config)
        splits = (data.train, data.val)
        _tensors.extend(each for split in splits for each in (split.inputs, split.targets))
        _tensors.append(data.transform)
    inputs, targets, val_inputs, val_targets, normalised = _tensors
    model = mnist_mlp.model({**config, "hidden_size": hidden_size})
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in range(MAX_EPOCHS):
        for batch in torch.randperm(len(targets)).split(config["batch_size"]):
            optimizer.zero_grad()
            cross_entropy(model(normalised(inputs[batch])), targets[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(normalised(val_inputs)).argmax(1) == val_targets).float().mean().item()
        if report(epoch + 1, accuracy):
            return


def with_optuna(num_trials, config):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    trials = []

    def objective(trial):
        lr, hidden_size = trial.suggest_float("lr", 0.01, 1.0, log=True), trial.suggest_int("hidden_size", 32, 256)
        begun, done = time.time(), []

        def report(epoch, accuracy):
            done.append(accuracy)
            trial.report(accuracy, epoch)
            return trial.should_prune()

        train(lr, hidden_size, config, report)
        trials.append([begun, time.time(), len(done)])
        if len(done) < MAX_EPOCHS:
            raise optuna.TrialPruned
        return done[-1]

    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
    study.optimize(objective, n_trials=num_trials)
    return trials


def with_tune(num_trials, config, num_concurrent, reuse_actors):
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    ray.init("local")  # not a cluster that runs here

    def trainable(point):
        torch.set_num_threads(1)

        def report(epoch, accuracy):
            tune.report({"accuracy": accuracy, "epoch": epoch})  # ends the function if ASHA stops the trial
            return False

        train(point["lr"], point["hidden_size"], config, report)

    class Times(tune.Callback):
        begun, trials = {}, []

        def on_trial_start(self, iteration, trials, trial, **info):
            self.begun.setdefault(trial.trial_id, time.time())

        def on_trial_complete(self, iteration, trials, trial, **info):
            epochs = trial.last_result.get("training_iteration", 0)
            self.trials.append([self.begun[trial.trial_id], time.time(), epochs])

    tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space={"lr": tune.loguniform(0.01, 1.0), "hidden_size": tune.randint(32, 257)},
        tune_config=tune.TuneConfig(
            num_samples=num_trials,
            search_alg=OptunaSearch(seed=0),
            scheduler=ASHAScheduler(max_t=MAX_EPOCHS, grace_period=1, reduction_factor=REDUCTION),
            metric="accuracy",
            mode="max",
            max_concurrent_trials=num_concurrent,
            reuse_actors=reuse_actors,
        ),
        run_config=tune.RunConfig(callbacks=[Times()], verbose=0),
    ).fit()
    return Times.trials


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=("tune", "tune with kept actors", "optuna"))
    parser.add_argument("--trials", type=int)
    parser.add_argument("--config", type=json.loads)
    parser.add_argument("--concurrent", type=int, default=1)
    args = parser.parse_args()
    if args.by == "optuna":
        trials = with_optuna(args.trials, args.config)
    else:
        trials = with_tune(args.trials, args.config, args.concurrent, reuse_actors=args.by != "tune")
    print("@@", json.dumps(trials))


if __name__ == "__main__":
    main()
