"""Cost and correctness of observing scripts that time their own steps by hand.

Five scripts train with and without the observer, and their losses must be equal to the last bit. They time whole steps,
and in other runs also the parts of their steps, by their own clock. Both are compared with what raypar observes in the
same run. Counterfactuals are compared with scripts that leave out the same work themselves. What observing adds to a
step is timed around the observer's functions.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import FOLDER, MARK, Figure, begin, failure, parser_for, print_bar, print_row, scratch

from raypar import observe
from raypar.observe.events import EventKind, read_events
from raypar.observe.ranks import RankSteps, read_ranks
from raypar.study.profile import BACKWARD, COMMUNICATION, STRAGGLERS

SCRIPTS = FOLDER / "observed"
MAX_COST_US, MAX_COST_SHARE = 25.0, 0.01
MAX_POINTS, MAX_GAP, MAX_WHAT_IF_GAP = 0.03, 0.02, 0.05
SAMPLE_S, QUICK_SAMPLE_S = 10.0, 2.0  # training whose steps are timed, of each size
NUM_DDP_PAIRS, NUM_QUICK_DDP_PAIRS = 300, 20
WHAT_IF_PAIRS = 3  # of runs, for each round: a machine's speed changes from run to run
ONCE_A_STEP = (EventKind.BATCH, EventKind.FORWARD, EventKind.BACKWARD, EventKind.STEP)
MICROSECONDS, PERCENT = "{:.1f} µs".format, "{:.1%}".format

CASES = {
    "one worker": (["mlp.py"], 1),
    "two workers, DDP": (["mlp.py"], 2),
    "slow loader": (["mlp.py", "--delay-us", "50", "--samples", "3200"], 1),
    "gradient accumulation of 4": (["mlp.py", "--accumulate", "4", "--samples", "12800"], 1),
    "two optimizers": (["gan.py"], 1),
    "language model without a loader": (["language.py"], 1),
    "two workers that average gradients themselves": (["averaging.py"], 2),
    "closures, checkpoints, a loader process": (["closures.py"], 1),
}
# Size of a step: width of the network, and the time of a step in seconds.
SIZES = {"0.5 ms": (32, 0.0005), "2 ms": (768, 0.002), "20 ms": (8192, 0.02)}
WITHOUT_SHARE = "0.5 ms"  # the bar in percent begins at 2 ms
# Counterfactual: the script, its workers, and its flag with the same effect.
WHAT_IFS = {
    "no loading": (["mlp.py", "--hidden", "1024", "--delay-us", "50", "--samples", "12800"], 1, "--no-loading"),
    "no communication": (["mlp.py", "--hidden", "2048", "--samples", "12800"], 2, "--no-synchronisation"),
}


@dataclass(frozen=True)
class Run:
    """Run of a script: what each rank printed, and what was observed of it."""

    printed: Sequence[Mapping[str, Any]]
    ranks: Sequence[RankSteps] = ()

    @property
    def losses(self) -> list[tuple[int, str]]:
        """Number and digest of the losses of each rank."""
        return [(each["num_losses"], each["losses"]) for each in self.printed]

    @property
    def printed_median_s(self) -> float:
        return max(each["median_step_s"] for each in self.printed)

    @property
    def observed_median_s(self) -> float:
        return max(statistics.median(each.step_times_s) for each in self.ranks)

    @property
    def observed_step_s(self) -> float:
        return max(each.rank.breakdown.step_s for each in self.ranks)


def run(
    words: Sequence[str], num_workers: int, events: Path | None = None, what_if: str = ""
) -> Sequence[Mapping[str, Any]]:
    """Run a script of the folder, and return what each rank printed.

    Args:
        events: folder for the observer's events; None: the script is not observed.
    """
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}"] * (num_workers > 1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if events is not None:
        environment |= observe.environment(events, environment, {"what_if": what_if} if what_if else {})
    command = [sys.executable, *start, str(SCRIPTS / words[0]), *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    printed = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or len(printed) != num_workers:
        raise failure(" ".join(words), done.returncode, done.stdout + done.stderr)
    return sorted(printed, key=lambda each: each["rank"])


def observed_run(words: Sequence[str], num_workers: int, what_if: str = "") -> Run:
    """Run a script of the folder with the observer."""
    with scratch() as events:
        printed = run(words, num_workers, events, what_if)
        ranks, why_not = read_ranks(events)
    if len(ranks) != num_workers:
        raise SystemExit(f"{' '.join(words)}: {len(ranks)} of {num_workers} ranks were observed: {why_not}")
    if problems := [problem for each in ranks for problem in each.rank.problems]:
        raise SystemExit(f"{' '.join(words)}: {'; '.join(problems)}")
    return Run(printed, ranks)


# ---- parts, times and losses


def part_gaps(by_hand: Run) -> dict[tuple[int, str], float]:
    """Return the difference of each part's share of the step from that measured by hand, by rank and part."""
    gaps = {}
    for i, (printed, each) in enumerate(zip(by_hand.printed, by_hand.ranks, strict=True)):
        expected, parts = dict(printed["parts"]), dict(each.rank.breakdown.parts)
        parts[COMMUNICATION] += parts.pop(STRAGGLERS)
        if COMMUNICATION not in expected:  # DDP communicates within the backward pass
            parts[BACKWARD] += parts.pop(COMMUNICATION)
        whole_s, step_s = sum(expected.values()), each.rank.breakdown.step_s
        for name in expected.keys() | parts.keys():
            gaps[i, name] = parts.get(name, 0.0) / step_s - expected.get(name, 0.0) / whole_s
    return gaps


