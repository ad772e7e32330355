"""Demo: a stored study that ships with raypar, for the commands that read one."""

from __future__ import annotations

import os
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from raypar.cli.verbs import Verbs
from raypar.errors import RayparError, suggest
from raypar.files import make_private_folder

STUDY = "quickstart"
JOURNAL = "demo.jsonl"  # written by docs/record_demo.py
VIEWS = {  # commands, with the words they need
    "report": (),
    "recommend": (),
    "fit": (),
    "predict": ("--workers", "8", "--set", "batch_size=768", "--parameters", "1.13M"),
    "show": (),
    "ui": (),
}
PATHS = ("--html", "--figures", "--plot")


def demo(
    context: typer.Context,
    view: Annotated[str, typer.Argument(metavar="[VIEW]", help=f"{', '.join(VIEWS)}.")] = "report",
) -> None:
    """Show a finished study that ships with raypar; nothing is trained.

    The study is a run of studies/quickstart.py. A view is a command and takes its flags.

    Examples:  raypar demo    raypar demo recommend --target accuracy=0.95    raypar demo ui
    """
    if view in context.find_root().help_option_names:  # after a view, the flag is passed to its command
        typer.echo(context.get_help())
        return
    if view not in VIEWS:
        raise RayparError(f"the demo has no view {view!r}", hint=suggest(view, list(VIEWS)))
    typer.echo(f"A stored run of studies/quickstart.py; views: raypar demo {' | '.join(VIEWS)}\n", err=True)
    words = context.args or VIEWS[view]
    here = Path.cwd()
    words = [from_here(word, before) for before, word in zip(["", *words], words, strict=False)]
    folder = demo_folder()
    stored = ("--tracking-uri", demo_uri(folder))
    os.chdir(folder)
    try:
        if view == "ui":
            from raypar.track.uploader import sync

            sync(folder, demo_uri(folder))
        root: Any = context.find_root().command
        commands = {place[-1]: command for place, command in root.walk()}
        views = Verbs(commands={view: commands[view] for view in VIEWS}, context_settings=root.context_settings)
        views.main([view, STUDY, *stored, *words], prog_name="raypar demo")
    finally:
        os.chdir(here)


def from_here(word: str, before: str) -> str:
    """Return a word of a command line; a path after a flag in `PATHS` becomes absolute."""
    flag, equals, path = word.partition("=")
    if equals and flag in PATHS:
        return f"{flag}={Path(path).absolute()}"
    return str(Path(word).absolute()) if before in PATHS else word


def demo_folder() -> Path:
    """Return a folder with the stored study in the user's cache, one for each version of the study."""
    from raypar.files import cache_dir

    folder = cache_dir() / f"demo-{zlib.crc32(_journal()):08x}"
    if not (folder / "mlflow.db").exists():  # `raypar demo ui` moves the journal to the database
        put_demo(folder)
    return folder


def put_demo(folder: Path) -> None:
    """Put the stored study into a folder as if it had been run there."""
    from raypar.track.journal import journal_path, write_ack

    path = journal_path(folder, STUDY, "demo")
    if not path.exists():
        make_private_folder(path.parent)
        write_ack(path, demo_uri(folder), 0)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(_journal())
        draft.replace(path)


def _journal() -> bytes:
    return (files("raypar") / JOURNAL).read_bytes()


def demo_uri(folder: Path) -> str:
    """Return the store of the demo's folder, regardless of the user's store."""
    return f"sqlite:///{folder.absolute()}/mlflow.db"
