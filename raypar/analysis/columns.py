"""Roles and units of a table's columns, by their names: ``GPUs``, ``images/sec``, ``time (ms)``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from raypar import units

# Columns that distinguish repeats of one run.
REPEATS = ("repeat", "rep", "run", "trial", "block", "iteration", "seed", "timestamp", "date")
WORKERS = {"worker", "gpu", "cpu", "device", "accelerator", "process", "proc", "rank", "core", "thread", "node"}
WORKERS |= {"replica", "tpu", "npu"}
COUNTS = {"num", "number", "no", "nr", "nb", "n", "count", "of", "total"}
GLUED = {f"n{noun}{s}" for noun in WORKERS for s in ("", "s")} | {"np"}  # "ngpus"
SECONDS = {"ns": 1e-9, **dict.fromkeys(("us", "µs", "usec", "microsecond", "microseconds"), 1e-6)}
SECONDS |= dict.fromkeys(("ms", "msec", "millis", "millisecond", "milliseconds"), 1e-3)
SECONDS |= dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0)
SECONDS |= dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0)
SECONDS |= dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), units.HOUR_S)
NO_NAMES = {"s", "us", "min", "h"}  # units that alone are not the name of a time
TIMES = {"time", "times", "duration", "elapsed", "runtime", "walltime", "wallclock", "wall", "latency", "makespan"}
RATES = {"throughput", "fps", "ips", "qps", "rps", "tps", "flops", "gflops", "tflops", "bandwidth"}
TOTALS = {"total", "global", "aggregate", "aggregated", "overall", "all", "cluster", "system", "combined"}
NO_TIMES = {"start", "started", "end", "ended", "finish", "finished", "date"}  # "start_time"
SPREADS = {"std", "stdev", "stddev", "sd", "sem", "var", "variance", "err", "error", "ci", "cv", "low", "high"}
NOT_MEASURED = {"ideal", "linear", "perfect", "theoretical", "expected", "predicted", "target"}  # "ideal speedup"
CLOCK_NAME = re.compile(r"\b(?:h+:)?m+(?:in)?:(?P<seconds>s+)\b|\bh+:m+\b")  # "time (h:mm:ss)"
# Of several columns for one role, these are not the typical value.
EXTREMES = {"minimum", "maximum", "min", "max", "best", "worst", "fastest", "slowest", "first", "last", "p"}  # "p99"


class Role(StrEnum):
    """Role of a column. If a table has several measured roles, the first one counts: the others follow from it."""

    WORKERS = "workers"
    TIME = "time"
    THROUGHPUT = "throughput"
    SPEEDUP = "speedup"
    EFFICIENCY = "efficiency"


MEASURED = tuple(role for role in Role if role is not Role.WORKERS)


@dataclass(frozen=True)
class TableColumn:
    """Column with a role.

    Attributes:
        index: from 0.
        name: as in the header.
        unit_s: unit of a time, in seconds; NaN: ``h:mm:ss`` or the like.
        unit: name of that unit; empty if the column's name has none, which means seconds.
        is_of_each: whether a rate is per worker; None if the name doesn't show it.
    """

    index: int
    name: str
    role: Role
    unit_s: float = 1.0
    unit: str = ""
    is_of_each: bool | None = None


def role_of(index: int, name: str) -> TableColumn | None:
    """Return the role that a column's name and unit imply; None if there is none."""
    words = words_of(name)
    pairs = list(pairwise(words))
    is_of_each = True if any(a == "per" and is_noun(b) for a, b in pairs) else False if TOTALS & set(words) else None
    kept = [w for w in words if w not in COUNTS]
    if (GLUED & set(words) and len(kept) == 1) or kept == ["world", "size"]:
        return TableColumn(index, name, Role.WORKERS)
    # "gpu" alone may be a column with the GPU's name.
    if len(kept) == 1 and (is_plural(kept[0]) or (is_noun(kept[0]) and len(words) > 1)):
        return TableColumn(index, name, Role.WORKERS)
    if (SPREADS | NOT_MEASURED) & set(words):
        return None
    if "speedup" in words or ("speed", "up") in pairs:
        return TableColumn(index, name, Role.SPEEDUP, is_of_each=False)
    if {"efficiency", "eff"} & set(words):
        return TableColumn(index, name, Role.EFFICIENCY, is_of_each=True)
    if RATES & set(words) or any(a == "per" and b in SECONDS and words[0] not in TIMES for a, b in pairs):
        return TableColumn(index, name, Role.THROUGHPUT, is_of_each=is_of_each)
    # "gpu_hours" and "cpu_time" are sums over workers.
    is_summed = any(is_noun(w) and ("per", w) not in pairs for w in words)
    at = next((i for i, w in enumerate(words) if w in TIMES), 0)
    is_unit = bool(words) and words[0] in SECONDS and (words[0] not in NO_NAMES or "per" in words)
    if is_summed or NO_TIMES & set(words) or not (is_unit or (words and words[at] in TIMES)):
        return None
    if clock := CLOCK_NAME.search(name.lower()):
        return TableColumn(index, name, Role.TIME, math.nan, clock[0])
    unit = words[0] if is_unit else next((w for w in reversed(words[at:]) if w in SECONDS), "")  # "min time": a minimum
    return TableColumn(index, name, Role.TIME, SECONDS.get(unit, 1.0), unit)


def words_of(name: str) -> list[str]:
    """Return the words of a column's name in lower case; a slash becomes "per"."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return re.findall(r"[^\W\d_]+", parted.replace("/", " per ").replace("#", " num ").lower())


def is_plural(word: str) -> bool:
    """Return whether a word names several workers: a GPU may also be a column of its models."""
    return is_noun(word) and word.endswith("s")


def is_noun(word: str) -> bool:
    return word in WORKERS or word.removesuffix("es") in WORKERS or word.removesuffix("s") in WORKERS
