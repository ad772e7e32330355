"""``raypar generate``: the best kept model of a study writes, or one sentence says why none does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import raypar, refused
from results import make_result

import raypar.workloads as shipped
from raypar.cli import common
from raypar.study.trial import TrialResult, TrialState, best_first


def trials(workload: str = "writer") -> list[TrialResult]:
    results = [make_result({"lr": lr}, accuracy=accuracy) for lr, accuracy in ((0.1, 0.8), (0.2, 0.9), (0.3, 0.7))]
    return [replace(result, spec=replace(result.spec, workload=workload)) for result in results]


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


@pytest.fixture(autouse=True)
def a_model_that_repeats_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = replace(shipped.gpt2_code, name="writer", generate=lambda folder, prompt, n: f"{folder} {prompt} {n}")
    monkeypatch.setattr(shipped, "gpt2_code", writer)


PROMPT = ("generate", "mnist", "--prompt", "add")


@pytest.mark.parametrize(
    ("kept", "flags", "text"),
    [((0, 1, 2), ("--max-new-tokens", "7"), "model-1 add 7\n"), ((0, 2), (), "model-0 add 128\n")],
    ids=["best", "best that kept its model"],
)
def test_the_best_kept_model_writes(
    monkeypatch: pytest.MonkeyPatch, kept: tuple[int, ...], flags: tuple[str, ...], text: str
) -> None:
    monkeypatch.setattr(common, "store_of", lambda _: Shelf(trials(), kept))
    code, out, err = raypar(*PROMPT, *flags)
    assert (code, out) == (0, text) and f"lr=0.{2 if 1 in kept else 1} #1" in err


@pytest.mark.parametrize(
    ("workload", "kept", "message"),
    [
        ("writer", (), "has kept no model → run it with --set keep_model=true"),
        ("mnist_mlp", (0,), "generates no text → these do: writer"),
        ("my_own", (0,), "does not ship with raypar"),
    ],
)
def test_why_none_writes(monkeypatch: pytest.MonkeyPatch, workload: str, kept: tuple[int, ...], message: str) -> None:
    monkeypatch.setattr(common, "store_of", lambda _: Shelf(trials(workload), kept))
    refused(message, *PROMPT)


def test_a_trial_counts_by_its_best_report_because_that_ones_weights_are_kept() -> None:
    def reported(lr: float, *losses: float) -> TrialResult:
        return replace(make_result({"lr": lr}), reports=tuple({"val_loss": loss} for loss in losses))

    overfitted, steady = reported(0.1, 2.0, 1.0, 3.0), reported(0.2, 2.5, 2.0, 1.5)
    broken, silent = reported(0.3, float("nan")), reported(0.4)
    failed = make_result({"lr": 0.5}, state=TrialState.FAILED)
    ordered = best_first([silent, steady, failed, broken, overfitted], "val_loss", "min")
    assert ordered[:2] == [overfitted, steady] and failed not in ordered and len(ordered) == 4
