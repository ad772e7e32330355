"""Generated results, recorded in a real embedded store."""

import base64
import contextlib
import functools
import json
import sqlite3
import tempfile
import zlib
from dataclasses import asdict, replace

from results import stored_conditions

from raypar.study.trial import TrialResult, TrialSpec, TrialState
from raypar.track.client import connect as client
from raypar.track.recorder import Execution, Recorder
from raypar.track.store import Store


@functools.cache
def _empty_database():
    """Return an empty database of the installed MLflow. Creating it takes over a second, so it is cached."""
    with tempfile.TemporaryDirectory() as folder:
        client(f"sqlite:///{folder}/mlflow.db")
        with contextlib.closing(sqlite3.connect(f"{folder}/mlflow.db")) as connection:
            return connection.serialize()


def new_store(folder):
    """Create an empty store in the folder if it has none."""
    path = folder / "mlflow.db"
    if not path.exists():
        path.write_bytes(_empty_database())
    return path


CONFIG = {"num_workers": 2, "batch_size": 64, "lr": 0.1, "hidden": (128, 64), "device": "cpu", "schedule": None}
INPUTS = {"inputs": {"dtype": "uint8", "shape": [28, 28]}, "targets": {"dtype": "int64", "shape": []}}
DATA = {
    "name": "MNIST",
    "source": "raypar.workloads.mnist_mlp:_data",
    "splits": {
        "train": {"num_samples": 60000, "digest": "0123456789abcdef", **INPUTS},
        "val": {"num_samples": 10000},
        "test": {"num_samples": 5000, "digest": "fedcba9876543210"},
    },
}


def make_result(batch_size=64, *, study="mnist", repeat=0, **changes):
    spec = TrialSpec(study, "mlp", {"batch_size": batch_size}, {**CONFIG, "batch_size": batch_size}, repeat, repeat)
    result = TrialResult(
        spec=spec,
        state=TrialState.FINISHED,
        started_at=1_700_000_000.0 + batch_size,
        wall_s=10.0,
        startup_s=1.0,
        warmup_s=0.5,
        train_time_s=6.0,
        eval_time_s=2.0,
        throughput_samples_per_s=100.0,
        reports=({"epoch": 1, "accuracy": 0.5}, {"epoch": 2, "accuracy": 0.9}),
        step_times_s=((0.1, 0.2), (0.2, 0.1)),
        conditions=stored_conditions({"node": "n1", "cores": [[0], [1]]}),
    )
    return replace(result, **changes)


def stripped(*results):
    """Return the results without step times, like a store."""
    return tuple(replace(result, step_times_s=()) for result in results)


def unpacked(view):
    """Return the state of a saved view."""
    packed = json.loads(view)["state"].removeprefix("deflate;")
    return json.loads(zlib.decompress(base64.b64decode(packed)))


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def recorder(project, uri, uid="e1", study="mnist", **kwargs):
    execution = Execution(uid, study, **{"started_at": 1.7e9, **kwargs.pop("execution", {})})
    made = Recorder(execution, tracking_uri=uri, project_dir=project, **kwargs)
    made.start()
    return made


def record(project, uri, *results, uid="e1", **kwargs):
    """Record a complete execution of a study."""
    rec = recorder(project, uri, uid, **kwargs)
    for result in results:
        rec.record(result)
    assert rec.close("finished") == 0


def recorded(folder, question, results, tags=(), *, resume=None, uid="", **execution):
    """Record an execution in the folder's store, created if missing; `execution`: fields of `Execution`."""
    new_store(folder)
    name = question.study_name
    asked = {"raypar.question": json.dumps(asdict(question)), "raypar.resume": json.dumps(resume or {})}
    execution["tags"] = {**dict(tags), **asked}
    results = [replace(result, spec=replace(result.spec, study=name)) for result in results]
    record(folder, f"sqlite:///{folder}/mlflow.db", *results, uid=uid or name, study=name, execution=execution)


def runs(uri, study="mnist", kind="trial"):
    experiment = client(uri).get_experiment_by_name(study)
    with_kind = f"tags.`raypar.kind` = '{kind}'"
    return list(client(uri).search_runs([experiment.experiment_id], with_kind)) if experiment else []


def results_of(uri, project):
    return Store(uri, project).results("mnist")


def history(uri, run, key):
    return [(m.step, m.value) for m in client(uri).get_metric_history(run.info.run_id, key)]


def block(project):
    """Return the URI of a store that is unreachable until `unblock`."""
    (project / "down").write_text("")
    return f"sqlite:///{project}/down/mlflow.db"


def unblock(project):
    (project / "down").unlink()
    (project / "down").mkdir()
    new_store(project / "down")


def data_sets(uri):
    """Return context, name and digest of each input of the only trial."""
    (child,) = runs(uri)
    inputs = [(i.tags[0].value, i.dataset.name, i.dataset.digest) for i in child.inputs.dataset_inputs]
    assert len(set(inputs)) == len(inputs)
    return set(inputs)
