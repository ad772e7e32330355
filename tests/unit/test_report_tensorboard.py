"""Event files of ``raypar store export --tensorboard``, read by TensorBoard and by raypar's own reader."""

import math
from dataclasses import replace

import pytest
from command import raypar, refused
from recording import recorded
from results import make_result
from tensorboard.backend.event_processing import data_provider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

from raypar.analysis.question import Question
from raypar.reporting.tensorboard import write_event_files
from raypar.study.conditions import Conditions
from raypar.study.trial import Failure, FailureKind, TrialState
from raypar.track.runs import child_run
from raypar.train.command import EventFiles

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))
CURVE = ({"epoch": 1, "accuracy": 0.5, "train_loss": 2.0}, {"epoch": 2, "accuracy": 0.75, "train_loss": 1.0})
RESULTS = [
    replace(make_result({"num_workers": n}, r, 4.0 / n + r), started_at=1.7e9 + 10 * r + n, reports=CURVE)
    for n in (1, 2)
    for r in range(2)
]
SPEEDUPS = {"w=1 #1": 1.0, "w=1 #2": 1.0, "w=2 #1": 2.0, "w=2 #2": 5 / 3}


class NoFilesYet(EventFiles):
    def __init__(self, folder):
        self.folder, self._others = folder, frozenset()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    recorded(folder, QUESTION, RESULTS)
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture
def exported(store, tmp_path):
    folder = tmp_path / "runs"
    code, out, err = raypar("store", "export", "mnist", "--tensorboard", folder, "--tracking-uri", store, width=400)
    shows = f"`tensorboard --logdir {folder}` shows them"
    assert (code, out, err) == (0, f"wrote the 4 trials of mnist to {folder}; {shows}\n", "")
    return folder


def scalars(folder):
    """Return step, value and Unix time of each scalar of a run, as TensorBoard reads them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value, e.wall_time) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def table(folder, *, statuses=(api_pb2.STATUS_SUCCESS,)):
    """Return the columns and rows of TensorBoard's HParams dashboard: hyperparameters and metrics of each row."""
    runs = EventMultiplexer().AddRunsFromDirectory(str(folder))
    runs.Reload()
    context = backend_context.Context(TBContext(data_provider=data_provider.MultiplexerDataProvider(runs, "")))
    asked = (RequestContext(), context, "e")
    experiment = get_experiment.Handler(*asked, api_pb2.GetExperimentRequest()).run()
    columns = [api_pb2.ColParams(hparam=info.name) for info in experiment.hparam_infos]
    request = api_pb2.ListSessionGroupsRequest(allowed_statuses=statuses, slice_size=99, col_params=columns)
    listed = list_session_groups.Handler(*asked, request).run()
    rows = {
        group.name: (
            {key: getattr(value, value.WhichOneof("kind")) for key, value in group.hparams.items()},
            {metric.name.tag: metric.value for metric in group.metric_values},
            len(group.sessions),
        )
        for group in listed.session_groups
    }
    return {info.name: api_pb2.DataType.Name(info.type) for info in experiment.hparam_infos}, rows


def test_each_trial_is_a_run_with_the_curves_and_metrics_that_it_has_in_mlflow(exported):
    assert sorted(path.name for path in exported.iterdir()) == ["w=1 #1", "w=1 #2", "w=2 #1", "w=2 #2"]
    for result in RESULTS:
        run = child_run(result, result_json="", recorded_at=0.0)
        read = scalars(exported / run.name)
        assert read.pop("speedup") == [(0, pytest.approx(SPEEDUPS[run.name]), run.end_ms / 1000)]
        wanted = {}
        for p in run.points:
            wanted.setdefault(p.key, []).append((p.step, pytest.approx(p.value), p.time_ms / 1000))
        swept = {"num_workers", "batch_size"}
        assert read == {key: values for key, values in wanted.items() if key not in swept}
        assert [(step, value) for step, value, _ in read["accuracy"]] == [(1, 0.5), (2, 0.75)]


