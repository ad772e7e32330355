"""Parts of a study: its blocks divided among independent runs, such as the jobs of a Slurm array, with one store.

A block is compared within itself, so it may run anywhere, if all machines are of one kind: points are also compared
across blocks. The parts run at the same time or one after another, and reports cover all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raypar import units
from raypar.errors import RayparError

if TYPE_CHECKING:
    from raypar.study.study import Study
    from raypar.study.trial import TrialSpec

PATTERN = re.compile(r"([1-9]\d*)/([1-9]\d*)")
COVERS = "part {} of {}: {}; `raypar report {}` covers all parts"


@dataclass(frozen=True)
class StudyPart:
    """Part of a study: the blocks of which the number, from 1, is `number` plus a multiple of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> StudyPart:
        """Return the part ``2/4``, the second of four."""
        number, _, count = text.partition("/")
        return cls(int(number), int(count))

    @staticmethod
    def is_one(text: str) -> bool:
        """Return whether a text names a part."""
        matched = PATTERN.fullmatch(text)
        return matched is not None and int(matched[1]) <= int(matched[2])

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def has(self, spec: TrialSpec) -> bool:
        return spec.repeat % self.count == self.number - 1

    def check(self, study: Study, asked: str = "--part {number}/{count}") -> None:
        """Raise RayparError if the study has no fixed blocks, or none for this part. `asked`: what asks for it."""
        asked = asked.format(number=self.number, count=self.count)
        if study.is_search or study.until:
            kind = "a search" if study.is_search else "a study until it is settled"
            hint = "give the study a space of fixed points and a number of repeats (--repeats), without `until`"
            raise RayparError(f"{asked}: {kind} has no fixed blocks to divide", hint=hint)
        if study.num_repeats < self.count:
            blocks = units.counted(study.num_repeats, "block")
            hint = f"give --repeats {self.count} or more, or at most {study.num_repeats} parts"
            raise RayparError(f"{asked}: the study has {blocks}, so a part has none", hint=hint)

    def lease_of(self, whole: Path) -> Path:
        """Return the file of the part's lease, given that of the study's."""
        return whole.with_name(f"{whole.name}-part{self.number}of{self.count}")


def describe(part: StudyPart, study: Study) -> str:
    """Return a notice on what a part runs."""
    blocks = range(part.number, study.num_repeats + 1, part.count)
    named = units.listed(list(map(str, blocks)), 5)
    return COVERS.format(part.number, part.count, f"block{'s' * (len(blocks) > 1)} {named}", study.name)
