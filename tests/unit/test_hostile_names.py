"""Stored names are shown as plain text: without control sequences, markup or misplaced files."""

import re

import pytest
from recording import recorded
from results import make_result
from typer.testing import CliRunner

from raypar.analysis.question import Question
from raypar.cli.app import app
from raypar.reporting.text import strip_control
from raypar.study.trial import TrialState

# Clears the screen, renames the window, overwrites text, and is invalid markup.
STEERS = "\x1b[2J\x1b]0;mine\x07 a\rb \x08\x9b31m gnp.exe [/nope] [link=http://x]y[/link]"
NAMES = (
    "../../x",
    "/etc/x",
    STEERS,
    "=cmd|' /C calc'!A0",
    "<img src=x onerror=alert(1)>",
    "a\0b",
    "-rf",
    "%n%s{0}{x.y}",
)
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def stored(folder, name):
    """Return the address of a store with a study that uses this name everywhere."""
    key = name.replace("\0", "") + " key"
    results = [
        make_result({"num_workers": workers, key: name}, repeat, environment={"node": [name]})
        for workers in (1, 2)
        for repeat in range(2)
    ]
    results.append(make_result({"num_workers": 4, key: name}, state=TrialState.FAILED, failure=f"ValueError: {name}"))
    question = Question(name, {"num_workers": 1}, ("num_workers", key))
    texts = {"description": name, "study_source": name, "params": {key: name}}
    recorded(folder, question, results, {"host": name, "git.commit": name}, uid="one", **texts)
    return f"sqlite:///{folder}/mlflow.db"


@pytest.mark.parametrize("name", NAMES, ids=[f"name{i}" for i in range(len(NAMES))])
def test_hostile_names_are_shown_and_written_as_text(name, tmp_path, monkeypatch):
    folder, outside = tmp_path / "outer" / "project", tmp_path / "out"
    folder.mkdir(parents=True)
    outside.mkdir()
    monkeypatch.chdir(folder)
    uri = stored(folder, name)
    # Drawing takes seconds, so only names with special characters are drawn.
    is_drawn = "\x1b" in name or "<" in name
    drawn = ["--html", str(outside / "r.html"), "--figures", str(outside / "figures")] if is_drawn else []
    shown = []
    for arguments in (
        ["list"],
        ["list", "--json"],
        ["store show", "--", name],
        ["store show", "--json", "--", name],
        ["report", "--json", "--", name],
        ["report", *drawn, "--", name],
        ["store export", "--", name, str(outside / "t.csv")],
        ["store export", "--", name, str(outside / "t.md")],
        ["recommend", "--", name],
        ["report", "--", name + STEERS],
        ["store resume", "--", name],
    ):
        verb, *rest = arguments
        done = CliRunner().invoke(app, [*verb.split(), "--tracking-uri", uri, *rest], env={"COLUMNS": "300"})
        assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, done.exception)
        assert not STEERING.search(done.output), (arguments, done.output)
        assert "[link=" not in name or "[/nope]" in done.output or verb not in ("list", "store show"), done.output
        shown.append(done.output)
    assert strip_control(name.replace("\0", "\N{REPLACEMENT CHARACTER}"))[:5].split()[0] in shown[0]
    here = {path.name for path in tmp_path.rglob("*") if path.is_file() and path.is_relative_to(outside)}
    assert {"t.csv", "t.md", *(["r.html"] if is_drawn else [])} <= here
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "outer"]
    assert [path.name for path in (tmp_path / "outer").iterdir()] == ["project"]
    assert {path.name for path in folder.iterdir()} == {"mlflow.db", "mlartifacts", ".raypar"}
    page = (outside / "r.html").read_text() if is_drawn else ""
    assert "<img src=x" not in page and "\x1b" not in page
