"""The studies that ship load, and compare like with like. Their trials are pinned in tests/golden/identities.json."""

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


@pytest.mark.parametrize("path", [p for p in FILES if p.stem not in HEAVY], ids=lambda p: p.stem)
def test_a_study_file_loads_into_trials_that_can_be_compared(path: Path) -> None:
    study = load_study(path).study
    assert study.name == path.stem and study.description and len(path.read_text(encoding="utf-8").splitlines()) <= 40
    assert study.num_repeats >= 3
    # Every point has a baseline, and some point differs from its own.
    points = study.points()
    assert study.baseline and all(study.baseline_of(point) in points for point in points)
    assert any(study.baseline_of(point) != point for point in points)


@pytest.mark.parametrize(
    "name",
    [
        *("epochs", "optimizer", "learning_rate", "loader_workers", "cpu_vs_gpu", "batch_size", "break_even"),
        *("fashion_data_parallel", "iris_threads", "mnist_cnn_device", "serial_vs_parallel"),
    ],
)
def test_a_study_that_repeats_a_report_names_it(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert any(f'"{title}"' in " ".join(docstring.split()) for title in REPORTS)


TECHNIQUES = (
    *("strategies", "overlap", "bucket_size", "compression", "pipeline_schedules", "large_batch_lars"),
    *("transformer_scaling", "weak_scaling", "strong_scaling"),
)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_is_compared_over_the_same_samples(name: str) -> None:
    study = study_file(name).study
    for point in study.points():
        config, base = (study.trial(p, 0).config for p in (point, study.baseline_of(point)))
        assert (config["epochs"], config["num_samples"]) == (base["epochs"], base["num_samples"])
        # Only in weak scaling does the batch grow: with the workers.
        same = "per_worker_batch_size" if name == "weak_scaling" else "batch_size"
        assert config[same] == base[same] is not None


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


def test_sending_early_and_late_is_compared_with_several_buckets_and_with_one_for_all() -> None:
    study = study_file("overlap").study
    sizes_mb = {p["bucket_mb"] for p in study.points()}
    assert min(sizes_mb) < gradients_mb(study) / 4 < gradients_mb(study) < max(sizes_mb)


def test_gradients_are_fused_from_none_to_all() -> None:
    study = study_file("bucket_size").study
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
    of = {name: [t.config for t in study.trials() if t.config["optimizer"] == name] for name in ("momentum", "lars")}
    pairs = {name: {(c["batch_size"], c["lr"]) for c in configs} for name, configs in of.items()}
    assert pairs["momentum"] == pairs["lars"] and len(pairs["lars"]) == 12
    assert {t.config["lr_scaling"] for t in study.trials()} == {"linear"}
    # The warm-up is shorter than the shortest training.
    largest = max(t.config["batch_size"] for t in study.trials())
    steps = 5 * -(-60_000 // largest)
    assert all(0 < t.config["lr_warmup_steps"] < steps for t in study.trials())


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
