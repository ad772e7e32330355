"""The studies that ship load, and compare like with like. Their trials are pinned in tests/golden/identities.json."""

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command import refused

from raypar import StudyError
from raypar.execution.plan import make_plan
from raypar.parallel.ddp import COMPRESSIONS
from raypar.parallel.pipeline import SCHEDULES, micro_batches_for
from raypar.parallel.strategy import check_compatible
from raypar.run.cluster import Cluster
from raypar.study.loader import load_study
from raypar.study.strategy import STRATEGIES
from raypar.study.validation import validate

pytestmark = pytest.mark.usefixtures("modules_as_they_were")

FOLDER = Path(__file__).parents[2] / "studies"
FILES = sorted(FOLDER.glob("*.py"))
FOREIGN = sorted(path for path in (FOLDER / "foreign").glob("*.py") if path.stem != "foreign_scripts")
TEXT = (FOLDER.parent / "docs" / "reports.md").read_text(encoding="utf-8")
REPORTS = re.findall(r"^\| \*([^*]+)\* ", TEXT, re.MULTILINE)
REPEATS_REPORT = (
    *("epochs", "optimizer", "learning_rate", "loader_workers", "cpu_vs_gpu", "batch_size", "break_even"),
    *("fashion_data_parallel", "iris_threads", "mnist_cnn_device", "serial_vs_parallel"),
)
WHOLE_BATCHES = ("strategies", "overlap", "bucket_size", "compression", "pipeline_schedules")
TECHNIQUES = (*WHOLE_BATCHES, "large_batch_lars", "transformer_scaling", "weak_scaling", "strong_scaling")
HEAVY = ("existing_loop",)  # imports torchvision and ray.train as its user's script does


def study_file(name):
    return load_study(FOLDER / f"{name}.py")


@pytest.mark.parametrize("path", [p for p in FILES if p.stem not in HEAVY], ids=lambda p: p.stem)
def test_a_study_file_loads_into_trials_that_can_be_compared(path):
    study, text = load_study(path).study, path.read_text(encoding="utf-8")
    assert study.name == path.stem and study.description and len(text.splitlines()) <= 40
    assert study.num_repeats >= 3
    if study.is_search:
        assert study.num_trials and study.baseline == {}
        return
    # Every point has a baseline, and some point differs from its own.
    points = study.points()
    assert study.baseline and all({**point, **study.baseline} in points for point in points)
    assert any({**point, **study.baseline} != point for point in points)
    if path.stem in REPEATS_REPORT:
        docstring = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
        assert any(f'"{title}"' in docstring for title in REPORTS)


@pytest.mark.parametrize("name", [p.stem for p in FOREIGN])
def test_a_study_of_another_projects_script_loads_and_names_the_command_that_brings_it(name, tmp_path, monkeypatch):
    for path in (FOLDER / "foreign").glob("*.py"):
        shutil.copy(path, tmp_path)  # there is no clone beside it
    monkeypatch.delitem(sys.modules, "foreign_scripts", raising=False)
    monkeypatch.chdir(tmp_path)
    study = load_study(tmp_path / f"{name}.py").study
    assert len(study.points()) == 2 and study.baseline and study.description
    docstring = ast.get_docstring(ast.parse((FOLDER / "foreign" / f"{name}.py").read_text(encoding="utf-8")))
    (clone,) = re.findall(r"^ +git clone --depth 1 (\S+) studies/foreign/(\S+)$", docstring, re.MULTILINE)
    refused("the script is not there", "plan", f"{name}.py", out=None)
    refused(f"git clone --depth 1 {clone[0]} {tmp_path / clone[1]}", "study", f"{name}.py", "--no-ray", out=None)


SEARCHES = ("search_asha", "search_optuna", "search_time_to_accuracy")  # where their trials run, the searcher decides
ON_CPU = ("cpu_affinity", "iris_threads", "quickstart", "search_population")
ON_BOTH = ("cpu_vs_gpu", "mnist_cnn_device")
ONE_WORKER = ("epochs", "large_batch_lars", "learning_rate", "loader_workers", "lr_scaling", "optimizer")


