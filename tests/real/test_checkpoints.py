"""Several ranks that go on from their checkpoints, by every strategy that can; and a retry of a trial that does so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from loops import NUM_CLASSES, NUM_FEATURES, acting, data
from ranks import Reports, on_ranks
from telling import losses, run, settings_at

from raypar import Study, Workload
from raypar.parallel.strategy import DistContext
from raypar.run.local import LocalRunner
from raypar.study.options import resolve
from raypar.train.affinity import allowed_cores
from raypar.train.job import RankOutcome
from raypar.train.loop import train


def model(config: Mapping[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 33),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(33, 32),
        nn.ReLU(),
        nn.Linear(32, NUM_CLASSES),
    )


def even_model(config: Mapping[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))


DEFAULTS = {"epochs": 3, "batch_size": 64, "lr": 0.02, "optimizer": "adam", "lr_schedule": "cosine"}
ODD = Workload(name="odd", model=model, data=data, defaults=DEFAULTS)  # 33 rows don't split evenly
EVEN = Workload(name="even", model=even_model, data=data, defaults=DEFAULTS)


class PowerCut(Exception):
    pass


class CutShort(Reports):
    """At the second report the power is cut, on every rank."""

    def report(self, metrics: Mapping[str, float]) -> bool:
        super().report(metrics)
        if len(self) == 3:
            raise PowerCut
        return True


def trained(
    workload: Workload, config: Mapping[str, Any], context: DistContext, channel: Reports, folder: Path
) -> RankOutcome:
    complete = resolve(workload, {"checkpoint_every_epochs": 1, **config, "num_workers": context.world_size})
    return train(workload, complete, 5, context, channel, start_s=0.0, checkpoint_dir=folder)


def learned(reports: Reports) -> list[list[str]]:
    return [[float(report[key]).hex() for key in ("epoch", "train_loss", "val_loss", "lr")] for report in reports]


@pytest.mark.parametrize(
    ("workload", "config", "num_ranks"),
    [
        (ODD, {"strategy": "ddp"}, 2),
        (ODD, {"strategy": "ddp", "optimizer": "momentum", "compression": "bf16", "accumulation_steps": 2}, 2),
        (ODD, {"strategy": "fsdp"}, 2),
        (ODD, {"strategy": "fsdp", "fsdp_reshard": False, "optimizer": "momentum", "precision": "fp64"}, 2),
        (EVEN, {"strategy": "tensor"}, 2),
        (EVEN, {"strategy": "pipeline", "num_microbatches": 4}, 2),
        (ODD, {"strategy": "local_sgd", "sync_every": 3}, 2),
        (ODD, {"strategy": "gather_broadcast"}, 2),
        (EVEN, {"strategy": "hybrid", "tensor_size": 2}, 4),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_ranks_that_go_on_come_to_the_same_losses_to_the_last_bit(
    tmp_path: Path, workload: Workload, config: dict[str, Any], num_ranks: int
) -> None:
    def both(context: DistContext) -> tuple[Reports, Reports, float]:
        uninterrupted, before, after = Reports(), CutShort(), Reports()
        trained(workload, config, context, uninterrupted, tmp_path / "whole")
        with pytest.raises(PowerCut):
            trained(workload, config, context, before, tmp_path / "cut")
        outcome = trained(workload, config, context, after, tmp_path / "cut")
        return uninterrupted, after, outcome.environment["resumed_at_epoch"]

    for uninterrupted, after, resumed_at in on_ranks(both, num_ranks):
        assert resumed_at == 2 and len(uninterrupted) == 3
        assert learned(after) == learned(uninterrupted)
    assert list((tmp_path / "cut").iterdir()) == []


def test_ranks_of_which_one_has_lost_its_checkpoint_all_begin_anew(tmp_path: Path) -> None:
    def both(context: DistContext) -> tuple[Reports, Reports, str]:
        uninterrupted, before, after = Reports(), CutShort(), Reports()
        trained(ODD, {}, context, uninterrupted, tmp_path / "whole")
        with pytest.raises(PowerCut):
            trained(ODD, {}, context, before, tmp_path / "cut")
        context.barrier()
        if context.rank == 1:
            for path in (tmp_path / "cut").glob("rank1-*"):
                path.unlink()
        context.barrier()
        outcome = trained(ODD, {}, context, after, tmp_path / "cut")
        assert "resumed_at_epoch" not in outcome.environment
        return uninterrupted, after, outcome.environment["not_resumed"]

    for uninterrupted, after, why_not in on_ranks(both, 2):
        assert learned(after) == learned(uninterrupted) and "began anew" in why_not


def test_ranks_of_which_one_is_a_checkpoint_behind_go_on_from_the_last_that_all_have(tmp_path: Path) -> None:
    def both(context: DistContext) -> tuple[Reports, Reports, float]:
        uninterrupted, after = Reports(), Reports()
        trained(ODD, {}, context, uninterrupted, tmp_path / "whole")

        class Dies(Reports):
            def report(self, metrics: Mapping[str, float]) -> bool:
                super().report(metrics)
                if len(self) == 2:  # the others write the second checkpoint, and wait for this rank in vain
                    raise PowerCut
                return True

        with pytest.raises(PowerCut):
            trained(ODD, {}, context, Dies(), tmp_path / "cut")
        if context.rank == 0:
            (first,) = (tmp_path / "cut").glob("rank0-*")
            first.with_name("rank0-step8.pt").write_bytes(first.read_bytes())
        context.barrier()
        outcome = trained(ODD, {}, context, after, tmp_path / "cut")
        return uninterrupted, after, outcome.environment["resumed_at_epoch"]

    for uninterrupted, after, resumed_at in on_ranks(both, 2):
        assert resumed_at == 1
        assert learned(after) == learned(uninterrupted)


@pytest.mark.skipif(len(allowed_cores()) < 2, reason="two workers need two cores")
def test_a_trial_whose_rank_is_killed_is_retried_from_its_checkpoint_without_ray(tmp_path: Path) -> None:
    config = {"epochs": 4, "dropout": 0.3, "optimizer": "adam", "lr": 0.01, "num_workers": 2}
    study = Study(workload=acting, name="falls", max_retries=1, config={**config, "checkpoint_every_epochs": 1})
    points: list[dict[str, Any]] = [{}, {"act": "fall", "scratch": str(tmp_path / "fell")}]
    specs = [study.trial(point, 0, order=i) for i, point in enumerate(points)]
    with LocalRunner(settings_at(tmp_path)) as runner:
        one, other = run(runner, study, specs).results
    assert (one.attempts, other.attempts, other.failure) == (1, 2, None)
    assert other.environment["resumed_at_epoch"] == [2, 2] and "resumed_at_epoch" not in one.environment
    assert losses(other) == losses(one) and len(other.reports) == 4
    assert [len(steps) for steps in other.step_times_s] == [16, 16]
    assert not list(tmp_path.rglob("*.pt"))
