"""One trial of raypar's without Ray, as a child process of loop_overhead.py and ddp.py."""

from __future__ import annotations

from common import local_trial, scratch, send_result, training_parser


def main() -> None:
    parser = training_parser(__doc__)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=1, help="of each worker")
    args = parser.parse_args()
    config = {
        "batch_size": args.batch_size,
        "num_samples": args.num_samples,
        "epochs": args.epochs,
        "num_workers": args.num_workers,
        "cpus_per_worker": args.num_threads,
        "device": "cpu",
    }
    with scratch() as folder:
        result = local_trial(args.workload, config, folder)
    assert result.conditions.of_ranks("num_threads") == [args.num_threads] * args.num_workers
    send_result({"samples_per_s": result.throughput_samples_per_s, "seconds": result.train_time_s})


if __name__ == "__main__":
    main()
