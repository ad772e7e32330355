"""Scripts: numbers and times read from their output, and two projects with studies of the same name.

The work is sleep, so that the right times don't depend on the machine's load; each script notes its own clock.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import reduce
from typing import Any

from plainlab import difference

from truth import REFUSED, RIGHT, WRONG, Outcome, Steps, User, outcome_of, problems_of_text

SPEEDUP_TOLERANCE = 0.15  # relative

CLOCK = """\
import argparse, csv, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--ranks", type=int, default=1)
args = parser.parse_args()
begin = time.monotonic()
{body}
work = time.monotonic() - begin
import psutil
with open("own.csv", "a") as file:
    csv.writer(file).writerow([args.epochs, args.ranks, work, time.time() - psutil.Process().create_time()])
"""
STUDY = """\
from raypar import Study, Workload, grid

study = Study(
    name="script",
    workload=Workload.from_command("python train.py --epochs {epochs} --ranks {ranks}", {METRICS}),
    space={SPACE},
    baseline={BASELINE},
    num_repeats=1,
    config={CONFIG},
)
"""
LOSS = r'metrics={"loss": r"loss: (\S+)"}, metric="loss", mode="min"'


def study(space: str, metrics: str = LOSS, baseline: str = "") -> str:
    """Return a study of ``train.py``."""
    config = ", ".join(f'"{key}": {value}' for key, value in (("epochs", 3), ("ranks", 1)) if f'"{key}"' not in space)
    parts = {"METRICS": metrics, "SPACE": f"{{{space}}}", "BASELINE": f"{{{baseline}}}", "CONFIG": f"{{{config}}}"}
    return reduce(lambda text, part: text.replace(f"{{{part[0]}}}", part[1]), parts.items(), STUDY)


def speedups(case: Steps, user: User, key: str, column: int) -> Outcome:
    """Compare the speedups of a report with those of the script's own clock, which may be those of the work alone or
    of the whole process, or lie between.

    Args:
        column: of ``own.csv``, the values of the key.
    """
    done = user.study("script_study.py")
    if done.code:
        return case.refusal(done)
    stored, problems = user.stored("script", done), problems_of_text(done.output, (), ())
    with (user.folder / "own.csv").open() as file:
        own = {int(row[column]): (float(row[2]), float(row[3])) for row in csv.reader(file)}
    for point in stored.report["points"]:
        value, speedup = point["point"][key], (point["speedup"] or {}).get("value")
        low, high = sorted(base / time_s for base, time_s in zip(own[min(own)], own[value], strict=True))
        if speedup is not None and not low * (1 - SPEEDUP_TOLERANCE) < speedup < high * (1 + SPEEDUP_TOLERANCE):
            problems.append(f"{key}={value}: {speedup:.2f}×, by its own clock {low:.2f}× to {high:.2f}×")
    return outcome_of(problems)


def of_epochs(case: Steps, user: User) -> Outcome:
    return speedups(case, user, "epochs", 0)


def of_ranks(case: Steps, user: User) -> Outcome:
    return speedups(case, user, "ranks", 1)


def judged_value(stored: Any) -> float | None:
    """Return the value that the only point of a study is judged by."""
    (point,) = stored.report["points"]
    value = (point["metric"] or {}).get("value")
    return None if value is None else float(value)


def value_is(*allowed: float, shown: Sequence[str] = (), hidden: Sequence[str] = ()) -> Any:
    """Return a judge of a study of one point: its metric's value is one of these."""

    def judge(case: Steps, user: User) -> Outcome:
        done = user.study("script_study.py")
        if done.code:
            return case.refusal(done)
        stored = user.stored("script", done, is_shown=bool(shown))
        return outcome_of(_of_value(stored, allowed, shown, hidden))

    return judge


def _of_value(stored: Any, allowed: Sequence[float], shown: Sequence[str], hidden: Sequence[str]) -> list[str]:
    value, problems = judged_value(stored), problems_of_text(stored.text, shown, hidden)
    if value is None or min(difference(value, right) for right in allowed) > 1e-6:
        problems.append(f"{stored.report['metric']} {value}, right is {' or '.join(map(str, allowed))}")
    return problems


