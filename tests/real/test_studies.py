"""Every shipped study, shrunk: all its trials finish, and its question is answered. Some run on Ray.

If MNIST and Fashion-MNIST are unavailable, files of their format hold scikit-learn's digits, enlarged. The tests check
that the studies run, not how well their networks learn.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from harness import HERE, run, settings_at
from sklearn.datasets import load_digits

from raypar.analysis.analyse import analyse
from raypar.execution.flags import RunFlags
from raypar.execution.plan import check_data, make_plan
from raypar.run.cluster import this_machine
from raypar.run.local import LocalRunner
from raypar.run.tune import TuneRunner
from raypar.study.loader import load_study
from raypar.study.trial import TrialState, gang_step_times_s
from raypar.study.workload import TrainLoopWorkload
from raypar.workloads.datasets import DATA_DIR_VARIABLE, IMAGE_SETS

FOLDER = HERE.parents[1] / "studies"
SHARED = HERE.parents[2] / "shared" / "data"
SMALL = ("epochs=1", "num_samples=600")
SHRUNK = {
    "batch_size": (*SMALL, "batch_size=32,128"),
    "break_even": (*SMALL[:1], "hidden_size=16,64", "num_samples=1000,2000"),
    "bucket_size": ("epochs=1", "depth=4", "num_points=256"),
    # Many buckets, since those of PowerSGD must keep their order.
    "compression": ("width=32", "depth=12", "num_points=512", "bucket_mb=0"),
    "cpu_affinity": (*SMALL, "hidden_size=16"),
    "cpu_vs_gpu": (*SMALL, "device=cpu", "num_loader_workers=1", "batch_size=64"),
    "custom_model": ("epochs=2", "channels=2,4"),
    "epochs": (*SMALL[1:], "epochs=1,2,3"),
    "existing_loop": ("num_epochs=1", "num_images=1024"),
    "fashion_data_parallel": ("epochs=3", "num_samples=2000", "batch_size=2000", "eval_every_steps=2"),
    "gpt2_finetune": ("init=scratch", "size=tiny", "epochs=1", "num_samples=16", "block_size=16", "eval_every_steps=1"),
    "iris_threads": ("epochs=2",),
    "large_batch_lars": (*SMALL, "batch_size=64,256", "lr=0.1"),
    "learning_rate": (*SMALL, "lr=0.01,0.1"),
    "loader_workers": (*SMALL, "num_loader_workers=0,1", "batch_size=64"),
    "lr_scaling": (*SMALL, "batch_size=32,64"),
    "mnist_cnn_device": (*SMALL, "device=cpu"),
    "optimizer": (*SMALL, "lr=0.01"),
    "overlap": ("width=32", "num_points=256", "bucket_mb=0.001,100"),
    "pipeline_schedules": ("width=16", "num_sequences=256", "batch_size=64"),
    "quickstart": ("epochs=2",),
    "search_asha": (*SMALL[1:], "epochs=2"),
    "search_optuna": (*SMALL[1:], "epochs=2"),
    "search_population": ("num_members=4", "num_epochs=2", "interval=1", "num_images=256"),
    "search_time_to_accuracy": (*SMALL[1:], "epochs=2"),
    "serial_vs_parallel": SMALL,
    "strategies": ("width=32", "num_points=512"),
    "strong_scaling": ("epochs=1", "num_images=64", "image_size=32", "batch_size=16"),
    "transformer_scaling": ("width=16", "num_sequences=256"),
    "weak_scaling": ("epochs=1", "num_images=64", "image_size=32", "per_worker_batch_size=8"),
}
ON_RAY = ("batch_size", "existing_loop", "fashion_data_parallel", "search_asha", "serial_vs_parallel", "strategies")
NEEDS = {"cpu_affinity": "tweeteval", "gpt2_finetune": "mbpp"}


def _write_digits_as(name, root):
    """Write the 8x8 digits in MNIST's format, enlarged to 24x24 in a frame of 28x28, and repeated to its size."""
    pixels, labels = load_digits(return_X_y=True)
    large = np.kron(pixels.reshape(-1, 8, 8), np.ones((3, 3))) * 15.9
    framed = np.pad(large.astype(np.uint8), ((0, 0), (2, 2), (2, 2)))
    folder = root / IMAGE_SETS[name].folder
    folder.mkdir(parents=True)
    for file in IMAGE_SETS[name].files:
        source = framed if "images" in file.name else labels.astype(np.uint8)
        every = np.resize(source, file.num_bytes - len(file.header))
        (folder / file.name).write_bytes(file.header + every.tobytes())


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Return the user's data folder, or one with generated data."""
    named = Path(os.environ.get(DATA_DIR_VARIABLE) or SHARED)
    with pytest.MonkeyPatch.context() as patch:
        if not named.is_dir():
            named = tmp_path_factory.mktemp("data")
            for name in IMAGE_SETS:
                _write_digits_as(name, named)
        patch.setenv(DATA_DIR_VARIABLE, str(named.absolute()))
        yield named


def test_every_shipped_study_is_tested():
    assert set(SHRUNK) == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ray) if name in ON_RAY else name for name in sorted(SHRUNK)]
)
def test_a_shipped_study_answers_its_question(name, data_dir, tmp_path, request, monkeypatch):
    if name in NEEDS and not (data_dir / NEEDS[name]).is_dir():
        pytest.skip(f"needs {NEEDS[name]} in {data_dir}")
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = load_study(FOLDER / f"{name}.py", SHRUNK[name], RunFlags(repeats=1).of_study)
    study = replace(loaded.study, until="", budget=None)
    if study.is_search:
        study = replace(study, num_trials=4)
    check_data(study, loaded.path)
    plan = make_plan(study, this_machine(), ())
    for module in (loaded.module_name, *loaded.local_modules):
        cloudpickle.register_pickle_by_value(sys.modules[module])
    environment = {DATA_DIR_VARIABLE: os.environ[DATA_DIR_VARIABLE]}
    settings = settings_at(tmp_path, environment=environment, sys_path=(str(FOLDER),))
    if name in ON_RAY:
        runner = TuneRunner(settings, owns_cluster=True, fork_addresses={"": request.getfixturevalue("fork_address")})
        results = run(runner, study, plan.missing).results
    else:
        with LocalRunner(settings) as local:
            results = run(local, study, plan.missing).results
    expected = {TrialState.FINISHED, *([TrialState.STOPPED] if study.is_search else [])}
    assert [(r.state, r.failure) for r in results if r.state not in expected] == []
    assert len(results) == (study.num_trials if study.is_search else len(study.points())) >= 1
    for result in results:
        if isinstance(study.workload, TrainLoopWorkload):  # it may report anything
            assert result.reports and result.train_time_s is not None and result.wall_s > result.train_time_s
        else:
            assert study.judged_by.name in result.final and result.final["step"] == len(gang_step_times_s(result)) > 0
    analysis = analyse(study, results)
    assert not study.baseline or all(p.speedup is not None for p in analysis.points if not p.is_baseline)
    assert analysis.verdict.answer
