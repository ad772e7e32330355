"""Several ranks resume from checkpoints, by every strategy that can (for retries see test_runner_contract.py)."""

import pytest
import torch
from loops import NUM_CLASSES, NUM_FEATURES, data
from ranks import Reports, on_ranks
from torch import nn

from raypar import Workload
from raypar.study.options import resolve
from raypar.train.job import MODEL_FOLDER
from raypar.train.loop import train
from raypar.train.saved_model import WEIGHTS_FILE


def model(config):
    first, second = nn.Linear(NUM_FEATURES, 33), nn.Linear(33, 32)  # not evenly divisible
    return nn.Sequential(first, nn.ReLU(), nn.Dropout(0.2), second, nn.ReLU(), nn.Linear(32, NUM_CLASSES))


def even_model(config):
    return nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))


DEFAULTS = {"epochs": 3, "batch_size": 64, "lr": 0.02, "optimizer": "adam", "lr_schedule": "cosine"}
ODD = Workload(name="odd", model=model, data=data, defaults=DEFAULTS)
EVEN = Workload(name="even", model=even_model, data=data, defaults=DEFAULTS)
CASES = {
    "ddp": (ODD, {"strategy": "ddp"}, 2),
    "ddp, compressed": (ODD, {"optimizer": "momentum", "compression": "bf16", "accumulation_steps": 2}, 2),
    "fsdp": (ODD, {"strategy": "fsdp"}, 2),
    "fsdp, fp64": (ODD, {"strategy": "fsdp", "fsdp_reshard": False, "optimizer": "momentum", "precision": "fp64"}, 2),
    "tensor": (EVEN, {"strategy": "tensor"}, 2),
    "pipeline": (EVEN, {"strategy": "pipeline", "num_microbatches": 4}, 2),
    "local_sgd": (ODD, {"strategy": "local_sgd", "sync_every": 3}, 2),
    "gather_broadcast": (ODD, {"strategy": "gather_broadcast"}, 2),
    "hybrid": (EVEN, {"strategy": "hybrid", "tensor_size": 2}, 4),
}


class PowerCut(Exception):
    pass


class CutShort(Reports):
    """Raises at a report, like a power cut."""

    def __init__(self, at):
        self._at = at

    def report(self, metrics):
        super().report(metrics)
        if len(self) == self._at:
            raise PowerCut
        return True


def check_resumed(case, folder, cut_at, resumed_at, before):
    """Check that the losses of an uninterrupted and a resumed training are equal bit for bit on all ranks."""
    workload, config, num_ranks = CASES[case]

    def both(context):
        complete = resolve(workload, {"checkpoint_every_epochs": 1, **config, "num_workers": context.world_size})

        def trained(channel, name):
            outcome = train(workload, complete, 5, context, channel, start_s=0.0, checkpoint_dir=folder / name)
            return outcome.conditions

        uninterrupted, after = Reports(), Reports()
        trained(uninterrupted, "whole")
        with pytest.raises(PowerCut):
            trained(CutShort(cut_at), "cut")
        before(context, folder / "cut")
        return uninterrupted, after, trained(after, "cut").resumed_at_epoch

    keys = ("epoch", "train_loss", "val_loss", "lr")
    for uninterrupted, after, epoch in on_ranks(both, num_ranks):
        assert epoch == resumed_at and len(uninterrupted) == 3
        assert [[report[key] for key in keys] for report in after] == [[r[key] for key in keys] for r in uninterrupted]
    assert list((folder / "cut").iterdir()) == []


@pytest.mark.parametrize("case", CASES)
def test_resumed_ranks_reproduce_the_losses_bit_for_bit(tmp_path, case):
    check_resumed(case, tmp_path, cut_at=3, resumed_at=2, before=lambda context, folder: None)


def test_ranks_resume_from_the_latest_checkpoint_that_all_have(tmp_path):
    def write_second(context, folder):
        if context.rank == 0:
            (first,) = folder.glob("rank0-*")
            first.with_name("rank0-step8.pt").write_bytes(first.read_bytes())
        context.barrier()

    check_resumed("ddp", tmp_path, cut_at=2, resumed_at=1, before=write_second)


class Stopped(Reports):
    """Stops the trial at its first report."""

    def report(self, metrics):
        super().report(metrics)
        return False


def test_a_trial_stopped_while_it_repeats_reports_keeps_its_split_model(tmp_path):
    workload, config, num_ranks = CASES["fsdp"]
    options = {**config, "checkpoint_every_epochs": 1, "keep_model": True, "num_workers": num_ranks}
    folders = {"checkpoint_dir": tmp_path / "cut", "artifact_dir": tmp_path / "kept"}

    def of_rank(context):
        complete = resolve(workload, options)
        with pytest.raises(PowerCut):
            train(workload, complete, 5, context, CutShort(3), start_s=0.0, **folders)
        return train(workload, complete, 5, context, Stopped(), start_s=0.0, **folders).stopped

    assert on_ranks(of_rank, num_ranks) == [True, True]
    weights = torch.load(tmp_path / "kept" / MODEL_FOLDER / WEIGHTS_FILE, weights_only=True)
    assert {key: value.shape for key, value in weights.items()} == {
        key: value.shape for key, value in model({}).state_dict().items()
    }
