"""Effects of hyperparameters on a training: schedules, clipping, precision, layouts, evaluations, kept models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import NUM_VAL, acting, data, model, seeing
from telling import losses, run, settings_at

from raypar import Study
from raypar.run.local import LocalRunner
from raypar.study.trial import TrialResult
from raypar.train.affinity import allowed_cores
from raypar.train.saved_model import WEIGHTS_FILE

pytestmark = pytest.mark.skipif(len(allowed_cores()) < 2, reason="two workers need two cores")

STEPS_PER_EPOCH, EPOCHS = 4, 3
ACTING: dict[str, dict[str, Any]] = {
    "plain": {},
    "by step": {"eval_every_steps": 5},
    "linear": {"lr_schedule": "linear", "lr_warmup_steps": 2, "eval_every_steps": 1},
    "scaled": {"lr": 0.1, "lr_scaling": "linear", "lr_base_batch_size": 32},
    "clipped": {"clip_grad_norm": 1e-3},
    "clipped in fp16": {"clip_grad_norm": 1e-3, "precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "kept": {"keep_model": True, "lr": 3.0},
    "gathered": {"strategy": "gather_broadcast", "num_workers": 2, "precision": "fp64"},
    "reduced": {"strategy": "ddp", "num_workers": 2, "precision": "fp64"},
    "lamb": {"optimizer": "lamb", "lr": 0.01, "num_workers": 2},
}
SEEING: dict[str, dict[str, Any]] = {
    "image": {},
    "two": {"num_workers": 2},
    "nhwc": {"channels_last": True},
    "compiled": {"compile": True},
    "from files": {"in_memory": False, "loader": "dataloader"},
    "from files, two": {"in_memory": False, "loader": "dataloader", "num_workers": 2, "num_loader_workers": 1},
    "ahead": {"loader": "dataloader", "num_loader_workers": 1, "prefetch_factor": 3, "pin_memory": False},
}

Trial = Callable[[str], TrialResult]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train_options")


@pytest.fixture(scope="module")
def trial(folder: Path) -> Trial:
    """Every trial of this module, by its name."""
    results: dict[str, TrialResult] = {}
    with LocalRunner(settings_at(folder)) as runner:
        for workload, trials in ((acting, ACTING), (seeing, SEEING)):
            study = Study(workload=workload, name="train_options", max_retries=0)
            specs = [study.trial({"epochs": EPOCHS, **point}, 0, order=i) for i, point in enumerate(trials.values())]
            listened = run(runner, study, specs)
            results |= {name: listened.result(spec) for name, spec in zip(trials, specs, strict=True)}

    def find(name: str) -> TrialResult:
        assert results[name].failure is None
        return results[name]

    return find


def series(result: TrialResult, key: str) -> list[float]:
    return [report[key] for report in result.reports]


def test_an_evaluation_every_so_many_steps_changes_when_it_is_told_and_not_what_is_learned(trial: Trial) -> None:
    plain, by_step = trial("plain"), trial("by step")
    assert series(plain, "step") == [4, 8, 12] and series(plain, "epoch") == [1, 2, 3]
    assert series(by_step, "step") == [5, 10, 12] and series(by_step, "epoch") == [1.25, 2.5, 3]
    assert by_step.final["val_loss"] == plain.final["val_loss"]
    total = sum(loss * size for loss, size in zip(series(plain, "train_loss"), (4, 4, 4), strict=True))
    assert sum(
        loss * size for loss, size in zip(series(by_step, "train_loss"), (5, 5, 2), strict=True)
    ) == pytest.approx(total)
    assert [len(steps) for steps in by_step.step_times_s] == [STEPS_PER_EPOCH * EPOCHS]


def test_the_lr_of_each_step_is_told(trial: Trial) -> None:
    rising_then_falling = [0.25, 0.5, *(0.5 * (1 - i / 10) for i in range(10))]
    assert series(trial("linear"), "lr") == pytest.approx(rising_then_falling)
    assert series(trial("scaled"), "lr") == pytest.approx([0.2] * EPOCHS)


def test_clipped_gradients_tell_their_norm_and_hardly_move_the_weights(trial: Trial) -> None:
    for name in ("clipped", "clipped in fp16"):
        clipped = trial(name)
        assert all(norm > 1e-3 for norm in series(clipped, "grad_norm"))  # before they were clipped, and unscaled
        assert all(norm < 10 for norm in series(clipped, "grad_norm"))
        assert abs(clipped.reports[0]["val_loss"] - clipped.final["val_loss"]) < 0.01
    assert "grad_norm" not in trial("plain").final


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_as_full_precision_does_but_not_bit_by_bit(trial: Trial, precision: str) -> None:
    plain, mixed = trial("plain"), trial(precision)
    assert mixed.final["val_loss"] == pytest.approx(plain.final["val_loss"], rel=0.05)
    assert losses(mixed) != losses(plain)


def test_the_two_ways_to_agree_on_weights_learn_alike(trial: Trial) -> None:
    for key in ("train_loss", "val_loss"):
        assert series(trial("gathered"), key) == pytest.approx(series(trial("reduced"), key), rel=1e-9)


def test_a_layerwise_optimizer_trains_on_two_workers(trial: Trial) -> None:
    losses_ = series(trial("lamb"), "train_loss")
    assert losses_[-1] < losses_[0]


@pytest.mark.parametrize("name", ["nhwc", "compiled"])
def test_layout_and_compilation_change_the_speed_and_not_the_learning(trial: Trial, name: str) -> None:
    assert series(trial(name), "train_loss") == pytest.approx(series(trial("image"), "train_loss"), rel=1e-3)


def test_what_is_no_mean_of_scores_is_summed_over_batches_and_ranks(trial: Trial) -> None:
    for name in ("image", "two", "from files, two"):
        result = trial(name)
        assert result.final["diagonal"] == pytest.approx(result.final["accuracy"] * NUM_VAL)


def test_a_set_that_is_not_in_memory_is_trained_and_evaluated_the_same(trial: Trial) -> None:
    for files, memory in (("from files", "image"), ("ahead", "image")):
        assert losses(trial(files)) == losses(trial(memory))
    for key in ("train_loss", "val_loss"):
        assert series(trial("from files, two"), key) == pytest.approx(series(trial("two"), key), rel=1e-6)


def test_the_best_models_weights_are_kept(trial: Trial, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = trial("kept")
    weights = torch.load(settings_at(folder).artifact_dir(kept.spec) / "model" / WEIGHTS_FILE)
    for variable, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(variable, value)
    rebuilt = model(kept.spec.config)
    rebuilt.load_state_dict(weights)
    val = data({}).val
    assert val is not None
    with torch.no_grad():
        accuracy = float((rebuilt.eval()(val.inputs).argmax(1) == val.targets).double().mean())
    assert accuracy == pytest.approx(max(series(kept, "accuracy")))
    assert not (folder / "logs" / trial("plain").spec.identity / "model").exists()


def test_the_time_that_the_data_took_is_told(trial: Trial) -> None:
    result = trial("plain")
    assert result.data_time_s is not None and result.startup_s is not None
    assert 0 < result.data_time_s < result.startup_s
