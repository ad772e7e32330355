"""The command line: verbs only. Whatever is heavy is imported inside the commands, so that help is instant."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from raypar.cli.comparing import compare
from raypar.cli.exporting import export
from raypar.cli.fitting import fit
from raypar.cli.generating import generate
from raypar.cli.predicting import predict
from raypar.cli.profiling import profile
from raypar.cli.recommending import recommend
from raypar.cli.running import plan, resume, study
from raypar.cli.stored import doctor, list_studies, report, show, sync, ui, workloads
from raypar.cli.submitting import attach, stop
from raypar.cli.usage import Verbs
from raypar.cli.working import work
from raypar.signals import EXIT_CODES

app = typer.Typer(
    name="raypar",
    cls=Verbs,
    help="Declare a training study, run it on warm Ray Train gangs, and learn what parallelism bought.",
    epilog="Examples:  raypar study studies/quickstart.py    raypar report quickstart    raypar ui",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False) -> None:
    if version:
        from raypar import __version__

        typer.echo(f"raypar {__version__}")
        raise typer.Exit


app.command(epilog="Example:  raypar study studies/batch_size.py --data-dir data --set epochs=1 --repeats 5")(study)
app.command(epilog="Example:  raypar plan studies/batch_size.py --set num_workers=1,2,4")(plan)
app.command(epilog="Example:  raypar resume batch_size")(resume)
app.command(epilog="Example:  raypar attach batch_size --address http://127.0.0.1:8265")(attach)
app.command(epilog="Example:  raypar stop batch_size --address http://127.0.0.1:8265")(stop)
app.command("list")(list_studies)
app.command()(show)
app.command()(report)
app.command(epilog="Examples:  raypar export batch_size trials.csv    raypar export batch_size summary.md --force")(
    export
)
app.command(epilog="Example:  raypar compare main_branch my_branch --fail-if-slower 5%")(compare)
app.command(epilog="Example:  raypar workloads mnist_cnn")(workloads)
app.command(epilog='Example:  raypar generate gpt2_finetune --prompt "Write a function to add two numbers."')(generate)
app.command(epilog="Examples:  raypar fit strong_scaling    raypar fit times.csv --scaling weak")(fit)
app.command(epilog="Example:  raypar predict strong_scaling --workers 1024 --nodes-of 8 --network 100Gbit")(predict)
app.command(epilog="Example:  raypar recommend strong_scaling --target accuracy=0.97 --min-efficiency 0.7")(recommend)
app.command(epilog="Example:  raypar profile studies/strong_scaling.py --set num_workers=2")(profile)
app.command(epilog="Example:  raypar work resnet --set architecture=resnet50 --set image_size=224")(work)
app.command()(sync)
app.command(epilog="Examples:  raypar ui    raypar ui batch_size --port 5050")(ui)
app.command()(doctor)


def main() -> None:
    try:
        app()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code in EXIT_CODES:
            # Everything is put away: what libraries still do (an import in a thread, say) is not waited for.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
        raise
