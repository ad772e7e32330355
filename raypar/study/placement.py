"""Placement options of a trial as people write them: ``cpu_affinity``, ``nodes`` and ``node_label``.

None
    cores that are free, `cpus_per_worker` for each worker
``2``
    two for each worker: `cpus_per_worker` in other words
``(0, 1, 4)``, ``"0-1,4"``
    these cores, shared out among the workers in equal, contiguous parts
``"spread"``, ``"compact"``
    `cpus_per_worker` for each worker, as far apart (sockets, then physical cores) or as close together (hardware
    threads of a core, then cores of a socket) as there are

``"pack"``
    on as few nodes as will do
``"spread"``
    over as many nodes as there are, as evenly as they allow
``2``
    over exactly so many nodes, the workers shared out as evenly as can be

``node_label="type=gpu"`` takes nodes with that label alone (``ray start --labels type=gpu``, or the `labels` of a node
type in a cluster file).
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


WAYS = ("pack", "spread")
# Options that came after results were stored: at these values a trial is the one that it was without them.
UNSAID = {"nodes": "pack", "node_label": None}


def nodes_problem(nodes: Value) -> str | None:
    """What is wrong with a value of ``nodes``, or None."""
    if nodes in WAYS or (isinstance(nodes, int) and not isinstance(nodes, bool) and nodes >= 1):
        return None
    return 'must be "pack", "spread", or a number of nodes of at least 1'


def label_problem(label: Value) -> str | None:
    """What is wrong with a value of ``node_label``, or None."""
    if not isinstance(label, str) or not all(label.strip() for label in _parts(label)) or label.count("=") != 1:
        return 'must be a label and its value: "type=gpu"'
    return None


def label_of(label: str) -> tuple[str, str]:
    """Key and value of a ``node_label`` that is fine."""
    key, value = _parts(label)
    return key.strip(), value.strip()


def _parts(label: str) -> tuple[str, str]:
    key, _, value = label.partition("=")
    return key, value
