"""The studies that ship load, are short, and ask what they say."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raypar.study.loader import LoadedStudy, load_study
from raypar.study.settings import with_flags

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
    study = load_study(path).study
    assert study.name == path.stem and study.description
    assert study.num_repeats >= 3
    # Every point has a baseline, and some point differs from its own.
    points = study.points()
    assert study.baseline and all(study.baseline_of(point) in points for point in points)
    assert any(study.baseline_of(point) != point for point in points)


WORKERS = ("batch_size", "break_even", "custom_model", "fashion_data_parallel", "quickstart", "serial_vs_parallel")


@pytest.mark.parametrize("name", WORKERS)
def test_a_study_of_workers_compares_two_with_one(name: str) -> None:
    study = study_file(name).study
    assert study.baseline == {"num_workers": 1}
    assert {t.placement.num_workers for t in study.trials()} == {1, 2}


# What a study sweeps, and the point it compares with: those of the document it is named after.
REFERENCES = {
    "epochs": ({"epochs"}, {"epochs": 3}),
    "optimizer": ({"optimizer", "lr"}, {"optimizer": "sgd"}),
    "learning_rate": ({"lr"}, {"lr": 0.1}),
    "loader_workers": ({"num_loader_workers", "batch_size"}, {"num_loader_workers": 0}),
    "cpu_vs_gpu": ({"device", "batch_size"}, {"device": "cpu"}),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_study_of_the_perceptron_on_mnist_differs_from_the_reference_in_what_it_sweeps(name: str) -> None:
    study, (swept, baseline) = study_file(name).study, REFERENCES[name]
    assert study.workload.name == "mnist_mlp" and set(study.space) == swept and study.baseline == baseline
    for trial in study.trials():
        reference = {"optimizer": "sgd", "lr": 0.1, "epochs": 3, "batch_size": 64, "num_workers": 1}
        assert {k for k, v in reference.items() if trial.config[k] != v} <= swept


AFTER_A_DOCUMENT = (
    *REFERENCES,
    "batch_size",
    "break_even",
    "fashion_data_parallel",
    "iris_threads",
    "mnist_cnn_device",
    "serial_vs_parallel",
)


@pytest.mark.parametrize("name", AFTER_A_DOCUMENT)
def test_a_study_after_a_document_names_it(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert re.search(r'After the document "[A-Z][^"]+"', ast.get_docstring(ast.parse(text)) or "")


def test_loader_processes_are_asked_about_where_there_are_some() -> None:
    for name, processes in (("loader_workers", {0, 4}), ("cpu_vs_gpu", {4}), ("mnist_cnn_device", {4})):
        configs = [t.config for t in study_file(name).study.trials()]
        assert {c["loader"] for c in configs} == {"dataloader"}
        assert {c["num_loader_workers"] for c in configs} == processes


def test_images_in_memory_can_be_compared_with_the_loader_processes() -> None:
    study = with_flags(study_file("loader_workers").study, ["loader=resident", "num_loader_workers=0"])
    assert {(t.config["loader"], t.config["num_loader_workers"]) for t in study.trials()} == {("resident", 0)}


def test_the_convolutional_network_is_asked_for_on_cpu_and_gpu_as_documented() -> None:
    study = study_file("mnist_cnn_device").study
    assert [p["device"] for p in study.points()] == ["cpu", "cuda"] and study.workload.name == "mnist_cnn"
    c = study.trials()[0].config
    assert (c["optimizer"], c["lr"], c["batch_size"], c["epochs"]) == ("adam", 0.001, 64, 10)


def test_the_iris_study_compares_batches_and_threads_with_neither() -> None:
    study = study_file("iris_threads").study
    assert study.baseline == {"batch_size": study.workload.num_train_samples, "preprocess_threads": 0}
    assert len(study.points()) == 4


def test_gradient_descent_on_fashion_takes_60_steps_of_the_whole_training_set() -> None:
    study = study_file("fashion_data_parallel").study
    assert {t.config["strategy"] for t in study.trials()} == {"ddp", "gather_broadcast"}
    for c in (t.config for t in study.trials()):
        assert c["batch_size"] == study.workload.num_train_samples == 50_000
        assert (c["epochs"], c["optimizer"], c["lr"], c["activation"]) == (60, "sgd", 0.01, "sigmoid")


def test_the_break_even_study_grows_the_layers_and_the_data() -> None:
    study = study_file("break_even").study
    assert list(study.space) == ["hidden_size", "num_samples", "num_workers"] and len(study.points()) == 18
    # 18 models of no use to anyone would fill the store.
    assert not any(t.config["keep_model"] for t in study.trials())


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
