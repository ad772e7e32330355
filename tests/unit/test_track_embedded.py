"""SQL reads the same as MLflow from an embedded database, without changing it."""

import hashlib
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from recording import make_result, new_store, record, recorder
from results import stored_conditions

from raypar.study.trial import Failure, FailureKind, TrialState
from raypar.track.client import connect
from raypar.track.names import experiment_name
from raypar.track.store import Store
from raypar.track.stored_runs import EmbeddedRuns, MlflowRuns, Unfamiliar

ODD = 'it\'s "quoted" `so`, naïve 研究 100%'
LONG = "x" * 600
STUDIES = ("mnist", "empty", "unfinished", "deleted", "restored", ODD, LONG, "never run")
FAILED = {"state": TrialState.FAILED, "failure": Failure(FailureKind.ERROR, "boom")}
NOISE = stored_conditions({"node": ["研" * 9000]})
TAGS = {"raypar.question": '{"q": "' + "long " * 4000 + '"}'}
EXECUTION = {"tags": TAGS, "description": "What for?", "study_source": "study = 1\n"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Store with finished, resumed, interrupted, deleted and restored studies, and foreign experiments."""
    folder = tmp_path_factory.mktemp("a project, 100% #1?")
    new_store(folder)
    uri = by_sql(folder)
    client = connect(uri)
    executions = {
        "e1": [make_result(32), make_result(64, **FAILED), make_result(128)],
        "e22": [make_result(64, started_at=1.75e9), make_result(256, conditions=NOISE)],
    }
    for uid, results in executions.items():
        record(folder, uri, *results, uid=uid, execution=EXECUTION)
    record(folder, uri, uid="e3", study="empty")
    unfinished = recorder(folder, uri, "e4", "unfinished")
    unfinished.record(make_result(32, study="unfinished"))
    unfinished._release()  # as if the process had died
    for study in ("deleted", "restored", ODD, LONG):
        results = [make_result(size, study=study, started_at=1.6e9 + size) for size in (32, 64)]
        record(folder, uri, *results, uid=f"e-{len(study)}", study=study, execution=EXECUTION)
    ids = {study: Store(uri, folder).experiment_id(study) for study in STUDIES}
    assert list(ids.values()).count(None) == 1
    client.delete_experiment(ids["deleted"])
    client.delete_experiment(ids["restored"])
    client.restore_experiment(ids["restored"])
    trials = client.search_runs([ids[ODD]], "tags.`raypar.kind` = 'trial'")
    client.delete_run(trials[0].info.run_id)
    others = client.create_experiment("someone's own")
    client.create_run(others, tags={"raypar.kind": "trial", "raypar.uid": "no study"})
    client.create_run(ids["mnist"], tags={"raypar.kind": "Trial"})
    client.create_run(ids["mnist"])
    return folder


def by_sql(project):
    return f"sqlite:///{project.as_posix().replace('%', '%25').replace('#', '%23').replace('?', '%3F')}/mlflow.db"


def by_mlflow(project):
    """Return the same database by a URI that only MLflow opens."""
    return by_sql(project).replace("sqlite:", "sqlite+pysqlite:")


def fingerprint(project):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in project.iterdir() if p.is_file()}


def test_sql_and_mlflow_read_the_same_runs(project):
    quick, slow = EmbeddedRuns(by_sql(project)), MlflowRuns(by_mlflow(project))
    experiments = quick.experiments()
    assert experiments, "a new schema: look at it, then add it to SCHEMAS"
    assert list(experiments.items()) == list(slow.experiments().items())
    assert set(experiments) == set(STUDIES) - {"deleted", "never run"}
    for name in map(experiment_name, STUDIES):
        assert quick.experiment_id(name) == slow.experiment_id(name), name
    ids = list(experiments.values())
    for tags in ({"kind": "trial"}, {"kind": "execution"}, {"kind": "trial", "repeat": "0"}, {"kind": "no such"}):
        full_tags = {f"raypar.{k}": v for k, v in tags.items()}
        read = quick.search(ids, full_tags)
        assert read == list(slow.search(ids, full_tags)), tags
        assert read == sorted(read, key=lambda run: (-run.start_ms, run.run_id))
    # mnist 5, unfinished 1, LONG 2, ODD 1; whether the runs of the restored experiment count depends on MLflow
    assert len(quick.search(ids, {"raypar.kind": "trial"})) >= 9


@pytest.mark.parametrize("study", STUDIES)
def test_sql_and_mlflow_read_the_same_study(project, study):
    quick, slow = (Store(uri, project) for uri in (by_sql(project), by_mlflow(project)))
    for read in (Store.results, Store.question, Store.study_source, Store.experiment_id):
        assert read(quick, study) == read(slow, study), read.__name__
    assert list(quick.origins(study)) == list(slow.origins(study))
    for identity in [r.spec.identity for r in quick.results(study)] or ["0" * 16]:
        assert quick.step_times(study, identity) == slow.step_times(study, identity)


def test_sql_and_mlflow_list_the_same_studies(project):
    studies = Store(by_sql(project), project).studies()
    assert studies == Store(by_mlflow(project), project).studies()
    assert {s.name: (s.num_executions, s.counts["num_finished"], s.counts["num_failed"]) for s in studies}["mnist"] == (
        2,
        4,
        1,
    )


def test_reading_imports_no_mlflow_and_changes_no_file(project):
    """In a new process, since MLflow is imported in this one."""
    before = fingerprint(project)
    code = (
        "import sys, raypar.track.recorder, raypar.track.server\nfrom pathlib import Path\n"
        "from raypar.track.store import Store\nstore = Store(sys.argv[1], Path(sys.argv[2]))\n"
        "assert store.studies() and store.results('mnist') and store.question('mnist')\n"
        "assert store.step_times('mnist', store.results('mnist')[0].spec.identity)\n"
        "print(sorted({'mlflow', 'sqlalchemy', 'torch', 'ray'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, by_sql(project), str(project)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert (done.stdout.strip(), fingerprint(project)) == ("[]", before)


# ---- databases that are left to MLflow


@pytest.fixture
def copied(project, tmp_path):
    shutil.copy(project / "mlflow.db", tmp_path / "mlflow.db")
    return tmp_path


def is_left_to_mlflow(uri):
    with pytest.raises(Unfamiliar):
        EmbeddedRuns(uri).search(["1"], {"raypar.kind": "trial"})
    return True


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE alembic_version SET version_num = 'ffffffffffff'",
        "DELETE FROM alembic_version",
        "DROP TABLE alembic_version",
        "ALTER TABLE tags RENAME COLUMN value TO worth",
        "UPDATE experiments SET workspace = 'team' WHERE experiment_id = 0",
    ],
)
def test_an_unfamiliar_database_is_left_to_mlflow_unchanged(copied, statement):
    with closing(sqlite3.connect(copied / "mlflow.db")) as database, database:
        database.execute(statement)
    before = fingerprint(copied)
    assert is_left_to_mlflow(by_sql(copied))
    assert fingerprint(copied) == before


def test_other_files_are_left_to_mlflow(tmp_path):
    for content in (b"", b"no database at all" * 100):
        (tmp_path / "mlflow.db").write_bytes(content)
        assert is_left_to_mlflow(by_sql(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["mlflow.db"]


def test_an_open_transaction_is_invisible_and_a_lock_is_left_to_mlflow(copied, monkeypatch):
    monkeypatch.setattr("raypar.track.stored_runs.LOCK_TIMEOUT_S", 0.0)
    before = EmbeddedRuns(by_sql(copied)).experiments()
    with closing(sqlite3.connect(copied / "mlflow.db", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM experiment_tags")
        assert EmbeddedRuns(by_sql(copied)).experiments() == before
        writer.execute("ROLLBACK")
        writer.execute("BEGIN EXCLUSIVE")
        assert is_left_to_mlflow(by_sql(copied))
        writer.execute("ROLLBACK")
    assert EmbeddedRuns(by_sql(copied)).experiments() == before


def test_other_stores_and_workspaces_are_left_to_mlflow(project, monkeypatch):
    databases = ("postgresql://host/mlflow", "sqlite://", "sqlite:///:memory:", "sqlite:///a.db?x=1")
    for uri in ("http://localhost:5000", *databases, by_mlflow(project)):
        assert is_left_to_mlflow(uri), uri
    monkeypatch.setenv("MLFLOW_ENABLE_WORKSPACES", "true")
    assert is_left_to_mlflow(by_sql(project))
    monkeypatch.setenv("MLFLOW_ENABLE_WORKSPACES", "false")
    assert EmbeddedRuns(by_sql(project)).experiments()
