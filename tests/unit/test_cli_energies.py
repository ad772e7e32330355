"""Energies as people write them on the command line."""

from __future__ import annotations

import pytest

from raypar.cli.recommend import joules
from raypar.errors import RayparError


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
    assert joules("--max-energy", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "J", "0", "-5J", "5 kg", "5..2J", "five", "1e999J", "nan", "5 k"])
def test_what_is_no_energy_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RayparError, match=r"^--max-energy .*: is no energy greater than 0") as error:
        joules("--max-energy", text)
    assert "500J" in str(error.value.hint)
