"""``cpu_affinity``: which cores a trial's workers are pinned to, as people write it.

None
    cores that are free, `cpus_per_worker` for each worker
``2``
    two for each worker: `cpus_per_worker` in other words
``(0, 1, 4)``, ``"0-1,4"``
    these cores, shared out among the workers in equal, contiguous parts
``"spread"``, ``"compact"``
    `cpus_per_worker` for each worker, as far apart (sockets, then physical cores) or as close together (hardware
    threads of a core, then cores of a socket) as there are
"""

from __future__ import annotations

from raypar.study.space import Value

LAYOUTS = ("spread", "compact")
MAX_CORES = 1_000_000


def listed_cores(affinity: Value) -> tuple[int, ...] | None:
    """The cores of an explicit list; None for anything else.

    Raises:
        ValueError: it is meant as a list and is none.
    """
    if isinstance(affinity, tuple):
        if not all(isinstance(core, int) and not isinstance(core, bool) and core >= 0 for core in affinity):
            raise ValueError("a list of cores holds whole numbers from 0")
        cores = affinity
    elif isinstance(affinity, str) and affinity not in LAYOUTS:
        cores = tuple(core for part in affinity.split(",") for core in _span(part.strip()))
    else:
        return None
    if not cores:
        raise ValueError("the list of cores is empty")
    if len(set(cores)) < len(cores):
        raise ValueError("a core is listed twice")
    return cores


def _span(part: str) -> range:
    first, _, last = part.partition("-")
    if not all(number.isascii() and number.isdecimal() for number in (first, last or first)) or part.endswith("-"):
        raise ValueError('write a count (2), a list of cores ("0-3" or (0, 1)), "spread" or "compact"')
    if max(len(first), len(last)) > 6:
        raise ValueError(f"no machine has {MAX_CORES:,} cores")
    span = range(int(first), int(last or first) + 1)
    if not span:
        raise ValueError(f"{part} runs backwards")
    return span


def affinity_problem(affinity: Value) -> str | None:
    """What is wrong with a value of ``cpu_affinity``, or None."""
    if isinstance(affinity, (bool, float)):
        return 'must be a count (2), a list of cores ("0-3" or (0, 1)), "spread" or "compact"'
    if isinstance(affinity, int):
        return None if affinity >= 1 else 'must be at least 1 core; core 0 alone is written "0-0" or (0,)'
    if not isinstance(affinity, (str, tuple)):
        kind = type(affinity).__name__
        return f'must be a count (2), a list of cores ("0-3" or (0, 1)), "spread" or "compact", not a {kind}'
    try:
        listed_cores(affinity)
    except ValueError as error:
        return str(error)
    return None


def affinity_width(affinity: Value, num_workers: int) -> int | None:
    """How many cores the affinity gives to each worker; None where that is up to ``cpus_per_worker``."""
    if isinstance(affinity, int):
        return affinity
    cores = listed_cores(affinity)
    return None if cores is None else max(1, len(cores) // num_workers)