def drafted(*allowed: float, shown: Sequence[str] = (), hidden: Sequence[str] = (), key: str = "epochs") -> Any:
    """Return a judge of the study that `raypar init` writes, at one point."""

    def judge(case: Steps, user: User) -> Outcome:
        done = user.run("init", "train.py")
        if done.code:
            return case.refusal(done)
        done = user.study("train_study.py", "--set", f"{key}=3", "--repeats", "1")
        if done.code:
            return case.refusal(done)
        return outcome_of(_of_value(user.stored("train_study", done, is_shown=bool(shown)), allowed, shown, hidden))

    return judge


def two_projects(case: Steps, user: User) -> Outcome:
    """Run two studies of one name with one store."""
    uri = f"sqlite:///{user.folder}/shared.db"
    for folder, right in (("a", 0.11), ("b", 0.99)):
        done = user.study("script_study.py", "--tracking-uri", uri, folder=folder)
        if done.code:
            return case.refusal(done) if folder == "b" else Outcome("FAILED", done.output[-300:])
        report = user.run("report", "script", "--tracking-uri", uri, folder=folder).output
        if f"{right}00" not in report:
            return Outcome(WRONG, f"project {folder}: not shown: {right}00")
    return Outcome(RIGHT)


def script(body: str) -> str:
    return CLOCK.replace("{body}", body)


PROJECT = script('for i in range(3):\n    print(f"step {i} loss: {VALUE:.4f}", flush=True)\n    time.sleep(0.1)')

