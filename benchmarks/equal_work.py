"""Losses of 1 and 2 workers, epoch by epoch, which must agree.

Plain SGD on part of MNIST, with a last batch that is short and odd. The same seed gives the same weights, and every
global batch holds the same samples, so the losses may differ only by the rounding of another summation order: 1e-4
relative in single precision, 1e-9 in double. Nothing is timed.

In fp32 a network with max-pooling is not a smooth function of its weights: rounding decides which of two nearly equal
activations receives the gradient, and a large learning rate amplifies that within epochs, on one worker as on two. So
mnist_cnn gets a small learning rate, and the difference between fp32 and fp64 on one worker is printed for scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common import begin, local_trial, parser_for, print_bar, print_row, relative, scratch

Report = Mapping[str, float]
BARS = {"fp32": 1e-4, "fp64": 1e-9}
# workload, learning rate, training samples, epochs, the last two with --quick
CASES = (("mnist_mlp", 0.1, 10_001, 5, 1_001, 2), ("mnist_cnn", 0.01, 6_001, 5, 501, 2))


def largest_difference(first: Sequence[Report], second: Sequence[Report], key: str) -> float:
    """Return the largest relative difference of a metric between two trials' reports."""
    return max(abs(b[key] / a[key] - 1) for a, b in zip(first, second, strict=True))


def main() -> None:
    args = begin(parser_for(__doc__, needs_mnist=True))
    with scratch() as folder:
        for workload, lr, num_samples, epochs, quick_samples, quick_epochs in CASES:
            one_worker = {}
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
                one_worker[precision] = one
                prefix = f"{workload}, {precision}"
                losses = " ".join(f"{report['train_loss']:.6f}" for report in one)
                print_row(f"{prefix}: training loss of 1 worker", losses)
                for key in ("train_loss", "val_loss"):
                    title = f"{prefix}: largest difference of {key}"
                    print_bar(title, largest_difference(one, two, key), relative, at_most=bar)
            rounding = largest_difference(one_worker["fp64"], one_worker["fp32"], "train_loss")
            print_row(f"{workload}: for comparison, fp32 against fp64, both on 1 worker", relative(rounding))


if __name__ == "__main__":
    main()
