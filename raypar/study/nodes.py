"""``nodes`` and ``node_label``: over which nodes of a cluster a trial's workers are spread, as people write it.

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
