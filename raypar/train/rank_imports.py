"""Modules that a rank needs after its start: a fork server imports them before the first rank.

Checks of workloads don't need them, and don't wait for them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from importlib.metadata import entry_points

from raypar.study.quantity import quantities
from raypar.study.strategy import STRATEGIES

MODULES = (
    "torch._dynamo",  # by the first optimizer; 0.6 to 1.6 s
    "torch.utils.serialization.config",  # by torch.load
    "cloudpickle",  # by workloads
)


def _know_backends() -> None:
    """Spare each process group that torch looks for its backend in all installed packages, which takes 17 ms."""
    from torch.distributed.distributed_c10d import Backend

    look: Callable[[str], None] = Backend._ensure_backend_registered
    of_packages = {point.name.lower() for point in entry_points(group="torch.distributed.backends")}
    known = set(Backend.backend_list) - of_packages

    def look_if_unknown(name: str) -> None:
        if name.lower() not in known:
            look(name)

    Backend._ensure_backend_registered = staticmethod(look_if_unknown)  # type: ignore[method-assign]


for name in MODULES:
    with contextlib.suppress(Exception):  # the trial that needs it fails
        importlib.import_module(name)
with contextlib.suppress(Exception):
    quantities()  # those of other packages too, which takes 20 ms
if "raypar.train.loop" in sys.modules:  # not for commands
    with contextlib.suppress(Exception):
        dict(STRATEGIES)
    with contextlib.suppress(Exception):
        _know_backends()
