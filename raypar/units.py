"""Rounding and units of all numbers that are shown. None, NaN and infinity are shown as ``–``."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeGuard

MISSING = "–"
TOO_NOISY = "(too noisy)"  # in place of an interval that needs more repeats
MAX_VALUE, MAX_VALUE_SHOWN = 200, 40  # longest value of a hyperparameter; characters shown of a longer one
MAX_SPREAD = 10  # ratio of an interval's bounds above which it is too noisy
INFINITE = "∞"  # an upper bound beyond all observed values

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
DURATIONS_S = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
SHARES = {"": 1.0, "%": 0.01}
SIZES_BYTES = {
    **{f"{letter}b": 10.0 ** (3 * i) for i, letter in enumerate(("", "k", "m", "g", "t"))},
    **{f"{letter}ib": 2.0 ** (10 * i) for i, letter in enumerate("kmgt", 1)},
}


def parsed(text: str, scales: Mapping[str, float]) -> float | None:
    """Parse a number with a unit, given by lower-case name and scale; None if it is not a number."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*|%)\s*", text.lower())
    try:
        value = float(match[1]) * scales[match[2]] if match else math.nan
    except (ValueError, KeyError):
        return None
    return value if math.isfinite(value) else None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_missing(value: float | None) -> bool:
    return value is None or not math.isfinite(value)


def _decimals(value: float, significant: int = 3) -> int:
    """Return the decimal places that show `value` with this many significant digits, at least 0."""
    if value == 0:
        return significant - 1
    # Rounded first: 9.999 with three significant digits is 10.0, not 10.00.
    magnitude = math.floor(math.log10(abs(float(f"{value:.{significant - 1}e}"))))
    return max(0, significant - 1 - magnitude)


def number(value: float | None, significant: int = 4) -> str:
    """Return a plain number: ``0.2134``. Trailing zeros are kept, so that columns line up."""
    if value is None or _is_missing(value):
        return MISSING
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{significant - 1}e}"
    return f"{value:.{_decimals(value, significant)}f}"


def count(value: int | None) -> str:
    """``12,345``."""
    return MISSING if value is None or _is_missing(value) else f"{value:,.0f}"


def whole(value: float) -> str:
    """Return a number of things as a whole number: ``1,234``."""
    return count(round(value))


def and_more(num_left: int, word: str = "and") -> str:
    """`` and 3 more``: the number of omitted entries; empty for none."""
    return f" {word} {count(num_left)} more" if num_left > 0 else ""


def listed(texts: Iterable[str], most: int, *, word: str = "", separator: str = ", ") -> str:
    """``a, b and 3 more``: the first texts, and the number of the others.

    Args:
        most: number of texts to show.
        word: "and" or "or" before the last text if all are shown; empty: the separator.
    """
    every = list(texts)
    if len(every) > most:
        return separator.join(every[:most]) + and_more(len(every) - most, word or "and")
    if word and len(every) > 1:
        return f"{separator.join(every[:-1])} {word} {every[-1]}"
    return separator.join(every)


def counted(value: int, noun: str) -> str:
    """``1 trial``, ``12 trials``: a count with a noun whose plural ends in -s."""
    return f"{count(value)} {noun}" if value == 1 else f"{count(value)} {noun}s"


def compact(value: float | None) -> str:
    """Return three significant digits and a factor: ``950``, ``18.6k``, ``2.50M``."""
    if value is None or _is_missing(value):
        return MISSING
    factor, letter = _scale(value, "kMG")
    return f"{value / factor:.{_decimals(value / factor)}f}{letter}"


def rate(value: float | None, unit: str = "samples/s") -> str:
    """``114k samples/s``."""
    return MISSING if value is None or _is_missing(value) else f"{compact(value)} {unit}".rstrip()


def size(value: float | None) -> str:
    """Return bytes in decimal units: ``512 B``, ``1.20 GB``."""
    if value is None or _is_missing(value):
        return MISSING
    factor, letter = _scale(value, "kMGT")
    return f"{value / factor:.{_decimals(value / factor) if letter else 0}f} {letter}B"


def energy(value: float | None) -> str:
    """Return joules: ``850 J``, ``12.3 kJ``, ``1.20 MJ``."""
    if value is None or _is_missing(value):
        return MISSING
    factor, letter = _scale(value, "kMG")
    return f"{value / factor:.{_decimals(value / factor)}f} {letter}J"


def seconds(value: float | None) -> str:
    """Return a duration: ``850 µs``, ``12.3 ms``, ``0.15 s``, ``23.5 s``, ``1 min 20 s``, ``2 h 5 min``."""
    if value is None or _is_missing(value):
        return MISSING
    if value < 0:
        return "-" + seconds(-value)
    if value == 0:
        return "0 s"
    if value < 0.0009995:
        return f"{value * 1e6:.{min(1, _decimals(value * 1e6))}f} µs"
    if value < 0.09995:
        return f"{value * 1e3:.{min(1, _decimals(value * 1e3))}f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    if value < 59.95:
        return f"{value:.1f} s"
    if (rounded := round(value)) < HOUR_S:
        return f"{rounded // MINUTE_S} min {rounded % MINUTE_S} s"
    if (minutes := round(value / MINUTE_S)) < DAY_S // MINUTE_S:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(value / HOUR_S)
    return f"{hours // 24} d {hours % 24} h"


