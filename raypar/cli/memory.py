"""Command that predicts the memory of workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from raypar.cli import common
from raypar.cli.flags import takes
from raypar.cli.study import check_is_model, load
from raypar.cli.target import Grids, Target, study_file
from raypar.errors import RayparError, check_for_training
from raypar.execution.flags import RunFlags
from raypar.signals import handle_signals
from raypar.units import SIZES_BYTES

if TYPE_CHECKING:
    from raypar.reporting.memory import PointMemory
    from raypar.study.study import Study


@takes("gpu_memory", "grid", "set", "data_dir")
def memory(
    target: Target,
    flags: RunFlags,
    gpu_memory: Annotated[
        str | None,
        common.what(metavar="SIZE", help="Memory of a GPU: 80GB. Also say which points fit. (default: on CPUs)"),
    ] = None,
    grid: Grids = None,
    as_json: common.AsJson = False,
) -> None:
    """Predict the memory of a worker.

    Each point of a study, or a script of python or torchrun, makes its first steps on shapes alone, with its number of
    workers and its strategy: without their memory, without the other workers, and without a GPU.

    Example:  raypar model memory studies/strategies.py --gpu-memory 24GB
    """
    gpu_bytes = common.parse_quantity("--gpu-memory", gpu_memory, SIZES_BYTES, "size", "80GB or 24GiB")
    check_for_training("without it raypar can't run the model's steps")
    from raypar.study.workload import CommandWorkload

    with handle_signals():
        loaded = load(study_file(target, grid, None, None, as_it_is=True), flags)
        study = loaded.study
        if not isinstance(study.workload, CommandWorkload):
            check_is_model(study, "raypar model memory")
        if study.is_search:
            raise RayparError(f"{target}: a search has no fixed points", hint="give its space values: --set lr=0.1")
        from raypar.reporting.memory import MemoryView, print_memory

        points = tuple(_predicted(study, loaded.path.parent, gpu_bytes))
        view = MemoryView(study.name, points, gpu_bytes)
    if as_json:
        common.print_json(view)
    else:
        print_memory(common.stdout(), view)


def _predicted(study: Study, folder: Path, gpu_bytes: float | None) -> Iterator[PointMemory]:
    """Yield the prediction at each point."""
    from raypar.errors import shortened
    from raypar.predict.script_shapes import predict_script_memory
    from raypar.predict.shapes import predict_memory
    from raypar.reporting.memory import PointMemory
    from raypar.study.workload import CommandWorkload, Workload

    for point in study.points():
        spec, workload = study.trial(point, 0), study.workload
        num_workers = spec.placement.num_workers
        try:
            if isinstance(workload, CommandWorkload):
                parts = predict_script_memory(workload.command, spec.config, spec.seed, folder)
            else:
                assert isinstance(workload, Workload)
                parts = predict_memory(workload, spec.config, spec.seed)
        except RayparError as error:
            yield PointMemory(point, num_workers, None, problem=error.message)
        except Exception as error:  # from the user's data, model or loss
            yield PointMemory(point, num_workers, None, problem=shortened(f"{type(error).__name__}: {error}"))
        else:
            yield PointMemory.of(point, num_workers, parts, gpu_bytes)
