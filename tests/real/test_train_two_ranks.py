"""Equal work: one worker and two see the same gradients, whatever the batches are and whoever loads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import NUM_VAL, acting
from telling import losses, run, settings_at

from raypar import Study
from raypar.run.local import LocalRunner
from raypar.study.trial import TrialResult, TrialState
from raypar.train.affinity import allowed_cores

pytestmark = pytest.mark.skipif(len(allowed_cores()) < 2, reason="two workers need two cores")

STUDY = Study(workload=acting, name="two_ranks", max_retries=0)
# With batches of 64: a last batch of 8; one of a single sample, which leaves one of two workers without any.
NUM_SAMPLES = (200, 193)
SHAPES = [
    {"precision": precision, "num_samples": num_samples, "num_workers": num_workers, "loader": loader}
    for precision in ("fp64", "fp32")
    for num_samples in NUM_SAMPLES
    for num_workers in (1, 2)
    for loader in ("resident", "dataloader")
    if loader == "resident" or precision == "fp32"
]
WARM_UPS = [{"num_warmup_steps": n, "dropout": 0.5, "optimizer": "adam", "lr": 0.01} for n in (0, 10)]
EPOCHS = 3

Trial = Callable[..., TrialResult]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Every trial of this module, found by its hyperparameters."""
    points: list[dict[str, Any]] = [{"epochs": EPOCHS, **point} for point in (*SHAPES, *WARM_UPS)]
    with LocalRunner(settings_at(tmp_path_factory.mktemp("two_ranks"))) as runner:
        listened = run(runner, STUDY, [STUDY.trial(point, 0, order=i) for i, point in enumerate(points)])

    def find(**point: Any) -> TrialResult:
        (result,) = [r for r in listened.results if point.items() <= r.spec.point.items()]
        assert result.failure is None
        return result

    return find


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-4)])
def test_one_worker_and_two_learn_alike_epoch_by_epoch(
    trial: Trial, precision: str, tolerance: float, num_samples: int
) -> None:
    one, two = (trial(precision=precision, num_samples=num_samples, num_workers=n, loader="resident") for n in (1, 2))
    assert len(one.reports) == len(two.reports) == EPOCHS
    for alone, together in zip(one.reports, two.reports, strict=True):
        for key in ("train_loss", "val_loss"):
            assert together[key] == pytest.approx(alone[key], rel=tolerance)
        assert together["epoch"] == alone["epoch"]
    assert one.final["train_loss"] < one.reports[0]["train_loss"]  # and they do learn


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
def test_one_worker_and_two_evaluate_every_sample_once(trial: Trial, num_samples: int) -> None:
    one, two = (trial(precision="fp64", num_samples=num_samples, num_workers=n) for n in (1, 2))
    for alone, together in zip(one.reports, two.reports, strict=True):
        assert alone["accuracy"] == together["accuracy"]
        assert alone["accuracy"] * NUM_VAL == pytest.approx(round(alone["accuracy"] * NUM_VAL), abs=1e-9)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
def test_a_dataloader_changes_no_bit_of_the_losses(trial: Trial, num_samples: int, num_workers: int) -> None:
    shape = {"precision": "fp32", "num_samples": num_samples, "num_workers": num_workers}
    assert losses(trial(**shape, loader="dataloader")) == losses(trial(**shape, loader="resident"))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
def test_every_rank_tells_the_time_of_every_step(trial: Trial, num_samples: int, num_workers: int) -> None:
    result = trial(precision="fp32", num_samples=num_samples, num_workers=num_workers, loader="resident")
    assert [len(steps) for steps in result.step_times_s] == [EPOCHS * 4] * num_workers
    assert all(step > 0 for steps in result.step_times_s for step in steps)
    assert result.train_time_s is not None and result.wall_s is not None
    assert result.train_time_s >= max(map(sum, result.step_times_s)) - 1e-6
    assert result.train_time_s < result.wall_s
    rate = EPOCHS * num_samples / result.train_time_s
    assert result.throughput_samples_per_s == pytest.approx(rate)
    assert result.state is TrialState.FINISHED


def test_warming_up_leaves_no_trace_in_the_result(trial: Trial) -> None:
    cold, warm = (trial(num_warmup_steps=n) for n in (0, 10))
    assert losses(warm) == losses(cold)
    assert cold.warmup_s is not None and warm.warmup_s is not None
