"""Findings: caveats on a study's measurements, and the checks that yield them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from raypar import units
from raypar.analysis.evidence import Evidence

MAX_NAMED = 3  # points that a finding lists by name


@dataclass(frozen=True)
class Finding:
    """Caveat that a check found.

    Attributes:
        subject: beginning of the sentence, without details: ``2 of 12 trials diverged``.
        values: details: names of trials or points, or the size of the effect.
        form: rest of the sentence, with ``{}`` for the values; if empty, the values follow a colon.
        check: name of the check; it and the advice are set by the `Check`.
        advice: what to do about it.
    """

    subject: str
    values: Sequence[str] = ()
    form: str = ""
    check: str = ""
    advice: str = ""

    @property
    def detail(self) -> str:
        """Sentence with the first few values."""
        form = self.form or (": {}." if self.values else ".")
        return self.subject + form.format(named(self.values))


@dataclass(frozen=True)
class Check:
    """Check of a study's measurements: a function that yields findings, and the advice on them."""

    name: str
    find: Callable[[Evidence], Iterator[Finding]]
    advice: str

    def __call__(self, evidence: Evidence) -> Iterator[Finding]:
        for finding in self.find(evidence):
            yield replace(finding, check=self.name, advice=self.advice)


def check(advice: str) -> Callable[[Callable[[Evidence], Iterator[Finding]]], Check]:
    """Turn a function into a check with the function's name."""
    return lambda find: Check(find.__name__, find, advice)


def named(labels: Sequence[str]) -> str:
    return units.listed(labels, MAX_NAMED)