def test_raypars_own_reader_has_the_same_values(exported):
    by_step = NoFilesYet(exported / "w=2 #1").scalars()
    assert {step: values["accuracy"] for step, (_, values) in by_step.items() if step} == {1: 0.5, 2: 0.75}
    assert by_step[0][1]["train_time_s"] == 2.0 and by_step[0][1]["speedup"] == 2.0


def test_hparams_has_a_row_for_each_point_with_means_over_its_trials(exported):
    columns, rows = table(exported)
    assert columns["num_workers"] == "DATA_TYPE_FLOAT64"
    assert rows.keys() == {"w=1", "w=2"}
    for n, (hparams, metrics, num_trials) in ((row[0]["num_workers"], row) for row in rows.values()):
        assert num_trials == 2 and hparams["num_workers"] == n
        assert metrics["train_time_s"] == pytest.approx(4.0 / n + 0.5)
        assert metrics["accuracy"] == 0.75


def test_an_earlier_export_is_only_replaced_with_force_and_other_files_stay(exported, store):
    (exported / "w=1 #1" / "events.out.tfevents.1.other").write_bytes(b"")
    (exported / "gone #1").mkdir()
    (exported / "gone #1" / "events.out.tfevents.1.raypar").write_bytes(b"")
    command = "store", "export", "mnist", "--tensorboard", exported, "--tracking-uri", store
    refused("has the event files of an export → name another folder, or replace it with --force", *command)
    before = scalars(exported / "w=2 #1")
    assert raypar(*command, "--force")[0] == 0
    assert scalars(exported / "w=2 #1") == before
    assert not (exported / "gone #1").exists()
    assert (exported / "w=1 #1" / "events.out.tfevents.1.other").exists()


def test_a_file_and_event_files_can_be_written_at_once_but_not_nothing(store, tmp_path):
    refused("nothing to write → name a FILE", "store", "export", "mnist", "--tracking-uri", store)
    (tmp_path / "file").touch()
    where = "--tracking-uri", store, "--tensorboard"
    refused("file: is not a folder", "store", "export", "mnist", *where, tmp_path / "file")
    assert raypar("store", "export", "mnist", str(tmp_path / "t.csv"), *where, str(tmp_path / "runs"))[0] == 0
    assert (tmp_path / "t.csv").exists() and len(list((tmp_path / "runs").iterdir())) == 4


def test_a_disturbed_trial_has_no_speedup_nor_has_one_compared_with_it(tmp_path):
    from raypar.analysis.analyse import trusted_speedups

    busy = Conditions.from_stored({"cores": [[0]], "foreign_cpu_share": [0.5]})
    results = [replace(RESULTS[0], conditions=busy), *RESULTS[1:]]
    write_event_files(tmp_path, results, trusted_speedups(QUESTION, results))
    assert {p.name for p in tmp_path.iterdir() if "speedup" in scalars(p)} == {"w=1 #2", "w=2 #2"}


def test_failed_trials_extreme_values_and_odd_names_are_written(tmp_path):
    reports = ({"epoch": 1, "accuracy": math.nan, "train_loss": math.inf},)
    point = {"optimizer": "../a/b", "hidden": (8, 4), "nesterov": True, "lr": 1e-3}
    failure = Failure(FailureKind.ERROR, "no")
    failed = replace(make_result(point, 0), reports=reports, state=TrialState.FAILED, failure=failure)
    other = replace(failed, spec=replace(failed.spec, config={**failed.spec.config, "epochs": 9}))
    long = make_result({"optimizer": "x" * 300}, 0)
    write_event_files(tmp_path, [failed, other, long], {})
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert len(folders) == 3 and all(len(name) < 120 for name in folders)
    _, rows = table(tmp_path, statuses=(api_pb2.STATUS_FAILURE,))
    assert len(rows) == 2  # of two settings
    assert all(hparams["optimizer"] == "../a/b" and hparams["hidden"] == "8,4" for hparams, _, _ in rows.values())
    assert all(hparams["nesterov"] is True and hparams["lr"] == 1e-3 for hparams, _, _ in rows.values())
    read = scalars(tmp_path / folders[0])
    assert math.isnan(read["accuracy"][0][1]) and read["train/loss"][0][1] > 1e38
