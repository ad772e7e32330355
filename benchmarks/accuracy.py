"""Whether the workloads learn what they should: test accuracy on the whole of MNIST, with their defaults.

`mnist_cnn` in at most ten epochs, `mnist_mlp` in its three; as many workers as there are cores (at most 2: the losses
don't depend on it). Nothing is timed here; the last lines say in which epoch the bar was reached.
"""

from __future__ import annotations

from common import begin, local_trial, parser_for, scratch, tell

from raypar import units
from raypar.train.affinity import allowed_cores

CASES = (("mnist_mlp", 3, 0.97), ("mnist_cnn", 10, 0.99))
QUICK_SAMPLES = 2_048


def main() -> None:
    parser = parser_for(__doc__, needs_mnist=True)
    parser.add_argument("--epochs", type=int, default=10, help="of mnist_cnn [default: 10]")
    parser.add_argument("--seed", type=int, default=0, help="[default: 0]")
    args = begin(parser)
    num_workers = min(2, len(allowed_cores()))
    with scratch() as folder:
        for workload, epochs, bar in CASES:
            config: dict[str, object] = {"num_workers": num_workers, "device": "cpu", "epochs": epochs}
            if workload == "mnist_cnn":
                config["epochs"] = args.epochs
            if args.quick:
                config |= {"epochs": 1, "num_samples": QUICK_SAMPLES}
            result = local_trial(workload, config, folder, repeat=args.seed)
            accuracies = [report["accuracy"] for report in result.reports]
            for epoch, accuracy in enumerate(accuracies, 1):
                tell(f"{workload}: test accuracy after epoch {epoch}", f"{100 * accuracy:.2f} %")
            reached = next((epoch for epoch, accuracy in enumerate(accuracies, 1) if accuracy >= bar), None)
            tell(
                f"{workload}: best of {len(accuracies)} epochs",
                f"{100 * max(accuracies):.2f} %   bar ≥ {100 * bar:.1f} %: "
                + (f"reached in epoch {reached}" if reached else "NOT REACHED"),
            )
            tell(f"{workload}: training and evaluation", units.seconds(result.wall_s))


if __name__ == "__main__":
    main()
