"""`Study.run`: its flags, and what a notebook shows of the events that the study's process sends."""

import re
from types import SimpleNamespace

import pytest
from results import make_result, make_spec

from raypar import RayparError, Study, grid
from raypar.analysis.question import Question
from raypar.cli import notebook as of_notebook
from raypar.cli.notebook import Failed
from raypar.cli.study import Beginning
from raypar.reporting.notebook import Printed
from raypar.run.runner import Notice, TrialEnded, TrialReported, TrialStarted
from raypar.workloads import digits

STUDY = Study(workload=digits, space={"lr": grid(0.1, 0.2)}, name="s", num_repeats=1)


class Notebook:
    """A notebook: what its cell shows, displays by their number, in order."""

    def __init__(self):
        self.cells, self.history = [], []
        self.display = SimpleNamespace(display=self.show)

    def show(self, what, display_id=False):
        self.cells.append(what)
        self.history.append(what)
        number = len(self.cells) - 1
        return SimpleNamespace(update=lambda other: self.update(number, other)) if display_id else None

    def update(self, number, what):
        self.cells[number] = what
        self.history.append(what)


class Process:
    """The connection to a study's process and the process itself; an exception in the messages is raised."""

    def __init__(self, messages):
        self.messages, self.signals = [*messages], []
        self.send_signal = self.signals.append

    def poll(self, _):
        return True

    def recv(self):
        if not self.messages:
            raise EOFError
        message = self.messages.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message


def begin(num_stored=0):
    return Beginning(num_stored, 2, (), (), Question("s", {}, ("lr",)), "starting Ray")


@pytest.fixture
def notebook(monkeypatch):
    opened = Notebook()
    monkeypatch.setattr("raypar.reporting.notebook.open_notebook", lambda: opened)
    monkeypatch.setattr("raypar.reporting.notebook.PERIOD_S", 0.0)
    return opened


def test_a_cell_shows_the_progress_which_the_report_replaces(notebook, capsys):
    first, second = make_spec({"lr": 0.1}), make_spec({"lr": 0.2})
    report = Printed("s: 2 points", "<pre>s: 2 points</pre>")
    events = [
        *(Notice("device=auto: cpu"), begin(1), TrialStarted(first, 1)),
        *(TrialReported(first, {"epoch": 1.0}), Notice("other load"), TrialEnded(make_result({"lr": 0.1}))),
        *(TrialStarted(second, 1), report),
    ]
    process = Process(events)
    assert of_notebook._follow(process, process) is False and process.signals == []
    texts = [shown.text for shown in notebook.history]
    assert "0/2 trials, 0 running" in texts[0] and "starting Ray" in texts[0]
    assert any("running: lr=0.1 #1  epoch 1" in text for text in texts)
    assert any("1/2 trials, 1 running" in text and "ended:   lr=0.1 #1" in text for text in texts)
    assert notebook.cells == [Printed("", ""), report]
    assert "<pre" in notebook.history[0].html and "lr=0.1" in notebook.history[3].html
    printed = capsys.readouterr().out
    assert re.findall("device=auto: cpu|1 of 2 trials are in the store already|other load", printed) == [
        *("device=auto: cpu", "1 of 2 trials are in the store already", "other load"),
    ]
    assert "trained" not in printed  # no line for each trial


def test_without_a_notebook_the_progress_is_lines(monkeypatch, capsys):
    monkeypatch.setattr("raypar.reporting.notebook.open_notebook", lambda: None)
    process = Process([begin(), TrialEnded(make_result({"lr": 0.1})), Printed("s: 2 points\n", "")])
    assert of_notebook._follow(process, process) is False
    printed = capsys.readouterr().out
    assert "[1/2] lr=0.1 #1  trained 4.00 s" in printed and printed.endswith("s: 2 points\n")


def test_an_interrupt_is_passed_on_once_and_what_follows_is_shown(notebook, capsys):
    report = Printed("interrupted", "<pre>interrupted</pre>")
    process = Process([begin(), KeyboardInterrupt(), Notice("stopping"), report])
    assert of_notebook._follow(process, process) is True
    assert len(process.signals) == 1 and notebook.cells[-1] == report
    assert "interrupted: ending the trials that run" in capsys.readouterr().out
    process = Process([begin(), KeyboardInterrupt(), KeyboardInterrupt(), report])
    with pytest.raises(KeyboardInterrupt):  # a second one does not wait
        of_notebook._follow(process, process)
    assert len(process.signals) == 1


def test_an_error_of_the_process_is_raised_here(notebook):
    process = Process([Failed("s: the data is missing", "download it")])
    with pytest.raises(RayparError, match="the data is missing") as error:
        of_notebook._follow(process, process)
    assert error.value.hint == "download it"


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        ({"repeat": 3}, "study.run(repeat=…): unknown flag", "did you mean 'repeats' or 'repeat_best'?"),
        ({"dry_run": True}, "study.run(dry_run=…): not in Python", "`raypar plan FILE` shows the plan"),
        ({"isolation": "cold"}, "--isolation cold: unknown", "one of warm, fresh"),
        ({"address": "http://host:8265"}, "study.run(address='http://host:8265'): is a dashboard", "raypar study FILE"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_written(tmp_path, monkeypatch, flags, message, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RayparError) as error:
        STUDY.run(**flags)
    assert error.value.message == message and hint in error.value.hint
    assert [*tmp_path.iterdir()] == []


def test_settings_may_be_one_text_or_several():
    assert of_notebook._flags({"set": "epochs=1"}).set == of_notebook._flags({"set": ["epochs=1"]}).set == ("epochs=1",)
