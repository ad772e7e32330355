"""Models as people have them: several inputs, own losses and optimizers, buffers, parameters without a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from plainlab import Objective, Plain
from torch import nn
from torch.nn import functional as F

from truth import BY_LOSS, REFUSED, Stored, Training, User, differences
from truth.losses import CLASSES, NET, VALUES

mean = Plain(Objective(lambda o, y: F.cross_entropy(o, y)))
by_name = Plain(mean.objective, lambda model, x: model(**x))
own_loss = Plain(Objective(lambda o, _: o["loss"]), lambda model, x: model(**x))
ACCURACY = {"accuracy": lambda o, y: float((o.argmax(1) == y).float().mean())}

TWO_INPUTS = """
def data(config):
    g = torch.Generator().manual_seed(3)
    x, z = torch.randn(277, 10, generator=g), torch.randint(0, 7, (277,), generator=g)
    y = (x[:, 0] + 0.3 * z > 1).long()
    first, last = slice(200), slice(200, None)
    return Data(train=Split(INPUTS(x[first], z[first]), y[first]), val=Split(INPUTS(x[last], z[last]), y[last]))
"""
TWO_INPUTS_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(7, 4), nn.Linear(14, 16), nn.Linear(16, 2)

    def forward(self, FORWARD):
        return self.head(self.body(torch.cat([features, self.table(group)], 1)).tanh())


def model(config):
    return Net()
"""
LABELLED = """
def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    y = (x[:, 0] > 0.3).long()
    part = lambda i: Split({"features": x[i], "labels": y[i]}, y[i])
    return Data(train=part(slice(200)), val=part(slice(200, None)))
"""
EMBEDDED = """
def model(config):
    return nn.Sequential(nn.Embedding(200, 8), nn.Flatten(), nn.Linear(48, 3))


def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randint(0, 120, (277, 6), generator=g)
    y = x[:, 0] // 40
    x = x.to(torch.DTYPE)
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
"""


def kept_model(_: Training, user: User, file: ModuleType, stored: Stored) -> list[str]:
    """Compare the reported numbers with those of the kept model."""
    problems = []
    for trial in stored.trials:
        (weights,) = user.folder.glob(f".raypar/logs/*/{trial['identity']}/artifacts/model/weights.pt")
        model = file.model({})
        model.load_state_dict(torch.load(weights, weights_only=True))
        outputs, targets = mean.evaluated(model, file.data({}))
        truth = {
            "val_loss": float(F.cross_entropy(outputs, targets)),
            "accuracy": ACCURACY["accuracy"](outputs, targets),
        }
        workers = f"the kept model of {trial['config.num_workers']} workers"
        problems += differences({key: trial[f"final.{key}"] for key in truth}, truth, workers)
    return problems


def groups(model: nn.Module, _: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}], lr=0.003
    )


def dtype_case(dtype: str) -> Training:
    return Training(
        name=f"tokens of {dtype}",
        code=EMBEDDED.replace("DTYPE", dtype),
        workload="",
        space="{}",
        plain=Plain(mean.objective, lambda model, x: model(x.long())),
        truths=ACCURACY,
        metric="accuracy",
    )


CASES = [
    Training(
        name="inputs in a dict",
        code=TWO_INPUTS.replace("INPUTS", "(lambda x, z: {'features': x, 'group': z})")
        + TWO_INPUTS_NET.replace("FORWARD", "group, features"),
        workload="",
        plain=by_name,
        truths=ACCURACY,
    ),
    Training(
        name="inputs in a tuple",
        code=TWO_INPUTS.replace("INPUTS", "(lambda x, z: (x, z))")
        + TWO_INPUTS_NET.replace("FORWARD", "features, group"),
        workload="",
        plain=Plain(mean.objective, lambda model, x: model(*x)),
        truths=ACCURACY,
    ),
    Training(
        name="one argument that is a dict",
        code=TWO_INPUTS.replace("INPUTS", "(lambda x, z: {'features': x, 'group': z})")
        + TWO_INPUTS_NET.replace("FORWARD", "batch").replace(
            "[features, self.table(group)]", "[batch['features'], self.table(batch['group'])]"
        ),
        workload="",
        plain=mean,
        truths=ACCURACY,
    ),
    Training(
        name="the model's own loss in a dict",
        code=LABELLED
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, features, labels):
        logits = self.layers(features)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def model(config):
    return Net()
""",
        workload=BY_LOSS,
        plain=own_loss,
    ),
    Training(
        name="the model's own loss in a dataclass, with a metric",
        code="from dataclasses import dataclass\n"
        + LABELLED
        + """
@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, features, labels=None):
        logits = self.layers(features)
        return Output(F.cross_entropy(logits, labels), logits)


def model(config):
    return Net()


def hits(outputs, targets):
    return (outputs.logits.argmax(1) == targets).float()
