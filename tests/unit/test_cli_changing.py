"""``raypar store delete`` and ``rename``, ``--since``, the time of a plan, and shell completion."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
from command import joined, raypar, refused
from recording import block, make_result, record, recorded, recorder, runs, unblock
from typer.testing import CliRunner

from raypar.analysis.question import Question
from raypar.cli.app import app
from raypar.run.locks import Holder, one_execution
from raypar.study.loader import load_study
from raypar.track.client import Unreachable, store_identity
from raypar.track.client import connect as client
from raypar.track.run_writer import RunWriter
from raypar.track.store import Store
from raypar.track.uploader import delete_study, rename_study

SMALL, LARGE = make_result(32), make_result(64)
QUESTION = Question("mnist", {}, ("batch_size",), points=({"batch_size": 32}, {"batch_size": 64}))


@pytest.fixture
def stored(project, uri, monkeypatch):
    """A store with one study, in the current folder."""
    monkeypatch.chdir(project)
    recorded(project, QUESTION, [SMALL, LARGE], uid="e1", started_at=1.7e9)
    return uri


def names(uri, project):
    return [study.name for study in Store(uri, project).studies()]


def asked(answer, *arguments):
    done = CliRunner().invoke(app, arguments, input=answer)
    return done.exit_code, done.output


def test_a_study_is_deleted_after_confirmation_and_its_name_is_free(stored, project):
    code, out = asked("n\n", "store", "delete", "mnist")
    assert code == 1 and "nothing was changed" in out and names(stored, project) == ["mnist"]
    assert f"delete study `mnist` (1 execution, 2 trials, in {stored})?" in joined(out)
    said = "no answer, so nothing was changed → answer y, or give --yes"
    refused(said, "store", "delete", "mnist", out=None)
    code, out, _ = raypar("store", "delete", "mnist", "--yes")
    experiment = client(stored).get_experiment_by_name("mnist")
    assert code == 0 and f"mlflow experiments restore --experiment-id {experiment.experiment_id}" in joined(out)
    assert "no studies yet" in raypar("list")[1]
    refused("no study `mnist` in the store", "store", "delete", "mnist", "--yes")
    record(project, stored, LARGE, uid="e2")
    assert [result.spec.point for result in Store(stored, project).results("mnist")] == [LARGE.spec.point]
    assert raypar("store", "delete", "mnist", "--yes")[0] == 0 and names(stored, project) == []


def test_a_deleted_study_can_be_restored_with_what_was_in_the_journals(project, monkeypatch):
    monkeypatch.chdir(project)
    uri = block(project)
    recorder(project, uri).record(SMALL)
    rec = recorder(project, uri, "e2")
    rec.record(LARGE)
    rec.close("finished")
    code, _, err = raypar("store", "delete", "mnist", "--yes", "--tracking-uri", uri)
    assert code == 2 and "can't be used" in err
    unblock(project)
    experiment_id = delete_study("mnist", uri, project)
    assert names(uri, project) == [] and list(project.rglob("*.jsonl")) == []
    client(uri).restore_experiment(experiment_id)
    assert len(Store(uri, project).results("mnist")) == 2


def test_a_renamed_study_is_the_same_study(stored, project):
    before = Store(stored, project)
    results, steps = before.results("mnist"), before.step_times("mnist", SMALL.spec.identity)
    code, out = asked("y\n", "store", "rename", "mnist", "digits 2")
    assert code == 0 and "rename study `mnist` (1 execution, 2 trials, in " in joined(out)
    after = Store(stored, project)
    renamed = tuple(replace(result, spec=replace(result.spec, study="digits 2")) for result in results)
    assert after.results("digits 2") == renamed and before.results("mnist") == ()
    assert names(stored, project) == ["digits 2"]
    assert steps and after.step_times("digits 2", renamed[0].spec.identity) == steps
    identities = {run.data.tags["raypar.point"] for run in runs(stored, "digits 2", "point")}
    assert identities == {result.spec.point_identity for result in renamed}
    assert raypar("report", "digits 2")[1].startswith("digits 2: 2 points, 2 trials")
    record(project, stored, LARGE, uid="e3")  # a new study may have the old name
    assert sorted(names(stored, project)) == ["digits 2", "mnist"]
    assert after.results("digits 2") == renamed


def test_an_interrupted_rename_can_be_repeated(stored, project):
    for method in ("log", "rename_experiment"):
        original, calls = getattr(RunWriter, method), []

        def fail(self, *arguments, original=original, calls=calls, most=method == "log", **others):
            calls.append(arguments)
            if len(calls) > most:
                raise Unreachable("killed")
            return original(self, *arguments, **others)

        with patch.object(RunWriter, method, fail), pytest.raises(Exception, match="killed"):
            rename_study("mnist", "digits", stored, project)
        assert len(Store(stored, project).results("mnist")) == 2
    rename_study("mnist", "digits", stored, project)
    (result, _) = Store(stored, project).results("digits")
    assert result.spec.study == "digits" and Store(stored, project).step_times("digits", result.spec.identity)


def test_a_deleted_studys_name_can_be_reused(stored, project):
    record(project, stored, make_result(study="digits"), uid="e2", study="digits")
    delete_study("digits", stored, project)
    rename_study("mnist", "digits", stored, project)
    assert len(Store(stored, project).results("digits")) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("store delete mnits", "no study `mnits` in the store → did you mean 'mnist'?"),
        ("store rename mnits digits", "no study `mnits` in the store → did you mean 'mnist'?"),
        (
            "store rename mnist other",
            "a study `other` already exists → choose another name, or `raypar store delete other` first",
        ),
        ("store rename mnist mnist", "study `mnist` already has that name"),
        ("store rename mnist a/b", "'a/b': the name of a study may hold letters, digits"),
    ],
)
def test_invalid_changes_are_refused(stored, project, arguments, message):
    record(project, stored, make_result(study="other"), uid="e2", study="other")
    refused(message, *arguments.split(), "--yes")
    assert sorted(names(stored, project)) == ["mnist", "other"]


@pytest.mark.parametrize("running", ["mnist", "new"])
def test_a_running_study_is_not_changed(stored, project, running):
    with one_execution(Holder.here(running, ["raypar", "study", "mnist.py"]), store_identity(stored)):
        refused(f"study `{running}` is already running", "store", "rename", "mnist", "new", "--yes")
        if running == "mnist":
            refused("study `mnist` is already running", "store", "delete", "mnist", "--yes")
    assert names(stored, project) == ["mnist"]


def test_a_renamed_study_needs_a_renamed_file(stored, project):
    (project / "mnist.py").write_text(
        "from raypar import Study\nfrom raypar.workloads import digits\nstudy = Study(workload=digits)\n"
    )
    unset = dict.fromkeys(("data_dir", "address", "trial_timeout"))
    flags = {
        **unset,
        "file": str(project / "mnist.py"),
        "set": [],
        "repeats": 1,
        "seed": 0,
        "isolation": "warm",
        "no_ray": False,
    }
    record(project, stored, uid="e2", execution={"started_at": 1.8e9, "tags": {"raypar.resume": json.dumps(flags)}})
    rename_study("mnist", "new", stored, project)
    message = "declares study `mnist`, not `new` → rename the file to new.py, or set Study(name='new')"
    refused(message, "store", "resume", "new")


# ---- --since


@pytest.fixture
def three(project, uri, monkeypatch):
    """Three executions, a trial each, on 14, 15 and 16 November 2023."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("TZ", "UTC")
    for number, result in enumerate((SMALL, LARGE, make_result(128)), 1):
        at = 1.7e9 + 86400 * (number - 1)
        recorded(project, QUESTION, [replace(result, started_at=at + 10)], uid=f"uid{number}", started_at=at)
    return uri


