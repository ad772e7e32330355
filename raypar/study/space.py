"""Domains of a hyperparameter: a grid that is run in full, or a range that a search draws from."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, TypeAlias

from raypar.errors import cut, shortened
from raypar.units import listed

LARGEST = 2**53  # up to here floats hold every whole number, and so do all formats that results are kept in
LARGEST_FLOAT = sys.float_info.max  # abs(x) <= this: x is finite; math.isfinite(x) raises OverflowError for large ints
MAX_VALUES = 100_000
TUNE_DOMAINS = "ray.tune.search.sample"  # module of Ray Tune's domains, which are recognised without importing Ray
_MAX_SHOWN = 8
_MAX_TEXT = 100  # characters of a value in a message

Value: TypeAlias = str | int | float | bool | tuple[int, ...] | None


class _Written:
    """Base of the domains, with the ``repr`` that a study file has.

    Attributes:
        is_drawn: a search draws its values; otherwise all of them are run.
    """

    is_drawn: ClassVar[bool] = True

    def __repr__(self) -> str:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]  # a dataclass
        if len(values) == 1 and isinstance(values[0], tuple):
            values = [*values[0]]
        return f"{type(self).__name__.lower()}({', '.join(map(repr, values))})"


@dataclass(frozen=True, repr=False)
class Grid(_Written):
    """Values that are all run; grids multiply."""

    is_drawn = False

    values: tuple[Value, ...]


@dataclass(frozen=True, repr=False)
class Choice(_Written):
    """Values of which a search draws one, each with the same probability."""

    values: tuple[Value, ...]


@dataclass(frozen=True, repr=False)
class Uniform(_Written):
    """Range [low, high) that a search draws a float from."""

    low: float
    high: float


@dataclass(frozen=True, repr=False)
class LogUniform(_Written):
    """Range [low, high) that a search draws a float from, uniformly on a log scale."""

    low: float
    high: float


@dataclass(frozen=True, repr=False)
class RandInt(_Written):
    """Range [low, high) that a search draws a whole number from."""

    low: int
    high: int


Domain: TypeAlias = Grid | Choice | Uniform | LogUniform | RandInt
DOMAINS = (Grid, Choice, Uniform, LogUniform, RandInt)


def grid(*values: Value) -> Grid:
    """Run every value: ``grid(1, 2, 4)``. Grids of several hyperparameters multiply."""
    return Grid(values)


def choice(*values: Value) -> Choice:
    """Draw one of the values, each with the same probability: ``choice("sgd", "adam")``."""
    return Choice(values)


def uniform(low: float, high: float) -> Uniform:
    """Draw a float from [low, high): ``uniform(0, 0.5)``."""
    return Uniform(low, high)


def loguniform(low: float, high: float) -> LogUniform:
    """Draw a float from [low, high), uniformly on a log scale: ``loguniform(1e-4, 1)``; `low` is above 0."""
    return LogUniform(low, high)


def randint(low: int, high: int) -> RandInt:
    """Draw a whole number from [low, high): ``randint(1, 9)``."""
    return RandInt(low, high)


MAKERS: Mapping[str, Callable[..., Domain]] = {
    "grid": grid,
    "choice": choice,
    "uniform": uniform,
    "loguniform": loguniform,
    "randint": randint,
}


def examples(domain: Domain) -> tuple[Value, ...]:
    """Return the values that decide whether a domain is valid: all of a grid or choice, both ends of a range."""
    match domain:
        case Grid(values) | Choice(values):
            return values
        case RandInt(low, high):
            return (low, high - 1)
        case Uniform(low, high) | LogUniform(low, high):
            return (low, high)


def contains(domain: Domain, value: Value) -> bool:
    """Return whether a domain can give a value."""
    match domain:
        case Grid(values) | Choice(values):
            return value in values
        case Uniform(low, high) | LogUniform(low, high) | RandInt(low, high):
            return isinstance(value, (int, float)) and low <= value < high


def problem(domain: Domain) -> str | None:
    """Return what is wrong with the domain itself, or None."""
    match domain:
        case Grid(values) | Choice(values) if not isinstance(values, tuple):
            return "holds no tuple of values: write grid(1, 2) or choice(1, 2)"
        case Grid(()) | Choice(()):
            return "is empty: give at least one value"
        case Grid(values) | Choice(values) if len(values) > MAX_VALUES:
            return f"holds {len(values):,} values, more than {MAX_VALUES:,}"
        case Grid(values):
            return _duplicates(values) or _alike(values)
        case Choice(values):  # a value that is given twice is drawn twice as often
            return _alike(values)
        case Uniform(low, high) | LogUniform(low, high) if not _are_numbers(low, high):
            return f"needs two numbers, has {low!r} and {high!r}"
        case RandInt(low, high) if not (_are_numbers(low, high) and int(low) == low and int(high) == high):
            return f"needs two whole numbers, has {low!r} and {high!r}"
        case Uniform(low, high) | RandInt(low, high) if low >= high:
            return f"needs low < high, has {low} and {high}"
        case LogUniform(low, high) if not 0 < low < high:
            return f"needs 0 < low < high, has {low} and {high}"
    return None


def _duplicates(values: Sequence[Value]) -> str | None:
    counts = Counter((type(value), _text_of(value)) for value in values)
    doubles = sorted(cut(text, _MAX_TEXT) for (_, text), count in counts.items() if count > 1)
    return f"holds duplicate values: {listed(doubles, _MAX_SHOWN)}" if doubles else None


def _alike(values: Sequence[Value]) -> str | None:
    """Return the values that are equal in Python (1, 1.0 and True; 0.0 and -0.0) or as text (1 and "1")."""
    first: dict[object, Value] = {}
    pairs: dict[str, None] = {}
    for value in values:
        for key in (value, ("text", _text_of(value))):
            with suppress(Exception):  # it can't be hashed: its type is refused later
                other = first.setdefault(key, value)
                if (type(other), _text_of(other)) != (type(value), _text_of(value)):
                    pairs[f"{shortened(other, _MAX_TEXT)} and {shortened(value, _MAX_TEXT)}"] = None
    return f"holds values that count as the same: {listed(pairs, _MAX_SHOWN)}" if pairs else None


def _text_of(value: object) -> str:
    try:
        return str(value)
    except Exception:  # its own, or a number of more digits than Python writes
        return f"{type(value).__name__} {id(value)}"


def lone_surrogate(value: object) -> str | None:
    """Return the first half of a character in a text, or in a container of texts."""
    match value:
        case str():
            return next((char for char in value if "\ud800" <= char <= "\udfff"), None)
        case Mapping():
            return lone_surrogate([*value.keys(), *value.values()])
        case list() | tuple():
            return next(filter(None, map(lone_surrogate, value)), None)
    if is_dataclass(value) and not callable(value):  # a function's fields aren't stored
        return lone_surrogate([getattr(value, each.name, None) for each in fields(value)])
    return None


def _of_tune(value: Any) -> Any:
    """Return raypar's domain for one of Ray Tune; other values, and domains that raypar lacks, stay the same."""
    if isinstance(value, dict) and [*value] == ["grid_search"] and isinstance(value["grid_search"], (list, tuple)):
        return Grid(tuple(value["grid_search"]))
    if type(value).__module__ != TUNE_DOMAINS:
        return value
    match type(value).__name__, type(value.get_sampler()).__name__:
        case "Categorical", "_Uniform":
            return Choice(tuple(value.categories))
        case "Float", "_Uniform":
            return Uniform(value.lower, value.upper)
        case "Float", "_LogUniform":
            return LogUniform(value.lower, value.upper)
        case "Integer", "_Uniform":
            return RandInt(value.lower, value.upper)
    return value


def plain(value: Any) -> Any:
    """Return a value in Python's own types, for ranks and the store.

    Members of a ``str`` or ``int`` enumeration become texts and numbers, scalars of numpy and torch become numbers,
    also in a domain, tuple, list or dict. Domains of Ray Tune become those of raypar. Other values stay the same.
    """
    if type(value) in (float, int, str, bool):
        return value
    value = _of_tune(value)
    match value:
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Grid(values) if isinstance(values, tuple):
            return Grid(tuple(plain(v) for v in values))
        case Choice(values) if isinstance(values, tuple):
            return Choice(tuple(plain(v) for v in values))
        case Uniform(low, high) | LogUniform(low, high) | RandInt(low, high):
            return type(value)(plain(low), plain(high))
        case tuple():
            return tuple(plain(v) for v in value)
        case list():
            return [plain(v) for v in value]
        case dict():
            return {plain(k): plain(v) for k, v in value.items()}
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _are_numbers(*values: object) -> bool:
    return all(math.isfinite(v) if isinstance(v, float) else type(v) is int and abs(v) <= LARGEST for v in values)
