"""Cases of `right_numbers.py`: small studies of a user, and the numbers that they have to show."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import RAYPAR, user_environment
from plainlab import Plain, difference

TIMEOUT_S = 600
# Relative, of a number after a training in fp32; a wrong loss is off by far more.
TOLERANCE = 1e-4
BAD_INPUT = 2  # exit code
# A share with one decimal is a metric. Efficiencies, which may exceed 1, have none.
SHOWN_SHARE = re.compile(r"(\d[\d,]*\.\d+) %")

RIGHT, REFUSED, WRONG, FAILED = "right", "refused", "WRONG", "FAILED"


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    output: str


@dataclass(frozen=True)
class User:
    """Somebody who works in a folder."""

    folder: Path
    options: tuple[str, ...] = ("--no-ray",)

    def write(self, name: str, text: str) -> Path:
        """Write a file and the folder in its name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def run(self, *arguments: str, folder: str = "") -> Done:
        """Run raypar to its end."""
        environment = {**user_environment(), "COLUMNS": "200", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment.pop("RAYPAR_LOCK_DIR", None)
        done = subprocess.run(
            [*RAYPAR, *arguments],
            cwd=self.folder / folder,
            # Studies of other cases run at the same time.
            env={**environment, "RAYPAR_LOCK_DIR": str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Done(done.returncode, done.stdout)

    def study(self, file: str, *arguments: str, folder: str = "") -> Done:
        """Run a study."""
        return self.run("study", file, *self.options, *arguments, folder=folder)

    def stored(self, name: str, study: Done, *, is_shown: bool = False) -> Stored:
        """Read the trials and the report of a study that has run.

        Args:
            study: its run, which prints its report.
            is_shown: what other commands show belongs to the text, too.

        Raises:
            LookupError: there are none.
        """
        done = self.run("store", "export", name, "trials.json", "--force")
        if done.code:
            raise LookupError(done.output)
        trials = json.loads((self.folder / "trials.json").read_text())["trials"]
        views = (("recommend",), ("store", "show")) if is_shown else ()
        text = "".join([study.output, *(self.run(*view, name).output for view in views)])
        return Stored(trials, json.loads(self.run("report", name, "--json").output), text)


@dataclass(frozen=True)
class Stored:
    """A study's trials, its report as JSON, and the texts that a user sees of it."""

    trials: Sequence[Mapping[str, Any]]
    report: Mapping[str, Any]
    text: str


@dataclass(frozen=True)
class Outcome:
    """Result of a case, and the reason in words."""

    got: str
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something that a user does.

    Attributes:
        expected: RIGHT, or REFUSED, where right numbers would be as good but are not supported.
        words: of a refusal; expressions, each of which has to be in it, the fix among them.
        tags: kinds it belongs to, for ``--only``.
    """

    name: str
    expected: str = RIGHT
    words: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """Name for files."""
        return re.sub(r"\W+", "_", self.name.lower()).strip("_")

    def judge(self, user: User) -> Outcome:
        """Run the user's commands, and compare the shown numbers with the truth."""
        raise NotImplementedError

    def refusal(self, done: Done) -> Outcome:
        """Return the outcome of a command that ended with an exit code other than 0."""
        missing = [word for word in self.words if not re.search(word, done.output, re.DOTALL)]
        problems = [line.strip() for line in done.output.splitlines() if " = " in line or "error" in line.lower()]
        last = " | ".join(problems[:3]) or done.output.strip()[-300:]
        if done.code != BAD_INPUT:
            return Outcome(FAILED, f"exit code {done.code}: {last}")
        if self.expected == REFUSED and missing:
            return Outcome(FAILED, f"refused without the words {', '.join(missing)}: {last}")
        return Outcome(REFUSED, last)


HEADER = """\
import torch
from torch import nn
from torch.nn import functional as F

import raypar
from raypar import Data, Split, Statistic, Study, Workload, grid
"""
# The last evaluation batch is smaller than the others.
CONFIG = {"epochs": 2, "batch_size": 32, "eval_batch_size": 8, "lr": 0.1, "device": "cpu", "num_warmup_steps": 1}
BY_LOSS = 'metrics={}, metric="val_loss", mode="min"'
WORKERS = '{"num_workers": grid(1, 2)}'
ACCUMULATION = '{"accumulation_steps": grid(1, 4)}'
EVALUATION = '{"eval_batch_size": grid(7, 1000)}'

Check = Callable[["Training", User, ModuleType, Stored], list[str]]


@dataclass(frozen=True, kw_only=True)
class Training(Case):
    """Study of a model, whose trials are trained once more in plain torch.

    Attributes:
        code: functions ``model`` and ``data``, and others.
        workload: further arguments of the workload.
        space: of the study.
        config: further options, besides those of the space.
        num_repeats: of every point.
        plain: the training in plain torch; None: no number can be compared.
        truths: the right value of each metric, of outputs and targets of the whole validation set.
        metric: name of the metric that points have to be judged by; empty: any.
        shown, hidden: expressions that the texts must have, and must not have.
        checks: functions that return mistakes.
    """

    code: str
    workload: str = f"loss=loss, {BY_LOSS}"
    space: str = WORKERS
    config: Mapping[str, Any] = field(default_factory=dict)
    num_repeats: int = 1
    plain: Plain | None = None
    truths: Mapping[str, Callable[[Any, Any], float]] = field(default_factory=dict)
    metric: str = ""
    shown: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()

    def text(self) -> str:
        """Return the study file."""
        arguments = ", ".join(
            part for part in (f'name="{self.slug}"', "model=model", "data=data", self.workload) if part
        )
        config = {key: value for key, value in {**CONFIG, **self.config}.items() if f'"{key}":' not in self.space}
        return f"""{HEADER}{self.code}

study = Study(
    workload=Workload({arguments}),
    space={self.space},
    num_repeats={self.num_repeats},
    config={config!r},
)
"""

    def judge(self, user: User) -> Outcome:
        file = user.write(f"{self.slug}.py", self.text())
        done = user.study(file.name)
        if done.code == BAD_INPUT and " trained " not in done.output:
            return self.refusal(done)
        try:
            stored = user.stored(self.slug, done, is_shown=bool(self.metric))
        except LookupError:
            return self.refusal(done)
        problems = [
            text for trial in stored.trials if trial["state"] == "finished" for text in self._trial(file, trial)
        ]
        if problems:
            return Outcome(WRONG, "; ".join(problems))
        if done.code:
            return self.refusal(done)
        problems = [*self._report(stored), *problems_of_text(stored.text, self.shown, self.hidden)]
        problems += [text for check in self.checks for text in check(self, user, loaded(file), stored)]
        return Outcome(WRONG, "; ".join(problems)) if problems else Outcome(RIGHT)

    def _trial(self, file: Path, trial: Mapping[str, Any]) -> list[str]:
        if self.plain is None:
            return []
        config = {key.removeprefix("config."): value for key, value in trial.items() if key.startswith("config.")}
        torch.set_num_threads(1)
        trained = self.plain.train(loaded(file), config, trial["seed"])
        truth = {**trained.reports[-1]}
        truth |= {name: right(trained.outputs, trained.targets) for name, right in self.truths.items()}
        return differences({name: trial.get(f"final.{name}") for name in truth}, truth, point_of(trial, self.space))

    def _report(self, stored: Stored) -> list[str]:
        """Return the mistakes of a report about its own trials."""
        name = stored.report["metric"]
        problems = [f"judged by {name}, not {self.metric}"] if self.metric not in ("", name) else []
        for point in stored.report["points"]:
            of = [t for t in stored.trials if all(t.get(f"config.{k}") == v for k, v in point["point"].items())]
            values = [t[f"final.{name}"] for t in of]
            shown = (point["metric"] or {}).get("value")
            if shown is None or difference(shown, sum(values) / len(values)) > TOLERANCE:
                problems.append(f"{point['point']}: {name} {shown} in the report, {values} in the trials")
        return problems


def problems_of_text(text: str, shown: Sequence[str], hidden: Sequence[str]) -> list[str]:
    """Return the mistakes in a report's text."""
    problems = [f"not shown: {each}" for each in shown if not re.search(each, text)]
    problems += [f"shown: {match[0]}" for each in hidden if (match := re.search(each, text))]
    shares = [float(value.replace(",", "")) for value in SHOWN_SHARE.findall(text)]
    return problems + [f"a share of {share} %" for share in shares if share > 100]


def differences(
    got: Mapping[str, Any], truth: Mapping[str, float], where: str, tolerance: float = TOLERANCE
) -> list[str]:
    """Return the numbers that are not the truth."""
    return [
        f"{where}: {name} {got[name]}, right is {right:.6g}"
        for name, right in truth.items()
        if not isinstance(got[name], (int, float)) or difference(got[name], right) > tolerance
    ]


def point_of(trial: Mapping[str, Any], space: str) -> str:
    """Return the values of a trial that vary."""
    return " ".join(f"{key}={trial.get(f'config.{key}')}" for key in re.findall(r'"(\w+)": grid', space)) or "trial"


_counter = itertools.count()


def loaded(file: Path) -> ModuleType:
    """Import a study file; its functions are given as those of a workload."""
    spec = importlib.util.spec_from_file_location(f"study_{next(_counter)}_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class Steps(Case):
    """Anything else.

    Attributes:
        files: texts by name.
        do: runs commands; returns the outcome.
    """

    files: Mapping[str, str]
    do: Callable[[Steps, User], Outcome]

    def judge(self, user: User) -> Outcome:
        for name, text in self.files.items():
            user.write(name, text)
        return self.do(self, user)


def outcome_of(problems: Sequence[str]) -> Outcome:
    """Return the outcome of a comparison."""
    return Outcome(WRONG, "; ".join(problems)) if problems else Outcome(RIGHT)


def is_close(value: Any, right: float, tolerance: float) -> bool:
    """Return whether a value is a number, and near the right one."""
    return isinstance(value, (int, float)) and math.isfinite(value) and difference(value, right) <= tolerance


def cases() -> list[Case]:
    """Return all cases, each with its module's name among its tags."""
    from dataclasses import replace

    from truth import data, losses, metrics, models, scripts, tables

    modules = (losses, metrics, models, data, scripts, tables)
    found = [
        replace(case, tags=(*case.tags, module.__name__.rpartition(".")[2]))
        for module in modules
        for case in module.CASES
    ]
    assert len({case.slug for case in found}) == len(found)
    return found
