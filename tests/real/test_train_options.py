"""Trainings of one and two local workers: equal work, and the effects of hyperparameters."""

import itertools

import pytest
import torch
from harness import losses, run, settings_at, weights_path
from loops import NUM_VAL, acting, data, model, seeing

from raypar import Study
from raypar.run.local import LocalRunner

STEPS_PER_EPOCH, EPOCHS = 4, 3
# With batches of 64: a last batch of 8, or of a single sample, which leaves one of two workers without any.
NUM_SAMPLES = (200, 193)
SHAPES = {
    (precision, size, n, loader): {"precision": precision, "num_samples": size, "num_workers": n, "loader": loader}
    for precision, loaders in (("fp64", ("resident",)), ("fp32", ("resident", "dataloader")))
    for size, n, loader in itertools.product(NUM_SAMPLES, (1, 2), loaders)
}
WARM_UP = {"dropout": 0.5, "optimizer": "adam", "lr": 0.01}
ACTING = {
    **SHAPES,
    "cold": {**WARM_UP, "num_warmup_steps": 0},
    "warm": {**WARM_UP, "num_warmup_steps": 10},
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
FROM_FILES = {"in_memory": False, "loader": "dataloader"}
SEEING = {
    "image": {},
    "two": {"num_workers": 2},
    "nhwc": {"channels_last": True},
    "compiled": {"compile": True},
    "from files": FROM_FILES,
    "from files, two": {**FROM_FILES, "num_workers": 2, "num_loader_workers": 1},
    "ahead": {"loader": "dataloader", "num_loader_workers": 1, "prefetch_factor": 3, "pin_memory": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train_options")


@pytest.fixture(scope="module")
def trial(folder):
    """Every trial of this module, by its name."""
    results = {}
    with LocalRunner(settings_at(folder)) as runner:
        for workload, trials in ((acting, ACTING), (seeing, SEEING)):
            study = Study(workload=workload, name="train_options", max_retries=0)
            specs = [study.trial({"epochs": EPOCHS, **point}, 0, order=i) for i, point in enumerate(trials.values())]
            results |= zip(trials, run(runner, study, specs).results, strict=True)
    assert {name: result.failure for name, result in results.items() if result.failure} == {}
    return results.__getitem__


def series(result, key):
    return [report[key] for report in result.reports]


@pytest.mark.parametrize("size", NUM_SAMPLES)
def test_one_and_two_workers_see_the_same_batches_and_every_sample_once(trial, size):
    for precision, tolerance in (("fp64", 1e-9), ("fp32", 1e-4)):
        one, two = (trial((precision, size, workers, "resident")) for workers in (1, 2))
        assert series(one, "epoch") == series(two, "epoch") == [1, 2, 3]
        for key in ("train_loss", "val_loss"):
            assert series(two, key) == pytest.approx(series(one, key), rel=tolerance)
        assert one.final["train_loss"] < one.reports[0]["train_loss"]  # they learn
    one, two = (trial(("fp64", size, workers, "resident")) for workers in (1, 2))
    assert series(one, "accuracy") == series(two, "accuracy")
    for accuracy in series(one, "accuracy"):
        assert accuracy * NUM_VAL == pytest.approx(round(accuracy * NUM_VAL), abs=1e-9)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("size", NUM_SAMPLES)
def test_every_step_is_timed_and_a_dataloader_changes_no_bit(trial, size, num_workers):
    result = trial(("fp32", size, num_workers, "resident"))
    assert losses(trial(("fp32", size, num_workers, "dataloader"))) == losses(result)
    assert [len(steps) for steps in result.step_times_s] == [EPOCHS * STEPS_PER_EPOCH] * num_workers
    assert all(step > 0 for steps in result.step_times_s for step in steps)
    assert max(map(sum, result.step_times_s)) - 1e-6 <= result.train_time_s < result.wall_s
    assert result.throughput_samples_per_s == pytest.approx(EPOCHS * size / result.train_time_s)
    assert 0 < result.data_time_s < result.startup_s


def test_warming_up_leaves_no_trace_in_the_result(trial):
    assert losses(trial("warm")) == losses(trial("cold"))
    assert trial("cold").warmup_s is not None and trial("warm").warmup_s is not None


def test_evaluating_by_steps_changes_the_reports_and_not_the_training(trial):
    plain, by_step = trial("plain"), trial("by step")
    assert series(plain, "step") == [4, 8, 12] and series(plain, "epoch") == [1, 2, 3]
    assert series(by_step, "step") == [5, 10, 12] and series(by_step, "epoch") == [1.25, 2.5, 3]
    assert by_step.final["val_loss"] == plain.final["val_loss"]
    total, same = (
        sum(loss * num_steps for loss, num_steps in zip(series(result, "train_loss"), sizes, strict=True))
        for result, sizes in ((plain, (4, 4, 4)), (by_step, (5, 5, 2)))
    )
    assert total == pytest.approx(same)


def test_the_lr_of_each_step_is_reported(trial):
    rising_then_falling = [0.25, 0.5, *(0.5 * (1 - i / 10) for i in range(10))]
    assert series(trial("linear"), "lr") == pytest.approx(rising_then_falling)
    assert series(trial("scaled"), "lr") == pytest.approx([0.2] * EPOCHS)


@pytest.mark.parametrize("name", ["clipped", "clipped in fp16"])
def test_clipped_gradients_report_their_norm_and_hardly_move_the_weights(trial, name):
    assert all(1e-3 < norm < 10 for norm in series(trial(name), "grad_norm"))  # unscaled, before clipping
    assert abs(trial(name).reports[0]["val_loss"] - trial(name).final["val_loss"]) < 0.01
    assert "grad_norm" not in trial("plain").final


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_like_full_precision_without_equal_bits(trial, precision):
    plain, mixed = trial("plain"), trial(precision)
    assert mixed.final["val_loss"] == pytest.approx(plain.final["val_loss"], rel=0.05)
    assert losses(mixed) != losses(plain)


ALIKE = {
    ("gathered", "reduced"): 1e-9,
    ("nhwc", "image"): 1e-3,
    ("compiled", "image"): 1e-3,
    ("from files, two", "two"): 1e-6,
    ("from files", "image"): 0.0,
    ("ahead", "image"): 0.0,
}


@pytest.mark.parametrize(("names", "tolerance"), ALIKE.items(), ids=map(" and ".join, ALIKE))
def test_strategy_layout_compilation_and_storage_do_not_change_the_losses(trial, names, tolerance):
    for key in ("train_loss", "val_loss"):
        assert series(trial(names[0]), key) == pytest.approx(series(trial(names[1]), key), rel=tolerance, abs=0)


def test_a_layerwise_optimizer_trains_on_two_workers(trial):
    assert trial("lamb").final["train_loss"] < trial("lamb").reports[0]["train_loss"]


@pytest.mark.parametrize("name", ["image", "two", "from files, two"])
def test_a_metric_that_is_not_a_mean_is_summed_over_batches_and_ranks(trial, name):
    assert trial(name).final["diagonal"] == pytest.approx(trial(name).final["accuracy"] * NUM_VAL)


def test_the_best_models_weights_are_kept(trial, folder, monkeypatch):
    kept = trial("kept")
    for variable, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(variable, value)
    rebuilt = model(kept.spec.config)
    rebuilt.load_state_dict(torch.load(weights_path(folder, kept.spec)))
    val = data({}).val
    with torch.no_grad():
        accuracy = float((rebuilt.eval()(val.inputs).argmax(1) == val.targets).double().mean())
    assert accuracy == pytest.approx(max(series(kept, "accuracy")))
    assert not weights_path(folder, trial("plain").spec).parent.exists()
