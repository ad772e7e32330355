"""Whether 1 and 2 workers do the same work: their losses, epoch by epoch.

Plain SGD on part of MNIST, with a last batch that is short and odd. The same seed gives the same weights, and every
global batch holds the same samples, so the losses may differ by the rounding of another order of summation only:
1e-4 relative in single precision, 1e-9 in double. Nothing is timed here.

In fp32 a network with max-pooling is no smooth function of its weights: rounding decides which of two nearly equal
activations a gradient goes to, and a large learning rate magnifies that within epochs, on one worker as on two. So the
learning rate of mnist_cnn is small here, and the difference between fp32 and fp64 on one worker stands beside.
"""

from __future__ import annotations

from common import begin, local_trial, parser_for, relative, scratch, tell

BARS = {"fp32": 1e-4, "fp64": 1e-9}
# workload, learning rate, training samples, epochs, the last two with --quick
CASES = (("mnist_mlp", 0.1, 10_001, 5, 1_001, 2), ("mnist_cnn", 0.01, 6_001, 5, 501, 2))


def main() -> None:
    args = begin(parser_for(__doc__, needs_mnist=True))
    with scratch() as folder:
        for workload, lr, num_samples, epochs, quick_samples, quick_epochs in CASES:
            alone = {}
            for precision, bar in BARS.items():
                config = {
                    "lr": lr,
                    "optimizer": "sgd",
                    "batch_size": 64,
                    "num_samples": quick_samples if args.quick else num_samples,
                    "epochs": quick_epochs if args.quick else epochs,
                    "precision": precision,
                    "device": "cpu",
                }
                one, two = (local_trial(workload, {**config, "num_workers": n}, folder).reports for n in (1, 2))
                alone[precision] = one
                who = f"{workload}, {precision}"
                losses = " ".join(f"{report['train_loss']:.6f}" for report in one)
                tell(f"{who}: training loss of 1 worker", losses)
                for key in ("train_loss", "val_loss"):
                    apart = [abs(b[key] / a[key] - 1) for a, b in zip(one, two, strict=True)]
                    worst = max(apart)
                    tell(
                        f"{who}: largest difference of {key}",
                        f"{relative(worst)}   bar ≤ {relative(bar)}: {'reached' if worst <= bar else 'NOT REACHED'}",
                    )
            worst = max(
                abs(a["train_loss"] / b["train_loss"] - 1) for a, b in zip(alone["fp32"], alone["fp64"], strict=True)
            )
            tell(f"{workload}: for comparison, fp32 against fp64, both on 1 worker", relative(worst))


if __name__ == "__main__":
    main()
