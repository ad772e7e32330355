"""README's examples are what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from raypar import Study, Workload, grid

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def names_of(example: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs_as_it_stands(example: str) -> None:
    names = names_of(example)
    assert isinstance(names.get("study") or names.get("workload"), (Study, Workload))


def test_a_workload_of_ones_own_takes_twenty_lines_and_can_be_studied() -> None:
    (example,) = [text for text in EXAMPLES if "workload = Workload(" in text]
    assert len(example.splitlines()) <= 20
    workload: Workload = names_of(example)["workload"]
    study = Study(workload=workload, space={"hidden_size": grid(4, 16)}, config={"batch_size": 100})
    config = study.trials()[0].config
    assert workload.model is not None and workload.data is not None
    data, model = workload.data(config), workload.model(config)
    assert data.train is not None and data.val is not None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data.train.inputs), data.train.targets).backward()
        optimizer.step()
    assert (model(data.val.inputs).argmax(1) == data.val.targets).double().mean() > 0.9
