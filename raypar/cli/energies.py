"""The option that limits energy, and joules as people write them."""

from __future__ import annotations

import math
import re
from typing import Annotated

import typer

from raypar.errors import RayparError

MaxEnergy = Annotated[
    str | None,
    typer.Option("--max-energy", metavar="ENERGY", help="Use no more, where it can be read: 500J, 5kJ, 2Wh."),
]
_UNITS_J = {"": 1.0, "j": 1.0, "kj": 1e3, "mj": 1e6, "gj": 1e9, "wh": 3600.0, "kwh": 3.6e6, "mwh": 3.6e9}


def joules(flag: str, text: str) -> float:
    """Joules of ``500J``, ``5 kJ``, ``2Wh``, ``0.1kWh``; a number alone is in joules. M is mega in either case.

    Raises:
        RayparError: it is none, or not greater than 0.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmg]?(?:j|wh)|)\s*", text.lower())
    try:
        value = float(found[1]) * _UNITS_J[found[2]] if found else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not (math.isfinite(value) and value > 0):
        raise RayparError(f"{flag} {text}: is no energy greater than 0", hint=f"write {flag} 500J, 5kJ or 2Wh")
    return value
