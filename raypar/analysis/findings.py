"""What a check is, what it looks at and what it finds; the checks themselves stand beside this, by theme."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from raypar import units
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import PointSamples, Question
from raypar.analysis.stats import MIN_RANKED
from raypar.study.trial import TrialResult, TrialState

MAX_NAMED = 3  # points that a finding names one by one


class Check(Enum):
    """What can be amiss; the value is the advice."""

    BASELINE_MISSING = "Run the study again: finished trials are kept, and the baseline's are made up for."
    OTHER_SETTINGS = (
        "They are kept. Run the study with their settings to ask about them again, or give it another name."
    )
    OTHER_CODE = (
        "Run the study with --fresh, so that all its trials run one code: what is compared here may differ by the "
        "code as much as by the point."
    )
    FAILED_TRIALS = "Run the study again: finished trials are kept, failed ones get another try."
    INCLUDES_START_UP = (
        "Make trials long against their start, or hand model and data to Workload(model=…, data=…): "
        "then the steps alone are timed."
    )
    MIXED_HARDWARE = (
        "Run the study on machines of one kind: else times say as much about the hardware as about the point."
    )
    RESUMED = (
        "Compare them with care: part of their steps was timed in a process that died, maybe on other cores. Run the "
        "study with --fresh where that matters."
    )
    SHARED_CORES = (
        "Run the study where processes can be bound to cores (Linux): elsewhere the system moves workers about, and "
        "onto each other's cores."
    )
    SIDE_BY_SIDE = (
        "Leave max_concurrent_trials out of the study: then there is one trial at a time on a machine. Say 1: then "
        "there is one on the whole cluster, and the network is its own."
    )
    OTHER_LOAD = (
        "Leave the machine to the study, or give workers fewer cores: where others have them too, times say as much "
        "about the neighbours. Then run it again with --fresh."
    )
    THROTTLED = (
        "Cool the machine, or fix its clock at a frequency that it can hold; then run the study again with --fresh."
    )
    CLOCK_CHANGES = (
        "Turn turbo off or fix the frequency (cpupower frequency-set): a clock that depends on how many cores work, or "
        "on how warm they are, goes into every speedup."
    )
    TOO_MANY_THREADS = (
        "Leave num_threads out, or raise cpus_per_worker: torch's threads wait for each other in a loop, and on one "
        "core each keeps the other from running."
    )
    UNEQUAL_WORK = "Give num_samples a multiple of every batch size, so that all points train on the same samples."
    METRIC_DIFFERS = (
        "Don't read the speedup as time saved for the same result; compare the time to a target, or tune lr for "
        "each number of workers."
    )
    MORE_THAN_LINEAR = (
        "See whether the baseline was disturbed (its steps' times, other load) or does more work; else say why: each "
        "worker's share of data or model fits its caches, or the baseline had too little memory bandwidth."
    )
    DRIFT_OVER_STUDY = (
        "Speedups compare trials of one block, so that a slow drift mostly cancels; times don't. Keep others off the "
        "machine, let it settle, and run the study again."
    )
    DRIFT_IN_TRIALS = (
        "Where steps become slower, fix the clock's frequency or cool the machine; where they become faster, raise "
        "num_warmup_steps."
    )
    SLOW_FIRST_TRIAL = "Its time is in the numbers: a median withstands one such trial, but few repeats feel it."
    OUTLIERS = "They are in the numbers: medians withstand a few. See what else the machine did then, or add repeats."
    SHORT_TIMES = "Raise epochs or num_samples, so that a trial trains for some seconds."
    FEW_REPEATS = f"Add repeats, say --repeats {MIN_RANKED}: finished trials are kept."
    NOT_SEPARATED = "More repeats narrow the intervals; longer trials steady the times."


@dataclass(frozen=True)
class Finding:
    """One thing to mind: what kind it is (with the advice), and the particulars."""

    check: Check
    detail: str

    @property
    def advice(self) -> str:
        return self.check.value


@dataclass(frozen=True)
class Evidence:
    """What checks look at: `gathered` and `points` are in the same order; `aside` says which trials are in neither."""

    question: Question
    time_metric: str
    gathered: tuple[PointSamples, ...]
    points: tuple[PointAnalysis, ...]
    excluded: str = ""

    @property
    def finished(self) -> list[TrialResult]:
        """Every finished trial, point by point."""
        return [r for p in self.gathered for r in p.results if r.state is TrialState.FINISHED]


OneCheck: TypeAlias = Callable[[Evidence], Iterator[Finding]]


def named(labels: Sequence[str], separator: str = ", ") -> str:
    """The first few, and how many more there are."""
    return units.listed(labels, MAX_NAMED, separator=separator)
