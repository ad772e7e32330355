"""Command that predicts the memory of workers."""

from __future__ import annotations

from raypar.cli import common
from raypar.cli.flags import takes
from raypar.cli.study import load, predicted_memory
from raypar.cli.target import Grids, Target, study_file
from raypar.execution.flags import RunFlags
from raypar.signals import handle_signals


@takes("gpu_memory", "grid", "set", "data_dir")
def memory(
    target: Target,
    flags: RunFlags,
    gpu_memory: common.GpuMemory = None,
    grid: Grids = None,
    as_json: common.AsJson = False,
) -> None:
    """Predict the memory of a worker.

    Each point of a study, or a script of python or torchrun, makes its first steps on shapes alone, with its number of
    workers and its strategy: without their memory, without the other workers, and without a GPU.

    Example:  raypar model memory studies/strategies.py --gpu-memory 24GB
    """
    gpu_bytes = common.gpu_bytes(gpu_memory)
    with handle_signals():
        loaded = load(study_file(target, grid, None, None, as_it_is=True), flags)
        points = predicted_memory(loaded, gpu_bytes, "raypar model memory")
    from raypar.reporting.memory import MemoryView, print_memory

    view = MemoryView(loaded.study.name, points, gpu_bytes)
    if as_json:
        common.print_json(view)
    else:
        print_memory(common.stdout(), view)
