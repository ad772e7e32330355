"""Command that finds the largest batch that fits into memory."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Annotated

from raypar.cli import common
from raypar.cli.flags import takes
from raypar.cli.study import check_is_model, executed, load, options_here
from raypar.errors import RayparError
from raypar.execution.flags import RunFlags
from raypar.masking import masked
from raypar.signals import handle_signals
from raypar.units import SIZES_BYTES


@takes(
    *("max_memory", "set", "start", "fresh", "no_ray", "address", "data_dir", "tracking_uri", "share_machine"),
    "trial_timeout",
)
def fit_batch(
    file: common.StudyFile,
    flags: RunFlags,
    max_memory: Annotated[
        str | None,
        common.what(metavar="SIZE", help="Memory limit of a worker: 20GB, 512MiB. (default: all of a GPU's)"),
    ] = None,
    start: Annotated[
        int | None,
        common.what(metavar="N", help="First batch per worker. (default: the largest that is predicted to fit)"),
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Find the largest batch that fits into memory.

    Short trials search for the largest batch per worker at each point of a study.

    Example:  raypar model fit-batch studies/strong_scaling.py --max-memory 2GB
    """
    from raypar.execution.fit_batch import BatchSearch

    common.parse_quantity("--max-memory", max_memory, SIZES_BYTES, "size", "20GB or 512MiB")
    if start is not None and start < 1:
        raise RayparError(f"--start {start}: must be at least 1", hint="write --start 64")
    with handle_signals():
        loaded = load(file, flags)
        check_is_model(loaded.study, "raypar model fit-batch")
        if loaded.study.is_search:
            raise RayparError(f"{file}: a search has no fixed points", hint="give its space values: --set lr=0.1")
        search = BatchSearch.of(loaded.study, max_memory, start)
        devices = {**search.study.workload.defaults, **search.study.config}
        if not devices.get("max_memory") and devices.get("device", "auto") != "cuda":
            hint = "write --max-memory 2GB, or --set device=cuda for all memory of a GPU"
            raise RayparError("--max-memory is missing: on a CPU, other programs share the memory", hint=hint)
        if start is None:
            search = search.expecting()
        options = options_here(flags, instead_of_training=True, source=search)
        from raypar.reporting.fit_batch import FitBatchView, print_fit_batch

        with executed(replace(loaded, study=search.study), options) as (_, outcome):
            answers = search.answers(tuple(outcome.results.values()))
        view = FitBatchView(str(search.study.config.get("max_memory") or ""), answers)
        if as_json:
            common.print_json(view)
        else:
            print_fit_batch(common.stdout(), view)
            if not all(answer.is_final or answer.failure for answer in answers):
                command = masked(shlex.join(options.command))
                common.say(common.stdout(), f"run `{command}` to continue; finished trials are kept")
        common.exit_as(outcome)