@pytest.mark.parametrize(
    ("since", "num_trials"),
    [("2023-11-01", 3), ("2023-11-15T20:00", 2), ("2023-11-16", 1), ("last", 1), ("2", 2), ("1", 3), ("uid2", 2)],
)
def test_since_selects_trials(three, since, num_trials):
    header = raypar("report", "mnist", "--since", since, width=200)[1].splitlines()[0]
    counted = f"{num_trials} trial" + "s" * (num_trials > 1)
    excluded = {1: "(2 earlier trials excluded)", 2: "(1 earlier trial excluded)", 3: "(which is all of them)"}[
        num_trials
    ]
    assert counted in header and header.endswith(excluded) and ", since 2023-11-1" in header
    for verb in ("store show", "recommend"):
        code, out, _ = raypar(*verb.split(), "mnist", "--since", since, width=200)
        assert code == 0 and out.startswith(f"mnist: {counted} since 2023-11-1") and excluded in out


@pytest.mark.parametrize(
    ("since", "message"),
    [
        (
            "yesterday",
            "--since yesterday: is neither a date nor an execution of `mnist` → write 2026-11-23, 2026-11-23T14:00",
        ),
        ("4", "--since 4: is neither a date nor an execution of `mnist`"),
        ("0", "a number from 1 to 3"),
        ("uid", "--since uid: names several executions"),
        ("2024-01-01", "no execution of `mnist` began since then → the last one began 2023-11-16 22:13"),
        ("", "is neither a date"),
    ],
)
def test_an_invalid_since_is_refused(three, since, message):
    for verb in ("report", "store show", "recommend"):
        refused(message, *verb.split(), "mnist", "--since", since)


