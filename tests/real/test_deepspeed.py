"""DeepSpeed's stages give the losses of one process, where the package is installed."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Reports, on_ranks, reports_of

from raypar.parallel.strategy import DistContext
from raypar.workloads.transformer import transformer
from raypar.workloads.wide_mlp import wide_mlp

pytest.importorskip("deepspeed", reason="needs raypar[deepspeed]")
COMMON = {"batch_size": 48, "epochs": 2, "num_warmup_steps": 2, "strategy": "deepspeed"}
WORKLOADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "wide_mlp": (wide_mlp, {"width": 32, "depth": 5, "num_samples": 200, "optimizer": "momentum", "lr": 0.01}),
    "transformer": (transformer, {"width": 16, "num_blocks": 2, "num_sequences": 200, "clip_grad_norm": 0.5}),
}
CASES = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
    "accumulation": {"zero_stage": 2, "accumulation_steps": 3},
    "cosine": {"zero_stage": 1, "lr_schedule": "cosine", "lr_warmup_steps": 3},
}


@pytest.mark.parametrize(("num_ranks", "names"), [(2, tuple(WORKLOADS)), (4, ("wide_mlp",))])
def test_every_stage_gives_the_losses_of_one_process(num_ranks: int, names: tuple[str, ...]) -> None:
    def run_all(context: DistContext) -> dict[tuple[str, str], Reports]:
        return {
            (name, case): reports_of(WORKLOADS[name][0], {**COMMON, **WORKLOADS[name][1], **extra}, context)
            for name in names
            for case, extra in CASES.items()
        }

    ranks = on_ranks(run_all, num_ranks)
    (alone,) = on_ranks(run_all, 1)
    for (name, case), one in alone.items():
        for rank in ranks:
            for report, expected in zip(rank[name, case], one, strict=True):
                for key in ("train_loss", "val_loss", *(["grad_norm"] if "grad_norm" in report else [])):
                    assert report[key] == pytest.approx(expected[key], rel=1e-5), (name, case, key)
