"""The command that lets a trained model write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from raypar.cli.common import shipped_workloads, store_of, told, unknown_study
from raypar.cli.options import Debug, StudyName, TrackingUri
from raypar.errors import RayparError
from raypar.report.text import harmless


def generate(
    name: StudyName,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What the model is to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Write at most so many tokens.")] = 128,
    tracking_uri: TrackingUri = None,
    debug: Debug = False,
) -> None:
    """Let the best model that a study has kept write on from a prompt."""
    with told(debug):
        from raypar.study.trial import best_first

        store = store_of(tracking_uri)
        results = store.results(name)
        if not results:
            raise unknown_study(name, store)
        question = store.question(name)
        for result in best_first(results, question.get("metric", ""), question.get("mode", "max")):
            folder = store.model_folder(name, result.spec.identity)
            if folder is not None:
                write = generator_of(result.spec.workload)
                typer.echo(harmless(f"{result.spec.label} writes:"), err=True)
                typer.echo(harmless(write(folder, prompt, max_new_tokens)))
                return
        raise RayparError(
            f"study `{name}` has kept no model",
            hint="run it with --set keep_model=true --fresh",
        )


def generator_of(workload: str) -> Callable[[Path, str, int], str]:
    """What makes text of a model of the shipped workload of that name."""
    every = shipped_workloads()
    writers = ", ".join(key for key, w in every.items() if w.generate is not None)
    if workload not in every:
        message = f"workload `{workload}` does not ship with raypar, so its way to generate text is not known here"
        raise RayparError(message, hint=f"these write: {writers}")
    write = every[workload].generate
    if write is None:
        raise RayparError(f"workload `{workload}` generates no text", hint=f"these do: {writers}")
    return write
