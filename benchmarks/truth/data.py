"""Real-world data: data sets, collate functions, own loaders, random splits, holes, uneven sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from plainlab import Objective, Plain, order_of
from torch.nn import functional as F

from truth import BY_LOSS, EVALUATION, REFUSED, Training
from truth.losses import CLASSES, NET

mean = Plain(Objective(lambda o, y: F.cross_entropy(o, y)))
ACCURACY = {"accuracy": lambda o, y: float((o.argmax(1) == y).float().mean())}


def stacked(dataset: Any) -> list[Any]:
    """Return the columns of the samples of a data set."""
    return [torch.stack([torch.as_tensor(each) for each in column]) for column in zip(*dataset, strict=True)]


def pairs(data: Any, name: str) -> tuple[Any, Any]:
    x, y = stacked(getattr(data, f"{name}_dataset"))
    return x, y


def triples(data: Any, name: str) -> tuple[Any, Any]:
    a, b, y = stacked(getattr(data, f"{name}_dataset"))
    return (a, b), y


def dicts(data: Any, name: str) -> tuple[Any, Any]:
    samples = list(getattr(data, f"{name}_dataset"))
    columns = {key: torch.stack([torch.as_tensor(each[key]) for each in samples]) for key in samples[0]}
    return columns, columns


def collated(data: Any, name: str) -> tuple[Any, Any]:
    dataset = getattr(data, f"{name}_dataset")
    x, y = data.collate([dataset[i] for i in range(len(dataset))])
    return x, y


def collated_batches(data: Any, config: Mapping[str, Any], seed: int, epoch: int) -> Iterator[tuple[Any, Any]]:
    for index in order_of(len(data.train_dataset), seed, epoch).split(config["batch_size"]):
        yield data.collate([data.train_dataset[i] for i in index.tolist()])


def sampled_batches(data: Any, config: Mapping[str, Any], _: int, epoch: int) -> Iterator[tuple[Any, Any]]:
    """Yield all samples of a DistributedSampler's ranks, 100 on each of two or 200 on one."""
    order = torch.randperm(200, generator=torch.Generator().manual_seed(epoch)).tolist()
    num = config["num_workers"]
    ranks = [order[rank::num] for rank in range(num)]
    size = config["batch_size"] // num
    x, y = data.whole
    for at in range(0, len(ranks[0]), size):
        index = [i for rank in ranks for i in rank[at : at + size]]
        yield x[index], y[index]


SETS = """
class Samples(torch.utils.data.Dataset):
    def __init__(self, first, last):
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(277, 10, generator=g)[first:last]
        self.y = (self.x[:, 0] > 0.3).long() + (self.x[:, 1] > 1).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return SAMPLE


def data(config):
    return Data(train_dataset=Samples(0, 200), val_dataset=Samples(200, 277))
"""
SEQUENCES = """
class Samples(torch.utils.data.Dataset):
    def __init__(self, first, last):
        self.first, self.last = first, last

    def __len__(self):
        return self.last - self.first

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.first + i)
        text = torch.randint(1, 9, (int(torch.randint(2, 9, (), generator=g)),), generator=g)
        return text, LABEL


def data(config):
    return Data(train_dataset=Samples(0, 200), val_dataset=Samples(200, 277), collate=collate)
"""
BAG = """
def collate(samples):
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return x, torch.tensor([y for _, y in samples])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.table(x).sum(1) / (x != 0).sum(1, keepdim=True))


def model(config):
    return Net()
"""
TAGGER = """
def collate(samples):
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    y = nn.utils.rnn.pad_sequence([y for _, y in samples], batch_first=True, padding_value=-100)
    return x, y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.table(x).tanh()).transpose(1, 2)


def model(config):
    return Net()
"""
OWN_LOADER = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Whole(Data):
    whole = ()


def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(277, 10, generator=g)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0.9).long() + (x[:, 2] > 1.2).long()
    samples = TensorDataset(x[:200], y[:200])

    def train_loader(rank, num_ranks, batch_size):
        sampler = DistributedSampler(samples, num_ranks, rank, shuffle=True, seed=0)
        return LOADER

    data = Whole(train_loader=train_loader, val=Split(x[200:], y[200:]))
    object.__setattr__(data, "whole", (x[:200], y[:200]))
    return data
