"""Studies of published comparisons of a GPU with a CPU, for gpu_check.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common import STUDIES, checked

from raypar.execution.flags import RunFlags
from raypar.run.runner import Event, Runner, TrialEnded
from raypar.study.loader import load_study
from raypar.study.trial import TrialResult

SMALL = {"epochs": 1, "num_samples": 500, "batch_size": 20}  # of a dry run


@dataclass(frozen=True)
class Comparison:
    """A shipped study at one point on both devices, beside a published figure.

    Attributes:
        study: the name of its file.
        settings: as for ``--set``.
        published: speedup of the GPU over the CPU, or a text if there is no number.
    """

    name: str
    study: str
    settings: Mapping[str, Any]
    published: float | str


COMPARISONS = (
    Comparison("mnist_mlp", "cpu_vs_gpu", {"batch_size": 64}, 48 / 16),
    # A fifth of the study's epochs: the ratio is the same.
    Comparison("mnist_cnn", "mnist_cnn_device", {"epochs": 2}, 316.18 / 148.9),
    # The smallest network; each batch is copied to the device.
    Comparison(
        "fashion_small",
        "break_even",
        {"hidden_size": 64, "num_samples": 10_000, "num_workers": 1, "loader": "dataloader"},
        "below 1",
    ),
)


def compare(
    comparison: Comparison, runner: Runner, device: str, *, is_dry_run: bool = False
) -> tuple[bool, dict[str, Any]]:
    """Run a comparison's study once on the CPU and once on the device; both have to learn something.

    Args:
        device: as a study has it; "cpu" again where the CPU stands in for a GPU.

    Returns:
        Whether both are better than guessing among ten classes, and the figures; times in seconds, of the timed steps.
    """
    settings = {**comparison.settings, **(SMALL if is_dry_run else {})}
    figures: dict[str, Any] = {"study": f"studies/{comparison.study}.py", **settings}
    accuracies, times_s = [], []
    for label, name in (("cpu", "cpu"), ("gpu", device)):
        result = _trial(comparison, runner, {**settings, "device": name})
        accuracies.append(result.final["accuracy"])
        times_s.append(result.train_time_s or 0.0)
        figures |= {f"{label}_train_s": times_s[-1], f"{label}_accuracy": accuracies[-1]}
    return min(accuracies) > 0.1, {
        **figures,
        "speedup": times_s[0] / times_s[1],
        "published_speedup": comparison.published,
    }


def _trial(comparison: Comparison, runner: Runner, settings: Mapping[str, Any]) -> TrialResult:
    path = STUDIES / f"{comparison.study}.py"
    study = load_study(path, [f"{key}={value}" for key, value in settings.items()], RunFlags(repeats=1).of_study).study
    (spec,) = study.trials()
    study.workload.prepare(spec.config)
    results: list[TrialResult] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            results.append(checked(event.result))

    runner.run(study, [spec], listen)
    return results[0]
