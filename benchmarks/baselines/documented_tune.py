"""Ray Tune over Ray Train as in Ray's guide: a function per trial that calls TorchTrainer(...).fit().

Default settings throughout. Ray gets one logical CPU more than the workers need, since in the guide's layout the
trial's function takes one too and would wait forever. Runs one trial per request.
"""

import argparse
import tempfile
import time

import ray
import ray.train
import ray.tune
from common import send_result, wait_for_go
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback


def train_loop_per_worker(_):
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(ones)
    ray.train.report({"sum": float(ones)})


def trial(config):
    TorchTrainer(
        train_loop_per_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=config["num_workers"]),
        run_config=ray.train.RunConfig(
            name=f"train-{ray.tune.get_context().get_trial_id()}",
            storage_path=config["storage_path"],
            callbacks=[TuneReportCallback()],
        ),
    ).fit()


class RequestedTrials(ray.tune.Callback):
    """Holds Tune after each trial until the next one is requested."""

    def __init__(self):
        self.begun_s = time.perf_counter()

    def on_trial_complete(self, iteration, trials, trial, **info):
        send_result({"seconds": time.perf_counter() - self.begun_s, "sum": trial.last_result.get("sum")})
        if not wait_for_go():
            raise SystemExit
        self.begun_s = time.perf_counter()

    def on_trial_error(self, iteration, trials, trial, **info):
        raise SystemExit("a trial failed; see Tune's output above")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--num-trials", type=int, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypar-benchmark-", ignore_cleanup_errors=True) as folder:
        ray.init(address="local", num_cpus=args.num_workers + 1, log_to_driver=False)
        try:
            ray.tune.Tuner(
                trial,
                param_space={
                    "num_workers": args.num_workers,
                    "storage_path": f"{folder}/train",
                    "lr": ray.tune.grid_search([0.1 * (i + 1) for i in range(args.num_trials)]),
                },
                tune_config=ray.tune.TuneConfig(max_concurrent_trials=1),
                run_config=ray.tune.RunConfig(storage_path=f"{folder}/tune", verbose=0, callbacks=[RequestedTrials()]),
            ).fit()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
