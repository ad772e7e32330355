"""Peak memory of a script's process, from its own first steps on tensors without numbers.

``python -m raypar.predict.script_shapes RESULT SCRIPT …`` runs a script until its third step. Parameters and buffers
have shapes but no memory (see `raypar.predict.shapes`), and so has everything that is computed from them; data are
read as usual. A number that the script reads from such a tensor, such as a loss that it prints, is 1.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from raypar.measure.memory import NUM_COUNTED_STEPS
from raypar.predict.memory import NotPredictable, PeakMemory
from raypar.predict.shapes import Shapes, Tracker, parts_of_snapshot, replacements
from raypar.study.command import Command, PlaceValues
from raypar.study.workload import Config
from raypar.train.script_launch import launch_of

LIMIT_S = 300.0
DATA_SHARE = 0.1  # that a script's data may take on top; 0.04 and 0.06 were measured
NO_STEP = "made no step of an optimizer"


def predict_script_memory(command: Command, config: Config, seed: int, folder: Path) -> PeakMemory:
    """Return the peak memory of a command's first process.

    Args:
        config: complete; fills in the command.
        folder: of the study, in which it runs.

    Raises:
        NotPredictable: it is no script of ``python`` or ``torchrun``, or ends before its third step, or needs values.
    """
    with tempfile.TemporaryDirectory() as scratch:
        places = PlaceValues(workers_per_node=config["num_workers"], seed=seed, output_dir=scratch)
        values = places.with_config(config)
        words, runs_in = command.filled(values), folder / command.folder.format_map(values)
        search_path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        launch = launch_of(words, search_path, runs_in, {})
        if launch is None:
            raise NotPredictable(f"{words[0]} does not start a script in the way of python or torchrun")
        result = Path(scratch) / "result.json"
        of_torchrun = launch.environment(0, places.master_port, "memory", Path(scratch))
        environment = {**os.environ, "PATH": search_path, **of_torchrun}
        argv = [sys.executable, "-m", "raypar.predict.script_shapes", str(result), *launch.argv]
        try:
            done = subprocess.run(
                argv, cwd=runs_in, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise NotPredictable(f"{launch.argv[0]} made no third step in {LIMIT_S:.0f} s") from None
        if not result.is_file():
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise NotPredictable(f"{launch.argv[0]}: {lines[-1] if done.returncode and lines else NO_STEP}")
        return PeakMemory(**json.loads(result.read_text()))


class _Steps:
    """End of the process before the third step of the optimizer that steps first."""

    def __init__(self, mode: Shapes, tracker: _DataTracker, result: Path) -> None:
        self._mode, self._tracker, self._result = mode, tracker, result
        self._first: torch.optim.Optimizer | None = None
        self._num = 0

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._first = self._first or optimizer
        if optimizer is self._first:
            self._num += 1
            if self._num > NUM_COUNTED_STEPS:
                self._end()

    def _end(self) -> NoReturn:
        parts = parts_of_snapshot(self._tracker.get_tracker_snapshot("peak"))
        parts["temporary"] += self._mode.scratch_bytes
        peak = PeakMemory(**parts, inputs=self._tracker.input_bytes)
        self._result.write_text(json.dumps(asdict(replace(peak, uncertain=round(DATA_SHARE * peak.total)))))
        os._exit(0)


class _DataTracker(Tracker):  # type: ignore[no-untyped-call]
    """Tracker of tensors without numbers. Those with numbers are data; batches count as the model's inputs.

    Attributes:
        input_bytes: of the largest batch.
    """

    input_bytes = 0

    def _track(self, kind: Any, tensor: Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            super()._track(kind, tensor)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if self.is_outermost(module):
            sizes = (each.nbytes for each in tree_leaves(inputs) if isinstance(each, Tensor))
            self.input_bytes = max(self.input_bytes, sum(sizes))
        super()._pre_fw_hook(module, inputs)


class _Numbers(Shapes):  # type: ignore[no-untyped-call]
    """Tensors without numbers; each number that is read is 1."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return super().dispatch(func, types, args, kwargs or {})


def run_script(result: Path, argv: list[str]) -> None:
    """Run a script in this process, which ends before the script's third step."""
    mode, tracker = _Numbers(allow_non_fake_inputs=True), _DataTracker()
    new_parameter, register_buffer = nn.Parameter.__new__, nn.Module.register_buffer
    init_group = dist.init_process_group

    def without_numbers(tensor: Any) -> Any:
        is_data = isinstance(tensor, Tensor) and not isinstance(tensor.data, FakeTensor)
        return mode.from_tensor(tensor.detach()) if is_data else tensor

    def parameter(cls: type, data: Any = None, requires_grad: bool = True) -> nn.Parameter:
        with torch.no_grad():
            return new_parameter(cls, data if data is None else without_numbers(data), requires_grad)

    def buffer(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        register_buffer(module, name, without_numbers(tensor), persistent)

    def group_in_name(*_: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank, size = (int(kwargs.get(key, os.environ.get(name, default))) for key, name, default in RANKS)
        init_group("fake", store=FakeStore(), rank=rank, world_size=size)

    register_optimizer_step_pre_hook(_Steps(mode, tracker, result).before_step)
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    with (
        replacements(),
        mock.patch.object(nn.Parameter, "__new__", staticmethod(parameter)),
        mock.patch.object(nn.Module, "register_buffer", buffer),
        mock.patch.object(dist, "init_process_group", group_in_name),
        mock.patch.object(FakeTensor, "numpy", _ones, create=True),
        mock.patch.object(FakeTensor, "tolist", lambda tensor: _ones(tensor).tolist(), create=True),
        mock.patch.object(torch, "save", return_value=None),  # its checkpoints would have no numbers
        mock.patch.object(torch, "compile", lambda model=None, **_: model if model is not None else lambda f: f),
        tracker,
    ):
        runpy.run_path(argv[0], run_name="__main__")


def _ones(tensor: Tensor, **_: Any) -> Any:
    """Return the numbers of a tensor without numbers, as an array."""
    with unset_fake_temporarily(), _disable_current_modes():
        return torch.ones(tensor.shape, dtype=tensor.dtype).numpy()


RANKS = (("rank", "RANK", "0"), ("world_size", "WORLD_SIZE", "1"))

if __name__ == "__main__":
    run_script(Path(sys.argv[1]), sys.argv[2:])
