"""Files in memory that a fork server keeps for its ranks: data sets that one rank has loaded and others map.

The server keeps descriptors only. It maps nothing, so its forks begin without the data.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

MAX_SHARE = 0.25  # of the machine's memory

Facts = Mapping[str, str]  # by name of a setting: its value, as text


class Key(NamedTuple):
    """Scope and settings that a file depends on.

    Attributes:
        scope: whose file it is.
        read: settings that its content depends on, with their values.
    """

    scope: str
    read: frozenset[tuple[str, str]]


class SharedFiles:
    """Files by key. When memory is short, those that were not used for the longest time go first."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = round(_memory_bytes() * MAX_SHARE) if max_bytes is None else max_bytes
        self._files: OrderedDict[Key, tuple[int, int]] = OrderedDict()  # descriptor and size, the last used one last
        self._offered: set[Key] = set()
        self._expected: set[Key] = set()

    @property
    def descriptors(self) -> Collection[int]:
        return [fd for fd, _ in self._files.values()]

    def find(self, scope: str, settings: Facts) -> int | None:
        """Return the descriptor of the file for these settings; None if there is none."""
        given = settings.items()
        for key, (fd, _) in self._files.items():
            if key.scope == scope and key.read <= given:
                self._files.move_to_end(key)
                return fd
        return None

    def accepts(self, scope: str, read: Facts, size: int) -> bool:
        """Return whether a rank should make the file that it offers: when it is offered for the second time."""
        key = Key(scope, frozenset(read.items()))
        if key in self._files or key in self._expected or size > self._max_bytes:
            return False
        if key not in self._offered:
            self._offered.add(key)
            return False
        self._expected.add(key)
        return True

    def keep(self, scope: str, read: Facts, fd: int) -> None:
        """Take over a file."""
        key = Key(scope, frozenset(read.items()))
        size = os.fstat(fd).st_size
        while self._files and size + sum(each for _, each in self._files.values()) > self._max_bytes:
            os.close(self._files.popitem(last=False)[1][0])
        self._expected.discard(key)
        self._files[key] = fd, size


def _memory_bytes() -> int:
    """Return the memory of this machine, or of its container if that has less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            sizes.append(int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):  # no such limit
            continue
    return min(sizes)
