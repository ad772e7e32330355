"""``raypar.load``: a study as a pandas frame, and what is said where there is none."""

import pickle

import pandas as pd
import pytest
from recording import recorded
from results import make_result

import raypar
from raypar.analysis.question import Question
from raypar.study.trial import TrialState


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the store of one study."""
    folder = tmp_path_factory.mktemp("project")
    results = [make_result({"num_workers": n}, r, 4.0 / n, started_at=10.0 * r + n) for n in (1, 2) for r in range(2)]
    results.append(make_result({"num_workers": 4}, state=TrialState.FAILED, started_at=100.0))
    recorded(folder, Question("mnist", {"num_workers": 1}, ("num_workers",)), results)
    return folder


def test_a_study_is_a_frame_of_its_trials(folder, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    frame = raypar.load("mnist", folder=folder)
    assert frame["point.num_workers"].tolist() == [1, 2, 1, 2, 4]
    medians = frame[frame.state == "finished"].groupby("point.num_workers").train_time_s.median()
    assert medians.to_dict() == {1: 4.0, 2: 2.0}
    assert frame.speedup.dropna().tolist() == [1.0, 2.0, 1.0, 2.0]
    assert frame.attrs["study"] == "mnist"


def test_a_frame_has_the_reports_figures_which_notebooks_show_and_files_take(folder, tmp_path):
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


def test_the_store_is_that_of_the_current_folder_unless_one_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(folder)
    assert len(raypar.load("mnist")) == 5
    monkeypatch.chdir(tmp_path)
    assert len(raypar.load("mnist", f"sqlite:///{folder}/mlflow.db")) == 5
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    assert len(raypar.load("mnist")) == 5


def test_a_study_or_folder_that_is_not_there_is_named_with_one_that_is(folder, tmp_path):
    with pytest.raises(raypar.RayparError, match="no study `mnits` in the store") as error:
        raypar.load("mnits", f"sqlite:///{folder}/mlflow.db")
    assert error.value.hint == "did you mean 'mnist'?"
    with pytest.raises(raypar.RayparError, match="there is no such folder"):
        raypar.load("mnist", folder=tmp_path / "no")
