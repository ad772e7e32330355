"""Critical batch size: the measured knee of steps over batch sizes, against raypar's gradient noise scale.

The knee (McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, equation 2.11): steps(B) = S_min (1 + B_crit / B)
until the validation loss reaches a target, fitted to trainings in plain torch whose constant learning rate is tuned for
each batch size by powers of the square root of 2. Figures are geometric means over seeds.

The noise scale: `noise_scale_samples` of trials of two workers at one batch size, which was fixed in advance, with the
learning rate tuned for it. Trials end soon after the target; blocks of steps after it do not count. It is weighted by
progress, as in the paper's appendix D, where B_crit = E_min / S_min is the mean over optimal steps.

The theory is that of SGD. The transformer is trained with momentum, too, and that does not count; perhaps its weights
swing along steep directions at its best rates, which would lengthen the mean gradient without progress.

The last rows are the cost of measuring it: trials with it / without, interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    Figure,
    begin,
    interleaved,
    local_trial,
    parser_for,
    print_bar,
    print_row,
    progress,
    scratch,
    times,
    workload_named,
)
from scipy.optimize import curve_fit
from torch import Tensor, nn

from raypar.analysis.gradient_noise import noise_scale_estimate, noise_scale_text
from raypar.analysis.stats import Estimate
from raypar.study.gradient_noise import Moments, measured_blocks
from raypar.study.options import resolve
from raypar.study.trial import TrialResult

BAR = 2.0  # largest ratio of knee and noise scale, either way
NUM_SEEDS = 3
MAX_STEPS = 10_000
MAX_LOSS = 100.0  # beyond it, a training has diverged
SLOWEST = 1.4  # a learning rate that takes this much longer than the best is given up
NUM_VAL = 2_000
EVAL_SHARE = 0.03  # of the steps so far, until the next evaluation
MARGIN = 1.15  # steps of a trial / steps until the target in the sweep
NUM_WORKERS = 2


@dataclass(frozen=True)
class Case:
    """Workload whose knee is measured.

    Attributes:
        target: validation loss.
        batch_sizes: of the sweep, from the largest.
        first_lr: where the search begins, for the largest batch.
        trial_batch: batch size of the trials that measure the noise scale.
    """

    workload: str
    config: dict[str, Any]
    target: float
    batch_sizes: tuple[int, ...]
    first_lr: float
    trial_batch: int

    @property
    def name(self) -> str:
        """Workload and optimizer."""
        return f"{self.workload}, {self.config['optimizer']}"

    @property
    def counts(self) -> bool:
        """True for the optimizer of the theory: the bar is on these."""
        return bool(self.config["optimizer"] == "sgd")


SGD, MOMENTUM = {"optimizer": "sgd"}, {"optimizer": "momentum"}
TRANSFORMER = {"width": 32, "num_blocks": 1, "sequence_length": 8}
CASES = (
    Case("digits", {**SGD, "hidden_size": 128}, 0.3, (512, 256, 128, 64, 32, 16, 8), 0.7, 32),
    Case("mnist_mlp", SGD, 0.25, (2048, 1024, 512, 256, 128, 64, 32, 16), 0.5, 128),
    Case("fashion_mlp", {**SGD, "activation": "relu"}, 0.42, (2048, 1024, 512, 256, 128, 64, 32, 16), 0.3, 128),
    Case("transformer", {**SGD, **TRANSFORMER}, 0.8, (128, 64, 32, 16, 8, 4), 0.7, 16),
    Case("transformer", {**MOMENTUM, **TRANSFORMER}, 0.5, (256, 128, 64, 32, 16, 8, 4), 0.1, 16),
)


@dataclass
class Sweep:
    """Trainings of a case in plain torch, on one thread."""

    case: Case
    num_seeds: int
    tuned: dict[int, tuple[float, float]] = field(default_factory=dict)  # learning rate and steps by batch size

    def __post_init__(self) -> None:
        self._workload = workload_named(self.case.workload)
        self._config = resolve(self._workload, self.case.config)
        assert self._workload.data is not None
        data = self._workload.data(self._config)
        transform: Callable[[Tensor], Tensor] = data.transform or (lambda inputs: inputs)
        self._inputs, self._targets = transform(data.train.inputs), data.train.targets
        self._val = transform(data.val.inputs)[:NUM_VAL], data.val.targets[:NUM_VAL]
        self._loss = self._workload.loss or nn.functional.cross_entropy

    @property
    def num_samples(self) -> int:
        """Samples of the training set."""
        return len(self._inputs)

    def run(self) -> None:
        """Tune the learning rate of every batch size, from the largest, each from the one before."""
        lr = self.case.first_lr
        for batch_size in self.case.batch_sizes:
            lr, steps = self._tuned(batch_size, lr)
            self.tuned[batch_size] = lr, steps
            progress(f"{self.case.name}: batch {batch_size}: {steps:.1f} steps at lr {lr:.3g}")

    def knee(self) -> tuple[float, float, float]:
        """Fit steps(B) = S_min (1 + B_crit / B); return S_min, B_crit and the largest relative residual."""
        sizes = np.array(list(self.tuned), dtype=float)
        logs = np.log([steps for _, steps in self.tuned.values()])

        def model(batch: Any, log_least: float, log_knee: float) -> Any:
            return log_least + np.log1p(np.exp(log_knee) / batch)

        found, _ = curve_fit(model, sizes, logs, p0=(logs.min(), math.log(sizes.mean())))
        return math.exp(found[0]), math.exp(found[1]), math.expm1(np.abs(model(sizes, *found) - logs).max())

    def _tuned(self, batch_size: int, first_lr: float) -> tuple[float, float]:
        tried: dict[float, float] = {}

        def steps_at(lr: float) -> float:
            if lr not in tried:
                limit = SLOWEST * min(tried.values(), default=math.inf)
                tried[lr] = self._mean_steps(batch_size, lr, min(limit, MAX_STEPS))
            return tried[lr]

        steps_at(first_lr)
        for factor in (0.5, 2.0, math.sqrt(0.5), math.sqrt(2)):
            best = min(tried, key=lambda lr: tried[lr])
            while steps_at(best * factor) < tried[best]:
                best *= factor
        best = min(tried, key=lambda lr: tried[lr])
        return best, tried[best]

    def _mean_steps(self, batch_size: int, lr: float, limit: float) -> float:
        """Return the geometric mean over the seeds; infinite if one diverges, or takes more than the limit."""
        logs = []
        for seed in range(self.num_seeds):
            steps = self._steps(batch_size, lr, seed, limit)
            if math.isinf(steps):
                return steps
            logs.append(math.log(steps))
        return math.exp(sum(logs) / len(logs))

    def _steps(self, batch_size: int, lr: float, seed: int, limit: float) -> float:
        """Return the steps until the target, interpolated between evaluations."""
        assert self._workload.model is not None
        torch.manual_seed(seed)
        model = self._workload.model(self._config)
        momentum = 0.9 if self.case.config["optimizer"] == "momentum" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        next_at, last = 1, (0, math.inf)
        for step, index in enumerate(self._batches(batch_size, seed), 1):
            optimizer.zero_grad()
            self._loss(model(self._inputs[index]), self._targets[index]).backward()
            optimizer.step()
            if step >= next_at:
                with torch.no_grad():
                    loss = float(self._loss(model(self._val[0]), self._val[1]))
                if loss <= self.case.target:
                    return interpolated(last, (step, loss), self.case.target)
                if not loss < MAX_LOSS or step > limit:
                    break
                last, next_at = (step, loss), step + max(1, int(EVAL_SHARE * step))
        return math.inf

    def _batches(self, batch_size: int, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(self.num_samples, generator=generator)
            yield from (part for part in order.split(batch_size) if len(part) == batch_size)


def interpolated(before: tuple[int, float], after: tuple[int, float], target: float) -> float:
    """Return the steps at which a loss reached the target, on a log scale between two evaluations."""
    (first, high), (last, low) = before, after
    if math.isinf(high) or low == high:
        return float(last)
    return first + (last - first) * math.log(high / target) / math.log(high / low)


def noise_of(sweep: Sweep, folder: Path) -> Estimate | None:
    """Measure the noise scale in raypar's own trials, until the target."""
    case, batch = sweep.case, sweep.case.trial_batch
    lr, steps = sweep.tuned[batch]
    num_samples = math.ceil(MARGIN * steps) * batch
    epochs = math.ceil(num_samples / sweep.num_samples)
    config = {
        **case.config,
        "num_workers": NUM_WORKERS,
        "batch_size": batch,
        "lr": lr,
        "noise_scale": True,
        "epochs": epochs,
        "num_samples": num_samples // epochs // batch * batch,
        "eval_every_steps": max(1, round(steps / 20)),
        "device": "cpu",
        "keep_model": False,
    }
    trials = [local_trial(case.workload, config, folder / f"{case.workload}{i}", i) for i in range(sweep.num_seeds)]
    return noise_scale_estimate([until_target(result, case.target) for result in trials])