def rough_seconds(value: float) -> str:
    """Return an estimated duration with two digits: ``40 s``, ``3.7 min``, ``1.5 h``, ``12 d``."""
    for size, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if value >= 1.5 * size:
            return f"{value / size:.{1 if value < 9.95 * size else 0}f}".removesuffix(".0") + f" {unit}"
    return f"{max(1, round(value))} s"


def ratio(value: float | None) -> str:
    """``1.87×``: two decimals, fewer from 10 on, more below 0.1."""
    return MISSING if value is None or _is_missing(value) else _ratio_digits(value) + "×"


def percent(share: float | None, decimals: int = 0) -> str:
    """Return a share of 1 as ``93 %``."""
    return MISSING if share is None or _is_missing(share) else f"{100 * share:.{decimals}f} %"


def level(share: float) -> str:
    """Return a confidence with four digits at most: ``95 %``, ``99.38 %``."""
    return f"{100 * share:.4g} %"


def value_of(value: object) -> str:
    """Return a hyperparameter's value for a table: floats with four significant digits, others as written.

    A long text is cut and gets a digest, so that different values stay different.
    """
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    text = "(" + ",".join(map(value_of, value)) + ")" if isinstance(value, (tuple, list)) else str(value)
    if len(text) <= MAX_VALUE:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{text[:MAX_VALUE_SHOWN]}… ({count(len(text))} characters, {digest})"


class Interval(Protocol):
    """Value with its bounds, which may be None."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


def ratio_interval(of: Interval | None) -> str:
    """``1.87× [1.80, 1.95]``; without brackets if there is no interval."""
    return MISSING if of is None else ratio(of.value) + brackets(of, _ratio_digits)


def percent_interval(of: Interval, decimals: int = 0) -> str:
    """``93 % [90, 96]``."""
    return percent(of.value, decimals) + brackets(of, lambda v: f"{100 * v:.{decimals}f}")


def rate_interval(of: Interval, unit: str = "samples/s") -> str:
    """``114k samples/s [110k, 118k]``."""
    return rate(of.value, unit) + brackets(of, compact)


def seconds_interval(of: Interval | None, *, bounds: bool = True) -> str:
    """``3.21 s [3.10, 3.40]``: one unit (ms, s, min or h) and the same decimals for all three."""
    if of is None or _is_missing(of.value):
        return MISSING
    factor, unit = next((f, u) for limit, f, u in _SCALES if of.value < limit)
    decimals = _decimals(of.value / factor)
    shown = brackets(of, lambda v: _bound(v / factor, decimals)) if bounds else ""
    return f"{of.value / factor:.{decimals}f} {unit}{shown}"


def energy_interval(of: Interval) -> str:
    """``12.3 kJ [11.9, 12.8]``: one unit for all three."""
    factor, _ = _scale(of.value, "kMG")
    decimals = _decimals(of.value / factor)
    return energy(of.value) + brackets(of, lambda v: _bound(v / factor, decimals))


def plus_minus(of: Interval) -> str:
    """Return the wider side of an interval in percent of the value: ``±4 %``; empty without an interval."""
    if not of.value or of.low is None or of.high is None or math.isinf(of.high):
        return ""
    if is_noise(of):
        return TOO_NOISY
    share = max(of.high - of.value, of.value - of.low) / abs(of.value)
    return f"±{100 * share:.{1 if share < 0.00995 else 0}f} %"


# Limit in seconds, and the unit used below it: its seconds and name.
_SCALES = ((0.09995, 1e-3, "ms"), (600.0, 1.0, "s"), (2.0 * HOUR_S, 60.0, "min"), (math.inf, 3600.0, "h"))


def _scale(value: float, letters: str) -> tuple[float, str]:
    """Return the power of 1,000 that a value is divided by, and its letter of ``kMGT``. 999.9 is 1.00k."""
    power = sum(abs(value) >= 1000.0**i * 0.9995 for i in range(1, len(letters) + 1))
    return 1000.0**power, ("", *letters)[power]


def brackets(of: Interval, show: Callable[[float], str]) -> str:
    """`` [1.80, 1.95]``: the bounds after a value; empty without an interval."""
    if of.low is None or of.high is None or math.isnan(of.low + of.high):
        return ""
    if is_noise(of):
        return f" {TOO_NOISY}"
    return f" [{show(of.low)}, {INFINITE if math.isinf(of.high) else show(of.high)}]"


def is_noise(of: Interval) -> bool:
    """Return True if an interval spans more than an order of magnitude, the only rule for ``(too noisy)``."""
    return of.low is not None and of.high is not None and of.low > 0 and MAX_SPREAD * of.low < of.high < math.inf


def _bound(value: float, decimals: int) -> str:
    """Return a bound with the decimals of its value, but at most three significant digits if it is far larger."""
    if abs(value) >= 9999.5:
        return compact(value)
    return f"{value:.{min(decimals, _decimals(value)) if abs(value) >= 1 else decimals}f}"


def _ratio_digits(value: float) -> str:
    if abs(value) >= 9999.5:
        return compact(value)
    if value == 0 or 0.0995 <= abs(value) < 9.995:
        return f"{value:.2f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.{_decimals(value, 2 if abs(value) < 1 else 3)}f}"
