"""The content of a store or a journal is data: it runs no code and reads no other files."""

import os
import pickle
import socket
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from recording import make_result as a_result
from recording import recorder
from results import make_result

from raypar import Study, grid
from raypar.errors import RayparError
from raypar.execution.options import ResumeFlags
from raypar.execution.plan import ExecutionPlan
from raypar.execution.results import ExecutionOutcome, ResultHandler
from raypar.run.cluster import this_machine
from raypar.run.runner import TrialEnded
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialState
from raypar.track.store import Store
from raypar.track.uploader import sync
from raypar.workloads import digits

ABSENT = {"data_dir": None, "address": None, "trial_timeout": None}
RESUME = {"set": ["epochs=1"], "repeats": 3, "seed": 0, "isolation": "warm", "no_ray": False, **ABSENT}


class Bomb:
    """Object that leaves a mark when unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


# ---- the study file


def last_flags(folder, stored, **named):
    """Return the flags of a study in the folder, with these in its store."""
    flags = ResumeFlags.from_stored("good", {**RESUME, "file": str(folder / "good.py"), **stored})
    return flags.trusted("good", folder, **named)


@pytest.mark.parametrize("named", ["/etc/evil.py", "{folder}/../evil.py", "{folder}/link.py", "../x.py", "a\0b.py"])
def test_a_study_file_outside_the_folder_has_to_be_named(named, tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "evil.py").touch()
    (folder / "link.py").symlink_to(tmp_path / "evil.py")
    monkeypatch.chdir(folder)
    stored = {"file": named.format(folder=folder)}
    with pytest.raises(RayparError, match="a study file is code") as refused:
        last_flags(folder, stored)
    assert "not in this folder" in str(refused.value) and "raypar store resume good --file " in str(refused.value)
    assert last_flags(folder, stored, file=tmp_path / "mine.py").file == str(tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("address", "problem", "hint"),
    [
        *((a, "gets your code and your token", f"--address {a}") for a in ("evil.example:6379", "10.0.0.1:6379")),
        ("127.0.0.1.evil.example:1", "gets your code and your token", "--address 127.0.0.1.evil.example:1"),
        ("ray://127.0.0.1:10001", "ray:// addresses are not supported", "--address http://HEAD:8265"),
    ],
)
def test_a_remote_cluster_has_to_be_named(address, problem, hint, tmp_path):
    with pytest.raises(RayparError, match=problem) as refused:
        last_flags(tmp_path, {"address": address})
    assert hint in str(refused.value)
    assert last_flags(tmp_path, {"address": address}, address="head:6379").flags.address == "head:6379"


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:6379", "localhost:6379", "[::1]:1"])
@pytest.mark.usefixtures("no_ray_of_others")
def test_a_local_cluster_is_joined_again(address, tmp_path):
    inside = str(tmp_path / "studies" / "good.py")
    last = last_flags(tmp_path, {"address": address, "file": inside})
    assert (last.file, last.flags.set, last.flags.repeats, last.flags.address) == (inside, ("epochs=1",), 3, address)


@pytest.mark.parametrize("who", ["nobody", "me", "another user", "somebody", "me and another user"])
def test_a_local_cluster_has_to_be_named_if_another_user_may_listen(who, tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        plain, real = psutil.net_connections, psutil.Process.username
        if who == "nobody":
            server.close()
        elif who != "me":
            # A user sees no process behind the sockets of others; root does.
            pid = None if who == "somebody" else os.getppid()
            mine = plain("tcp") if who.startswith("me and") else []
            other = SimpleNamespace(
                status=psutil.CONN_LISTEN, laddr=SimpleNamespace(port=server.getsockname()[1]), pid=pid
            )
            monkeypatch.setattr(psutil, "net_connections", lambda kind: [*mine, other])

            def username(process):
                return "mallory" if process.pid == os.getppid() else real(process)

            monkeypatch.setattr(psutil.Process, "username", username)
        if who in ("nobody", "me"):
            assert last_flags(tmp_path, {"address": address}).flags.address == address
        else:
            with pytest.raises(RayparError, match="another user may listen there now") as refused:
                last_flags(tmp_path, {"address": address})
            assert f"raypar store resume good --address {address}" in str(refused.value)
        assert last_flags(tmp_path, {"address": address}, address=address).flags.address == address


@pytest.mark.parametrize("found", ["10.9.8.7:6379", None])
def test_auto_has_to_be_named_if_it_resolves_to_another_machine(found, tmp_path, monkeypatch):
    def resolve(_):
        if found is None:
            raise ConnectionError("no Ray here")
        return found

    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address", resolve)
    if found is None:
        assert last_flags(tmp_path, {"address": "auto"}).flags.address == "auto"
    else:
        with pytest.raises(RayparError, match="--address auto"):
            last_flags(tmp_path, {"address": "auto"})


WRONG = (("file", 3), ("set", "epochs=1"), ("set", [1]), ("repeats", "3"), ("no_ray", None), ("seed", {}))


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_flags_with_wrong_types_and_missing_flags_are_reported(key, value, tmp_path):
    stored = {"file": "good.py", **RESUME}
    for wrong in ({**stored, key: value}, {k: v for k, v in stored.items() if k != key}):
        with pytest.raises(RayparError, match=f"has no record of how study `good` was run: {key}"):
            ResumeFlags.from_stored("good", wrong)


# ---- journals


def journalled(project, uri, artifact_dir):
    """Journal a trial while its store can't be reached; return its identity."""
    rec = recorder(project, uri)
    rec._retry_at_s = float("inf")
    rec.record(a_result(), artifact_dir)
    rec._release()
    return a_result().spec.identity


