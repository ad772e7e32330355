"""Claims of a report on points that are all the same: a real study, run several times.

The points differ in an option that nothing reads: 20 of them, trained on the embedded digits by one worker, 6 repeats.
`raypar study` runs them, and every claim of the report and of the recommendation is false. A trend over the study may
be one of the machine, so it is printed and does not count. Each study takes about two minutes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from common import begin, parser_for, print_bar, print_row, run_raypar, scratch
from honesty import claims_of, recommendation_claims

from raypar.analysis.analyse import analyse
from raypar.analysis.recommend import Constraints, recommend
from raypar.execution.stored import read_study
from raypar.track.store import default_tracking_uri

NUM_STUDIES = 3
TREND = "drift_over_study"
STUDY = """
from dataclasses import replace

from raypar import Study, grid
from raypar.workloads import digits

study = Study(
    workload=replace(digits, name="same", options={**digits.options, "ignored": 0}),
    space={"ignored": grid(*range(NUM_POINTS))},
    baseline={"ignored": 0},
    num_repeats=NUM_REPEATS,
    config={"epochs": 8, "num_workers": 1, "device": "cpu"},
)
"""


def claims(folder: Path, num_points: int, num_repeats: int) -> Counter[str]:
    """Run a study in a folder and return its claims."""
    text = STUDY.replace("NUM_POINTS", str(num_points)).replace("NUM_REPEATS", str(num_repeats))
    folder.mkdir()
    (folder / "same.py").write_text(text)
    run_raypar(folder, "study", "same.py")
    stored = read_study("same", default_tracking_uri(folder), folder)
    advice = recommend(stored.question, stored.results, Constraints())
    return Counter([*claims_of(analyse(stored.question, stored.results)), *recommendation_claims(advice)])


def main() -> None:
    args = begin(parser_for(__doc__, rounds=NUM_STUDIES))
    num_points, num_repeats = (4, 2) if args.quick else (20, 6)
    num_claiming = 0
    with scratch() as folder:
        for i in range(args.rounds):
            claimed = claims(folder / str(i), num_points, num_repeats)
            print_row(f"study {i + 1}", ", ".join(f"{num} × {claim}" for claim, num in claimed.items()) or "no claim")
            num_claiming += bool(claimed.keys() - {TREND})
    print_bar(f"{num_points} same points, {num_repeats} repeats: studies with a claim", num_claiming, str, at_most=1)


if __name__ == "__main__":
    main()
