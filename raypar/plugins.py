"""Additions from installed packages, found by their entry points.

raypar's own entries are written in the same way, ``name: "module:attribute"``, in one table for each kind of thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from raypar.errors import RayparError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Lazy(Mapping[str, T], Generic[T]):
    """Mapping that is made when it is first read."""

    def __init__(self, make: Callable[[], Mapping[str, T]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[str, T]:
        return self._make()

    def __getitem__(self, key: str) -> T:
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def registered(group: str, kind: type[T], own_entries: Mapping[str, str]) -> Lazy[T]:
    """Return raypar's own entries and those that installed packages add, imported when they are first read.

    Args:
        group: group of the entry points, such as ``raypar.strategies``.
        kind: type of the entries.
        own_entries: raypar's own, by name, each as ``"module:attribute"``.

    Returns:
        The entries by name: raypar's own first, in their order, then the others by name. Reading it raises RayparError
        if an entry can't be imported, is of another type, or has the same name as another.
    """

    def load() -> dict[str, T]:
        from importlib.metadata import EntryPoint, entry_points  # slow to import

        points = [EntryPoint(name, value, group) for name, value in own_entries.items()]
        points += sorted(entry_points(group=group), key=lambda point: (point.name, point.value))
        entries: dict[str, T] = {}
        for point in points:
            if point.name in entries:
                raise _error(point, "has the same name as another entry")
            entries[point.name] = _loaded(point, kind)
        return entries

    return Lazy(load)


def _loaded(point: EntryPoint, kind: type[T]) -> T:
    try:
        value: Any = point.load()
    except Exception as error:  # the package's own code
        raise _error(point, f"can't be imported: {type(error).__name__}: {error}") from error
    if not isinstance(value, kind):
        raise _error(point, f"is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _error(point: EntryPoint, problem: str) -> RayparError:
    package = point.dist.name if point.dist else "raypar"
    what = f"entry point {point.name} = {point.value} of {point.group}, in the package {package}"
    return RayparError(f"{what}: {problem}", hint=f"correct the package {package}, or uninstall it")
