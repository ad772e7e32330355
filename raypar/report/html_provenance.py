"""Where a study's numbers come from, for its HTML report: `Origin` and its lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypar import units
from raypar.report.html_tables import by_rank, same_for_all
from raypar.study.trial import TrialResult

MAX_SEEDS = 50
_NAMES = {
    "command": "command",
    "git.commit": "git commit",
    "git.dirty": "changes that no commit has",
    "host": "host",
    "os": "operating system",
    "cpu": "CPU",
    "cores": "cores",
    "gpu": "GPU",
    "load": "load at the start",
}
_VERSION = "version."


@dataclass(frozen=True)
class Origin:
    """Where a study's numbers come from, as its executions have it.

    Attributes:
        tags: of `raypar.provenance.provenance`; others are not shown.
        description: what the study asks.
        study_source: the text of the study's file.
        partial: what the numbers lack, where the execution did not get to its end.
    """

    tags: Mapping[str, str]
    description: str = ""
    study_source: str = ""
    partial: str = ""


def provenance_lines(tags: Mapping[str, str], trials: Sequence[TrialResult]) -> list[tuple[str, str]]:
    """Name and value: command, commit, versions and machine, then what the trials ran on and with."""
    found = [(name, tags[key]) for key, name in _NAMES.items() if key in tags]
    if found and "git.commit" not in tags:
        found.insert(1, ("git commit", "none: the study's file is in no git repository"))
    versions = [f"{key.removeprefix(_VERSION)} {tags[key]}" for key in tags if key.startswith(_VERSION)]
    if versions:
        found.append(("versions", ", ".join(sorted(versions))))
    for key, called in (("node", "nodes of the trials"), ("device_name", "devices of the trials")):
        if values := dict.fromkeys(value for r in trials for value in by_rank(r, key)):
            found.append((called, ", ".join(values)))
    if seeds := sorted({r.spec.seed for r in trials}):
        found.append(("seeds", units.listed(map(str, seeds), MAX_SEEDS)))
    if same := same_for_all(trials):
        found.append(("the same for all trials", ", ".join(f"{key}={value}" for key, value in same.items())))
    return found
