"""Parts that the commands share."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from raypar.cli.app import app
from raypar.cli.common import parse_quantity
from raypar.cli.recommend import _UNITS_J
from raypar.errors import BrokeOff, RayparError, StoreError
from raypar.execution.stored import unknown_study


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


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(BrokeOff("lost the cluster"), 1), (KeyError("bug"), 1), (StoreError("no such store"), 2), (RayparError("no"), 2)],
    ids=lambda value: type(value).__name__,
)
def test_a_study_that_broke_off_has_failed_and_what_the_user_can_fix_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, error: Exception, exit_code: int
) -> None:
    def raise_it(*_args: object) -> None:
        raise error

    monkeypatch.setattr("raypar.track.store.Store.studies", raise_it)
    done = CliRunner().invoke(app, ["list"])
    assert done.exit_code == exit_code and done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500", 500.0),
        ("500J", 500.0),
        ("2.5 kJ", 2500.0),
        ("1e3 kJ", 1e6),
        ("3MJ", 3e6),
        ("2Wh", 7200.0),
        ("0.5kWh", 1.8e6),
        (" 7 wh ", 25200.0),
    ],
)
def test_energies_are_read_with_their_units(text: str, value: float) -> None:
    assert parse_quantity("--max-energy", text, _UNITS_J, "energy", "500J") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "J", "0", "-5J", "5 kg", "5..2J", "five", "1e999J", "nan", "5 k"])
def test_what_is_no_energy_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RayparError, match=r"^--max-energy .*: is no energy greater than 0") as error:
        parse_quantity("--max-energy", text, _UNITS_J, "energy", "500J")
    assert "500J" in str(error.value.hint)
