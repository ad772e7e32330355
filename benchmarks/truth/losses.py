"""Losses: combined parts must give the loss of whole batches; others are refused if a batch is cut."""

from __future__ import annotations

import torch
from plainlab import Objective, Plain, once
from torch.nn import functional as F

from truth import ACCUMULATION, BY_LOSS, EVALUATION, REFUSED, Training

PAIR = r"\(sum, weight\)"  # the fix

NET = """
def model(config):
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, {}))
"""
CLASSES = """
def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0.9).long() + (x[:, 2] > 1.2).long()
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
"""
RARE = """
def data(config):  # one sample in a hundred is of the second class
    g = torch.Generator().manual_seed(3)
    x = torch.randn(1300, 10, generator=g)
    y = (x[:, 0] > 2.4).long()
    return Data(train=Split(x[:1000], y[:1000]), val=Split(x[1000:], y[1000:]))
"""
VALUES = """
def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    y = x[:, :1].sin() + 0.3 * torch.randn(277, 1, generator=g)
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
"""
HOLES = """
def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    y = x[:, :3].sin()
    y[torch.rand(277, 3, generator=g) < torch.rand(277, 1, generator=g) * 0.8] = float("nan")
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
"""
MARKS = """
def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    y = (x[:, :1] > 1.0).float()
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
"""
TOKENS = """
def model(config):
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 30), nn.Unflatten(1, (5, 6)))


def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    y = torch.randint(1, 5, (277, 6), generator=g)
    length = torch.randint(1, 7, (277, 1), generator=g)
    y[torch.arange(6).expand(277, 6) >= length] = PADDING
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
"""


def tokens(padding: int) -> str:
    return TOKENS.replace("PADDING", str(padding))


WEIGHTED = """
def loss(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=torch.tensor([0.3, 1.0, 8.0]))
"""
WEIGHTS = torch.tensor([0.3, 1.0, 8.0])
weighted = Plain(Objective(lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS), lambda _, y: WEIGHTS[y].sum()))
# What a training on one worker notes of its steps, where nothing is cut: the mean weighted by samples.
weighted_steps = Plain(Objective(lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS)))


def kept(o: torch.Tensor, y: torch.Tensor, padding: int) -> torch.Tensor:
    losses = -o.log_softmax(1).gather(1, y.clamp(0)[:, None]).squeeze(1)
    return losses[y != padding].mean()


def padded(padding: int) -> Plain:
    return Plain(Objective(lambda o, y: kept(o, y, padding), lambda _, y: (y != padding).sum()))