def until_target(result: TrialResult, target: float) -> tuple[Moments, ...]:
    """Return the blocks of a trial's steps up to the report that reached the target."""
    blocks, num_steps = measured_blocks(result.conditions), result.final["step"]
    reached = next((r["step"] for r in result.reports if r["val_loss"] <= target), num_steps)
    return blocks[: max(1, round(len(blocks) * reached / num_steps))]


COST = {
    "mnist_mlp": {"batch_size": 128, "num_samples": 30_000},
    "mnist_cnn": {"batch_size": 128, "num_samples": 3_000},
    "transformer": {"batch_size": 128, "num_sequences": 2_000},
}


def cost(workload: str, folder: Path, num_rounds: int) -> Figure:
    """Measure the training time with the noise scale / without it."""
    config = {**COST[workload], "num_workers": NUM_WORKERS, "epochs": 2, "device": "cpu"}
    count = iter(range(10**6))

    def train(notes: bool) -> float:
        result = local_trial(workload, {**config, "noise_scale": notes}, folder / f"cost{next(count)}")
        assert result.train_time_s is not None
        return result.train_time_s

    measured = interleaved({"with": lambda: train(True), "without": lambda: train(False)}, num_rounds)
    return Figure.ratio(measured["with"], measured["without"])


def main() -> None:
    parser = parser_for(__doc__, rounds=6, quick_rounds=1, needs_mnist=True)
    parser.add_argument("--only", choices=[*dict.fromkeys(case.workload for case in CASES)], help="no cost")
    args = begin(parser)
    torch.set_num_threads(1)
    cases = [case for case in CASES if args.only in (None, case.workload)][: 1 if args.quick else None]
    within = 0
    with scratch() as folder:
        for case in cases:
            sweep = Sweep(case, 1 if args.quick else NUM_SEEDS)
            sweep.run()
            least, knee, residual = sweep.knee()
            noise = noise_of(sweep, folder)
            print_row(f"{case.name}: knee", f"{knee:.0f} samples ({least:.0f} steps at least; ±{residual:.0%})")
            if noise is None:
                print_row(f"{case.name}: noise scale", "not shown by the trials")
                continue
            ratio = noise.value / knee
            within += case.counts and 1 / BAR <= ratio <= BAR
            text = f"{noise_scale_text(noise)} samples at batch {case.trial_batch}: {times(ratio)} the knee"
            print_row(f"{case.name}: noise scale", text)
        num_counted = sum(case.counts for case in cases)
        print_bar(f"workloads within {BAR:g}× of the knee, SGD", within, "{:.0f}".format, at_least=num_counted)
        for workload in () if args.only or args.quick else COST:
            print_row(f"{workload}: training time with it / without", cost(workload, folder, args.rounds).show(times))


if __name__ == "__main__":
    main()