CASES = [
    Steps(
        name="times of a script that prints every epoch",
        files={
            "train.py": script(
                "for epoch in range(args.epochs):\n"
                "    time.sleep(0.3)\n"
                '    print(f"epoch {epoch} loss: {1 / (epoch + 1)}", flush=True)'
            ),
            "script_study.py": study('"epochs": grid(2, 4, 8)', baseline='"epochs": 2'),
        },
        do=of_epochs,
        tags=("laps",),
    ),
    Steps(
        name="times of a script that prints every hundred batches",
        files={
            "train.py": script(
                "for batch in range(350 // args.ranks):\n"
                "    time.sleep({1: 0.004, 2: 0.0075}[args.ranks])\n"
                "    if batch % 100 == 0:\n"
                '        print(f"batch {batch} loss: {1 / (batch + 1)}", flush=True)'
            ),
            "script_study.py": study('"ranks": grid(1, 2)', baseline='"ranks": 1'),
        },
        do=of_ranks,
        tags=("laps",),
    ),
    Steps(
        name="times of a script that prints at its end",
        files={
            "train.py": script('time.sleep(0.5 * args.epochs)\nprint("loss: 0.5", flush=True)'),
            "script_study.py": study('"epochs": grid(1, 4)', baseline='"epochs": 1'),
        },
        do=of_epochs,
    ),
    Steps(
        name="per cent without a sign",
        files={
            "train.py": script('print("test accuracy: 88.1")\nprint("test accuracy: 93.21")'),
            "script_study.py": study(
                '"ranks": grid(1)',
                r'metrics={"test_accuracy": r"test accuracy: (\S+)"}, metric="test_accuracy", mode="max"',
            ),
        },
        do=value_is(93.21, shown=(r"93\.21?\b",), hidden=("9321", r"9,321")),
        tags=("units",),
    ),
    Steps(
        name="per cent with a sign, drafted",
        files={
            "train.py": script(
                "for epoch in range(args.epochs):\n"
                '    print(f"epoch {epoch}: val accuracy: {90 + epoch + 0.25:.2f}%", flush=True)'
            )
        },
        do=drafted(92.25, shown=(r"92\.2",), hidden=("9225", r"9,225")),
        tags=("units",),
    ),
    Steps(
        name="a share of counts and in brackets, drafted",
        files={
            "train.py": script(
                "for epoch in range(args.epochs):\n"
                "    correct, loss = 9000 + 300 * epoch, 0.5 / (epoch + 1)\n"
                '    print(f"Test set: Average loss: {loss:.4f}, Accuracy: {correct}/10000 ({correct / 100:.0f}%)")'
            )
        },
        do=drafted(0.1667, 96.0, 0.96, hidden=("9600.0 %", r"9,600")),
        tags=("units",),
    ),
    Steps(
        name="two phases in one print, drafted",
        files={
            "train.py": script(
                "for epoch in range(args.epochs):\n"
                '    for phase in ["train", "val"]:\n'
                '        loss = (1.0 if phase == "train" else 2.0) / (epoch + 1)\n'
                '        acc = 0.9 if phase == "train" else 0.6 + epoch / 100\n'
                '        print(f"{phase} Loss: {loss:.4f} Acc: {acc:.4f}", flush=True)\n'
                'print(f"Best val Acc: {0.62:4f}")'
            )
        },
        do=drafted(0.62, 0.6667),
        tags=("output",),
    ),
    Steps(
        name="two phases in brackets, drafted",
        files={
            "train.py": script(
                "for epoch in range(args.epochs):\n"
                "    loss, accuracy = 0.1 / (epoch + 1), 0.97\n"
                '    print(f"[Train] Epoch: {epoch} | Loss: {loss:.4f} | Accuracy: {accuracy:.4f}")\n'
                "    loss, accuracy = 0.7 + epoch / 10, 0.5 + epoch / 100\n"
                '    print(f"[Valid] Epoch: {epoch} | Loss: {loss:.4f} | Accuracy: {accuracy:.4f}", flush=True)\n'
            )
        },
        do=drafted(0.52, 0.9),
        tags=("output",),
    ),
    Steps(
        name="training lines after validation lines, drafted",
        files={
            "train.py": script(
                "for epoch in range(args.epochs):\n"
                '    print(f"val loss: {0.7 + epoch / 10:.4f}", flush=True)\n'
                '    print(f"train loss: {0.1 / (epoch + 1):.4f}", flush=True)'
            )
        },
        do=drafted(0.9),
        tags=("output",),
    ),
    Steps(
        name="capital exponents, drafted",
        files={
            "train.py": script(
                "for epoch in range(args.epochs):\n"
                '    print(f"Epoch {epoch} | Loss: {0.00125 * 10 ** -epoch:.3E}", flush=True)'
            )
        },
        do=drafted(1.25e-5),
        tags=("output",),
    ),
    Steps(
        name="capital exponents, an expression that stops early",
        files={
            "train.py": script('print("loss: 1.250E-05")'),
            "script_study.py": study(
                '"ranks": grid(1)', r'metrics={"loss": r"loss: ([0-9.]+)"}, metric="loss", mode="min"'
            ),
        },
        do=value_is(1.25e-5),
        tags=("output",),
    ),
    Steps(
        name="thousands with commas",
        files={
            "train.py": script('print("reward: 12,345.6")'),
            "script_study.py": study(
                '"ranks": grid(1)', r'metrics={"reward": r"reward: ([\d.,]+)"}, metric="reward", mode="max"'
            ),
        },
        do=value_is(12345.6),
        tags=("output",),
    ),
    Steps(
        name="lines of JSON",
        files={
            "train.py": script(
                "import json\nfor epoch in range(args.epochs):\n"
                '    print(json.dumps({"epoch": epoch, "loss": 1 / (epoch + 1)}), flush=True)'
            ),
            "script_study.py": study('"ranks": grid(1)', 'metric="loss", mode="min"'),
        },
        do=value_is(1 / 3),
    ),
    Steps(
        name="reports from a script",
        files={
            "train.py": script(
                "import raypar\n"
                "for epoch in range(args.epochs):\n"
                '    raypar.report({"epoch": epoch, "score": 2.0 ** -epoch})'
            ),
            "script_study.py": study('"ranks": grid(1)', 'metric="score", mode="max"'),
        },
        do=value_is(0.25),
    ),
    Steps(
        name="lines of two ranks",
        files={
            "train.py": "import os, time\n"
            "rank = int(os.environ['RANK'])\n"
            "for step in range(3):\n"
            "    time.sleep(0.2 + 0.1 * rank)\n"
            "    print(f'step {step} loss: {1 / (step + 1) + 10 * rank:.4f}', flush=True)\n",
            "script_study.py": study('"num_workers": grid(2)').replace(
                "python train.py", "torchrun --standalone --nproc-per-node={num_workers} train.py"
            ),
        },
        do=value_is(0.3333),
        tags=("output",),
    ),
    Steps(
        name="two projects, one store, one name",
        files={
            f"{folder}/{name}": text
            for folder, value in (("a", "0.11"), ("b", "0.99"))
            for name, text in (
                ("train.py", PROJECT.replace("VALUE", value)),
                ("script_study.py", study('"ranks": grid(1)')),
            )
        },
        do=two_projects,
        expected=REFUSED,
        words=("name", "tracking-uri"),
        tags=("store",),
    ),
]
