"""Workloads that behave or misbehave as their config says; the ranks import them from here.

``act`` names the misbehaviour of a trial (see `_act`). With two ranks, the last one misbehaves, while the other waits
for it in a collective.
"""

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from raypar import Data, Split, Statistic, Workload
from raypar.train.model_check import MAX_PASSES

NUM_TRAIN = 256
NUM_VAL = 101  # two ranks can't share it evenly
NUM_FEATURES = 16
NUM_CLASSES = 4


class Learning(nn.Linear):
    """A layer that learns even with gradients switched off, so that a soiling trial can finish."""

    def forward(self, x):
        with torch.set_grad_enabled(self.training):
            return super().forward(x)


def model(config):
    print(json.dumps(state_of_this_process()), flush=True)
    _act(config)
    layers = nn.Sequential(
        Learning(NUM_FEATURES, 32), nn.ReLU(), nn.Dropout(config["dropout"]), Learning(32, NUM_CLASSES)
    )
    if config["num_ballast"]:
        layers.register_buffer("ballast", torch.arange(config["num_ballast"], dtype=torch.float32))
    if config["act"] == "fall" and os.environ["RANK"] == "1":
        steps = itertools.count(1)

        def fall(module, _):
            # In the first attempt, in the third epoch of 4 steps, after the check's passes and 2 steps to warm up.
            step = MAX_PASSES + 2 + 2 * NUM_TRAIN // 64 + 2
            if module.training and next(steps) == step and _first_time(config):
                os.kill(os.getpid(), signal.SIGKILL)

        layers.register_forward_pre_hook(fall)
    return layers


def data(_):
    """Return classes that are almost linearly separable, the same ones every time."""
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(NUM_TRAIN + NUM_VAL, NUM_FEATURES, generator=generator, dtype=torch.float32)
    directions = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=generator, dtype=torch.float32)
    targets = (inputs @ directions).argmax(1)
    train, val = Split(inputs[:NUM_TRAIN], targets[:NUM_TRAIN]), Split(inputs[NUM_TRAIN:], targets[NUM_TRAIN:])
    return Data(train=train, val=val)


def loss(outputs, targets):
    with torch.set_grad_enabled(outputs.requires_grad):
        return cross_entropy(outputs, targets)


acting = Workload(
    name="acting",
    model=model,
    data=data,
    loss=loss,
    metric="accuracy",
    num_train_samples=NUM_TRAIN,
    options={"act": "train", "scratch": "", "dropout": 0.0, "num_ballast": 0},
    defaults={"epochs": 2, "batch_size": 64, "lr": 0.5, "num_warmup_steps": 2},
)


LOADED = "loads its data"
_scale = torch.full((), 2.0)


def _scaled(x):
    return x * _scale


def _slow_data(config):
    print(LOADED, flush=True)
    time.sleep(0.05)  # data that load faster are not shared
    made = data(config)
    noise = torch.randn_like(made.train.inputs) + random.random() + np.random.rand() if config["noise"] else 0.0
    return Data(Split(made.train.inputs + noise, made.train.targets), made.val, transform=_scaled)


slow_to_load = Workload(
    name="slow_to_load",
    model=lambda _: nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.Dropout(0.2), nn.Linear(32, NUM_CLASSES)),
    data=_slow_data,
    num_train_samples=NUM_TRAIN,
    options={"noise": 0},
)


def state_of_this_process():
    """Return the state that a previous trial could have changed."""
    return {
        "pid": os.getpid(),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dirt": os.environ.get("DIRT", ""),
        "cwd": str(Path.cwd()),
        "seeds": [random.getstate()[1][0], int(np.random.get_state()[1][0]), torch.initial_seed()],
    }


def _act(config):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank != world_size - 1 or (config["act"] in ("heal", "wait") and not _first_time(config)):
        return
    match config["act"]:
        case "raise":
            raise ValueError("no such luck")
        case "kill" | "heal":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang" | "wait":
            threading.Event().wait()  # until this process is killed
        case "soil":
            _soil()
        case "stray" | "stray and kill" as act:
            for pid in _strays():
                print(json.dumps({"stray": pid}), flush=True)
            if act == "stray and kill":
                os.kill(os.getpid(), signal.SIGKILL)


def _strays():
    """Start processes that keep running: in the rank's group and, on Linux, in new sessions, one without a parent."""
    command = ["sleep", "600"]
    yield subprocess.Popen(command).pid
    if sys.platform == "linux":
        yield subprocess.Popen(command, start_new_session=True).pid
        orphan = ["sh", "-c", "setsid sleep 600 > /dev/null & echo $!"]
        yield int(subprocess.run(orphan, stdout=subprocess.PIPE, check=True).stdout)


def _first_time(config):
    """Return True in the first attempt to come here; write this process's id to the trial's scratch file."""
    path = Path(config["scratch"])
    if path.exists():
        return False
    draft = path.with_suffix(".draft")
    draft.write_text(str(os.getpid()))
    draft.rename(path)  # the file never appears without the id
    return True


