"""Studies on a real Slurm of three nodes: trials that are lost, doubled or begun in vain when jobs stop.

1. Two users run a study of 1, 2 and 3 workers at once, on the same three nodes.
2. Slurm's time limit ends a job in mid-trial, and it continues: trials lost, doubled, and begun in vain.
3. A node's power is cut in mid-trial, and the study goes to its end.
4. The power of the first node, which runs the study, is cut in mid-trial, and the job runs again on others.

The nodes are namespaces of this machine and share its cores, so that times say little about a cluster. Needs root,
slurm-wlm and munge.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from common import begin, parser_for, print_bar, print_row, progress
from slurmlab import SlurmLab, why_not
from slurmlab.submitted import Submitted
from study_process import num_duplicates

STUDY = """
from raypar import Study, grid
from raypar.workloads import digits
study = Study(workload=digits, space={"num_workers": grid(1, 2, 3)}, num_repeats=1, config={"epochs": 1})
"""
NUM_TRIALS = 3
WHOLE = "{:.0f}".format


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--only", choices=CASES, help="run one of the cases")
    args = begin(parser)
    if reason := why_not():
        sys.exit(f"SKIPPED: {reason}")
    with SlurmLab(3) as lab:
        for name, case in CASES.items():
            if args.only in (None, name):
                progress(f"{name} …")
                begun_s = time.monotonic()
                case(lab)
                print_row(f"{name}: in all", f"{time.monotonic() - begun_s:.0f} s")


def num_lost(study: Submitted) -> int:
    return NUM_TRIALS - len({row["identity"] for row in study.rows() if row["state"] == "finished"})


def two_jobs(lab: SlurmLab) -> None:
    studies = [Submitted(lab, user, "--nodes 3 --time 1h --cpus-per-node 1", STUDY) for user in ("alice", "bob")]
    ends = [study.until_over() for study in studies]
    print_row("two jobs at once on the same nodes: ends", ", ".join(f"{state} {code}" for state, code in ends))
    print_bar("results missing", sum(map(num_lost, studies)), WHOLE, at_most=0)
    for study in studies:
        study.end()


def end_of_time(lab: SlurmLab) -> None:
    study = Submitted(lab, "alice", "--nodes 2 --time 1h --cpus-per-node 1 --until-done")
    study.faulty.go(study.until_held())
    study.until_held()
    study.end_in_minutes(2)
    study.until(study.was_requeued, "another run")
    (study.folder / "holds").unlink()
    study.start_again()
    print_row("the end of the time in mid-trial: end", " ".join(study.until_over()))
    print_trials(study)
    print_bar("trials begun in vain, per stop", len(study.faulty.starts()) - NUM_TRIALS, WHOLE, at_most=1)
    study.end()


def power_cut(lab: SlurmLab) -> None:
    study = Submitted(lab, "alice", "--nodes 3 --time 1h --cpus-per-node 1")
    first = study.until_held()
    lab.power_off(3)
    begun_s = time.monotonic()
    study.until(lambda: "the cluster has 2 nodes" in study.output(), "the loss of a node")
    print_row("a node's power cut in mid-trial: noticed after", f"{time.monotonic() - begun_s:.0f} s")
    (study.folder / "holds").unlink()
    study.faulty.go(first)
    print_row("end", " ".join(study.until_over()))
    print_trials(study)
    study.end()
    lab.power_on(3)


def power_cut_of_first(lab: SlurmLab) -> None:
    study = Submitted(lab, "alice", "--nodes 2 --time 1h --cpus-per-node 1 --until-done")
    study.faulty.go(study.until_held())
    study.until_held()
    lab.power_off(1)
    begun_s = time.monotonic()
    study.until(study.was_requeued, "another run")
    print_row("the first node's power cut in mid-trial: in the queue after", f"{time.monotonic() - begun_s:.0f} s")
    (study.folder / "holds").unlink()
    study.start_again()
    print_row("end", " ".join(study.until_over()))
    print_trials(study)
    study.end()
    lab.power_on(1)


def print_trials(study: Submitted) -> None:
    print_bar("trials lost", num_lost(study), WHOLE, at_most=0)
    print_bar("trials doubled", num_duplicates(study.folder), WHOLE, at_most=0)


CASES: dict[str, Callable[[SlurmLab], None]] = {
    "two-jobs": two_jobs,
    "end-of-time": end_of_time,
    "power-cut": power_cut,
    "first-node": power_cut_of_first,
}


if __name__ == "__main__":
    main()
