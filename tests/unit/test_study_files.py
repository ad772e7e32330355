"""The studies that ship load, are short, and ask what they say."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raypar.study.loader import LoadedStudy, load_study

FOLDER = Path(__file__).parents[2] / "studies"
FILES = sorted(FOLDER.glob("*.py"))
HEAVY = ("existing_loop",)  # imports torchvision and ray.train as its user's script does


@pytest.fixture(autouse=True)
def _path_as_it_was() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def study_file(name: str) -> LoadedStudy:
    return load_study(FOLDER / f"{name}.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_study_file_is_short_and_says_what_it_asks_and_what_to_expect(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert len(text.splitlines()) <= 40
    assert len(docstring) > 80 and "xpect" in docstring


@pytest.mark.parametrize("path", [p for p in FILES if p.stem not in HEAVY], ids=lambda p: p.stem)
def test_a_study_file_loads_into_trials_that_can_be_compared(path: Path) -> None:
    found = load_study(path)
    assert found.study.name == path.stem and found.study.description
    assert found.study.baseline == {"num_workers": 1}
    assert {t.placement.num_workers for t in found.study.trials()} == {1, 2}
    assert found.study.num_repeats >= 3


def test_the_quick_start_is_twelve_trials_of_embedded_data() -> None:
    study = study_file("quickstart").study
    assert len(study.trials()) == 12 and study.workload.name == "digits"
    assert all(batch < 1_536 and 1_536 % batch == 0 for batch in (t.config["batch_size"] for t in study.trials()))  # type: ignore[operator]


def test_the_batch_size_study_is_that_of_the_design() -> None:
    study = study_file("batch_size").study
    assert {t.config["batch_size"] for t in study.trials()} == {32, 64, 128, 256, 512}
    assert {(t.config["epochs"], t.config["lr"], t.config["optimizer"]) for t in study.trials()} == {(3, 0.1, "sgd")}
    assert len(study.trials()) == 30


def test_the_own_model_trains_on_its_own_data() -> None:
    study = study_file("custom_model").study
    trial = study.trials()[0]
    assert study.workload.data is not None and study.workload.model is not None
    data = study.workload.data(trial.config)
    assert len(data.train) == study.workload.num_train_samples
    outputs = study.workload.model(trial.config)(data.train.inputs[:5])
    torch.nn.functional.cross_entropy(outputs, data.train.targets[:5]).backward()
    assert outputs.shape == (5, 10)


def test_the_own_models_third_party_imports_can_be_made_ahead_of_its_trials() -> None:
    assert study_file("custom_model").imported_modules == ("sklearn.datasets", "torch")


@pytest.mark.slow
def test_the_existing_loop_is_taken_as_it_is() -> None:
    study = study_file("existing_loop").study
    assert study.workload.is_train_loop and study.workload.name == "train_func"
    assert {t.config["num_workers"] for t in study.trials()} == {1, 2}
    assert "batch_size" not in study.trials()[0].config
