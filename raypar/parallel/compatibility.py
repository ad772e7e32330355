"""Whether a workload can be trained by a strategy: asked before anything is started."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from raypar.study.options import pipeline_size, tensor_size
from raypar.study.workload import Config, Workload


def why_not(workload: Workload, config: Config) -> tuple[str, str] | None:
    """What keeps a workload from being trained by the strategy of a config, and the way out."""
    strategy = config["strategy"]
    if config["num_workers"] == 1:
        return None
    if strategy == "deepspeed" and find_spec("deepspeed") is None:
        hint = "pip install 'raypar[deepspeed]' on every machine that runs workers"
        return "needs the package deepspeed, which is not installed", hint
    stages, splits = pipeline_size(config), tensor_size(config)
    if stages == splits == 1:
        return None
    from raypar.parallel import pipeline, tensor

    model = _built(workload, config)
    if stages > 1 and (problem := pipeline.why_not(workload, model, config, stages)) is not None:
        return problem
    return tensor.why_not(workload, model, splits) if splits > 1 else None


def _built(workload: Workload, config: Config) -> nn.Module:
    """The model without numbers, where it can be built so: a large one takes no memory then."""
    assert workload.model is not None
    try:
        with torch.device("meta"):
            return workload.model(config)
    except (RuntimeError, NotImplementedError, TypeError):  # it looks at numbers when it is built
        return workload.model(config)