"""
NOISE = """
def data(config):
    import numpy as np
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(277, 10, generator=g), torch.randint(0, 2, (277,), generator=g)
    order = ORDER
    x, y = x[order], y[order]
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]))
"""
SEEDED = r"manual_seed|default_rng\(0\)"


def noise(order: str) -> str:
    return NET.format(2) + NOISE.replace("ORDER", order)


CASES = [
    Training(
        name="a data set of pairs",
        code=NET.format(3) + SETS.replace("SAMPLE", "self.x[i], self.y[i]"),
        workload="",
        config={"loader": "dataloader"},
        space='{"num_workers": grid(1, 2), "num_loader_workers": grid(0, 1)}',
        plain=Plain(mean.objective, samples=pairs),
        truths=ACCURACY,
    ),
    Training(
        name="a data set with the default loader",
        code=NET.format(3) + SETS.replace("SAMPLE", "self.x[i], int(self.y[i])"),
        workload="",
        plain=Plain(mean.objective, samples=pairs),
        truths=ACCURACY,
    ),
    Training(
        name="a data set of triples",
        code=SETS.replace("SAMPLE", "self.x[i, :5], self.x[i, 5:], self.y[i]")
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, a, b):
        return self.head((self.left(a) + self.right(b)).tanh())


def model(config):
    return Net()
""",
        workload="",
        plain=Plain(mean.objective, lambda model, x: model(*x), samples=triples),
        truths=ACCURACY,
    ),
    Training(
        name="a data set of dicts",
        code=SETS.replace("SAMPLE", '{"features": self.x[i], "labels": self.y[i]}')
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, features, labels):
        logits = self.layers(features)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def model(config):
    return Net()


def hits(outputs, targets):
    return (outputs["logits"].argmax(1) == targets["labels"]).float()
""",
        workload='metrics={"hits": hits}, metric="hits"',
        plain=Plain(Objective(lambda o, _: o["loss"]), lambda model, x: model(**x), samples=dicts),
        truths={"hits": lambda o, y: float((o["logits"].argmax(1) == y["labels"]).float().mean())},
        metric="hits",
    ),
    Training(
        name="collate that pads inputs",
        code=SEQUENCES.replace("LABEL", "int(text.float().mean() > 4.5)") + BAG,
        workload="",
        plain=Plain(mean.objective, samples=collated, batches=collated_batches),
        truths=ACCURACY,
    ),
    Training(
        name="collate that pads targets, torch's loss",
        code=SEQUENCES.replace("LABEL", "text % 3") + TAGGER,
        workload=BY_LOSS,
        plain=Plain(
            Objective(mean.objective.loss, lambda _, y: (y != -100).sum()), samples=collated, batches=collated_batches
        ),
    ),
    Training(
        name="collate that pads targets, a pair",
        code=SEQUENCES.replace("LABEL", "text % 3")
        + TAGGER
        + """
def loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum"), (targets != -100).sum()
""",
        plain=Plain(
            Objective(mean.objective.loss, lambda _, y: (y != -100).sum()), samples=collated, batches=collated_batches
        ),
    ),
    Training(
        name="collate that pads targets, a function",
        code=SEQUENCES.replace("LABEL", "text % 3")
        + TAGGER
        + "\ndef loss(outputs, targets):\n    return F.cross_entropy(outputs, targets)\n",
        expected=REFUSED,
        words=("num_workers = 2", r"\(sum, weight\)"),
        plain=Plain(mean.objective, samples=collated, batches=collated_batches),
    ),
    Training(
        name="collate that pads targets, a function, evaluated in parts",
        code=SEQUENCES.replace("LABEL", "text % 3")
        + TAGGER
        + "\ndef loss(outputs, targets):\n    return F.cross_entropy(outputs, targets)\n",
        space=EVALUATION,
        expected=REFUSED,
        words=("eval_batch_size",),
        plain=Plain(mean.objective, samples=collated, batches=collated_batches),
    ),
    Training(
        name="an own loader",
        code=NET.format(3) + OWN_LOADER.replace("LOADER", "DataLoader(samples, batch_size, sampler=sampler)"),
        workload="",
        plain=Plain(mean.objective, batches=sampled_batches),
        truths=ACCURACY,
    ),
    Training(
        name="own loaders of different lengths",
        code=NET.format(3)
        + OWN_LOADER.replace(
            "LOADER", "DataLoader(samples, batch_size, sampler=range(rank, 200 - 90 * rank, num_ranks))"
        ),
        workload="",
        space='{"num_workers": grid(2)}',
        expected=REFUSED,
        words=("train_loader", "DistributedSampler|drop_last"),
    ),
    Training(
        name="a split without a seed, two workers",
        code=noise("torch.from_numpy(np.random.default_rng().permutation(277))"),
        workload="",
        config={"epochs": 20},
        expected=REFUSED,
        words=("samples", SEEDED),
    ),
    Training(
        name="a split without a seed, one worker, two repeats",
        code=noise("torch.randperm(277, generator=torch.Generator().manual_seed(__import__('time').time_ns()))"),
        workload="",
        space="{}",
        num_repeats=2,
        expected=REFUSED,
        words=("samples", SEEDED),
        tags=("check",),
    ),
    Training(
        name="a split by the global generators",
        code=noise("torch.from_numpy(np.random.permutation(277))"),
        workload="",
        plain=mean,
        truths=ACCURACY,
        num_repeats=2,
    ),
    Training(
        name="a split with a seed",
        code=noise("torch.randperm(277, generator=torch.Generator().manual_seed(4))"),
        workload="",
        plain=mean,
        truths=ACCURACY,
    ),
    Training(
        name="NaN in inputs of the validation set",
        code=NET.format(3) + CLASSES.replace("    return", "    x[250, 3] = float('nan')\n    return"),
        workload="",
        space="{}",
        expected=REFUSED,
        words=(r"data\.val\.inputs", "NaN", "drop|fill"),
    ),
    Training(
        name="a last batch that is smaller",
        code=NET.format(3) + CLASSES,
        workload="",
        config={"batch_size": 48},
        plain=mean,
        truths=ACCURACY,
    ),
    Training(
        name="a last batch of one sample on two workers",
        code=NET.format(3) + CLASSES,
        workload="",
        config={"batch_size": 199},
        space='{"num_workers": grid(1, 2), "accumulation_steps": grid(1, 3)}',
        plain=mean,
        truths=ACCURACY,
    ),
    Training(
        name="a last batch left out",
        code=NET.format(3) + CLASSES,
        workload="",
        config={"batch_size": 48, "drop_last": True},
        plain=mean,
        truths=ACCURACY,
    ),
    Training(
        name="the first samples only",
        code=NET.format(3) + CLASSES,
        workload="",
        config={"num_samples": 70},
        plain=mean,
        truths=ACCURACY,
    ),
    Training(
        name="one validation sample for two workers",
        code=NET.format(3) + CLASSES.replace("Split(x[200:], y[200:])", "Split(x[200:201], y[200:201])"),
        workload="",
        plain=mean,
        truths=ACCURACY,
    ),
    Training(
        name="images of bytes with a transform",
        code="""
def model(config):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 2))


def scaled(x):
    return (x.float() - 128) / 64


def data(config):
    g = torch.Generator().manual_seed(3)
    x = torch.randint(0, 256, (277, 1, 8, 8), generator=g).to(torch.uint8)
    y = (x[:, 0, :4].float().mean((1, 2)) > 128).long()
    return Data(train=Split(x[:200], y[:200]), val=Split(x[200:], y[200:]), transform=scaled)
""",
        workload="",
        plain=Plain(mean.objective, lambda model, x: model((x.float() - 128) / 64)),
        truths=ACCURACY,
    ),
    Training(
        name="an iterable data set",
        code=NET.format(3)
        + """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(10), 0)] * 40)


def data(config):
    return Data(train_dataset=Stream(), val_dataset=Stream())
""",
        workload="",
        space="{}",
        expected=REFUSED,
        words=("map-style", "__getitem__"),
    ),
    Training(
        name="fewer targets than inputs, and no validation set",
        code=NET.format(3)
        + "\ndef data(config):\n    return Data(train=Split(torch.zeros(40, 10), torch.zeros(39).long()))\n",
        workload="",
        space="{}",
        expected=REFUSED,
        words=("40 inputs and 39 targets", r"data\.val"),
    ),
    Training(
        name="inputs that are sparse",
        code=NET.format(3)
        + CLASSES.replace("    return", "    x = (x * (x > 1)).to_sparse()\n    return")
        .replace("x[:200]", "x.index_select(0, torch.arange(200))")
        .replace("Split(x[200:]", "Split(x.index_select(0, torch.arange(200, 277))"),
        workload="",
        expected=REFUSED,
        words=("sparse", "to_dense"),
        plain=Plain(
            mean.objective,
            samples=lambda data, name: (getattr(data, name).inputs.to_dense(), getattr(data, name).targets),
        ),
        truths=ACCURACY,
        tags=("optim",),
    ),
]
