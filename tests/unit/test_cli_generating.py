"""``raypar generate``: the best kept model of a study writes, or one sentence says why none does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from results import make_result
from typer.testing import CliRunner

import raypar.workloads
from raypar.cli import store as generating
from raypar.cli.app import app
from raypar.study.trial import TrialResult, TrialState, best_first


def of_workload(name: str, result: TrialResult) -> TrialResult:
    return replace(result, spec=replace(result.spec, workload=name))


class Shelf:
    """A store with some results, of which some have kept a model."""

    def __init__(self, results: list[TrialResult], kept: tuple[int, ...]) -> None:
        self._results = results
        self._kept = {results[i].spec.identity: Path(f"model-{i}") for i in kept}

    def results(self, _: str) -> list[TrialResult]:
        return self._results

    def question(self, _: str) -> dict[str, Any]:
        return {"metric": "accuracy", "mode": "max"}

    def model_folder(self, _: str, identity: str) -> Path | None:
        return self._kept.get(identity)

    def studies(self) -> list[Any]:
        return []


def written(monkeypatch: pytest.MonkeyPatch, shelf: Shelf, *flags: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, with a model that repeats what it is asked."""
    writer = replace(
        raypar.workloads.gpt2_code, name="writer", generate=lambda folder, prompt, n: f"{folder} {prompt} {n}"
    )
    monkeypatch.setattr(raypar.workloads, "gpt2_code", writer)
    monkeypatch.setattr(generating, "store_of", lambda _: shelf)
    done = CliRunner().invoke(app, ["generate", "mnist", "--prompt", "add", *flags])
    return done.exit_code, done.stdout, done.stderr


THREE = [
    of_workload("writer", make_result({"lr": lr}, accuracy=accuracy))
    for lr, accuracy in ((0.1, 0.8), (0.2, 0.9), (0.3, 0.7))
]


def test_the_best_model_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = written(monkeypatch, Shelf(THREE, kept=(0, 1, 2)), "--max-new-tokens", "7")
    assert code == 0 and out == "model-1 add 7\n" and "lr=0.2 #1" in err


def test_a_trial_that_kept_no_model_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, Shelf(THREE, kept=(0, 2)))[1] == "model-0 add 128\n"


def test_a_study_without_a_kept_model_is_told_how_to_keep_one(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = written(monkeypatch, Shelf(THREE, kept=()))
    assert code == 2 and "has kept no model" in err and "keep_model" in err


def test_a_study_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = written(monkeypatch, Shelf([], kept=()))
    assert code == 2 and "no study `mnist`" in err


@pytest.mark.parametrize(
    ("workload", "why"), [("mnist_mlp", "generates no text"), ("my_own", "does not ship with raypar")]
)
def test_a_workload_that_can_not_write_is_told(monkeypatch: pytest.MonkeyPatch, workload: str, why: str) -> None:
    result = of_workload(workload, make_result({"lr": 0.1}))
    code, _, err = written(monkeypatch, Shelf([result], kept=(0,)))
    assert code == 2 and why in err and "writer" in err


def test_a_trial_counts_by_its_best_report_because_that_ones_weights_are_kept() -> None:
    def reported(lr: float, *losses: float) -> TrialResult:
        return replace(make_result({"lr": lr}), reports=tuple({"val_loss": loss} for loss in losses))

    overfitted, steady = reported(0.1, 2.0, 1.0, 3.0), reported(0.2, 2.5, 2.0, 1.5)
    broken, silent = reported(0.3, float("nan")), replace(make_result({"lr": 0.4}), reports=())
    failed = make_result({"lr": 0.5}, state=TrialState.FAILED)
    ordered = best_first([silent, steady, failed, broken, overfitted], "val_loss", "min")
    assert ordered[:2] == [overfitted, steady] and failed not in ordered and len(ordered) == 4
