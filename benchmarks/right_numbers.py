"""Numbers that raypar shows for small studies, against plain torch, the script's own clock or a sum.

Each case is a study file that is run as a user runs it, in an empty folder; then its trials, the report as JSON and the
report's text are compared with an independent computation (`truth/`). A case is expected to be right, or refused before
anything is trained, with words that name the fix.

With ``--workers``, losses of every kind on 1, 2, 3 and 4 workers, each with 1, 2 and 4 accumulation steps, in fp32,
against plain torch on whole batches.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from common import FOLDER, begin, parser_for, print_bar, print_row, progress, relative, scratch

sys.path += [str(FOLDER.parent / "tests" / "real")]

import cloudpickle
import plainlab
from plainlab import KINDS, largest_difference
from ranks import on_ranks, reports_of
from truth import FAILED, REFUSED, RIGHT, WRONG, Case, Outcome, User, cases

from raypar.errors import WorkloadError

MAX_REFUSED = 3  # without need
MAX_DIFFERENCE = 1e-6
WORKERS, ACCUMULATIONS = (1, 2, 3, 4), (1, 2, 4)
TRAINING = {"batch_size": 24, "epochs": 2, "eval_batch_size": 7, "num_warmup_steps": 1, "device": "cpu"}


def judged(case: Case, options: Sequence[str]) -> tuple[Outcome, float]:
    """Return what became of a case, and the seconds that it took."""
    begun_s = time.perf_counter()
    with scratch() as folder:
        try:
            outcome = case.judge(User(folder.resolve(), tuple(options)))
        except subprocess.TimeoutExpired as error:
            outcome = Outcome(FAILED, f"not done after {error.timeout} s")
        except Exception:  # for example of the case itself
            outcome = Outcome(FAILED, traceback.format_exc(limit=-2).replace("\n", " | "))
    return outcome, time.perf_counter() - begun_s


def verdict_of(case: Case, outcome: Outcome) -> str:
    """Return "ok", or what is wrong with a case."""
    if outcome.got in (WRONG, FAILED):
        return {WRONG: "wrong number", FAILED: "failed"}[outcome.got]
    return "refused without need" if (outcome.got, case.expected) == (REFUSED, RIGHT) else "ok"


def print_studies(chosen: Sequence[Case], num_jobs: int, options: Sequence[str]) -> bool:
    """Run the cases, print a row for each, and return whether the bars are reached."""
    width = max(len(case.name) for case in chosen) + 2
    print(f"{'case':<{width}}{'expected':<10}{'got':<10}verdict")
    verdicts: Counter[str] = Counter()
    context = get_context("forkserver")
    with ProcessPoolExecutor(num_jobs, context) as pool:
        futures = {pool.submit(_judged, case.slug, options): case for case in chosen}
        for future in as_completed(futures):
            case, (outcome, time_s) = futures[future], future.result()
            verdict = verdict_of(case, outcome)
            verdicts[verdict] += 1
            note = "" if verdict == "ok" else f": {outcome.text}"
            print(f"{case.name:<{width}}{case.expected:<10}{outcome.got:<10}{verdict}{note}", flush=True)
            progress(f"{sum(verdicts.values())}/{len(chosen)}, {time_s:.0f} s: {case.name}: {outcome.text or 'right'}")
    print()
    print_row("cases", str(len(chosen)))
    count = "{:.0f}".format
    return all(
        [
            print_bar("wrong number shown", verdicts["wrong number"], count, at_most=0),
            print_bar("refused without need", verdicts["refused without need"], count, at_most=MAX_REFUSED),
            print_bar("failed: neither right nor refused with the fix", verdicts["failed"], count, at_most=0),
        ]
    )


def _judged(slug: str, options: Sequence[str]) -> tuple[Outcome, float]:
    """Return `judged` of a case, which can't be pickled."""
    return judged(next(case for case in cases() if case.slug == slug), options)


def of_rank(context: Any) -> Mapping[tuple[str, int], Any]:
    """Return this rank's reports, or why there are none, by kind of loss and accumulation steps."""
    got: dict[tuple[str, int], Any] = {}
    for name, kind in KINDS.items():
        for num_parts in ACCUMULATIONS:
            config = {**TRAINING, "lr": kind.lr, "accumulation_steps": num_parts}
            try:
                got[name, num_parts] = reports_of(kind.workload, config, context)
            except WorkloadError as error:
                got[name, num_parts] = str(error)
    return got


def print_workers() -> bool:
    """Train losses of every kind on ranks without a runner; return whether all are equal or refused as they should."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cloudpickle.register_pickle_by_value(plainlab)
    right = {name: kind.plain.train(kind.workload, {**TRAINING, "lr": kind.lr}).reports for name, kind in KINDS.items()}
    gangs = {num: on_ranks(of_rank, num) for num in WORKERS}
    is_reached = True
    for name, kind in KINDS.items():
        differences, num_refused, num_unexpected = [0.0], 0, 0
        for num, ranks in gangs.items():
            for num_parts in ACCUMULATIONS:
                for reports in (rank[name, num_parts] for rank in ranks):
                    if not isinstance(reports, str):
                        differences.append(largest_difference(reports, right[name]))
                is_refused = isinstance(ranks[0][name, num_parts], str)
                num_refused += is_refused
                num_unexpected += is_refused and (kind.cuts or num == num_parts == 1)
        title = f"loss: {name}"
        if num_refused:
            title += f", {num_refused} of {len(WORKERS) * len(ACCUMULATIONS)} refused"
        is_reached &= print_bar(f"{title}: largest difference", max(differences), relative, at_most=MAX_DIFFERENCE)
        if num_unexpected:
            is_reached &= print_bar("  refused without need", num_unexpected, "{:.0f}".format, at_most=0)
    return is_reached


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases with one of these in their name or tags")
    parser.add_argument("--skip", nargs="+", metavar="WORD", help="no cases with one of these in their name or tags")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="cases at once [default: cores]")
    parser.add_argument("--ray", action="store_true", help="run the studies on Ray, one at a time")
    parser.add_argument("--workers", action="store_true", help="only losses of every kind on 1 to 4 workers")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    args = begin(parser)
    if args.workers:
        sys.exit(not print_workers())

    def has_one(case: Case, words: Sequence[str]) -> bool:
        return any(word.lower() in f"{case.name} {case.slug} {' '.join(case.tags)}".lower() for word in words)

    chosen = [c for c in cases() if (not args.only or has_one(c, args.only)) and not has_one(c, args.skip or ())]
    chosen = chosen[:: 1 + 9 * args.quick]
    if args.list or not chosen:
        print("\n".join(f"{case.name} ({', '.join(case.tags)})" for case in chosen) or "no case has these words")
        sys.exit(not chosen)
    options = () if args.ray else ("--no-ray",)
    sys.exit(not print_studies(chosen, 1 if args.ray else args.jobs, options))


if __name__ == "__main__":
    main()