""",
        workload='metrics={"hits": hits}, metric="hits"',
        plain=Plain(Objective(lambda o, _: o.loss), own_loss.call),
        truths={"hits": lambda o, y: float((o.logits.argmax(1) == y).float().mean())},
        metric="hits",
    ),
    Training(
        name="the model's own loss with class weights",
        code=LABELLED
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, features, labels):
        logits = self.layers(features)
        return {"loss": F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 6.0])), "logits": logits}


def model(config):
    return Net()
""",
        workload=BY_LOSS,
        expected=REFUSED,
        words=("num_workers = 2",),
        plain=own_loss,
    ),
    Training(
        name="the model's own loss of a whole batch, evaluated in parts",
        code=LABELLED
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, features, labels):
        logits = self.layers(features)
        return {"loss": F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 6.0])), "logits": logits}


def model(config):
    return Net()
""",
        workload=BY_LOSS,
        space='{"eval_batch_size": grid(7, 1000)}',
        expected=REFUSED,
        words=("eval_batch_size",),
        plain=own_loss,
    ),
    Training(
        name="a penalty on the weights in the model's own loss",
        code=LABELLED
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 2)

    def forward(self, features, labels):
        logits = self.last(self.first(features).tanh())
        return {"loss": F.cross_entropy(logits, labels) + 0.01 * self.first.weight.square().sum(), "logits": logits}


def model(config):
    return Net()
""",
        workload=BY_LOSS,
        plain=own_loss,
    ),
    Training(
        name="batch norm on one worker",
        code=NET.format(3).replace("nn.Tanh()", "nn.BatchNorm1d(16), nn.Tanh()") + CLASSES,
        workload="",
        space="{}",
        config={"keep_model": True, "drop_last": True},
        plain=mean,
        truths=ACCURACY,
        checks=(kept_model,),
    ),
    Training(
        name="batch norm on two workers: the kept model",
        code=NET.format(3).replace("nn.Tanh()", "nn.BatchNorm1d(16), nn.Tanh()") + CLASSES,
        workload="",
        space='{"num_workers": grid(2), "strategy": grid("ddp", "gather_broadcast", "local_sgd")}',
        config={"keep_model": True, "drop_last": True, "batch_size": 16},
        checks=(kept_model,),
        tags=("optim",),
    ),
    Training(
        name="batch norm and a last batch of one sample a worker",
        code=NET.format(3).replace("nn.Tanh()", "nn.BatchNorm1d(16), nn.Tanh()") + CLASSES.replace("200", "194"),
        workload="",
        space='{"num_workers": grid(2)}',
        expected=REFUSED,
        words=("drop_last",),
        tags=("optim",),
    ),
    Training(
        name="parameters without a gradient",
        code=CLASSES
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.never = nn.Linear(10, 16), nn.Linear(16, 3), nn.Linear(7, 7)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def model(config):
    return Net()
""",
        workload="",
        plain=mean,
        truths=ACCURACY,
        tags=("optim",),
    ),
    Training(
        name="a frozen first layer",
        code=CLASSES
        + """
def model(config):
    net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))
    net[0].requires_grad_(False)
    return net
""",
        workload="",
        plain=mean,
        truths=ACCURACY,
    ),
    *map(dtype_case, ("uint8", "int16", "int32")),
    Training(
        name="LSTM",
        code="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        _, (hidden, _) = self.cells(x)
        return self.head(hidden[-1])


def model(config):
    return Net()


def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 5, 3, generator=g)
    y = (x[:, 0, 0] + x[:, 4, 1] > 0).long()
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
""",
        workload="",
        plain=mean,
        truths=ACCURACY,
    ),
    Training(
        name="lazy layers",
        code=CLASSES
        + "\ndef model(config):\n    return nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(3))\n",
        workload="",
        plain=mean,
        truths=ACCURACY,
    ),
    Training(
        name="tied weights",
        code="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.body(self.table(x)).tanh()).transpose(1, 2)


def model(config):
    return Net()


def data(config):
    g = torch.Generator().manual_seed(3)
    text = torch.randint(0, 20, (277, 9), generator=g)
    x, y = text[:, :-1], text[:, 1:]
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
""",
        workload=BY_LOSS,
        space='{"num_workers": grid(1, 2), "accumulation_steps": grid(1, 4)}',
        plain=mean,
    ),
    Training(
        name="an optimizer with groups",
        code=NET.format(3)
        + CLASSES
        + """
def optimizer(model, config):
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    return torch.optim.Adam(groups, lr=0.003)
""",
        workload="optimizer=optimizer",
        plain=Plain(mean.objective, optimizer=groups),
        truths=ACCURACY,
        tags=("optim",),
    ),
    Training(
        name="gradients clipped with a pair as loss",
        code=NET.format(1) + VALUES + "\ndef loss(outputs, targets):"
        "\n    return 9 * (outputs - targets).square().sum(), torch.tensor(3.0 * len(targets))\n",
        config={"clip_grad_norm": 0.05},
        space='{"num_workers": grid(1, 2), "accumulation_steps": grid(1, 4)}',
        plain=Plain(
            Objective(lambda o, y: 3 * ((o - y) ** 2).mean()),
            optimizer=lambda model, config: _Clipped(model.parameters(), lr=config["lr"]),
        ),
    ),
]


class _Clipped(torch.optim.SGD):
    """SGD that clips first."""

    def step(self, *args: Any) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.05)
        super().step(*args)
