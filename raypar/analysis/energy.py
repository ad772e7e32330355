"""Joules by point: what the machines' CPU packages and the trials' GPUs used while trials were timed.

Energies are compared only where they are of the same parts: with the packages' share in all of them, or in none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raypar.analysis.question import PointSamples
from raypar.analysis.stats import Estimate, median_estimate
from raypar.study.trial import TrialResult, TrialState

PACKAGES = "CPU packages"
MIXED = "the energies of some trials hold that of the CPU packages, those of others don't"
NOT_MEASURED = "no trial says what energy it used"


def energy_source(gathered: Iterable[PointSamples]) -> str:
    """What the trials' energies are of: "CPU packages", "GPUs" or both; empty where there is none to be compared."""
    told = {str(r.environment.get("energy_of")) for p in gathered for r in _measured(p)}
    if len({PACKAGES in parts for parts in told}) != 1:
        return ""
    return max(told, key=len)  # on CPUs alone some trials have no GPUs to count


def energy_of(samples: PointSamples) -> Estimate | None:
    """Of a whole training: median over the finished trials that tell it."""
    joules = [r.energy_j for r in _measured(samples) if r.energy_j]
    return median_estimate(joules) if joules else None


def energy_to(samples: PointSamples, times: Mapping[int, float]) -> Estimate | None:
    """Of a training up to some time after its first timed step, in seconds by repeat.

    Power is taken as constant: a share of the timed region uses that share of its energy.
    """
    joules = [
        r.energy_j * min(1.0, times[r.spec.repeat] / r.train_time_s)
        for r in _measured(samples)
        if r.energy_j and r.train_time_s and r.spec.repeat in times
    ]
    return median_estimate(joules) if joules else None


def why_no_energy(results: Sequence[TrialResult]) -> str:
    """Why no energies can be compared, in words of the machine where it has some."""
    if any(r.energy_j is not None for r in results):
        return MIXED
    reasons = dict.fromkeys(str(r.environment["no_energy"]) for r in results if r.environment.get("no_energy"))
    return "; ".join(reasons) or NOT_MEASURED


def _measured(samples: PointSamples) -> list[TrialResult]:
    return [r for r in samples.results if r.state is TrialState.FINISHED and r.energy_j is not None]
