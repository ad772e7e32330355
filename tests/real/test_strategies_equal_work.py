"""Equal work: whatever the strategy and the number of ranks, the losses are those of one process on the same batches.

Ranks are forked without a runner. Four of them run on any machine, since nothing is timed.
"""

from dataclasses import replace
from importlib.util import find_spec

import cloudpickle
import plainlab
import pytest
import torch
from plainlab import KINDS, largest_difference
from ranks import on_ranks, reports_of, trained

from raypar.workloads.transformer import transformer
from raypar.workloads.wide_mlp import wide_mlp

# The last batch has 8 samples.
COMMON = {"batch_size": 48, "epochs": 2, "precision": "fp64", "num_warmup_steps": 2}
WORKLOADS = {
    "wide_mlp": (wide_mlp, {"width": 32, "depth": 5, "num_samples": 104, "optimizer": "momentum", "lr": 0.01}),
    "transformer": (transformer, {"width": 16, "num_blocks": 4, "num_sequences": 104, "clip_grad_norm": 0.5}),
}
EXACT = {
    "ddp": {},
    "ddp, no fused gradients": {"bucket_mb": 0.0},
    "ddp, sent after the backward pass": {"overlap": False},
    "ddp, gradients accumulated": {"accumulation_steps": 3},
    "ddp, static graph": {"static_graph": True},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, weights kept for backward": {"strategy": "fsdp", "fsdp_reshard": False},
    "fsdp, gradients accumulated": {"strategy": "fsdp", "accumulation_steps": 3},
    "tensor": {"strategy": "tensor"},
    "pipeline, gpipe": {"strategy": "pipeline", "pipeline_schedule": "gpipe"},
    "pipeline, 1f1b": {"strategy": "pipeline"},
    "pipeline, interleaved": {"strategy": "pipeline", "pipeline_schedule": "interleaved", "stages_per_worker": 1},
    "pipeline, cut by measured time": {"strategy": "pipeline", "pipeline_split": "measured"},
    "hybrid of data": {"strategy": "hybrid", "bucket_mb": 0.01},
    "hybrid of data and tensor": {"strategy": "hybrid", "tensor_size": 2},
    "hybrid of data and pipeline": {"strategy": "hybrid", "pipeline_size": 2},
    "gather_broadcast": {"strategy": "gather_broadcast"},
    "ddp, activations computed again": {"activation_checkpointing": True},
    "fsdp, activations computed again": {"strategy": "fsdp", "activation_checkpointing": True},
    "tensor, activations computed again": {"strategy": "tensor", "activation_checkpointing": True},
    "pipeline, activations computed again": {"strategy": "pipeline", "activation_checkpointing": True},
}
ONLY_2 = {
    "pipeline, two stages a worker": {"strategy": "pipeline", "pipeline_schedule": "interleaved"},
    "pipeline, cut before a named layer": {"strategy": "pipeline", "pipeline_split": ("2",)},
}
ONLY_4 = {
    "hybrid of pipeline and tensor": {"strategy": "hybrid", "tensor_size": 2, "pipeline_size": 2},
    "fsdp, in groups of two": {"strategy": "fsdp", "shard_size": 2},
    "fsdp, in groups of one": {"strategy": "fsdp", "shard_size": 1},
    "fsdp, in groups, accumulated": {"strategy": "fsdp", "shard_size": 2, "accumulation_steps": 3},
}
# Largest allowed relative difference of a loss; there must be a difference.
LOSSY = {
    "fp16": ({"compression": "fp16"}, 0.03),
    "bf16": ({"compression": "bf16"}, 0.05),
    "powersgd": ({"compression": "powersgd"}, 0.2),
    "powersgd, sent after the backward pass": ({"compression": "powersgd", "overlap": False}, 0.2),
    "powersgd, in many buckets": ({"compression": "powersgd", "bucket_mb": 0.0}, 0.2),
    "local_sgd": ({"strategy": "local_sgd", "sync_every": 2}, 0.3),
}
KEYS = ("train_loss", "val_loss")
# All strategies accept these losses: their batches may be cut, and their inputs, outputs and targets are tensors.
CUT = {name: kind for name, kind in KINDS.items() if kind.cuts and kind.has_one_tensor}
# In fp32, against one process with the same strategy, if the package is installed.
DEEPSPEED = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
    "accumulation": {"zero_stage": 2, "accumulation_steps": 3},
    "cosine": {"zero_stage": 1, "lr_schedule": "cosine", "lr_warmup_steps": 3},
}


def run_all(num_ranks, cases, **common):
    """Return every rank's reports, by workload and case; one gang runs them all."""

    def of_rank(context):
        return {
            (name, case): reports_of(workload, {**COMMON, **config, **common, **extra}, context)
            for name, (workload, config) in WORKLOADS.items()
            for case, extra in cases.items()
        }

    ranks = on_ranks(of_rank, num_ranks)
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


def assert_equal(where, rank, one, tolerance):
    for report, expected in zip(rank, one, strict=True):
        for key in (*KEYS, *(key for key in report if key == "grad_norm")):
            assert report[key] == pytest.approx(expected[key], rel=tolerance), (where, key)


@pytest.fixture(scope="module")
def alone():
    return {name: trained(workload, {**COMMON, **config})[0] for name, (workload, config) in WORKLOADS.items()}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_strategy_gives_the_losses_of_one_process(num_ranks, alone):
    cases = {**EXACT, **(ONLY_2 if num_ranks == 2 else ONLY_4), **{case: config for case, (config, _) in LOSSY.items()}}
    for (workload, case), ranks in run_all(num_ranks, cases).items():
        one = alone[workload]
        assert one[-1]["train_loss"] < one[0]["train_loss"]  # there is something to compare
        if case not in LOSSY:
            for rank in ranks:
                assert_equal((workload, case), rank, one, 1e-12)
            continue
        for rank in ranks[1:]:
            assert [[r[key] for key in KEYS] for r in rank] == [[r[key] for key in KEYS] for r in ranks[0]]
        pairs = [(report[key], expected[key]) for report, expected in zip(ranks[0], one, strict=True) for key in KEYS]
        assert 1e-12 < max(abs(loss / expected - 1) for loss, expected in pairs) < LOSSY[case][1], (workload, case)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_kind_of_loss_equals_plain_torch_under_every_strategy(num_ranks):
    cloudpickle.register_pickle_by_value(plainlab)  # the ranks can't import it
    cases = {**EXACT, **(ONLY_2 if num_ranks == 2 else ONLY_4)}
    config = {**COMMON, "batch_size": 24, "eval_batch_size": 7}

    def of_rank(context):
        return {
            (name, case): reports_of(kind.workload, {**config, "lr": kind.lr, **extra}, context)
            for name, kind in CUT.items()
            for case, extra in cases.items()
        }

    right = {
        name: replace(kind.plain, dtype=torch.float64).train(kind.workload, {**config, "lr": kind.lr}).reports
        for name, kind in CUT.items()
    }
    for reports in on_ranks(of_rank, num_ranks):
        for (name, case), of_case in reports.items():
            assert largest_difference(of_case, right[name]) < 1e-12, (name, case)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs raypar[deepspeed]")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_stage_of_deepspeed_gives_the_losses_of_one_process(num_ranks):
    common = {"precision": "fp32", "strategy": "deepspeed"}
    one = run_all(1, DEEPSPEED, **common)
    for key, ranks in run_all(num_ranks, DEEPSPEED, **common).items():
        for rank in ranks:
            assert_equal(key, rank, one[key][0], 1e-5)
