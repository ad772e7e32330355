"""What an examination tells of each thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `mend` says what to do where it is amiss."""

    what: str
    found: str
    is_well: bool = True
    mend: str = ""


def well_or(what: str, found: str, *, is_well: bool, mend: str) -> Finding:
    """A finding whose way out is told only where it is needed."""
    return Finding(what, found, is_well, "" if is_well else mend)
