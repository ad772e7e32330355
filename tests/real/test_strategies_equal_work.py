"""Equal work: whatever the strategy and the number of ranks, the losses are those of one process on the same batches.

Ranks are forked here without a runner: four of them fit on any machine, since only numbers matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ranks import Reports, on_ranks, reports_of, trained

from raypar.parallel.strategy import DistContext
from raypar.workloads.transformer import transformer
from raypar.workloads.wide_mlp import wide_mlp

# A last batch of 8; three epochs would tell no more.
COMMON = {"batch_size": 48, "epochs": 2, "precision": "fp64", "num_warmup_steps": 2}
WORKLOADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "wide_mlp": (wide_mlp, {"width": 32, "depth": 5, "num_samples": 104, "optimizer": "momentum", "lr": 0.01}),
    "transformer": (
        transformer,
        {"width": 16, "num_blocks": 4, "num_sequences": 104, "clip_grad_norm": 0.5},
    ),
}
EXACT: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, every gradient by itself": {"bucket_mb": 0.0},
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
}
ONLY_2 = {
    "pipeline, two stages a worker": {"strategy": "pipeline", "pipeline_schedule": "interleaved"},
    "pipeline, cut before a named layer": {"strategy": "pipeline", "pipeline_split": ("2",)},
}
ONLY_4 = {"hybrid of pipeline and tensor": {"strategy": "hybrid", "tensor_size": 2, "pipeline_size": 2}}
# The largest relative difference of a loss that passes; there has to be one.
LOSSY: dict[str, tuple[dict[str, Any], float]] = {
    "fp16": ({"compression": "fp16"}, 0.03),
    "bf16": ({"compression": "bf16"}, 0.05),
    "powersgd": ({"compression": "powersgd"}, 0.2),
    "powersgd, sent after the backward pass": ({"compression": "powersgd", "overlap": False}, 0.2),
    "powersgd, in many buckets": ({"compression": "powersgd", "bucket_mb": 0.0}, 0.2),
    "local_sgd": ({"strategy": "local_sgd", "sync_every": 2}, 0.3),
}
KEYS = ("train_loss", "val_loss")


def _cases(num_ranks: int) -> dict[str, dict[str, Any]]:
    more = ONLY_2 if num_ranks == 2 else ONLY_4
    return {**EXACT, **more, **{name: config for name, (config, _) in LOSSY.items()}}


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def by_case(request: pytest.FixtureRequest) -> dict[tuple[str, str], list[Reports]]:
    """Every rank's reports, by workload and case; one gang runs them all."""
    num_ranks = request.param

    def run_all(context: DistContext) -> dict[tuple[str, str], Reports]:
        return {
            (name, case): reports_of(workload, {**COMMON, **config, **extra}, context)
            for name, (workload, config) in WORKLOADS.items()
            for case, extra in _cases(num_ranks).items()
        }

    ranks = on_ranks(run_all, num_ranks)
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


@pytest.fixture(scope="module")
def alone() -> dict[str, Reports]:
    return {name: trained(workload, {**COMMON, **config})[0] for name, (workload, config) in WORKLOADS.items()}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("case", [*EXACT, *ONLY_2, *ONLY_4])
def test_a_strategy_gives_the_losses_of_one_process(
    by_case: Mapping[tuple[str, str], list[Reports]], alone: Mapping[str, Reports], workload: str, case: str
) -> None:
    if (workload, case) not in by_case:
        pytest.skip("for another number of ranks")
    assert alone[workload][-1]["train_loss"] < alone[workload][0]["train_loss"]  # there is something to compare
    for rank in by_case[workload, case]:
        assert len(rank) == COMMON["epochs"]
        for report, one in zip(rank, alone[workload], strict=True):
            for key in KEYS:
                assert report[key] == pytest.approx(one[key], rel=1e-12)
            if "grad_norm" in report:
                assert report["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-12)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("case", LOSSY)
def test_what_loses_something_stays_near_and_is_the_same_on_every_rank(
    by_case: Mapping[tuple[str, str], list[Reports]], alone: Mapping[str, Reports], workload: str, case: str
) -> None:
    ranks, (_, most) = by_case[workload, case], LOSSY[case]
    for rank in ranks[1:]:
        assert [[r[key] for key in KEYS] for r in rank] == [[r[key] for key in KEYS] for r in ranks[0]]
    gaps = [
        abs(report[key] / one[key] - 1) for report, one in zip(ranks[0], alone[workload], strict=True) for key in KEYS
    ]
    assert 1e-12 < max(gaps) < most
