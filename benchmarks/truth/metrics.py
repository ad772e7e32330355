"""Metrics of the whole validation set, in their own unit, and metrics that are not named."""

from __future__ import annotations

import numpy as np
from plainlab import Objective, Plain
from sklearn.metrics import f1_score, r2_score
from torch.nn import functional as F

from truth import REFUSED, Training
from truth.losses import CLASSES, MARKS, MASKS, NET, VALUES, tokens

mean = Plain(Objective(lambda o, y: F.cross_entropy(o, y)))
squares = Plain(Objective(lambda o, y: ((o - y) ** 2).mean()))
logits = Plain(Objective(lambda o, y: F.softplus(o).sub(o * y).mean()))
MANY = """
def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    y = x[:, :9].argmax(1)
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
"""
PIXELS = """
def model(config):
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1))


def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(140, 1, 6, 6, generator=g)
    y = (x[:, 0] > 0.5).long() + (x[:, 0] > 1.5).long()
    return Data(train=Split(x[:100], y[:100]), val=Split(x[100:], y[100:]))
"""

CASES = [
    Training(
        name="macro F1",
        code="from raypar.workloads.metrics import macro_f1\n" + NET.format(3) + CLASSES,
        workload='metrics={"f1": macro_f1(3)}, metric="f1"',
        config={"epochs": 4},
        plain=mean,
        truths={"f1": lambda o, y: f1_score(y, o.argmax(1), average="macro")},
        metric="f1",
    ),
    Training(
        name="accuracy over tokens as a pair",
        code=tokens(0)
        + """
def token_share(outputs, targets):
    mask = targets != 0
    return ((outputs.argmax(1) == targets) & mask).sum(), mask.sum()
""",
        workload='metrics={"right_tokens": token_share}, metric="right_tokens"',
        plain=mean,
        truths={"right_tokens": lambda o, y: float((o.argmax(1) == y)[y != 0].float().mean())},
        metric="right_tokens",
    ),
    Training(
        name="precision as a pair",
        code=NET.format(1)
        + MARKS
        + """
def precision(outputs, targets):
    called = outputs > -1.5
    return (called & (targets == 1)).sum(), called.sum()
""",
        workload='loss=F.binary_cross_entropy_with_logits, metrics={"precision": precision}, metric="precision"',
        plain=logits,
        truths={"precision": lambda o, y: float(y[o > -1.5].mean())},
    ),
    Training(
        name="top 5",
        code=NET.format(9)
        + MANY
        + """
def top5(outputs, targets):
    return (outputs.topk(5, 1).indices == targets[:, None]).any(1).float()
""",
        workload='metrics={"top5": top5}, metric="top5"',
        plain=mean,
        truths={
            "top5": lambda o, y: float(
                np.mean([t in np.argsort(-s)[:5] for s, t in zip(o.numpy(), y.numpy(), strict=True)])
            )
        },
        metric="top5",
    ),
    Training(
        name="mean absolute error",
        code=NET.format(1) + VALUES + "\ndef mae(outputs, targets):\n    return (outputs - targets).abs().squeeze(1)\n",
        workload='loss=F.mse_loss, metrics={"mae": mae}, metric="mae", mode="min"',
        plain=squares,
        truths={"mae": lambda o, y: float((o - y).abs().mean())},
        metric="mae",
    ),
    Training(
        name="R2 as a statistic",
        code=NET.format(1)
        + VALUES
        + """
def collect(outputs, targets):
    n = torch.tensor(float(len(targets)))
    return torch.stack([n, targets.sum(), (targets**2).sum(), ((outputs - targets) ** 2).sum()])


def finish(total):
    n, s, squares, errors = total.tolist()
    return 1 - errors / (squares - s * s / n)
""",
        workload='loss=F.mse_loss, metrics={"r2": Statistic(collect, finish)}, metric="r2"',
        config={"epochs": 6},
        plain=squares,
        truths={"r2": lambda o, y: r2_score(y, o)},
        metric="r2",
    ),
    Training(
        name="a metric that is a mean already",
        code=NET.format(3)
        + CLASSES
        + "\ndef hits(outputs, targets):\n    return (outputs.argmax(1) == targets).float().mean()\n",
        workload='metrics={"hits": hits}, metric="hits"',
        space="{}",
        expected=REFUSED,
        words=("hits", r"shape \(batch,\)"),
    ),
    Training(
        name="a metric of every token",
        code=tokens(0) + "\ndef hits(outputs, targets):\n    return (outputs.argmax(1) == targets).float()\n",
        workload='metrics={"hits": hits}, metric="hits"',
        space="{}",
        expected=REFUSED,
        words=("hits", "a pair"),
    ),
    Training(
        name="a metric that broadcasts",
        code=NET.format(1)
        + MARKS.replace("    return", "    y = y.squeeze(1)\n    return")
        + """
def loss(outputs, targets):
    return F.binary_cross_entropy_with_logits(outputs.squeeze(1), targets)


def hits(outputs, targets):
    return ((outputs > 0) == targets).float()
""",
        workload='loss=loss, metrics={"hits": hits}, metric="hits"',
        space="{}",
        expected=REFUSED,
        words=("hits", r"shape \(batch,\)"),
    ),
    Training(
        name="a share in per cent",
        code=NET.format(3)
        + CLASSES
        + "\ndef test_acc(outputs, targets):\n    return 100.0 * (outputs.argmax(1) == targets)\n",
        workload='metrics={"test_acc": test_acc}, metric="test_acc", mode="max"',
        config={"epochs": 4},
        plain=mean,
        truths={"test_acc": lambda o, y: 100 * float((o.argmax(1) == y).float().mean())},
        metric="test_acc",
        tags=("units",),
    ),
    # The metric is not named.
    Training(
        name="no metric: classes",
        code=NET.format(3) + CLASSES,
        workload="",
        plain=mean,
        truths={"accuracy": lambda o, y: float((o.argmax(1) == y).float().mean())},
        metric="accuracy",
    ),
    Training(
        name="no metric: torch's cross-entropy with weights",
        code=NET.format(3) + CLASSES,
        workload="loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 1.0]))",
        plain=mean,
        truths={"accuracy": lambda o, y: float((o.argmax(1) == y).float().mean())},
        metric="accuracy",
    ),
    Training(
        name="no metric: one logit, targets of shape (n, 1)",
        code=NET.format(1) + MARKS + "\ndef loss(o, y):\n    return F.binary_cross_entropy_with_logits(o, y)\n",
        workload="loss=loss",
        plain=logits,
        metric="val_loss",
        tags=("units",),
    ),
    Training(
        name="no metric: one logit, all flat",
        code=NET.format("1), nn.Flatten(0") + MARKS.replace("    return", "    y = y.squeeze(1)\n    return"),
        workload="loss=F.binary_cross_entropy_with_logits",
        plain=logits,
        metric="val_loss",
        tags=("units",),
    ),
    Training(
        name="no metric: several labels",
        code=MASKS,
        workload="loss=nn.BCEWithLogitsLoss()",
        plain=logits,
        metric="val_loss",
        hidden=("accuracy",),
        tags=("units",),
    ),
    Training(
        name="no metric: regression",
        code=NET.format(1) + VALUES,
        workload="loss=F.mse_loss",
        plain=squares,
        metric="val_loss",
        hidden=("accuracy",),
        tags=("units",),
    ),
    Training(
        name="no metric: segmentation",
        code=PIXELS,
        workload="",
        plain=mean,
        truths={"accuracy": lambda o, y: float((o.argmax(1) == y).float().mean())},
        tags=("units",),
    ),
    Training(
        name="no metric: padded tokens",
        code=tokens(0),
        workload="loss=nn.CrossEntropyLoss(ignore_index=0)",
        plain=Plain(Objective(lambda o, y: F.cross_entropy(o, y, ignore_index=0), lambda _, y: (y != 0).sum())),
        truths={"accuracy": lambda o, y: float((o.argmax(1) == y)[y != 0].float().mean())},
        tags=("units",),
    ),
]
