"""The studies that ship load, are short, and ask what they say."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raypar.parallel.pipeline import micro_batches_for
from raypar.parallel.strategy import check_compatible
from raypar.study.loader import LoadedStudy, load_study
from raypar.study.options import COMPRESSIONS, PIPELINE_SCHEDULES, STRATEGIES
from raypar.study.overrides import with_flags
from raypar.study.study import Study
from raypar.study.validation import validate

FOLDER = Path(__file__).parents[2] / "studies"
FILES = sorted(FOLDER.glob("*.py"))
REPORTS = re.findall(
    r"^\| \*([^*]+)\* ", (FOLDER.parent / "docs" / "reports.md").read_text(encoding="utf-8"), re.MULTILINE
)
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


WORKERS = (
    "batch_size",
    "break_even",
    "custom_model",
    "fashion_data_parallel",
    "quickstart",
    "serial_vs_parallel",
    "strong_scaling",
    "transformer_scaling",
    "weak_scaling",
)


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
def test_a_study_that_repeats_a_report_names_it(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert any(f'"{title}"' in " ".join(docstring.split()) for title in REPORTS)


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


# Studies of one lecture's techniques: the workload, what is swept, and how many workers share a step.
TECHNIQUES = {
    "strategies": ("wide_mlp", {"strategy", "batch_size"}, {2}),
    "overlap": ("wide_mlp", {"overlap", "bucket_mb"}, {2}),
    "bucket_size": ("wide_mlp", {"bucket_mb"}, {2}),
    "compression": ("wide_mlp", {"compression"}, {2}),
    "pipeline_schedules": ("transformer", {"pipeline_schedule", "num_microbatches"}, {2}),
    "large_batch_lars": ("mnist_mlp", {"batch_size", "lr", "optimizer"}, {1}),
    "transformer_scaling": ("transformer", {"batch_size", "num_workers"}, {1, 2}),
    "weak_scaling": ("resnet", {"num_workers"}, {1, 2}),
    "strong_scaling": ("resnet", {"num_workers"}, {1, 2}),
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_study_of_a_technique_varies_it_alone_and_names_the_lecture(name: str) -> None:
    study, (workload, swept, num_workers) = study_file(name).study, TECHNIQUES[name]
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert f'"{REPORTS[-1]}"' in " ".join((ast.get_docstring(ast.parse(text)) or "").split())
    assert study.workload.name == workload and set(study.space) == swept
    assert {t.placement.num_workers for t in study.trials()} == num_workers


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_is_compared_over_the_same_samples(name: str) -> None:
    study = study_file(name).study
    for point in study.points():
        own, base = (study.trial(p, 0).config for p in (point, study.baseline_of(point)))
        assert (own["epochs"], own["num_samples"]) == (base["epochs"], base["num_samples"])
        # Only in weak scaling does the batch grow: with the workers.
        same = "per_worker_batch_size" if name == "weak_scaling" else "batch_size"
        assert own[same] == base[same] is not None


@pytest.mark.parametrize("name", ["strategies", "overlap", "bucket_size", "compression", "pipeline_schedules"])
def test_no_point_of_a_study_of_strategies_ends_on_a_smaller_batch(name: str) -> None:
    study = study_file(name).study
    assert study.workload.num_train_samples is not None and callable(study.workload.num_train_samples)
    for config in (t.config for t in study.trials()):
        num_samples = study.workload.num_train_samples(config)
        assert num_samples % config["batch_size"] == 0
        assert num_samples // config["batch_size"] >= 8


def test_every_way_to_share_a_step_that_torch_brings_is_compared_with_ddp() -> None:
    study = study_file("strategies").study
    missing = set(STRATEGIES) - {p["strategy"] for p in study.points()}
    assert missing == {"hybrid", "deepspeed"}  # of four workers and more; of another package
    assert study.baseline == {"strategy": "ddp"}


def test_sending_early_and_late_is_compared_with_several_buckets_and_with_one_for_all() -> None:
    study = study_file("overlap").study
    assert study.baseline == {"overlap": False} and {p["overlap"] for p in study.points()} == {False, True}
    sizes_mb = {p["bucket_mb"] for p in study.points()}
    assert min(sizes_mb) < gradients_mb(study) / 4 < gradients_mb(study) < max(sizes_mb)


def test_gradients_are_fused_from_none_to_all() -> None:
    study = study_file("bucket_size").study
    assert study.baseline == {"bucket_mb": 0.0}
    sizes_mb = [p["bucket_mb"] for p in study.points()]
    assert sizes_mb == sorted(sizes_mb) and sizes_mb[-1] > gradients_mb(study) > sizes_mb[-2]


def gradients_mb(study: Study) -> float:
    """Of a step, in MiB."""
    assert study.workload.model is not None
    model = study.workload.model(study.trials()[0].config)
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20


def test_every_compression_is_compared_with_none() -> None:
    study = study_file("compression").study
    assert {p["compression"] for p in study.points()} == set(COMPRESSIONS)
    assert study.baseline == {"compression": "none"}


def test_every_schedule_of_a_pipeline_is_run_with_micro_batches_that_it_can_do() -> None:
    study = study_file("pipeline_schedules").study
    assert {p["pipeline_schedule"] for p in study.points()} == set(PIPELINE_SCHEDULES)
    for config in (t.config for t in study.trials()):
        assert config["strategy"] == "pipeline" and validate(config, study.workload) == []
        assert check_compatible(study.workload, config) is None
        # What is asked for is run, not fewer of them.
        num = config["num_microbatches"]
        assert micro_batches_for(config["batch_size"], num, 2) == num


def test_lars_and_momentum_have_the_same_batches_and_rates_to_choose_from() -> None:
    study = study_file("large_batch_lars").study
    assert study.baseline == {"optimizer": "momentum"}
    of = {name: [t.config for t in study.trials() if t.config["optimizer"] == name] for name in ("momentum", "lars")}
    pairs = {name: {(c["batch_size"], c["lr"]) for c in configs} for name, configs in of.items()}
    assert pairs["momentum"] == pairs["lars"] and len(pairs["lars"]) == 12
    assert {t.config["lr_scaling"] for t in study.trials()} == {"linear"}
    # The warm-up is shorter than the shortest training.
    largest = max(t.config["batch_size"] for t in study.trials())
    steps = 5 * -(-60_000 // largest)
    assert all(0 < t.config["lr_warmup_steps"] < steps for t in study.trials())


def test_the_transformers_study_has_both_ways_of_scaling() -> None:
    points = {(p["num_workers"], p["batch_size"]) for p in study_file("transformer_scaling").study.points()}
    assert {(1, 128), (2, 128), (2, 256)} <= points  # strong: the first two; weak: the first and the last


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


def test_the_existing_loop_is_taken_as_it_is() -> None:
    study = study_file("existing_loop").study
    assert study.workload.is_train_loop and study.workload.name == "train_func"
    assert {t.config["num_workers"] for t in study.trials()} == {1, 2}
    assert "batch_size" not in study.trials()[0].config
