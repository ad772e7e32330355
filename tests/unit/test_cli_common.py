"""Exit codes, logs, help screens and messages of commands."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from command import GROUPS, VERBS, joined, raypar, refused
from recording import make_result, new_store, record

from raypar.cli import study
from raypar.cli.common import DRIVER_LOG, quiet
from raypar.cli.verbs import MOVED
from raypar.errors import BrokeOff, RayparError, StoreError, closest, suggest
from raypar.execution.options import Options
from raypar.execution.stored import unknown_study
from raypar.reporting.text import TerminalConsole
from raypar.signals import EXIT_NOBODY_READS, Interrupted
from raypar.study.options import OPTIONS
from raypar.track.store import default_tracking_uri


def test_a_study_without_results_is_reported_with_a_command():
    error = unknown_study("mine", SimpleNamespace(studies=lambda: [SimpleNamespace(name="mine")]))
    assert str(error) == "study `mine` has no result yet\n  → `raypar store resume mine` runs what is missing"


@pytest.mark.parametrize(("name", "here"), [("mnist", ""), ("mnist", "other"), ("nope", "")])
def test_in_a_subfolder_the_parents_store_is_named_too(project, uri, monkeypatch, name, here):
    record(project, uri, make_result())
    (project / "sub" / "folder").mkdir(parents=True)
    monkeypatch.chdir(project / "sub" / "folder")
    if here:
        new_store(project / "sub" / "folder")
        record(Path.cwd(), default_tracking_uri(Path.cwd()), make_result(study=here), study=here)
    said = "has other studies" if here else "is empty: `raypar study FILE` makes a study"
    both = f"→ the store {default_tracking_uri(Path.cwd())} {said}; the store of {project} has `mnist`: `cd {project}`"
    refused(f"no study `{name}` in the store {both}, or --tracking-uri {uri}", "store", "show", name, out=None)
    assert here or f"the store of {project} has `mnist`" in joined(raypar("list")[1])
    code, _, err = raypar("store", "show", name, "--tracking-uri", f"sqlite:///{project}/another.db")
    assert code == 2 and "of a folder" not in err and "`cd " not in err


@pytest.mark.parametrize("words", [["model", "list"], ["--help"], ["init", "-o", "-"], ["init", "nope.py"]])
def test_a_closed_pipe_ends_a_command_quietly(words, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [Path(sys.executable).with_name("raypar"), *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, timeout=120)
    os.close(writer)
    if "nope.py" in words:
        assert done.returncode == 2 and done.stderr.startswith(b"error: ")
    else:
        assert (done.returncode, done.stderr) == (EXIT_NOBODY_READS, b"")


def test_a_closed_pipe_interrupts_a_study():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        console = TerminalConsole(file=file)
        with pytest.raises(Interrupted) as caught:
            console.print("the first trial")
        assert caught.value.exit_code == EXIT_NOBODY_READS
        console.print("a line during cleanup")


@pytest.mark.parametrize("columns", ["0", "1", "-1", "many", "\N{SUPERSCRIPT TWO}"])
def test_invalid_columns_are_ignored(columns):
    assert raypar("model", "list", width=columns) == raypar("model", "list", width=80)
    assert raypar("--help", width=columns)[1].strip()


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(BrokeOff("lost the cluster"), 1), (KeyError("bug"), 1), (StoreError("no such store"), 2), (RayparError("no"), 2)],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes_tell_failures_from_bad_input(monkeypatch, error, exit_code):
    monkeypatch.setattr("raypar.track.store.Store.studies", Mock(side_effect=error))
    code, _, err = raypar("list")
    assert code == exit_code and err.startswith("error: ")


def test_every_execution_has_its_own_log(monkeypatch, tmp_path):
    loaded = SimpleNamespace(study=SimpleNamespace(name="s"), path=tmp_path / "s.py")
    options = Options(project_dir=tmp_path, tracking_uri="sqlite:///x")
    logs = tmp_path / ".raypar" / "logs"
    log_dirs = []

    def execute(_, __, log_dir, *___):
        log_dirs.append(log_dir)
        if len(log_dirs) == 1:
            os.write(1, b"first, ")
            study.run(loaded, options)  # as a second command that finds nothing to do
            assert list(logs.iterdir()) == log_dirs[:1]
            os.write(1, b"still first")
        return SimpleNamespace(was_interrupted=False, num_done=0)

    monkeypatch.setattr("raypar.execution.execute.execute", execute)
    monkeypatch.setattr(study, "print_outcome", Mock())
    monkeypatch.setattr("raypar.cli.common.exit_as", Mock())
    study.run(loaded, options)
    assert log_dirs[0] != log_dirs[1] and list(logs.iterdir()) == log_dirs[:1]
    assert (log_dirs[0] / DRIVER_LOG).read_text() == "first, still first"


def test_a_removed_log_is_not_an_error(tmp_path):
    with quiet(tmp_path / "logs" / "doctor.log"):
        (tmp_path / "logs" / "doctor.log").unlink()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["attach", "stop"])
def test_without_a_cluster_the_message_explains_local_studies(verb):
    nowhere = ["--address", "http://127.0.0.1:9"]
    refused("error: no Ray dashboard answers at --address http://127.0.0.1:9", "cluster", verb, "mnist", *nowhere)
    refused("Ctrl-C in its terminal stops a study on this machine", "cluster", verb, "mnist", *nowhere)


@pytest.mark.parametrize(
    ("word", "choices", "close"),
    [
        ("batchsize", OPTIONS, ["batch_size"]),
        ("accumulate_steps", OPTIONS, ["accumulation_steps"]),
        ("workers", OPTIONS, ["num_workers", "num_loader_workers"]),
        ("optim", OPTIONS, ["optimizer"]),
        *(
            (word, OPTIONS, [])
            for word in ("hidden_size", "num_layers", "num_cores", "dropout", "rate", "cores", "lr2d")
        ),
        *((word, ["cpu", "cuda", "auto"], []) for word in ("tpu", "gpu", "", "u")),
        ("scaling", ["weak_scaling", "strong_scaling", "epochs"], ["weak_scaling", "strong_scaling"]),
        ("MNIST", ["mnist_cnn", "resnet"], ["mnist_cnn"]),
        ("mnits", ["mnist"], ["mnist"]),
        ("alexnet", ["lenet5", "resnet"], []),
        ("x" * 10**6, ["x" * 1000], []),
    ],
)
def test_only_close_names_are_suggested(word, choices, close):
    assert closest(word, choices) == close
    assert suggest(word, choices).startswith("did you mean" if close else "choose from")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reprot"], "No such command 'reprot' → did you mean `raypar report`? `raypar --help`"),
        (["plot"], "No such command 'plot' → `raypar --help`"),
        (["exprot", "s"], "No such command 'exprot' → did you mean `raypar store export`? `raypar --help`"),
        (["workload"], "did you mean `raypar model list`"),
        (["stroe", "show"], "No such command 'stroe' → did you mean `raypar store`? `raypar --help`"),
        (["store", "shwo"], "No such command 'shwo' → did you mean `raypar store show`? `raypar store --help`"),
        (["model", "lst"], "No such command 'lst' → did you mean `raypar model list`? `raypar model --help`"),
        (["store", "predict"], "did you mean `raypar model predict`? `raypar store --help`"),
        (
            ["study", "s.py", "--repeat", "3"],
            "No such option: --repeat → did you mean --repeats or --repeat-best? `raypar study --help`",
        ),
        (["report", "s", "--foo"], "No such option: --foo → `raypar report --help`"),
        (["store", "show", "s", "--jsn"], "No such option: --jsn → did you mean --json? `raypar store show --help`"),
        (["store", "show", "s", "\u2014json"], "unexpected extra argument(s) (\u2014json) → did you mean --json?"),
    ],
)
def test_a_misspelt_verb_or_flag_gets_suggestions(arguments, message):
    refused(message, *arguments)


@pytest.mark.parametrize("word", MOVED)
def test_a_moved_verb_is_reported_with_its_new_name(word):
    assert raypar(word, "mnist", "--json") == (2, "", f"error: raypar {word} is now `raypar {MOVED[word]}`\n")
    assert MOVED[word] in VERBS and word not in VERBS


@pytest.mark.parametrize("verb", ["", *GROUPS, *VERBS])
def test_no_help_shows_a_type_for_a_flag(verb):
    code, out, _ = raypar(*verb.split(), "--help")
    assert code == 0 and "bool" not in out.lower()


def test_the_first_screen_has_at_most_twelve_verbs_and_the_groups():
    code, out, _ = raypar("--help")
    assert code == 0 and len(out.splitlines()) <= 35 and max(map(len, out.splitlines())) <= 80
    shown = re.findall(r"^│ ([a-z][a-z-]*) +\S", out, re.MULTILINE)
    assert shown == [*(verb for verb in VERBS if " " not in verb), *GROUPS] and len(shown) - len(GROUPS) <= 12
    assert [panel in out for panel in ("─ Start ─", "─ Answers ─", "─ Look around ─", "─ Groups ─")] == [True] * 4


@pytest.mark.parametrize("verb", [*GROUPS, *VERBS])
def test_a_verb_has_one_line_in_the_help_of_its_group(verb):
    *group, name = verb.split()
    (line,) = re.findall(rf"^│ {name} +([A-Z].*\.) +│$", raypar(*group, "--help")[1], re.MULTILINE)
    assert len(line) <= 70


@pytest.mark.parametrize("group", ["", *GROUPS])
def test_a_group_alone_shows_its_help(group):
    code, out, err = raypar(*group.split())
    assert (code, err) == (2, "") and out.strip() == raypar(*group.split(), "--help")[1].strip()


def test_options_of_a_run_are_in_panels():
    out = raypar("study", "--help")[1]
    assert re.findall(r"^╭─ ([\w ]+) ─+╮$", out, re.M) == ["Arguments", "What runs", "Where", "When it stops", "Output"]
    firsts = ["--set", "--no-ray", "--until", "--debug"]
    assert re.findall(r"^╭─ (?:W|O).*\n│ (--[a-z-]+)", out, re.M) == firsts
