"""Helpers of the tests of workloads: networks and data at a workload's own settings, and plain training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raypar import Workload
from raypar.study.options import resolve
from raypar.study.workload import Data
from raypar.train.optim import build_optimizer
from raypar.workloads import datasets
from raypar.workloads.datasets import FileSet, image_set

REAL_DATA = Path(os.environ.get("RAYPAR_DATA_DIR") or Path(__file__).parents[3] / "shared" / "data")


def needs(folder: str) -> pytest.MarkDecorator:
    """Skip where the real data set is not in `REAL_DATA`."""
    return pytest.mark.skipif(not (REAL_DATA / folder).is_dir(), reason=f"{folder} is not here: set RAYPAR_DATA_DIR")


def network(workload: Workload, **chosen: Any) -> Any:
    assert workload.model is not None
    return workload.model(resolve(workload, chosen))


def loaded(workload: Workload, **chosen: Any) -> Any:
    """The workload's data; typed Any, since every test knows which splits there are."""
    assert workload.data is not None
    data: Data = workload.data(resolve(workload, chosen))
    return data


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def trained(workload: Workload, num_steps: int, *, seed: int = 0, **chosen: Any) -> tuple[nn.Module, Data, list[float]]:
    """A model after plain training at the workload's own settings, the data, and the losses."""
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


def transformed(data: Data, inputs: Tensor) -> Tensor:
    return data.transform(inputs) if data.transform else inputs


def accuracy(model: nn.Module, data: Any, num_samples: int = 2000) -> float:
    """On the first validation samples."""
    with torch.inference_mode():
        scores = model(transformed(data, data.val.inputs[:num_samples]))
    return float((scores.argmax(-1) == data.val.targets[:num_samples]).float().mean())


def tiny_image_set(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> FileSet:
    """Write an image set of 20 + 10 images to `root`, name it as the data folder, and let it stand for the real one."""
    tiny = image_set(name, num_train=20, num_test=10)
    write_image_set(tiny, root)
    monkeypatch.setattr(datasets, "IMAGE_SETS", {name: tiny})
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(root))
    return tiny


def write_image_set(files: FileSet, root: Path) -> None:
    folder = root / files.folder
    folder.mkdir(parents=True)
    for file in files.files:
        size = file.num_bytes - len(file.header)
        first = 0 if file.name.startswith("train") else 7
        body = bytes((i + first) % (251 if "images" in file.name else 10) for i in range(size))
        (folder / file.name).write_bytes(file.header + body)
