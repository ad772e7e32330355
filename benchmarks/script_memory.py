"""Memory that a script allocates for its training: run it until its third step, with torch's allocations recorded.

``python script_memory.py RESULT SCRIPT …`` writes the bytes to the file RESULT, as JSON. `peak` is from the first
forward pass to the third step of the first optimizer. `others` are what was there before, besides the model and its
inputs: mostly data, which are not part of the peak.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

NUM_STEPS = 2
MARK = "first forward pass"
CPU = 0  # of torch's types of devices


class Recorded:
    """Allocations of this process, from now to the third step."""

    def __init__(self, result: Path) -> None:
        self._result, self._num_steps, self._own_bytes = result, 0, 0
        self._module: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._profile.start()

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Mark the first forward pass of a module that can be trained."""
        if self._module is None and any(p.requires_grad for p in module.parameters()):
            self._module = module
            tensors = [*module.parameters(), *module.buffers(), *tree_leaves(inputs)]
            storages = {
                s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors if isinstance(t, Tensor))
            }
            self._own_bytes = sum(storages.values())
            with torch.profiler.record_function(MARK):
                pass

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """End the process before the third step."""
        self._optimizer = self._optimizer or optimizer
        self._num_steps += optimizer is self._optimizer
        if self._num_steps > NUM_STEPS:
            self._end()

    def _end(self) -> None:
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(errors="replace"))["traceEvents"]
        started = next(each["ts"] for each in events if each.get("name") == MARK)
        changes = [(each["ts"], each["args"]) for each in events if each.get("name") == "[memory]"]
        changes = sorted((at, change["Bytes"]) for at, change in changes if change["Device Type"] == CPU)
        live = [*zip((at for at, _ in changes), accumulate(change for _, change in changes), strict=True)]
        before = [num_bytes for at, num_bytes in live if at <= started][-1]
        others = before - self._own_bytes
        peak = max(num_bytes for at, num_bytes in live if at > started) - others
        self._result.write_text(json.dumps({"peak": peak, "others": others}))
        os._exit(0)


def main() -> None:
    recorded = Recorded(Path(sys.argv[1]))
    register_module_forward_pre_hook(recorded.before_forward)
    register_optimizer_step_pre_hook(recorded.before_step)
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
