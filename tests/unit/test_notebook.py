"""``raypar.load``: a study as a pandas frame, and messages about missing studies."""

import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from command import joined
from command import raypar as command
from recording import recorded
from results import make_result

import raypar
from raypar.analysis.question import Question
from raypar.reporting.frame import StudyFrame
from raypar.study.trial import TrialState


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the store of one study."""
    folder = tmp_path_factory.mktemp("project")
    results = [make_result({"num_workers": n}, r, 4.0 / n, started_at=10.0 * r + n) for n in (1, 2) for r in range(2)]
    results.append(make_result({"num_workers": 4}, state=TrialState.FAILED, started_at=100.0))
    recorded(folder, Question("mnist", {"num_workers": 1}, ("num_workers",)), results)
    return folder


def test_a_study_is_a_frame_of_its_trials(folder, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    frame = raypar.load("mnist", folder=folder)
    assert list(frame)[:7] == ["num_workers", "repeat", "state", "train_time_s", "wall_s", "speedup", "accuracy"]
    assert frame.num_workers.tolist() == [1, 2, 1, 2, 4] and frame.repeat.tolist() == [1, 1, 2, 2, 1]
    medians = frame[frame.state == "finished"].groupby("num_workers").train_time_s.median()
    assert medians.to_dict() == {1: 4.0, 2: 2.0}
    assert frame.speedup.dropna().tolist() == [1.0, 2.0, 1.0, 2.0]
    assert frame.attrs["study"] == "mnist" and frame.attrs["constants"]["config.lr"] == 0.1
    assert not {"study", "set_aside", "config.lr", "config.num_workers", "energy_j", "environment.node"} & set(frame)
    assert all(frame[column].nunique(dropna=False) > 1 for column in frame)


def test_all_columns_have_the_same_names(folder):
    few, frame = (raypar.load("mnist", folder=folder, all=each) for each in (False, True))
    assert set(few) | set(few.attrs["constants"]) < set(frame)
    assert all(few[column].equals(frame[column]) for column in few)
    assert frame["num_workers"].tolist() == frame["config.num_workers"].tolist() == [1, 2, 1, 2, 4]
    assert {"study", "accuracy", "config.lr", "energy_j", "environment.node"} <= set(frame)
    assert frame.repeat.tolist() == [1, 1, 2, 2, 1] and "constants" not in frame.attrs


def test_ambiguous_names_keep_their_prefix_and_columns_that_are_always_shown_may_be_constant():
    results = [make_result({"seed": 7, "accuracy": n}, n, accuracy=0.9, started_at=n) for n in range(2)]
    frame = StudyFrame.of(Question("s", {}, ("seed", "accuracy")), results, all=False)
    everything = StudyFrame.of(Question("s", {}, ("seed", "accuracy")), results, all=True)
    assert set(frame) < set(everything) and everything.accuracy.tolist() == [0, 1]
    assert {"point.seed", "accuracy", "final.accuracy", "seed", "train_time_s", "state"} <= set(frame)
    assert frame.accuracy.tolist() == [0, 1] and frame["final.accuracy"].tolist() == [0.9, 0.9]
    assert StudyFrame.of(Question("s", {}, ()), [], all=False).empty


def test_its_points_verdict_and_report_are_those_of_the_command(folder, capsys):
    frame = raypar.load("mnist", folder=folder)
    points = frame.points.set_index("num_workers")
    assert points.n.tolist() == [2, 2, 0] and points.recommended.tolist() == [False, True, False]
    assert points.speedup[2] == pytest.approx(2.0) and points.speedup_low[2] <= 2 <= points.speedup_high[2]
    assert points.train_time_s[1] == 4.0 and points.efficiency[2] == pytest.approx(1.0)
    assert {"accuracy", "accuracy_low", "accuracy_high"} <= set(points) and "cost" not in points
    assert frame.verdict.answer.startswith("2 workers are faster than 1") and "TrialResult" not in repr(frame.verdict)
    frame.report()
    shown = capsys.readouterr().out
    code, out, _ = command("report", "mnist", "--tracking-uri", f"sqlite:///{folder}/mlflow.db")
    assert code == 0 and shown == out and frame.verdict.answer in joined(out)


def test_a_notebook_shows_the_report_once_as_coloured_text(folder, monkeypatch, capsys):
    shown = []
    notebook = SimpleNamespace(get_ipython=lambda: object(), display=SimpleNamespace(display=shown.append))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    frame = raypar.load("mnist", folder=folder)
    assert frame.report(verbose=True) is None
    (view,) = shown
    bundle = view._repr_mimebundle_()
    assert capsys.readouterr().out == "" and "Recommended: num_workers=2" in bundle["text/plain"]
    assert bundle["text/html"].startswith("<pre") and "font-weight: bold" in bundle["text/html"]


def test_a_frame_has_the_figures_of_the_report_for_notebooks_and_files(folder, tmp_path):
    frame = raypar.load("mnist", f"sqlite:///{folder}/mlflow.db")
    figures = frame.figures
    assert {"speedup", "times", "pareto"} <= set(figures) and "heat_map" not in figures
    assert any("hyperparameters" in reason for reason in figures.left_out.values())
    shown = figures["speedup"]._repr_mimebundle_()
    assert shown["image/svg+xml"].startswith("<svg") and "2 workers" in shown["text/plain"]
    assert figures._repr_html_().count("<svg") == len(figures)
    with pytest.raises(raypar.RayparError, match="unknown format 'pdf'"):
        figures["speedup"].save(tmp_path / "s.pdf")
    with pytest.raises(raypar.RayparError, match="no figure 'speedups'") as error:
        figures["speedups"]
    assert error.value.hint == "did you mean 'speedup'?"
    again = pickle.loads(pickle.dumps(frame))
    assert set(again.figures) == set(figures) and again.equals(frame)
    assert type(frame[frame.state == "finished"]) is pd.DataFrame


def test_figures_leave_out_trials_of_other_settings_like_the_report():
    def trial(lr, repeat, epochs, time_s):
        result = make_result({"lr": lr}, repeat, time_s, config={"epochs": epochs}, started_at=1000 / epochs + repeat)
        return replace(result, reports=tuple({"accuracy": 0.9, "train_time_s": time_s / epochs} for _ in range(epochs)))

    asked = Question("s", {}, ("lr",), num_repeats=3, config={"epochs": 1})
    current = [trial(lr, repeat, 1, 4.0) for lr in (0.1, 0.2) for repeat in range(3)]
    earlier = [trial(0.1, repeat, 10, 40.0) for repeat in range(3)]
    assert "1.00× in the first half, 1.00×" in StudyFrame.of(asked, [*earlier, *current]).figures["drift"].caption
    elsewhere = [trial(0.7, repeat, 10, 40.0) for repeat in range(3)]  # the only learning curves, at no current point
    assert "learning" not in StudyFrame.of(asked, [*elsewhere, *current]).figures


def test_the_store_is_that_of_the_current_folder_unless_one_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(folder)
    assert len(raypar.load("mnist")) == 5
    monkeypatch.chdir(tmp_path)
    assert len(raypar.load("mnist", f"sqlite:///{folder}/mlflow.db")) == 5
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    assert len(raypar.load("mnist")) == 5


def test_a_missing_study_or_folder_is_named_with_a_suggestion(folder, tmp_path):
    with pytest.raises(raypar.RayparError, match="no study `mnits` in the store") as error:
        raypar.load("mnits", f"sqlite:///{folder}/mlflow.db")
    assert error.value.hint == "did you mean 'mnist'?"
    with pytest.raises(raypar.RayparError, match="no such folder"):
        raypar.load("mnist", folder=tmp_path / "no")
