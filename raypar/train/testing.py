"""The test set: seen by a kept model, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from raypar.parallel.strategy import Place
from raypar.study.workload import Config, Workload
from raypar.train.evaluate import Evaluation
from raypar.train.keep import WEIGHTS_FILE
from raypar.train.numerics import numerics_of


def final_scores(workload: Workload, config: Config, model_dir: Path) -> dict[str, float]:
    """``loss`` and every metric of a kept model on ``Data.test``, in this process and on the CPU.

    Raises:
        OSError: the weights are not there.
    """
    assert workload.model is not None and workload.data is not None
    device = torch.device("cpu")
    data = workload.data(config)
    if data.test is None:
        raise ValueError(f"workload {workload.name} says has_test, but its data has no test split")
    numerics = numerics_of(config, device)
    model = numerics.place(workload.model(config))
    model.load_state_dict(torch.load(model_dir / WEIGHTS_FILE, weights_only=True))
    evaluation = Evaluation(workload, replace(data, val=data.test), config, numerics, Place(0, 1, device))
    scores = evaluation(model)
    return {"loss": scores.pop("val_loss"), **scores}
