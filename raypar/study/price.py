"""Price of a node: one for all nodes, or one for each kind of node, as ``node_label`` selects them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

from raypar.errors import Mistake, suggest
from raypar.study.options import node_label_of
from raypar.study.space import LARGEST_FLOAT, Value
from raypar.units import listed

Price: TypeAlias = float | Mapping[str, float]  # of an hour, in any currency; a mapping is by `node_label`

FIELD = "price_per_node_hour"
MAX_NAMED = 4
MUST_BE = "must be a number greater than 0"
NONE_HERE = "a price for each kind of node needs points that name their kind"


def price_of(price: Price | None, node_label: Value) -> float | None:
    """Return the price of an hour on a node with this ``node_label``; None: unknown."""
    if not isinstance(price, Mapping):
        return price
    return {_kind(label): each for label, each in price.items()}.get(_kind(node_label))


def price_text(price: Price | None) -> str:
    """Return ``2.5``, or ``0.8 (type=a) or 4.1 (type=b)``."""
    if not isinstance(price, Mapping):
        return f"{price or 0:g}"
    return listed([f"{each:g} ({label})" for label, each in price.items()], MAX_NAMED, word="or")


def prices_of(price: Price | None, node_labels: Collection[Value]) -> Price | None:
    """Return the price without kinds of nodes other than these, for a study of fewer kinds."""
    if not isinstance(price, Mapping):
        return price
    kinds = set(map(_kind, node_labels))
    return {label: each for label, each in price.items() if _kind(label) in kinds}


def price_mistakes(price: object, node_labels: Mapping[str, Collection[Value]]) -> Iterator[Mistake]:
    """Yield the mistakes of a price.

    Args:
        node_labels: every ``node_label`` of the study, by the place where the study gives it; empty: none.
    """
    if not isinstance(price, Mapping):
        if price is not None and not _is_price(price):
            yield Mistake(FIELD, price, MUST_BE, hint=f"set {FIELD}=2.5, or leave it out")
        return
    asked = {_kind(label): label for labels in node_labels.values() for label in labels}
    if not any(label is not None for label in asked.values()):
        hint = f'sweep it: space={{"node_label": grid(…)}}, or set one price: {FIELD}=2.5'
        yield Mistake(FIELD, price, NONE_HERE, hint=hint)
        return
    for label, each in price.items():
        where = f"{FIELD}[{label!r}]"
        if not _is_price(each):
            yield Mistake(where, each, MUST_BE, hint=f"set {where}=2.5")
        if not any(_kind(label)):
            yield Mistake(
                where, each, "its key must be a label and its value", hint='write it like a node_label: "type=gpu"'
            )
        elif _kind(label) not in asked:
            hint = suggest(str(label), [str(each) for each in asked.values() if each is not None])
            yield Mistake(where, each, "no point has this node_label", hint=hint)
    priced = set(map(_kind, price))
    for where, labels in node_labels.items():
        for label in labels:
            if label is None:
                yield Mistake(where, label, "any node: its price is unknown", hint="name its label, or leave it out")
            elif any(_kind(label)) and _kind(label) not in priced:
                yield Mistake(where, label, "has no price", hint=f"add it: {FIELD}={{{label!r}: 2.5, …}}")


def _kind(label: object) -> tuple[str, str]:
    return node_label_of(label) if isinstance(label, str) else ("", "")


def _is_price(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= LARGEST_FLOAT
