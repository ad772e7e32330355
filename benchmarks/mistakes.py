"""Time from the command to the one message that names all mistakes of data and model, for files with 2 to 5 of them.

Each file is run as a user runs it, with Ray, which must not start: the message comes first, with exit code 2.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from common import RAYPAR, begin, parser_for, print_bar, print_row, scratch, user_environment

from raypar.errors import EXIT_BAD_INPUT

MAX_S = 5.0

HEAD = """
import torch
from torch import nn
from torch.nn import functional
from raypar import Data, Split, Study, Workload, grid

X, Y = torch.randn(60, 4), torch.arange(60) % 3


def hits(outputs, targets):
    return (outputs.argmax(1) == targets).float()


"""
TAIL = """
study = Study(
    workload=Workload(name="mine", model=model, data=data, {rest}),
    space={{"num_workers": grid(1, 2)}},
    baseline={{"num_workers": 1}},
    config={{"epochs": 1, "batch_size": 16, "device": "cpu"}},
)
"""
LINEAR = "def model(config):\n    return nn.Linear(4, 3)\n\n\n"


@dataclass(frozen=True)
class File:
    """Study file with mistakes.

    Attributes:
        words: one for each mistake, which its message contains.
    """

    model: str
    data: str
    rest: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{HEAD}{self.model}def data(config):\n    return {self.data}\n\n{TAIL.format(rest=self.rest)}"


FILES = {
    "2: class numbers, a metric": File(
        LINEAR,
        "Data(train=Split(X, Y + 1), val=Split(X, Y))",
        'metrics={"hits": hits, "mean": lambda o, t: o.mean()}, metric="hits", mode="max"',
        ("data.train.targets", "metrics['mean']"),
    ),
    "3: lengths, an empty set, a class": File(
        "def model(config):\n    return nn.Linear\n\n\n",
        "Data(train=Split(X, Y[:9]), val=Split(X[:0], Y[:0]))",
        "",
        ("60 inputs and 9 targets", "data.val = 0 samples", "model(config) = class Linear"),
    ),
    "2: both functions raise": File(
        "def model(config):\n    return nn.Linear(4, None)\n\n\n",
        'Data(train=Split({}["x"], Y), val=Split(X, Y))',
        "",
        ("data(config)", "model(config)"),
    ),
    "3: types of both splits, a shape": File(
        "def model(config):\n    return nn.Linear(5, 3)\n\n\n",
        "Data(train=Split(X, Y.float()), val=Split(X, Y.float()))",
        'metrics={"hits": hits}, metric="hits", mode="max"',
        ("data.train.targets", "data.val.targets", "model(inputs)"),
    ),
    "5: NaN, a loss, three metrics": File(
        LINEAR,
        "Data(train=Split(X / 0 * 0, Y), val=Split(X, Y))",
        "loss=lambda o, t: functional.cross_entropy(o, t, reduction='none'), "
        'metrics={"a": lambda o, t: o.mean(), "b": lambda o, t: o.none, "c": lambda o, t: o}',
        ("data.train.inputs", "loss(outputs, targets)", "metrics['a']", "metrics['b']", "metrics['c']"),
    ),
}


def main() -> None:
    args = begin(parser_for(__doc__, rounds=3))
    missed, seconds = 0, []
    for name, file in FILES.items():
        times_s = []
        for _ in range(args.rounds):
            with scratch() as folder:
                (folder / "mine.py").write_text(file.text)
                begun_s = time.perf_counter()
                command = [*RAYPAR, "study", "mine.py"]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=user_environment())
                times_s.append(time.perf_counter() - begun_s)
        not_named = [words for words in file.words if words not in done.stderr]
        missed += len(not_named) or done.returncode != EXIT_BAD_INPUT
        seconds.append(statistics.median(times_s))
        print_row(name, f"{seconds[-1]:.1f} s" + (f"; not named: {not_named}\n{done.stderr}" if not_named else ""))
    is_reached = [
        print_bar("mistakes that are not named", missed, "{:.0f}".format, at_most=0),
        print_bar("time to the message, the slowest file", max(seconds), "{:.1f} s".format, at_most=MAX_S),
    ]
    sys.exit(not all(is_reached))


if __name__ == "__main__":
    main()
