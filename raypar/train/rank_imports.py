"""Modules that a rank needs after its start: a fork server imports them before the first rank.

Checks of workloads don't need them, and don't wait for them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

from raypar.study.quantity import quantities
from raypar.study.strategy import STRATEGIES

MODULES = (
    "torch._dynamo",  # by the first optimizer; 0.6 to 1.6 s
    "torch.utils.serialization.config",  # by torch.load
    "cloudpickle",  # by workloads
    "raypar.train.logged_run",
)

for name in MODULES:
    with contextlib.suppress(Exception):  # the trial that needs it fails
        importlib.import_module(name)
with contextlib.suppress(Exception):
    quantities()  # those of other packages too, which takes 20 ms
if "raypar.train.loop" in sys.modules:  # not for commands
    with contextlib.suppress(Exception):
        dict(STRATEGIES)
for name in ("gloo", "nccl"):  # for each process group, torch would look for its backend in all packages: 17 ms
    with contextlib.suppress(Exception):
        importlib.import_module("torch.distributed.distributed_c10d").Backend._ensure_backend_registered(name)