@pytest.fixture
def private(tmp_path_factory):
    """Folder outside of the project."""
    folder = tmp_path_factory.mktemp("ssh")
    (folder / "model").mkdir()
    for path in (folder / "id", folder / "model" / "id"):
        path.write_text("a private key")
    return folder


def test_only_the_projects_own_folders_are_uploaded(project, uri, private):
    identity = journalled(project, uri, private)
    assert Store(uri, project).model_folder("mnist", identity) is None
    sent = sync(project)
    assert (sent.num_left, sent.num_rejected, len(Store(uri, project).results("mnist"))) == (0, 0, 1)
    assert not list((project / "mlartifacts").rglob("id"))


def test_links_to_files_outside_of_a_kept_folder_are_not_uploaded(project, uri, private):
    kept = project / ".raypar" / "logs" / "x" / "artifacts"
    (kept / "model" / "deep").mkdir(parents=True)
    (kept / "model" / "deep" / "weights.pt").write_text("weights")
    (kept / "model" / "same.pt").symlink_to(Path("deep") / "weights.pt")
    (kept / "model" / "id").symlink_to(private / "id")
    (kept / "model" / "all").symlink_to(private)
    (kept / "linked").symlink_to(private)
    identity = journalled(project, uri, kept)
    assert sync(project).num_left == 0
    folder = Store(uri, project).model_folder("mnist", identity)
    assert folder is not None and folder.is_relative_to(project / "mlartifacts")
    assert sorted(path.name for path in folder.rglob("*")) == ["deep", "same.pt", "weights.pt"]
    assert not list(project.glob("mlartifacts/**/linked"))


def test_no_pickle_is_loaded_from_a_kept_model(tmp_path):
    from raypar.train.evaluate import evaluate_test_split
    from raypar.train.saved_model import WEIGHTS_FILE
    from raypar.workloads import digits
    from workloads.gpt2_code import generate

    mark = tmp_path / "mark"
    for name in (WEIGHTS_FILE, "pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(Exception):  # noqa: B017, PT011 - torch's own
        evaluate_test_split(digits, {**digits.options, "epochs": 1, "precision": "fp32"}, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 4}')
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(Exception):  # noqa: B017, PT011 - transformers' own
        generate(tmp_path, "x", 1)
    assert not mark.exists()
    pickle.loads((tmp_path / WEIGHTS_FILE).read_bytes())
    assert mark.exists()  # the mark works


# ---- results from ranks


def handled(folder, result):
    """Handle the end of a trial; return recorded results, failures and shown events."""
    recorder, shown = Mock(), []
    study = Study(workload=digits, space={"num_workers": grid(1, 2)}, num_repeats=1, name="mnist")
    outcome = ExecutionOutcome(ExecutionPlan(study, (), (), (), this_machine()), folder, {})
    ResultHandler(outcome, recorder, shown.append)(TrialEnded(result))
    return [call.args[0] for call in recorder.record.call_args_list], outcome.failures, shown


RESULT = make_result({"num_workers": 1})


def test_secrets_in_failures_are_masked(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_planted0123")
    text = "401 for hf_planted0123 at http://me:pw@db/x"
    failure = Failure(FailureKind.ERROR, text, 0, f"Traceback\n{text}")
    recorded, failures, shown = handled(tmp_path, TrialResult(RESULT.spec, TrialState.FAILED, failure=failure))
    for result in (*recorded, *(event.result for event in shown if isinstance(event, TrialEnded)), *failures):
        assert result.failure.message == "401 for *** at http://me:***@db/x"
        assert result.failure.traceback == "Traceback\n401 for *** at http://me:***@db/x"
    assert (len(recorded), len(shown), len(failures)) == (1, 1, 1)
