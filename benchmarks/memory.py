"""Peak memory of models of known size, and the largest batch found against exhaustive search; on the CPU.

The first is a trial's `peak_memory_bytes` (and beside it `peak_rss_bytes`, which the machine needs) against weights,
Adam's state and activations, computed by hand, of two models: one has its peak in the backward pass, the other in the
optimizer's step. The second counts the peak of every batch size up to beyond a limit, and has `raypar model fit-batch`
find the largest that fits, from starts within 8x of the answer. About three minutes.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from common import begin, parser_for, print_bar, print_row, raypar_document, run_raypar, scratch

from raypar import units
from raypar.parallel.strategy import DistContext
from raypar.run.ranks import BASE_PRELOAD, LATE_PRELOAD
from raypar.study.options import resolve
from raypar.train.job import Profiling
from raypar.train.loop import train

MAX_ERROR, MAX_MISS, MAX_TRIALS = 0.10, 0.125, 8
MIN_BYTES = 300e6
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)  # of the answer, at which the search starts
MOST, ANSWER = 450, 400  # batch sizes of the exhaustive search; the largest that should fit
STUDY = '''"""How much memory does a network of linear layers need?"""
from raypar import Data, Split, Study, Workload


def model(config):
    from torch import nn

    width = config["width"]
    layers = [layer for _ in range(config["num_layers"]) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def data(config):
    import torch

    inputs = torch.zeros(config["size"], config["width"])
    targets = torch.zeros(config["size"], dtype=torch.long)
    return Data(train=Split(inputs, targets), val=Split(inputs[:1], targets[:1]))


MLP = Workload(
    name="known_mlp",
    model=model,
    data=data,
    options={"width": 1024, "num_layers": 12, "size": 4096},
    defaults={"optimizer": "adam", "lr": 1e-3, "num_warmup_steps": 2},
)
study = Study(workload=MLP, name="known", num_repeats=1)
'''
NAME = "known_model"
MODELS = {
    "large batch, peak in the backward pass": {"width": 1024, "num_layers": 12, "size": 4096, "batch_size": 4096},
    "small batch, peak in the optimizer's step": {"width": 1024, "num_layers": 24, "size": 64, "batch_size": 64},
}
SMALL = {"width": 128, "num_layers": 4, "size": 4096}


def peaks_by_hand(config: dict[str, int]) -> tuple[int, int]:
    """Return the bytes at two moments: the end of the forward pass, and a layer's update in the optimizer's step.

    The first has weights, Adam's two moments, the batch and every ReLU's output, and two gradients of activations; the
    second weights, moments, gradients, the batch and two temporary tensors of the size of a layer's weights.
    """
    width, num_layers = config["width"], config["num_layers"]
    weights = 4 * (num_layers * (width * width + width) + width * 10 + 10)
    activation = 4 * config["batch_size"] * width
    return 3 * weights + activation * (1 + num_layers + 2), 4 * weights + activation + 2 * 4 * width * width


def settings(config: dict[str, int]) -> list[str]:
    """Return the flags by which a study runs with a config."""
    return [word for key, value in config.items() for word in ("--set", f"{key}={value}")]


def measure_known_models(folder: Path) -> None:
    """Print the peaks of trials beside the bytes by hand."""
    for number, (title, config) in enumerate(MODELS.items()):
        place = folder / f"model{number}"
        place.mkdir()
        run_raypar(place, "study", f"../{NAME}.py", "--no-ray", *settings(config))
        (trial,) = raypar_document(place, "store", "show", "known", "--json")["trials"]
        expected = max(peaks_by_hand(config))
        peak, rss = trial["peak_memory_bytes"], trial["peak_rss_bytes"]
        print_row(f"{title}: by hand", units.size(expected) + (" (too small)" if expected < MIN_BYTES else ""))
        print_row(f"{title}: peak_memory_bytes; peak_rss_bytes", f"{units.size(peak)}; {units.size(rss)}")
        error = abs(peak / expected - 1)
        print_bar(f"{title}: difference", error, lambda share: f"{share:.1%}", at_most=MAX_ERROR)


def peak_bytes(workload: Any, batch_size: int) -> int:
    """Return the peak of a small model, counted in a fork like the peak of a trial."""
    out, into = os.pipe()
    if not (pid := os.fork()):
        config = resolve(workload, {**SMALL, "batch_size": batch_size})
        alone, memory_only = DistContext(0, 1, torch.device("cpu")), Profiling(0, instead_of_training=True)
        outcome = train(workload, config, 0, alone, None, start_s=0.0, profiling=memory_only)  # type: ignore[arg-type]
        os.write(into, str(outcome.conditions.peak_memory_bytes).encode())
        os._exit(0)
    os.close(into)
    os.waitpid(pid, 0)
    with os.fdopen(out) as text:
        return int(text.read())


def measure_searches(folder: Path, *, is_quick: bool) -> None:
    """Print the largest batch that fits by exhaustive search, and what `raypar model fit-batch` finds."""
    # Preloaded as by a rank's fork server; otherwise each process takes most of a second to import them.
    for name in (*BASE_PRELOAD, LATE_PRELOAD):
        importlib.import_module(name)
    sys.path.insert(0, str(folder))
    workload = importlib.import_module(NAME).MLP
    peaks = {size: peak_bytes(workload, size) for size in range(1, MOST // 10 if is_quick else MOST)}
    limit = peaks[ANSWER // 10 if is_quick else ANSWER]
    largest = max(size for size, peak in peaks.items() if peak <= limit)
    print_row(f"exhaustive search: largest batch in {units.size(limit)}", f"{largest} of 1 to {max(peaks)}")
    misses, counts = [], []
    for number, factor in enumerate(FACTORS[::3] if is_quick else FACTORS):
        start = round(largest * factor)
        place = folder / f"from{number}"  # a separate store, since a search starts from stored trials
        place.mkdir()
        words = [f"../{NAME}.py", "--no-ray", "--json", "--max-memory", f"{limit}B", "--start", str(start)]
        (point,) = raypar_document(place, "model", "fit-batch", *words, *settings(SMALL))["points"]
        found, num_trials = point["batch_size"] or 0, point["num_trials"]
        print_row(f"fit-batch from {start}", f"{found} in {num_trials} trials, peak {units.size(point['peak_bytes'])}")
        misses.append(abs(found / largest - 1))
        counts.append(num_trials)
    print_bar("largest difference from the exhaustive search", max(misses), lambda x: f"{x:.1%}", at_most=MAX_MISS)
    print_bar("most trials of a search", max(counts), str, at_most=MAX_TRIALS)


def main() -> None:
    args = begin(parser_for(__doc__))
    with scratch() as folder:
        (folder / f"{NAME}.py").write_text(STUDY)
        measure_known_models(folder)
        measure_searches(folder, is_quick=args.quick)


if __name__ == "__main__":
    main()
