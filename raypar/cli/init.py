"""Command that writes a study file."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypar.cli.common import path_from_here
from raypar.errors import RayparError, cut
from raypar.reporting.text import check_file, strip_control, write_text
from raypar.units import counted, listed

if TYPE_CHECKING:
    from raypar.init.draft import Draft
    from raypar.init.script import Script, ScriptOption

STARTER_FILE = Path("first_study.py")
MAX_SHOWN = 6
MAX_SAMPLE = 160


def init(
    script: Annotated[
        Path | None,
        typer.Argument(metavar="[SCRIPT]", help="The training script; without it, a starter study."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write; -: print it. (default: SCRIPT_study.py beside the script)",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a study file for a training script.

    Reads the script's options, its metrics and how it is started, without running it.

    Examples:  raypar init    raypar init train.py && raypar study train_study.py
    """
    from raypar.init.draft import draft_of, starter
    from raypar.init.script import read_script
    from raypar.study.metric import Metric, direction_of

    code = read_script(script) if script is not None else None
    is_printed = output == Path("-")
    path = STARTER_FILE if script is None else script.with_name(f"{script.stem}_study.py")
    if output is not None and not is_printed:
        path = output
    if not is_printed:
        _check_output(path, code, force=force)
    draft = draft_of(code, path) if code is not None else starter()
    for line in _summary(code, draft) if code is not None else ():
        typer.echo(strip_control(line), err=is_printed)
    if is_printed:
        typer.echo(draft.text, nl=False)
        return
    write_text(path, draft.text)
    shown = shlex.quote(path_from_here(path))
    typer.echo(f"wrote {shown}: {draft.swept}")
    if draft.metric:
        typer.echo(f"judged by: {Metric(draft.metric, direction_of(draft.metric) or 'min').text}")
    todo = f"fill in {listed(draft.open_options, MAX_SHOWN)}, then " if draft.open_options else ""
    typer.echo(f"next: {todo}raypar study {shown}    (raypar plan {shown} shows what it runs)")


def _check_output(path: Path, script: Script | None, *, force: bool) -> None:
    """Raise RayparError if the study can't be written there, or would not work there."""
    if path.suffix != ".py":
        raise RayparError(f"{path}: must end in .py, like every study file", hint="write --output my_study.py")
    check_file(path, force=force)
    if script is None:
        return
    if path.resolve() == script.path.resolve():
        raise RayparError(f"{path}: is the script itself", hint="name another file: --output FILE")
    if script.train_loop and path.resolve().parent != script.path.resolve().parent:
        what = f"{path}: a study of a {script.kind} imports the script and must be in the same folder"
        raise RayparError(what, hint=f"--output {script.path.parent / path.name}")


def _summary(script: Script, draft: Draft) -> list[str]:
    """Return the findings about a script, with an example of the printed line for each metric."""
    lines = [f"{script.path}: a {script.kind}" + (f" ({script.evidence})" if script.evidence else "")]
    if script.options:
        of = f" of {script.parser}" if script.parser else ""
        shown = listed([_shown(option) for option in script.options], MAX_SHOWN)
        lines.append(f"{counted(len(script.options), 'option')}{of}: {shown}")
    elif not script.notes:
        lines.append("no options: the script parses no command line, or parses it in a way that raypar doesn't know")
    if script.metrics:
        metrics = [f"{m.name} (line {m.line})" if m.line else m.name for m in script.metrics]
        lines.append(f"{counted(len(metrics), 'metric')}: {listed(metrics, MAX_SHOWN)}")
        lines += [f"  {m.name} = {m.value} in: {cut(m.sample, MAX_SAMPLE)}" for m in script.metrics if m.sample]
        lines += [
            f"note: {m.name} (line {m.line}): other lines print the same words, and the last one counts: check it"
            for m in script.metrics
            if m.is_mixed
        ]
    else:
        lines.append('no metrics: only times are measured; raypar.report({"loss": loss}) in the script adds one')
    if draft.metric:
        lines.append(
            f"points are judged by {draft.metric}, raypar init's choice: change metric= in the file if it is wrong"
        )
    return [*lines, *(f"note: {note}" for note in script.notes)]


def _shown(option: ScriptOption) -> str:
    name = option.flag.rstrip("=") or option.name
    return f"{name} {option.default}" if option.default is not None else name + " (required)" * option.is_required