def present(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (o - y.nan_to_num()).square()[y.isfinite()].mean()


def focal(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p = torch.where(y == 1, o.sigmoid(), 1 - o.sigmoid())
    return (-((1 - p) ** 2) * p.log()).sum() / y.sum().clamp(1)


def dice(o: torch.Tensor, y: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    p = o.sigmoid()
    return (1 - (2 * (p * y).sum(dims) + 1) / (p.sum(dims) + y.sum(dims) + 1)).mean()


MASKS = """
def model(config):
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12))


def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    y = (torch.rand(277, 12, generator=g) < x[:, :1].sigmoid() ** 2).float()
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
"""

CASES = [
    Training(
        name="class weights in a function: evaluation batches",
        code=NET.format(3) + CLASSES + WEIGHTED,
        space=EVALUATION,
        plain=weighted_steps,
    ),
    Training(
        name="class weights in a function: workers",
        code=NET.format(3) + CLASSES + WEIGHTED,
        expected=REFUSED,
        words=("num_workers = 2", PAIR),
        plain=weighted_steps,
    ),
    Training(
        name="class weights in a function: accumulation",
        code=NET.format(3) + CLASSES + WEIGHTED,
        space=ACCUMULATION,
        expected=REFUSED,
        words=("accumulation_steps = 4", PAIR),
        plain=weighted_steps,
    ),
    Training(
        name="class weights as a pair",
        code=NET.format(3)
        + CLASSES
        + """
def loss(outputs, targets):
    weights = torch.tensor([0.3, 1.0, 8.0])[targets]
    return (weights * F.cross_entropy(outputs, targets, reduction="none")).sum(), weights.sum()
""",
        plain=weighted,
    ),
    Training(
        name="class weights in torch's loss",
        code=NET.format(3) + CLASSES,
        workload=f"loss=nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.0, 8.0])), {BY_LOSS}",
        space='{"num_workers": grid(1, 2), "accumulation_steps": grid(1, 4)}',
        plain=weighted,
    ),
    Training(
        name="class weights and label smoothing in torch's loss",
        code=NET.format(3) + CLASSES,
        workload=("loss=nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.0, 8.0]), label_smoothing=0.1), " + BY_LOSS),
        plain=Plain(
            Objective(
                lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS, label_smoothing=0.1), lambda _, y: WEIGHTS[y].sum()
            )
        ),
    ),
    Training(
        name="class weights in a partial",
        code="from functools import partial\n" + NET.format(3) + CLASSES,
        workload=f"loss=partial(F.cross_entropy, weight=torch.tensor([0.3, 1.0, 8.0])), {BY_LOSS}",
        expected=REFUSED,
        words=("num_workers = 2", PAIR),
        plain=weighted_steps,
    ),
    Training(
        name="class weights of a rare class in a function",
        code=NET.format(2)
        + RARE
        + """
def loss(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 50.0]))
""",
        expected=REFUSED,
        words=("num_workers = 2", PAIR),
        plain=Plain(Objective(lambda o, y: F.cross_entropy(o, y, weight=torch.tensor([1.0, 50.0])))),
    ),
    Training(
        name="class weights in a function, and a last layer of zeros",
        code=NET.format(3).replace("    return nn", "    net = nn")
        + "    nn.init.zeros_(net[2].weight)\n    nn.init.zeros_(net[2].bias)\n    return net\n"
        + CLASSES
        + WEIGHTED,
        expected=REFUSED,
        words=("num_workers = 2", PAIR),
        plain=weighted_steps,
    ),
    Training(
        name="a rare sample weight among the targets",
        code=NET.format(2)
        + RARE.replace("    return", "    w = torch.ones(1300)\n    w[700] = 30.0\n    return")
        .replace("y[:1000]", '{"y": y[:1000], "w": w[:1000]}')
        .replace("y[1000:]", '{"y": y[1000:], "w": w[1000:]}')
        + """
def loss(outputs, targets):
    losses = F.cross_entropy(outputs, targets["y"], reduction="none")
    return (losses * targets["w"]).sum() / targets["w"].sum()
""",
        expected=REFUSED,
        words=("num_workers = 2", PAIR),
        plain=Plain(
            Objective(lambda o, y: (F.cross_entropy(o, y["y"], reduction="none") * y["w"]).sum() / y["w"].sum())
        ),
    ),
    Training(
        name="ignored targets in torch's loss",
        code=tokens(0),
        workload=f"loss=nn.CrossEntropyLoss(ignore_index=0), {BY_LOSS}",
        plain=padded(0),
    ),
    Training(
        name="ignored targets by default",
        code=tokens(-100),
        workload=BY_LOSS,
        plain=padded(-100),
    ),
    Training(
        name="ignored targets in the validation set only",
        code=NET.format(3) + CLASSES.replace("    return", "    y[205::3] = -100\n    return"),
        workload=BY_LOSS,
        plain=Plain(Objective(lambda o, y: F.cross_entropy(o, y), lambda _, y: (y >= 0).sum())),
    ),
    Training(
        name="ignored targets in a function",
        code=tokens(-1)
        + "\ndef loss(outputs, targets):\n    return F.cross_entropy(outputs, targets, ignore_index=-1)\n",
        space=ACCUMULATION,
        expected=REFUSED,
        words=("accumulation_steps = 4", PAIR),
        plain=Plain(Objective(lambda o, y: kept(o, y, -1))),
    ),
    Training(
        name="one ignored target in two thousand",
        code=NET.format(2)
        + RARE.replace("    return", "    y[777] = -7\n    return")
        + "\ndef loss(outputs, targets):\n    return F.cross_entropy(outputs, targets, ignore_index=-7)\n",
        expected=REFUSED,
        words=("num_workers = 2", PAIR),
        plain=Plain(Objective(lambda o, y: F.cross_entropy(o, y, ignore_index=-7))),
    ),
    Training(
        name="padding mask as a pair",
        code=tokens(0)
        + """
def loss(outputs, targets):
    mask = targets != 0
    return (F.cross_entropy(outputs, targets, reduction="none") * mask).sum(), mask.sum()
""",
        plain=padded(0),
    ),
    Training(
        name="plain mean over tokens",
        code=tokens(0)
        + """
def loss(outputs, targets):
    return F.cross_entropy(outputs.transpose(1, 2).reshape(-1, 5), targets.reshape(-1))
""",
        plain=Plain(Objective(lambda o, y: F.cross_entropy(o, y))),
    ),
    Training(
        name="sum over samples",
        code=NET.format(1)
        + VALUES
        + '\ndef loss(outputs, targets):\n    return F.mse_loss(outputs, targets, reduction="sum")\n',
        config={"lr": 0.003},
        plain=Plain(Objective(lambda o, y: ((o - y) ** 2).sum(), once)),
    ),
    Training(
        name="sum over samples by a constant",
        code=NET.format(1)
        + VALUES
        + "\ndef loss(outputs, targets):\n    return ((outputs - targets) ** 2).sum() / 64\n",
        space='{"num_workers": grid(1, 2), "accumulation_steps": grid(1, 4)}',
        plain=Plain(Objective(lambda o, y: ((o - y) ** 2).sum() / 64, once)),
    ),
    Training(
        name="Kullback-Leibler batchmean",
        code=NET.format(4)
        + """
def data(config):
    x = torch.randn(277, 10, generator=torch.Generator().manual_seed(3))
    y = (2 * x[:, :4]).softmax(1)
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))


def loss(outputs, targets):
    return F.kl_div(outputs.log_softmax(1), targets, reduction="batchmean")
""",
        plain=Plain(Objective(lambda o, y: (y * (y.log() - o.log_softmax(1))).sum(1).mean())),
    ),
    Training(
        name="label smoothing",
        code=NET.format(3) + CLASSES,
        workload=f"loss=nn.CrossEntropyLoss(label_smoothing=0.2), {BY_LOSS}",
        plain=Plain(Objective(lambda o, y: F.cross_entropy(o, y, label_smoothing=0.2))),
    ),
    Training(
        name="soft labels",
        code=NET.format(3) + CLASSES.replace("    return", "    y = F.one_hot(y, 3) * 0.9 + 0.1 / 3\n    return"),
        workload=BY_LOSS,
        plain=Plain(Objective(lambda o, y: -(y * o.log_softmax(1)).sum(1).mean())),
    ),
    Training(
        name="BCE with pos_weight",
        code=NET.format(1) + MARKS,
        workload=f"loss=nn.BCEWithLogitsLoss(pos_weight=torch.tensor([5.0])), {BY_LOSS}",
        plain=Plain(Objective(lambda o, y: -(5 * y * F.logsigmoid(o) + (1 - y) * F.logsigmoid(-o)).mean())),
    ),
    Training(
        name="focal loss as a pair",
        code=NET.format(1)
        + MARKS
        + """
def loss(outputs, targets):
    each = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).sum(), targets.sum()
""",
        plain=Plain(Objective(focal, lambda _, y: y.sum())),
    ),
    Training(
        name="contrastive loss on one worker",
        code=NET.format(4)
        + VALUES.replace("y = x[:, :1].sin() + 0.3 * torch.randn(277, 1, generator=g)", "y = x[:, :4].sin()")
        + """
def loss(outputs, targets):
    scores = F.normalize(outputs, dim=1) @ F.normalize(targets, dim=1).T / 0.2
    return F.cross_entropy(scores, torch.arange(len(scores)))
""",
        space=EVALUATION,
        plain=Plain(
            Objective(
                lambda o, y: -(F.cosine_similarity(o[:, None], y[None], dim=2) / 0.2).log_softmax(1).diagonal().mean()
            )
        ),
    ),
    Training(
        name="contrastive loss on two workers",
        code=NET.format(4)
        + VALUES.replace("y = x[:, :1].sin() + 0.3 * torch.randn(277, 1, generator=g)", "y = x[:, :4].sin()")
        + """
def loss(outputs, targets):
    scores = F.normalize(outputs, dim=1) @ F.normalize(targets, dim=1).T / 0.2
    return F.cross_entropy(scores, torch.arange(len(scores)))
""",
        expected=REFUSED,
        words=("num_workers = 2", "one worker"),
    ),
    Training(
        name="RMSE on one worker",
        code=NET.format(1) + VALUES + "\ndef loss(outputs, targets):\n    return F.mse_loss(outputs, targets).sqrt()\n",
        space=EVALUATION,
        plain=Plain(Objective(lambda o, y: ((o - y) ** 2).mean().sqrt())),
    ),
    Training(
        name="RMSE accumulated",
        code=NET.format(1) + VALUES + "\ndef loss(outputs, targets):\n    return F.mse_loss(outputs, targets).sqrt()\n",
        space=ACCUMULATION,
        expected=REFUSED,
        words=("accumulation_steps = 4",),
    ),
    Training(
        name="a norm added to the mean",
        code=NET.format(1)
        + VALUES
        + "\ndef loss(outputs, targets):\n    return F.mse_loss(outputs, targets) + 0.01 * outputs.norm()\n",
        expected=REFUSED,
        words=("num_workers = 2",),
    ),
    Training(
        name="CTC",
        code="""
def model(config):
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 60), nn.Unflatten(1, (12, 5)))


def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    y = {"labels": torch.randint(1, 5, (277, 4), generator=g), "lengths": torch.randint(1, 5, (277,), generator=g)}
    part = lambda index: {key: value[index] for key, value in y.items()}
    return Data(train=Split(x[:200], part(slice(200))), val=Split(x[200:], part(slice(200, None))))


def loss(outputs, targets):
    steps = torch.full((len(outputs),), 12)
    scores = outputs.log_softmax(2).transpose(0, 1)
    return F.ctc_loss(scores, targets["labels"], steps, targets["lengths"])
""",
        plain=Plain(
            Objective(
                lambda o, y: (
                    F.ctc_loss(
                        o.log_softmax(2).transpose(0, 1),
                        y["labels"],
                        torch.full((len(o),), 12),
                        y["lengths"],
                        reduction="none",
                    )
                    / y["lengths"]
                ).mean()
            )
        ),
    ),
    Training(
        name="several tasks in dicts",
        code="""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.value = nn.Linear(10, 16), nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return {"kind": self.kind(hidden), "value": self.value(hidden)}


def model(config):
    return Net()


def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    kind, value = (x[:, 0] > 0).long() + (x[:, 1] > 1).long(), x[:, 2:3].sin()
    return Data(
        train=Split(x[:200], {"kind": kind[:200], "value": value[:200]}),
        val=Split(x[200:], {"kind": kind[200:], "value": value[200:]}),
    )


def loss(outputs, targets):
    return F.cross_entropy(outputs["kind"], targets["kind"]) + 0.5 * F.mse_loss(outputs["value"], targets["value"])
""",
        plain=Plain(
            Objective(
                lambda o, y: F.cross_entropy(o["kind"], y["kind"]) + 0.5 * ((o["value"] - y["value"]) ** 2).mean()
            )
        ),
    ),
    Training(
        name="regression with holes: evaluation batches",
        code=NET.format(3)
        + HOLES
        + """
def loss(outputs, targets):
    there = ~targets.isnan()
    return F.mse_loss(outputs[there], targets[there])
""",
        space=EVALUATION,
        plain=Plain(Objective(present)),
    ),
    Training(
        name="regression with holes: workers",
        code=NET.format(3)
        + HOLES
        + """
def loss(outputs, targets):
    there = ~targets.isnan()
    return F.mse_loss(outputs[there], targets[there])
""",
        expected=REFUSED,
        words=("num_workers = 2", PAIR),
    ),
    Training(
        name="regression with holes as a pair",
        code=NET.format(3)
        + HOLES
        + """
def loss(outputs, targets):
    there = ~targets.isnan()
    return F.mse_loss(outputs[there], targets[there], reduction="sum"), there.sum()
""",
        plain=Plain(Objective(present, lambda _, y: y.isfinite().sum())),
    ),
    Training(
        name="Dice over the batch",
        code=MASKS
        + """
def loss(outputs, targets):
    p = outputs.sigmoid()
    return 1 - (2 * (p * targets).sum() + 1) / (p.sum() + targets.sum() + 1)
""",
        expected=REFUSED,
        words=("num_workers = 2",),
        plain=Plain(Objective(lambda o, y: dice(o, y, (0, 1)))),
    ),
    Training(
        name="Dice of each sample",
        code=MASKS
        + """
def loss(outputs, targets):
    p = outputs.sigmoid()
    return (1 - (2 * (p * targets).sum(1) + 1) / (p.sum(1) + targets.sum(1) + 1)).mean()
""",
        plain=Plain(Objective(lambda o, y: dice(o, y, (1,)))),
    ),
    Training(
        name="a pair of a mean and a weight",
        code=NET.format(3)
        + CLASSES
        + "\ndef loss(outputs, targets):\n    return F.cross_entropy(outputs, targets), len(targets)\n",
        expected=REFUSED,
        words=("pair", "sum"),
    ),
    Training(
        name="losses of samples, not reduced",
        code=NET.format(3)
        + CLASSES
        + '\ndef loss(outputs, targets):\n    return F.cross_entropy(outputs, targets, reduction="none")\n',
        space="{}",
        expected=REFUSED,
        words=("not a single number", "mean"),
    ),
    Training(
        name="one logit against flat targets",
        code=NET.format(1) + VALUES.replace("    return", "    y = y.squeeze(1)\n    return"),
        workload=f"loss=F.mse_loss, {BY_LOSS}",
        expected=REFUSED,
        words=("pairs each output with every target", r"squeeze\(1\)"),
    ),
]
