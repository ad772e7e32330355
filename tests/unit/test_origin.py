"""Origin of a study's code, which keeps projects in the same store apart."""

import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.job_submission import JobStatus
from stage import Stage, a_study, finished

from raypar.cli import cluster
from raypar.errors import RayparError
from raypar.execution.origin import ORIGIN_VARIABLE, CodeOrigin
from raypar.run import jobs

ELSEWHERE = "http://127.0.0.1:5000"


def git(folder, *words):
    identity = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_COMMITTER_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    environment = {**identity, "GIT_CONFIG_GLOBAL": "/dev/null", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, env=environment)


def made(folder, text="study"):
    """Put a study's file into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "s.py").write_text(text)
    return folder / "s.py"


def repository(folder, text="study", within="studies", remote=""):
    file = made(folder / within, text)
    git(folder, "init", "-q")
    if remote:
        git(folder, "remote", "add", "origin", remote)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return file


def are_same(one, other, uri=ELSEWHERE):
    origins = [CodeOrigin.of(file, uri) for file in (one, other)]
    assert [CodeOrigin.from_json(origin.to_json()) for origin in origins] == origins
    assert origins[0].is_of(origins[1]) == origins[1].is_of(origins[0])
    return origins[0].is_of(origins[1])


def test_links_to_a_folder_are_the_same_origin(tmp_path):
    one, other = made(tmp_path / "a"), made(tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert not are_same(one, other) and are_same(one, tmp_path / "link" / "s.py")


def test_clones_and_worktrees_are_the_same_origin(tmp_path):
    file = repository(tmp_path / "first")
    other = made(tmp_path / "first" / "others")
    git(tmp_path, "clone", "-q", "first", "second")
    git(tmp_path / "first", "worktree", "add", "-q", str(tmp_path / "third"))
    assert are_same(file, tmp_path / "second/studies/s.py") and are_same(file, tmp_path / "third/studies/s.py")
    assert not are_same(file, other)


def test_a_shallow_clone_is_known_by_its_remote(tmp_path):
    file = repository(tmp_path / "first", remote="git@host.org:me/project.git")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{tmp_path}/first", "second")
    assert not are_same(file, tmp_path / "second/studies/s.py")
    git(tmp_path / "second", "remote", "set-url", "origin", "https://me:secret@host.org/me/project/")
    assert are_same(file, tmp_path / "second/studies/s.py")
    assert "secret" not in CodeOrigin.of(tmp_path / "second/studies/s.py", ELSEWHERE).to_json()


def test_another_repository_at_the_same_path_is_another_origin(tmp_path):
    first = CodeOrigin.of(repository(tmp_path / "app", "one"), ELSEWHERE)
    (tmp_path / "app").rename(tmp_path / "app-before")
    assert not CodeOrigin.of(repository(tmp_path / "app", "another"), ELSEWHERE).is_of(first)


def test_a_folder_that_becomes_a_repository_is_the_same_origin(tmp_path):
    before = CodeOrigin.of(made(tmp_path / "a"), ELSEWHERE)
    after = CodeOrigin.of(repository(tmp_path / "a", within="."), ELSEWHERE)
    assert after.repository and not before.repository and after.is_of(before)


def test_a_folder_moved_with_its_store_is_the_same_origin(tmp_path):
    before = CodeOrigin.of(made(tmp_path / "a/studies"), f"sqlite:///{tmp_path}/a/mlflow.db")
    (tmp_path / "a").rename(tmp_path / "b")
    file, uri = tmp_path / "b/studies/s.py", f"sqlite:///{tmp_path}/b/mlflow.db"
    assert CodeOrigin.of(file, uri).is_of(before)
    assert not CodeOrigin.of(made(tmp_path / "b/others"), uri).is_of(before)


def test_a_submitted_study_has_the_origin_of_its_client(tmp_path, monkeypatch):
    client = CodeOrigin.of(repository(tmp_path / "a"), ELSEWHERE)
    monkeypatch.setenv(ORIGIN_VARIABLE, client.to_json())
    assert CodeOrigin.of(made(tmp_path / "job"), ELSEWHERE) == client
    monkeypatch.setenv(ORIGIN_VARIABLE, "{")
    assert CodeOrigin.of(made(tmp_path / "job"), ELSEWHERE) != client


def test_a_client_sends_its_origin_to_the_head(tmp_path, monkeypatch):
    file, given = repository(tmp_path / "a"), []
    over = SimpleNamespace(status=JobStatus.SUCCEEDED, driver_exit_code=0)
    monkeypatch.setattr(jobs, "connect", lambda *_: SimpleNamespace(list_jobs=list))
    monkeypatch.setattr(jobs, "submit", lambda *arguments: given.extend(arguments))
    monkeypatch.setattr(jobs, "follow", lambda *_: over)
    assert cluster.submit("s", file, "http://127.0.0.1:8265", [], ["raypar", "study", "s.py"], ELSEWHERE) == 0
    assert CodeOrigin.from_json(given[-1][ORIGIN_VARIABLE]) == CodeOrigin.of(file, ELSEWHERE)


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def from_elsewhere(stage, folder="/projects/other", host="", code=""):
    stored = CodeOrigin(str(folder), host=host or platform.node(), code=code)
    stage.origins = [({}, ""), ({CodeOrigin.TAG: stored.to_json()}, "")]


@pytest.mark.parametrize(
    ("folder", "host", "is_same"), [("gone", "", True), ("there", "another", True), ("there", "", False)]
)
@pytest.mark.parametrize("has_same_code", [False, True])
def test_an_invisible_folder_is_known_by_its_code(stage, folder, host, is_same, has_same_code):
    stage.code = {"s.py": "py3.11:1"}
    (stage.tmp_path / "there").mkdir()
    stage.execute(a_study())
    code = CodeOrigin.from_json(stage.execution.tags[CodeOrigin.TAG]).code
    from_elsewhere(stage, stage.tmp_path / folder, host, code if has_same_code else "another")
    if is_same and has_same_code:
        stage.execute(a_study())
    else:
        with pytest.raises(RayparError, match="of another project: its code is in "):
            stage.execute(a_study())


def test_a_study_of_the_same_name_from_another_folder_is_refused(stage):
    study = a_study()
    stage.stored = [finished(spec) for spec in study.trials()]
    from_elsewhere(stage)
    with pytest.raises(RayparError) as caught:
        stage.execute(study)
    assert stage.happened == ["checked"]
    assert "`s` of another project: its code is in /projects/other, not in " in caught.value.message
    hint, file = caught.value.hint, stage.tmp_path / "s.py"
    assert f'Study(name="{stage.tmp_path.name}_s")' in hint and "--tracking-uri" in hint
    assert f"raypar store resume s --file {file} --tracking-uri sqlite:///x" in hint


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_confirmed_move_is_stored(stage, is_complete):
    study = a_study()
    stage.stored = [finished(spec) for spec in study.trials()] if is_complete else []
    from_elsewhere(stage)
    stage.execute(study, has_moved=True)
    assert stage.of("closed") == ["finished"] and bool(stage.of("ran")) != is_complete
    stage.origins = [(stage.execution.tags, "")]
    stage.execute(study)


def test_a_study_without_an_origin_gets_one(stage):
    stage.origins = [({}, "")]
    stage.execute(a_study())
    stored = CodeOrigin.from_json(stage.execution.tags[CodeOrigin.TAG])
    assert Path(stored.folder) == stage.tmp_path.resolve()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"folder": 1, "repository": 2}', '{"repository": [], "other": 1}'])
def test_an_invalid_origin_counts_as_none(text):
    assert CodeOrigin.from_json(text) is None