# ---- the time of a plan


def test_a_plan_names_the_source_of_its_time(project, uri, monkeypatch):
    monkeypatch.chdir(project)
    text = "from raypar import Study, grid\nfrom raypar.workloads import digits\n"
    text += "study = Study(workload=digits, space={'batch_size': grid(32, 64)}, num_repeats=2, config={'epochs': 2})\n"
    for name in ("plants.py", "flowers.py"):
        (project / name).write_text(text)
    specs = load_study(project / "plants.py").study.trials()[:2]
    estimate = "estimated time: {}"
    assert estimate.format("unknown before the first trials") in raypar("plan", "plants.py")[1]
    results = [
        make_result(study="plants", spec=spec, wall_s=30.0, train_time_s=20.0, eval_time_s=5.0) for spec in specs
    ]
    record(project, uri, *results, study="plants")
    assert estimate.format("about 60 s (from 2 stored trials)") in raypar("plan", "plants.py")[1]
    longer = estimate.format("about 3.7 min (from 2 stored trials of `plants`)")  # 4 trials of 5 + 2 * 25 s
    assert longer in raypar("plan", "flowers.py", "--set", "epochs=4")[1]


# ---- completion in a shell


def completed(words, **environment):
    at = str(words.count(" "))
    asked = {"_RAYPAR_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": at, **environment}
    done = CliRunner().invoke(app, [], env=asked, prog_name="raypar")
    assert done.exit_code == 0, done.output
    return done.output.split()


def test_names_of_studies_and_workloads_are_completed(stored, project):
    record(project, stored, make_result(study="mlp"), uid="e2", study="mlp")
    recorder(project, stored, "e3", "mine")
    for verb in (
        "report",
        "store show",
        "store export",
        "store delete",
        "store rename",
        "model fit",
        "store compare",
        "model predict",
        "recommend",
        "store resume",
        "ui",
    ):
        assert sorted(completed(f"raypar {verb} m")) == ["mine", "mlp", "mnist"], verb
    assert completed("raypar report mn") == ["mnist"] and completed("raypar report x") == []
    assert completed("raypar model work tr") == completed("raypar model list tr") == ["transformer"]
    delete_study("mlp", stored, project)
    assert sorted(completed("raypar report m")) == ["mine", "mnist"]


def test_verbs_are_completed_in_their_groups():
    assert completed("raypar st") == ["study", "store"] and completed("raypar sho") == []
    assert completed("raypar store re") == ["resume", "rename"]


@pytest.mark.parametrize("uri", ["sqlite:///{}/no.db", "sqlite:///{}/broken.db", "http://127.0.0.1:9", "nonsense"])
def test_an_unreadable_store_completes_nothing(tmp_path, monkeypatch, uri):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.db").write_bytes(b"no database")
    assert completed("raypar report m", MLFLOW_TRACKING_URI=uri.format(tmp_path)) == []
    assert completed(f"raypar report --tracking-uri {uri.format(tmp_path)} m") == []
    assert [path.name for path in tmp_path.iterdir()] == ["broken.db"]


def test_completion_imports_nothing_heavy(stored, project):
    code = (
        "import atexit, sys\n"
        "heavy = ('torch', 'ray', 'mlflow', 'pandas', 'numpy', 'scipy', 'sklearn')\n"
        "atexit.register(lambda: print('heavy:', *(name for name in heavy if name in sys.modules)))\n"
        "sys.argv = ['raypar']\n"
        "from raypar.cli.app import app\n"
        "app(prog_name='raypar')\n"
    )
    for words, name in (("raypar report mn", "mnist"), ("raypar model work tr", "transformer")):
        variables = {"_RAYPAR_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=project, env={**os.environ, **variables})
        assert done.stdout.split() == [name, "heavy:"], done.stdout + done.stderr
