"""Losses of each strategy on two workers against one worker's on the same batches.

The wide perceptron and the transformer, in double precision with a short last batch. Strategies that only distribute
the work may differ by rounding (1e-9 relative). Compression and local SGD are lossy: their largest difference of a loss
is printed without a bar. Nothing is timed; studies/strategies.py does that.
"""

from __future__ import annotations

from typing import Any

from common import begin, local_trial, parser_for, print_bar, print_row, relative, scratch

BAR = 1e-9
WORKLOADS: dict[str, dict[str, Any]] = {
    "wide_mlp": {"width": 128, "depth": 5, "optimizer": "momentum", "lr": 0.005},
    "transformer": {"width": 32, "num_blocks": 4, "clip_grad_norm": 1.0},
}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, gradients one by one": {"bucket_mb": 0.0},
    "ddp, sent after the backward pass": {"overlap": False},
    "ddp, accumulation over 4 parts": {"accumulation_steps": 4},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"strategy": "tensor"},
    "pipeline, gpipe": {"strategy": "pipeline", "pipeline_schedule": "gpipe"},
    "pipeline, 1f1b": {"strategy": "pipeline"},
    "pipeline, interleaved": {"strategy": "pipeline", "pipeline_schedule": "interleaved"},
    "hybrid, tensor_size=2": {"strategy": "hybrid", "tensor_size": 2},
    "hybrid, pipeline_size=2": {"strategy": "hybrid", "pipeline_size": 2},
    "gather_broadcast": {"strategy": "gather_broadcast"},
}
LOSSY: dict[str, dict[str, Any]] = {
    "ddp, fp16 gradients": {"compression": "fp16"},
    "ddp, bf16 gradients": {"compression": "bf16"},
    "ddp, PowerSGD of rank 1": {"compression": "powersgd"},
    "ddp, PowerSGD of rank 4": {"compression": "powersgd", "powersgd_rank": 4},
    "local SGD, every 2 steps": {"strategy": "local_sgd", "sync_every": 2},
    "local SGD, every 8 steps": {"strategy": "local_sgd", "sync_every": 8},
}


def main() -> None:
    args = begin(parser_for(__doc__))
    common = {
        "batch_size": 64,
        "epochs": 2 if args.quick else 4,
        "num_samples": 328 if args.quick else 2_056,
        "precision": "fp64",
        "device": "cpu",
    }
    with scratch() as folder:
        for workload, config in WORKLOADS.items():
            one = local_trial(workload, {**common, **config, "num_workers": 1}, folder).reports
            print_row(f"{workload}: loss of 1 worker", " ".join(f"{report['train_loss']:.6f}" for report in one))
            for name, extra in {**CASES, **LOSSY}.items():
                two = local_trial(workload, {**common, **config, **extra, "num_workers": 2}, folder).reports
                keys = ("train_loss", "val_loss")
                worst = max(abs(b[key] / a[key] - 1) for a, b in zip(one, two, strict=True) for key in keys)
                if name in LOSSY:
                    print_row(f"{workload}: {name}", relative(worst))
                else:
                    print_bar(f"{workload}: {name}", worst, relative, at_most=BAR)


if __name__ == "__main__":
    main()