def largest_gap(runs: Sequence[Run]) -> tuple[float, str]:
    """Return the largest difference of a part, in the median of the runs, and the part."""
    by_run = [part_gaps(each) for each in runs]
    medians = {key: statistics.median(gaps.get(key, 0.0) for gaps in by_run) for key in set().union(*by_run)}
    rank, part = max(medians, key=lambda key: abs(medians[key]))
    return abs(medians[rank, part]), part


def relative_gaps(seen: Run) -> tuple[float, float]:
    """Return the largest relative differences of step time and samples/s from the figures that the script prints."""
    time_gaps, rate_gaps = [], []
    for printed, each in zip(seen.printed, seen.ranks, strict=True):
        rank = each.rank
        time_gaps.append(abs(rank.breakdown.step_s / printed["step_s"] - 1))
        rate = rank.samples_per_step / rank.breakdown.step_s
        own_rate = printed["samples_per_s"]  # 0: without a loader, raypar knows no samples
        rate_gaps.append(abs(rate / own_rate - 1) if own_rate else rate)
    return max(time_gaps), max(rate_gaps)


def compare_cases(num_rounds: int) -> None:
    """Print the differences between what scripts measure and what raypar observes, and their bars."""
    gaps, time_gaps, rate_gaps, num_unequal = [], [], [], 0
    for title, (words, num_workers) in CASES.items():
        plain = Run(run(words, num_workers))
        seen = observed_run(words, num_workers)
        by_hand = [observed_run([*words, "--by-hand"], num_workers) for _ in range(num_rounds)]
        gap, part = largest_gap(by_hand)
        time_gap, rate_gap = relative_gaps(seen)
        is_equal = all(plain.losses == each.losses for each in (seen, *by_hand))
        texts = (
            f"step of {seen.observed_step_s * 1e3:.1f} ms: parts within {gap * 100:.1f} points ({part})",
            f"time within {PERCENT(time_gap)}",
            f"samples/s within {PERCENT(rate_gap)}",
            f"{sum(num for num, _ in seen.losses)} losses {'equal' if is_equal else 'NOT EQUAL'}",
        )
        print_row(title, ", ".join(texts))
        gaps.append(gap)
        time_gaps.append(time_gap)
        rate_gaps.append(rate_gap)
        num_unequal += not is_equal
    print_bar("scripts whose losses differ in any bit", num_unequal, "{:.0f}".format, at_most=0)
    print_bar("largest gap of a part, share of the step", max(gaps), PERCENT, at_most=MAX_POINTS)
    print_bar("largest gap of a step's time", max(time_gaps), PERCENT, at_most=MAX_GAP)
    print_bar("largest gap of samples/s", max(rate_gaps), PERCENT, at_most=MAX_GAP)


# ---- counterfactuals


