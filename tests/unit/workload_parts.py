"""Helpers of the tests of workloads: networks and data at a workload's own settings, and plain training."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from raypar.study.options import resolve
from raypar.train.optim import build_optimizer
from raypar.workloads import datasets
from raypar.workloads.datasets import image_set

REAL_DATA = Path(os.environ.get("RAYPAR_DATA_DIR") or Path(__file__).parents[3] / "shared" / "data")


def needs(folder):
    """Skip where the real data set is not in `REAL_DATA`."""
    return pytest.mark.skipif(not (REAL_DATA / folder).is_dir(), reason=f"{folder} is not here: set RAYPAR_DATA_DIR")


def network(workload, **chosen):
    return workload.model(resolve(workload, chosen))


def loaded(workload, **chosen):
    """Return the workload's data."""
    return workload.data(resolve(workload, chosen))


def num_parameters(model):
    return sum(p.numel() for p in model.parameters())


def trained(workload, num_steps, *, seed=0, **chosen):
    """Return a model after plain training at the workload's own settings, the data, and the losses."""
    config, data = resolve(workload, chosen), loaded(workload, **chosen)
    torch.manual_seed(seed)
    model = network(workload, **chosen)
    optimizer = build_optimizer(model.parameters(), config)
    loss_of = workload.loss or nn.functional.cross_entropy
    losses, order = [], torch.empty(0, dtype=torch.int64)
    for _ in range(num_steps):
        if not len(order):
            order = torch.randperm(len(data.train))
        some, order = order[: config["batch_size"]], order[config["batch_size"] :]
        loss = loss_of(model(transformed(data, data.train.inputs[some])), data.train.targets[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.eval(), data, losses


def transformed(data, inputs):
    return data.transform(inputs) if data.transform else inputs


def accuracy(model, data, num_samples=2000):
    """Return the accuracy on the first validation samples."""
    with torch.inference_mode():
        scores = model(transformed(data, data.val.inputs[:num_samples]))
    return float((scores.argmax(-1) == data.val.targets[:num_samples]).float().mean())


def tiny_image_set(name, root, monkeypatch):
    """Write an image set of 20 + 10 images to `root`, and use it and this data folder instead of the real ones."""
    tiny = image_set(name, num_train=20, num_test=10)
    write_image_set(tiny, root)
    monkeypatch.setattr(datasets, "IMAGE_SETS", {name: tiny})
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(root))
    return tiny


def write_image_set(files, root):
    folder = root / files.folder
    folder.mkdir(parents=True)
    for file in files.files:
        size = file.num_bytes - len(file.header)
        first = 0 if file.name.startswith("train") else 7
        body = bytes((i + first) % (251 if "images" in file.name else 10) for i in range(size))
        (folder / file.name).write_bytes(file.header + body)
