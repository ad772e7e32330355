"""``raypar model generate``: text of the best kept model, and refusals."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import raypar, refused
from results import make_result

import raypar.workloads as shipped
from raypar.cli import common
from raypar.study.trial import TrialState, best_first


@pytest.fixture
def stored(monkeypatch):
    """A function that puts three trials into the store, of which some have kept a model."""

    def put(kept, workload="writer", file=""):
        results = [make_result({"lr": lr}, accuracy=accuracy) for lr, accuracy in ((0.1, 0.8), (0.2, 0.9), (0.3, 0.7))]
        results = [replace(result, spec=replace(result.spec, workload=workload)) for result in results]
        folders = {results[i].spec.identity: Path(f"model-{i}") for i in kept}
        question = {"metric": "accuracy", "mode": "max"}
        answers = {"results": results, "question": question, "resume_info": {"file": file}}
        store = SimpleNamespace(**{key: lambda _, answer=answer: answer for key, answer in answers.items()})
        store.model_folder = lambda _, identity: folders.get(identity)
        monkeypatch.setattr(common, "store_of", lambda _: store)

    return put


@pytest.fixture(autouse=True)
def a_model_that_repeats_its_prompt(monkeypatch):
    writer = replace(shipped.digits, name="writer", generate=lambda folder, prompt, n: f"{folder} {prompt} {n}")
    monkeypatch.setattr(shipped, "WORKLOADS", {**shipped.WORKLOADS, "writer": writer})


PROMPT = ("model", "generate", "mnist", "--prompt", "add")


@pytest.mark.parametrize(
    ("kept", "flags", "text"),
    [((0, 1, 2), ("--max-new-tokens", "7"), "model-1 add 7\n"), ((0, 2), (), "model-0 add 128\n")],
    ids=["best", "best that kept its model"],
)
def test_the_best_kept_model_generates_text(stored, kept, flags, text):
    stored(kept)
    code, out, err = raypar(*PROMPT, *flags)
    assert (code, out) == (0, text) and f"lr=0.{2 if 1 in kept else 1} #1" in err


OWN = """
from dataclasses import replace
from raypar import Study
from raypar.workloads import digits
study = Study(workload=replace(digits, name="my_own", generate=lambda folder, prompt, n: f"mine: {prompt}"))
"""


@pytest.mark.usefixtures("modules_as_they_were")
def test_the_workload_of_the_studys_file_writes(stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "writes.py").write_text(OWN)
    stored((0,), "my_own", "writes.py")
    assert raypar(*PROMPT)[:2] == (0, "mine: add\n")


@pytest.mark.parametrize(
    ("workload", "kept", "message"),
    [
        ("writer", (), "kept no model → run it with --set keep_model=true"),
        ("mnist_mlp", (0,), "workload `mnist_mlp` generates no text → give the Workload generate="),
        (
            "my_own",
            (0,),
            "study `mnist` is not in this folder, and no workload `my_own` ships with raypar",
        ),
    ],
)
def test_a_missing_generator_is_explained(stored, workload, kept, message):
    stored(kept, workload)
    refused(message, *PROMPT)


def test_a_trial_is_ranked_by_its_best_report():
    def reported(lr, *losses):
        return replace(make_result({"lr": lr}), reports=tuple({"val_loss": loss} for loss in losses))

    overfitted, steady = reported(0.1, 2.0, 1.0, 3.0), reported(0.2, 2.5, 2.0, 1.5)
    broken, silent = reported(0.3, float("nan")), reported(0.4)
    failed = make_result({"lr": 0.5}, state=TrialState.FAILED)
    ordered = best_first([silent, steady, failed, broken, overfitted], "val_loss", "min")
    assert ordered[:2] == [overfitted, steady] and failed not in ordered and len(ordered) == 4