def devices_of(name, num_gpus):
    """Return the devices of a study's trials on a machine with this many GPUs; none: it needs a GPU."""
    if name in ON_BOTH:
        return {"cpu", "cuda"} if num_gpus else set()
    return {"cuda"} if name not in ON_CPU and num_gpus >= (1 if name in ONE_WORKER else 2) else {"cpu"}


@pytest.mark.parametrize("path", [p for p in FILES if p.stem not in SEARCHES], ids=lambda p: p.stem)
def test_a_study_runs_on_any_number_of_gpus(path):
    study = load_study(path).study
    for num_gpus in (0, 1, 2, 8):
        machine = Cluster(({"CPU": 16, "GPU": num_gpus},), is_own=True)
        if devices := devices_of(path.stem, num_gpus):
            assert {placement.device for placement in make_plan(study, machine, ()).placements} == devices
        else:
            with pytest.raises(StudyError, match="needs 1 GPU in one gang, the cluster has 0"):
                make_plan(study, machine, ())


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_is_compared_over_the_same_samples(name):
    study = study_file(name).study
    for point in study.points():
        config, base = (study.trial(p, 0).config for p in (point, {**point, **study.baseline}))
        assert (config["epochs"], config["num_samples"]) == (base["epochs"], base["num_samples"])
        # Only in weak scaling does the batch grow: with the workers.
        same = "per_worker_batch_size" if name == "weak_scaling" else "batch_size"
        assert config[same] == base[same] is not None
        if name in WHOLE_BATCHES:  # no point ends on a smaller batch
            num_samples = study.workload.train_size(config)
            assert num_samples is not None and num_samples % config["batch_size"] == 0
            assert num_samples // config["batch_size"] >= 8


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        # Hybrid needs four workers and more, DeepSpeed another package.
        ("strategies", "strategy", set(STRATEGIES) - {"hybrid", "deepspeed"}),
        ("compression", "compression", set(COMPRESSIONS)),
        ("pipeline_schedules", "pipeline_schedule", set(SCHEDULES)),
        ("existing_loop", "num_workers", {1, 2}),
    ],
)
def test_a_study_of_a_technique_has_all_its_kinds(name, key, values):
    assert {trial.config[key] for trial in study_file(name).study.trials()} == values


@pytest.mark.parametrize("name", ["overlap", "bucket_size"])
def test_gradients_are_sent_in_several_buckets_and_in_one_for_all(name):
    study = study_file(name).study
    model = study.workload.model(study.trials()[0].config)
    gradients_mb = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    sizes_mb = sorted({p["bucket_mb"] for p in study.points()})
    assert sizes_mb[0] < gradients_mb / 4 and sizes_mb[-2] < gradients_mb < sizes_mb[-1]


def test_every_schedule_of_a_pipeline_is_run_with_micro_batches_that_it_can_do():
    study = study_file("pipeline_schedules").study
    for config in (t.config for t in study.trials()):
        assert config["strategy"] == "pipeline" and validate(config, study.workload) == []
        assert check_compatible(study.workload, config) is None
        num = config["num_microbatches"]
        assert micro_batches_for(config["batch_size"], num, 2) == num  # not fewer


def test_lars_and_momentum_have_the_same_batches_and_rates_to_choose_from():
    configs = [t.config for t in study_file("large_batch_lars").study.trials()]
    assert {c["lr_scaling"] for c in configs} == {"linear"}
    pairs = [{(c["batch_size"], c["lr"]) for c in configs if c["optimizer"] == name} for name in ("momentum", "lars")]
    assert pairs[0] == pairs[1] and len(pairs[0]) == 12
    # The warm-up is shorter than the shortest training.
    num_steps = 5 * -(-60_000 // max(c["batch_size"] for c in configs))
    assert all(0 < c["lr_warmup_steps"] < num_steps for c in configs)


def test_the_custom_model_trains_on_its_own_data():
    loaded = study_file("custom_model")
    workload, config = loaded.study.workload, loaded.study.trials()[0].config
    assert loaded.imported_modules == ("sklearn.datasets", "torch")  # can be imported before its trials
    train = workload.data(config).train
    assert train is not None and len(train) == workload.num_train_samples
    outputs = workload.model(config)(train.inputs[:5])
    torch.nn.functional.cross_entropy(outputs, train.targets[:5]).backward()
    assert outputs.shape == (5, 10)
