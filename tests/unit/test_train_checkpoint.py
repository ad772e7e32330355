"""A training that resumes from a checkpoint ends like an uninterrupted one."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from training import ALONE, NOISY

from raypar import Study, grid
from raypar.analysis.question import question_of
from raypar.parallel.strategy import DistContext
from raypar.study.options import resolve
from raypar.study.trial import best_report
from raypar.train.checkpoint import Checkpoints
from raypar.train.loop import NO_ENERGY, train
from raypar.train.saved_model import WEIGHTS_FILE

EPOCHS, STEPS_PER_EPOCH = 5, 4
WORKLOAD = replace(NOISY, defaults={**NOISY.defaults, "epochs": EPOCHS, "keep_model": True})


class PowerCut(Exception):
    pass


class Channel(list):
    """Reports, one of which cuts the power or stops the trial."""

    def __init__(self, cut_at=0, stop_at=0):
        self._cut_at, self._stop_at = cut_at, stop_at

    def report(self, metrics):
        self.append(metrics)
        if len(self) == self._cut_at:
            raise PowerCut
        return len(self) != self._stop_at

    @property
    def learned(self):
        return [[r[key] for key in ("epoch", "step", "train_loss", "val_loss", "lr")] for r in self]


def trained(channel, folder, seed=7, **config):
    random.seed(seed)
    np.random.seed(seed)
    complete = resolve(WORKLOAD, {"checkpoint_every_epochs": 1, **config})
    folders = {"artifact_dir": folder, "checkpoint_dir": folder / "kept"}
    return train(WORKLOAD, complete, 3, ALONE, channel, start_s=0.0, cores=(0,), **folders)


def interrupted(folder, cut_at=4, **config):
    channel = Channel(cut_at)
    with pytest.raises(PowerCut):
        trained(channel, folder, **config)
    return channel


@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": "momentum", "lr_schedule": "cosine", "lr_warmup_steps": 3},
        {"optimizer": "adam", "lr": 0.01, "precision": "fp64", "lr_schedule": "linear", "clip_grad_norm": 1.0},
        {"optimizer": "lars", "loader": "dataloader", "num_warmup_steps": 0},
        {"optimizer": "lamb", "lr": 0.01, "precision": "bf16", "accumulation_steps": 2},
        {"optimizer": "adam", "lr": 0.01, "eval_every_steps": 3},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_a_resumed_training_equals_an_uninterrupted_one_to_the_last_bit(tmp_path, config):
    uninterrupted, after = Channel(), Channel()
    trained(uninterrupted, tmp_path / "full", **config)
    interrupted(tmp_path / "cut", **config)
    outcome = trained(after, tmp_path / "cut", seed=8, **config)  # Python's and numpy's draws are restored
    assert outcome.conditions.resumed_at_epoch > 0 and list((tmp_path / "cut" / "kept").iterdir()) == []
    assert after.learned == uninterrupted.learned
    one, other = (torch.load(tmp_path / way / "model" / "weights.pt", weights_only=True) for way in ("full", "cut"))
    assert one.pop("5._extra_state") == other.pop("5._extra_state")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_steps_of_a_lost_attempt_count_up_to_its_last_checkpoint(tmp_path):
    after, before = Channel(), interrupted(tmp_path, checkpoint_every_epochs=2)
    outcome = trained(after, tmp_path, checkpoint_every_epochs=2)
    assert outcome.conditions.resumed_at_epoch == 2
    assert after[:2] == before[:2]  # their times too
    assert after[2]["train_time_s"] != before[2]["train_time_s"]
    assert len(outcome.step_times_s) == EPOCHS * STEPS_PER_EPOCH and outcome.num_samples == EPOCHS * 60
    assert outcome.train_time_s == pytest.approx(sum(r["train_time_s"] for r in after))
    assert outcome.counters is not None and outcome.counters.no_energy == (NO_ENERGY,)


def test_a_trial_that_stops_while_its_reports_are_repeated_trains_no_further(tmp_path):
    interrupted(tmp_path)
    after = Channel(stop_at=2)
    outcome = trained(after, tmp_path)
    assert outcome.stopped and len(after) == 2 and list((tmp_path / "kept").iterdir()) == []


def test_a_damaged_checkpoint_is_reported_and_the_training_starts_again(tmp_path):
    uninterrupted, after = Channel(), Channel()
    trained(uninterrupted, tmp_path / "full")
    interrupted(tmp_path, cut_at=3)
    (file,) = (tmp_path / "kept").iterdir()
    file.write_bytes(file.read_bytes()[:-500])
    outcome = trained(after, tmp_path)
    assert after.learned == uninterrupted.learned
    assert "started again" in outcome.conditions.not_resumed and outcome.conditions.resumed_at_epoch is None


@dataclass(frozen=True)
class BesideAnother(DistContext):
    """A rank of two, whose collectives combine its values with these of the other."""

    others: Iterator[list[float]]

    def max(self, values):
        return list(map(max, values, next(self.others)))


@pytest.mark.parametrize(("others", "state"), [([-4, 0], {"at": 4}), ([-4, 1], None), ([0, 1], None)])
def test_no_rank_uses_a_checkpoint_that_another_rank_lacks_or_can_not_read(tmp_path, others, state):
    Checkpoints(tmp_path, ALONE).save(4, {"at": 4})
    oldest, lacks_it = others
    context = BesideAnother(0, 2, ALONE.device, iter([[oldest, -oldest], [lacks_it]]))
    checkpoints = Checkpoints(tmp_path, context)
    assert checkpoints.load() == state and bool(checkpoints.why_not) == (state is None)


def test_an_unfinished_checkpoint_is_ignored_and_only_the_last_is_kept(tmp_path):
    Checkpoints(tmp_path, ALONE).save(4, {"at": 4})
    (tmp_path / "rank0-step8.unfinished").write_bytes(b"half")
    assert Checkpoints(tmp_path, ALONE).load() == {"at": 4}
    Checkpoints(tmp_path, ALONE).save(12, {"at": 12})
    assert Checkpoints(tmp_path, ALONE).load() == {"at": 12}
    assert [path.name for path in tmp_path.glob("*.pt")] == ["rank0-step12.pt"]
    Checkpoints(tmp_path, ALONE).remove()
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_not_part_of_a_trials_identity_unless_they_are_swept():
    plain = Study(workload=WORKLOAD, name="s", space={"lr": grid(0.1, 0.2)})
    keeping = Study(workload=WORKLOAD, name="s", space=plain.space, config={"checkpoint_every_epochs": 2})
    assert [t.identity for t in plain.trials()] == [t.identity for t in keeping.trials()]
    assert question_of(plain) == question_of(keeping)  # and excludes no stored trial
    swept = Study(workload=WORKLOAD, name="s", space={"checkpoint_every_epochs": grid(1, 2)}, num_repeats=1)
    assert len({t.identity for t in swept.trials()}) == 2


@pytest.mark.parametrize("cut_at", [0, 4])
def test_the_weights_of_every_report_are_kept_on_request_across_an_interruption(tmp_path, cut_at):
    if cut_at:
        interrupted(tmp_path, cut_at, keep_checkpoints=True)
    channel = Channel()
    trained(channel, tmp_path, keep_checkpoints=True)
    kept = [torch.load(tmp_path / "reports" / str(i) / WEIGHTS_FILE) for i in range(EPOCHS)]
    assert {path.name for path in (tmp_path / "reports").iterdir()} == set(map(str, range(EPOCHS)))
    for before, after in pairwise(kept):
        assert not torch.equal(*(next(iter(weights.values())) for weights in (before, after)))
    best = best_report(channel, *(lambda m: (m.name, m.mode))(WORKLOAD.metric_of()))
    torch.testing.assert_close(torch.load(tmp_path / "model" / WEIGHTS_FILE), kept[best], rtol=0, atol=0)
    trained(Channel(), tmp_path / "not asked for")
    assert not (tmp_path / "not asked for" / "reports").exists()
