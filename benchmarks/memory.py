"""Peak memory of a model of known size, and the largest batch found against exhaustive search; on the CPU.

    PYTHONPATH=. python3 benchmarks/memory.py [--quick]

The first is a trial's `peak_memory_bytes` (and beside it `peak_rss_bytes`, which the machine needs) against weights,
Adam's state and activations, computed by hand. The second runs every batch size up to beyond the limit, and then the
search of `raypar fit-batch` from starts within 8x of the answer. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import begin, parser_for
from torch import nn

from raypar import Data, Split, Study, Workload, units
from raypar.execution.fit_batch import Attempted, next_batch
from raypar.parallel.strategy import DistContext
from raypar.run.local import LocalRunner
from raypar.run.ranks import BASE_PRELOAD
from raypar.run.runner import Event, TrialEnded
from raypar.study.options import resolve
from raypar.train.job import Profiling, RunSettings
from raypar.train.loop import train

MAX_ERROR, MAX_MISS, MAX_TRIALS = 0.10, 0.125, 8
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)  # of the answer, at which the search starts
MEMORY_ONLY = Profiling(0, instead_of_training=True)


def model(config: Mapping[str, Any]) -> nn.Module:
    width = config["width"]
    layers = [layer for _ in range(config["num_layers"]) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def data(config: Mapping[str, Any]) -> Data:
    inputs, targets = torch.zeros(config["size"], config["width"]), torch.zeros(config["size"], dtype=torch.long)
    return Data(train=Split(inputs, targets), val=Split(inputs[:1], targets[:1]))


MLP = Workload(
    name="known_mlp",
    model=model,
    data=data,
    options={"width": 1024, "num_layers": 12, "size": 4096},
    defaults={"optimizer": "adam", "lr": 1e-3, "batch_size": 4096, "num_warmup_steps": 2},
)


def bytes_by_hand(config: Mapping[str, Any]) -> int:
    """Return the larger of two peaks: of the backward pass, and of the optimizer's step.

    The first has weights, Adam's two moments, the batch and every ReLU's output, and two gradients of activations; the
    second weights, moments, gradients, the batch and two temporary tensors of the size of a layer's weights.
    """
    width, num_layers = config["width"], config["num_layers"]
    weights = 4 * (num_layers * (width * width + width) + width * 10 + 10)
    activation = 4 * config["batch_size"] * width
    return max(3 * weights + activation * (1 + num_layers + 2), 4 * weights + activation + 2 * 4 * width * width)


def peak_of_known_model() -> bool:
    """Print a trial's peaks beside the bytes by hand; True within the bar."""
    study, events = Study(workload=MLP, name="memory", num_repeats=1), list[Event]()
    with TemporaryDirectory() as folder, LocalRunner(RunSettings(log_dir=Path(folder))) as runner:
        runner.run(study, [study.trial({}, 0)], events.append)
    (result,) = (event.result for event in events if isinstance(event, TrialEnded))
    expected, peak = bytes_by_hand(result.spec.config), result.peak_memory_bytes or 0.0
    error = peak / expected - 1
    shown = (units.size(each) for each in (expected, peak, result.peak_rss_bytes))
    print("by hand {}; peak_memory_bytes {}; peak_rss_bytes {}".format(*shown), f"error {100 * error:+.1f} %")
    return abs(error) <= MAX_ERROR and expected >= 300e6


def peak_bytes(batch_size: int) -> int:
    """Return the peak of a small model, counted in a process of its own, as that of a trial is."""
    out, into = os.pipe()
    if not (pid := os.fork()):
        os.write(into, str(_counted_bytes(batch_size)).encode())
        os._exit(0)
    os.close(into)
    os.waitpid(pid, 0)
    with os.fdopen(out) as text:
        return int(text.read())


def _counted_bytes(batch_size: int) -> int:
    config = resolve(MLP, {"width": 128, "num_layers": 4, "size": 4096, "batch_size": batch_size})
    alone = DistContext(0, 1, torch.device("cpu"))
    outcome = train(MLP, config, 0, alone, None, start_s=0.0, profiling=MEMORY_ONLY)  # type: ignore[arg-type]
    return int(outcome.environment["peak_memory_bytes"])


def largest_batches(most: int, answer: int) -> bool:
    """Print the largest batch that fits by exhaustive search, and what the search finds; True within the bars."""
    for name in BASE_PRELOAD:  # as a rank's fork server does: otherwise each process imports them, for most of a second
        importlib.import_module(name)
    peaks = {size: peak_bytes(size) for size in range(1, most + 1)}
    limit = peaks[answer]
    largest = max(size for size, peak in peaks.items() if peak <= limit)
    print(f"exhaustive: {largest} of 1 to {most} is the largest in {units.size(limit)}")
    is_good = True
    for factor in FACTORS:
        tried: dict[int, Attempted] = {}
        while (size := next_batch(tried, round(largest * factor), limit_bytes=limit)) is not None:
            peak = peak_bytes(size)
            tried[size] = Attempted(peak <= limit, peak if peak <= limit else None)
        found = max(size for size, each in tried.items() if each.fits)
        is_good &= (1 - MAX_MISS) * largest <= found <= largest and len(tried) <= MAX_TRIALS
        print(f"start {round(largest * factor)}: {found} in {len(tried)} trials ({', '.join(map(str, tried))})")
    return is_good


def main() -> None:
    args = begin(parser_for(__doc__))
    good = [peak_of_known_model(), largest_batches(*((40, 30) if args.quick else (450, 400)))]
    print("bars: " + ", ".join("met" if each else "MISSED" for each in good))
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