def compare_what_ifs(num_rounds: int) -> None:
    """Print the gaps between counterfactuals and scripts that leave out the same work, and their bar."""
    gaps = []
    for what_if, (words, num_workers, flag) in WHAT_IFS.items():
        ratios = []
        for i in range(num_rounds):
            step_s = {}
            for is_by_hand in (i % 2 == 0, i % 2 == 1):
                if is_by_hand:
                    step_s[is_by_hand] = Run(run([*words, flag], num_workers)).printed_median_s
                else:
                    step_s[is_by_hand] = observed_run(words, num_workers, what_if).observed_median_s
            ratios.append(step_s[False] / step_s[True])
        print_row(f"{what_if}: step / that of a changed script", Figure.of(ratios).show("{:.3f}×".format))
        gaps.append(abs(statistics.median(ratios) - 1))
    print_bar("largest gap of a counterfactual", max(gaps), PERCENT, at_most=MAX_WHAT_IF_GAP)


# ---- cost


def cost_of(hidden: int, num_steps: int, num_workers: int) -> tuple[float, float]:
    """Return what observing adds to a step and the time of the step in seconds, of the slowest rank."""
    with scratch() as folder:
        printed = run(["cost.py", "--hidden", str(hidden), "--steps", str(num_steps)], num_workers, folder)
        for each in printed:  # what is not observed has no cost
            events, _ = read_events(folder / f"{each['pid']}.events")
            counts = Counter(event[0] for event in events)
            if any(abs(counts[kind] - each["num_observed"]) > 1 for kind in ONCE_A_STEP):
                texts = ", ".join(f"{counts[kind]} {kind.name}" for kind in ONCE_A_STEP)
                raise SystemExit(f"cost.py: {each['num_observed']} steps were to be observed: {texts}")
    return max(each["cost_s"] for each in printed), max(each["step_s"] for each in printed)


def ddp_cost_s(num_pairs: int) -> float:
    """Return the time that DDP's timers take in each step, in seconds."""
    with scratch() as folder:
        words = ["cost.py", "--hidden", "32", "--steps", "0", "--ddp-pairs", str(num_pairs)]
        return max(0.0, run(words, 1, folder)[0]["ddp_s"])


def measure_costs(num_rounds: int, *, is_quick: bool) -> None:
    """Print the cost of a step for each size and number of workers, and its bars."""
    values: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    ddp_s = []
    for _ in range(num_rounds):
        ddp_s.append(ddp_cost_s(NUM_QUICK_DDP_PAIRS if is_quick else NUM_DDP_PAIRS))
        for title, (hidden, step_s) in SIZES.items():
            num_steps = round((QUICK_SAMPLE_S if is_quick else SAMPLE_S) / step_s)
            for num_workers in (1, 2):
                values[title, num_workers].append(cost_of(hidden, num_steps, num_workers))
    ddp = Figure.of([each * 1e6 for each in ddp_s])
    print_row("of which DDP's timers, 2 workers", ddp.show(MICROSECONDS))
    costs_us, shares = [], []
    for (title, num_workers), each in values.items():
        extra_s = ddp.value / 1e6 if num_workers > 1 else 0.0
        cost_us = Figure.of([(cost_s + extra_s) * 1e6 for cost_s, _ in each])
        share = Figure.of([(cost_s + extra_s) / step_s for cost_s, step_s in each])
        step_ms = statistics.median(step_s for _, step_s in each) * 1e3
        costs_us.append(cost_us)
        if title != WITHOUT_SHARE:
            shares.append(share)
        name = f"cost of a step of about {title}, {num_workers} worker{'s' * (num_workers > 1)}"
        print_row(name, f"{cost_us.show(MICROSECONDS)}; {PERCENT(share.value)} of {step_ms:.2f} ms")
    largest_us, largest = (max(figures, key=lambda figure: figure.value) for figures in (costs_us, shares))
    print_bar("largest cost of a step", largest_us, MICROSECONDS, at_most=MAX_COST_US)
    print_bar("largest cost of a step from 2 ms on, share of it", largest, PERCENT, at_most=MAX_COST_SHARE)


PARTS = ("cases", "counterfactuals", "costs")


def main() -> None:
    parser = parser_for(__doc__, rounds=5)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    args = begin(parser)
    if "cases" in args.only:
        compare_cases(min(args.rounds, 3))
    if "counterfactuals" in args.only:
        compare_what_ifs(args.rounds * WHAT_IF_PAIRS)
    if "costs" in args.only:
        measure_costs(args.rounds, is_quick=args.quick)


if __name__ == "__main__":
    main()
