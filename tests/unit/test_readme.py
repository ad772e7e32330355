"""README's examples run, and its own workload learns."""

import re
from pathlib import Path

import torch

from raypar import Study, Workload, grid

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_examples_run_and_the_custom_workload_learns():
    workloads = []
    for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        names = {}
        exec(compile(example, "README.md", "exec"), names)
        assert isinstance(names.get("study") or names.get("workload"), (Study, Workload))
        if "workload = Workload(" in example:
            assert len(example.splitlines()) <= 20
            workloads.append(names["workload"])
    (workload,) = workloads
    study = Study(workload=workload, space={"hidden_size": grid(4, 16)}, config={"batch_size": 100})
    config = study.trials()[0].config
    data, model = workload.data(config), workload.model(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data.train.inputs), data.train.targets).backward()
        optimizer.step()
    assert (model(data.val.inputs).argmax(1) == data.val.targets).double().mean() > 0.9
