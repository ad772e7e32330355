"""Command line in this process: its verbs, and calls of them."""

import typer
from typer.testing import CliRunner

from raypar.cli.app import app

VERBS = {" ".join(words): verb for words, verb in typer.main.get_command(app).walk()}
GROUPS = list(dict.fromkeys(verb.split()[0] for verb in VERBS if " " in verb))


def joined(text):
    return " ".join(text.split())


def raypar(*args, width=80):
    """Run a command; return its exit code, standard output and standard error."""
    done = CliRunner().invoke(app, args, env={"COLUMNS": str(width)})
    return done.exit_code, done.stdout, done.stderr


def refused(message, *args, out=""):
    """Assert that a command ends with exit code 2 and this message, ignoring line breaks. `out`: None: any output."""
    code, stdout, err = raypar(*args)
    assert code == 2 and out in (stdout, None), err
    assert joined(message) in joined(err) and "→" in err and "Traceback" not in err, err
