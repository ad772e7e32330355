"""Command that finds the largest batch that fits into memory."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from raypar.cli import common
from raypar.cli.flags import takes
from raypar.cli.study import check_can_profile, executed, load, options_here
from raypar.errors import RayparError
from raypar.execution.flags import RunFlags
from raypar.masking import masked
from raypar.signals import handle_signals
from raypar.units import SIZES_BYTES, counted, size

if TYPE_CHECKING:
    from raypar.execution.fit_batch import Largest
    from raypar.reporting.documents import FitBatchDocument


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
        int | None, common.what(metavar="N", help="First batch per worker. (default: the study's smallest)")
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
        check_can_profile(loaded.study, "raypar model fit-batch")
        if loaded.study.is_search:
            raise RayparError(f"{file}: a search has no fixed points", hint="give its space values: --set lr=0.1")
        search = BatchSearch.of(loaded.study, max_memory, start)
        devices = {**search.study.workload.defaults, **search.study.config}
        if not devices.get("max_memory") and devices.get("device", "auto") != "cuda":
            hint = "write --max-memory 2GB, or --set device=cuda for all memory of a GPU"
            raise RayparError("--max-memory is missing: on a CPU, other programs share the memory", hint=hint)
        options = options_here(flags, instead_of_training=True, source=search)
        with executed(replace(loaded, study=search.study), options) as (_, outcome):
            answers = search.answers(tuple(outcome.results.values()))
        if as_json:
            limit = str(search.study.config.get("max_memory") or "") or None
            common.print_json(_document(answers, limit))
        else:
            for answer in answers:
                common.say(common.stdout(), answer_line(answer, str(search.study.config.get("max_memory") or "")))
            if not all(answer.is_final or answer.failure for answer in answers):
                command = masked(shlex.join(options.command))
                common.say(common.stdout(), f"run `{command}` to continue; finished trials are kept")
        common.exit_as(outcome)


def _document(answers: Sequence[Largest], limit: str | None) -> FitBatchDocument:
    return {
        "schema": 1,
        "kind": "fit-batch",
        "max_memory": limit,
        "points": [
            {
                "point": a.point,
                "num_workers": a.num_workers,
                "batch_size": a.batch_size,
                "peak_bytes": a.peak_bytes,
                "too_large": a.too_large,
                "reason": a.reason,
                "num_trials": a.num_trials,
                "is_final": a.is_final,
                "is_all_data": a.is_all_data,
                "failure": a.failure,
            }
            for a in answers
        ],
    }


def answer_line(answer: Largest, limit: str) -> str:
    """Return the answer, for example ``per_worker_batch_size 384 is the largest that fits in 2GB on 1 worker: …``."""
    from raypar.study.trial import point_label

    at = f" at {point_label(answer.point)}" if answer.point else ""
    where = f"in {limit or 'the GPU'} on {counted(answer.num_workers, 'worker')}{at}"
    trials = f" ({counted(answer.num_trials, 'trial')})"
    if answer.failure:
        return f"No answer {where}: a trial failed: {answer.failure}"
    if not answer.is_final:
        fits = f"{answer.batch_size} fits" if answer.batch_size else "nothing that was run fits"
        return f"Not finished {where}: so far {fits}{trials}"
    if answer.batch_size is None:
        reason = f": {answer.too_large} {answer.reason}" if answer.reason else ""
        return f"No batch fits {where}{reason}{trials}"
    text = f"per_worker_batch_size {answer.batch_size} is the largest that fits {where}"
    if answer.peak_bytes:
        text += f": peak {size(answer.peak_bytes)}"
    if answer.too_large is None:
        return f"{text}; the training set allows no larger one{trials}"
    return f"{text}; {answer.too_large} {answer.reason or 'does not fit'}{trials}"
