"""What the commands say of studies that they can't show."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from raypar.cli.common import unknown_study


@dataclass
class Summary:
    name: str


@dataclass
class Store:
    names: tuple[str, ...]

    def studies(self) -> list[Summary]:
        return [Summary(name) for name in self.names]


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        ((), "no study `mine` in the store", "the store is empty"),
        (("mind",), "no study `mine` in the store", "did you mean 'mind'?"),
        (("mine",), "study `mine` has no result yet", "raypar resume mine"),
    ],
)
def test_a_study_that_can_not_be_shown_is_told_with_the_way_out(
    names: tuple[str, ...], message: str, hint: str
) -> None:
    error = unknown_study("mine", Store(names))
    assert error.message == message and hint in (error.hint or "")