def _soil():
    """Change all the state that a trial can change in its process, and continue."""
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(7)
    torch.manual_seed(12345)
    random.seed(12345)
    np.random.seed(12345)
    os.environ["DIRT"] = "left"
    os.environ["OMP_NUM_THREADS"] = "7"
    os.chdir("/")


# ---- train loops as Ray's documentation writes them; nothing in them is raypar's


def train_func(config):
    import ray.train
    import ray.train.torch

    samples = data({}).train
    model = ray.train.torch.prepare_model(torch.nn.Linear(NUM_FEATURES, NUM_CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    loader = DataLoader(TensorDataset(samples.inputs, samples.targets), batch_size=config["batch"], shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    context = ray.train.get_context()
    for epoch in range(config["num_epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        num_seen = 0
        for inputs, targets in loader:
            loss_value = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss_value.backward()
            optimizer.step()
            num_seen += len(targets)
        where = {"world_size": context.get_world_size(), "rank": context.get_world_rank(), "note": "not a number"}
        ray.train.report({"loss": loss_value.item(), "num_seen": num_seen, **where})


def diverging_func(config):
    """Report a loss five times; on rank 0, all but the first are not finite."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    for epoch in range(1, 6):
        ray.train.report({"loss": math.nan if rank == 0 and epoch > 1 else 1.0})


def lr_func(config):
    """Report lr as the accuracy of every epoch."""
    import ray.train

    for epoch in range(4):
        ray.train.report({"accuracy": config["lr"], "of_epoch": epoch + 1})


# ---- a workload with images, and with a metric that is not a mean of per-sample scores


def _small_images(_):
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, NUM_CLASSES))
    return nn.Sequential(*layers)


def _image_data(config):
    vectors = data(config)
    train, val = (Split(s.inputs.view(-1, 1, 4, 4), s.targets) for s in (vectors.train, vectors.val))
    if config["in_memory"]:
        return Data(train=train, val=val)
    train_dataset, val_dataset = (TensorDataset(split.inputs, split.targets) for split in (train, val))
    return Data(train_dataset=train_dataset, val_dataset=val_dataset)


def _confusion(outputs, targets):
    return torch.bincount(targets * NUM_CLASSES + outputs.argmax(1), minlength=NUM_CLASSES**2)


seeing = Workload(
    name="seeing",
    model=_small_images,
    data=_image_data,
    num_train_samples=NUM_TRAIN,
    metrics={
        "accuracy": lambda outputs, targets: outputs.argmax(1) == targets,
        "diagonal": Statistic(_confusion, lambda total: float(total.view(NUM_CLASSES, -1).diagonal().sum())),
    },
    options={"in_memory": True},
    defaults={"epochs": 2, "batch_size": 64, "lr": 0.2, "num_warmup_steps": 2},
)

# A script of torchrun, whose losses are the same for any number of processes.
TORCHRUN_SCRIPT = """
import argparse, os, sys, torch, torch.distributed as dist
import raypar
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--note")
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
inputs = torch.randn(64, 8)[dist.get_rank() :: dist.get_world_size()]
for epoch in range(2):
    for _ in range(5):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        raypar.step()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        mean = loss.item() / dist.get_world_size()
        print(f"epoch {epoch} loss: {mean:.6f} {args.note} on {len(os.sched_getaffinity(0))} cores")
dist.destroy_process_group()
# Skip Python's shutdown, in which threads left by torch occasionally abort the process.
sys.stdout.flush()
os._exit(0)
"""


def uneven_loop(config):
    """A train loop whose last rank misbehaves as `case` says; ranks report a standstill at once."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    import raypar
    from raypar.train import position

    position.EVERY_S, position.STANDS_S = 0.05, 0.5
    is_last = distributed.get_rank() == distributed.get_world_size() - 1
    layer = DistributedDataParallel(nn.Linear(4, 1))
    for _ in range(10 + (is_last if config["case"] == "longer" else -is_last if config["case"] == "shorter" else 0)):
        layer(torch.ones(2, 4)).sum().backward()
    if config["case"] == "evaluates" and is_last:
        matrix = torch.ones(200, 200)
        until_s = time.monotonic() + 2.0  # four times as long as a rank may stand
        while time.monotonic() < until_s:
            matrix = (matrix @ matrix).clamp(-1, 1)
    distributed.barrier()
    raypar.report({"loss": 1.0})


uneven = Workload.from_train_loop(uneven_loop, options={"case": "even"}, metric="loss", mode="min")


def logging_loop(config):
    """Log to MLflow on each rank, to an experiment of the loop's own; report another metric."""
    import mlflow
    import ray.train

    mlflow.set_experiment("mine")
    for step in range(3):
        mlflow.log_metric("val_acc", config["lr"] * step, step=step)
    ray.train.report({"loss": 1.0})


def _logged_model(config):
    import mlflow

    mlflow.log_metric("num_features", NUM_FEATURES, synchronous=False)
    return model(config)


logging_loop_workload = Workload.from_train_loop(logging_loop, options={"lr": 0.5}, metric="val_acc")
logging_workload = replace(acting, name="logging", model=_logged_model)
