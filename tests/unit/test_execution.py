"""An execution runs what is missing, and keeps each result before it shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stage import Stage, a_study, finished

from raypar import grid
from raypar.errors import DataError, StudyError
from raypar.execution.execute import CHANGED_CODE
from raypar.execution.plan import check_data
from raypar.run.runner import TrialEnded
from raypar.study.trial import TrialResult


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path)


def test_every_result_is_recorded_before_it_is_shown_and_the_end_is_said(stage: Stage) -> None:
    study = a_study()
    outcome = stage.execute(study)
    assert stage.of("ran") == [study.trials()]
    assert tuple(stage.of("recorded")) == study.trials()
    for i, entry in enumerate(stage.happened):
        if isinstance(entry, tuple) and entry[0] == "recorded":
            later = stage.happened[i + 1 :]
            assert "shown" in later and stage.happened[:i].count("shown") == stage.of("recorded").index(entry[1])
    assert stage.happened[:3] == ["checked", "started", "runner up"]
    assert stage.happened[-1] == ("closed", "finished")
    assert not outcome.was_interrupted and outcome.num_failed == 0 and outcome.analysis.num_trials == 8


def test_speedups_of_pairs_go_to_their_trials_as_soon_as_both_are_there_and_once(stage: Stage) -> None:
    study = a_study()
    stage.execute(study)
    specs = {spec.identity: spec for spec in study.trials()}
    told = [(identity, values) for metrics in stage.of("metrics") for identity, values in metrics.items()]
    assert len(told) == len({identity for identity, _ in told}) == 8
    for identity, values in told:
        two = specs[identity].placement.num_workers == 2
        assert values == {"speedup": pytest.approx(2.0 if two else 1.0), "efficiency": pytest.approx(1.0)}
    (scaling,) = stage.of("scaling")
    for width in (4, 8):
        curve = {num_workers: v for (key, num_workers), v in scaling.items() if key == f"scaling/speedup width {width}"}
        assert curve == {1: 1.0, 2: pytest.approx(2.0)}


def test_what_is_stored_is_not_run_again_unless_asked(stage: Stage) -> None:
    study = a_study()
    stage.stored = [finished(spec) for spec in study.trials()[:5]]
    outcome = stage.execute(study)
    assert stage.of("ran") == [study.trials()[5:]] and outcome.analysis.num_trials == 8
    stage.happened.clear()
    stage.execute(study, rerun_all=True)
    assert stage.of("ran") == [study.trials()]


def test_a_fresh_execution_that_goes_on_takes_only_results_of_its_own(stage: Stage) -> None:
    study = a_study()
    stage.stored = [finished(spec, started_at=100.0 + i) for i, spec in enumerate(study.trials())]
    stage.execute(study, rerun_all=True)
    since = json.loads(stage.execution.tags["raypar.resume"])["not_before"]
    assert since == stage.execution.started_at > 1e9
    stage.happened.clear()
    stage.execute(study, not_before=103.0)
    assert stage.of("ran") == [study.trials()[:3]]
    assert json.loads(stage.execution.tags["raypar.resume"])["not_before"] == 103.0


def test_where_nothing_is_missing_nothing_is_started(stage: Stage) -> None:
    study = a_study()
    stage.stored = [finished(spec) for spec in study.trials()]
    outcome = stage.execute(study)
    assert stage.happened == ["checked"]
    assert outcome.analysis.num_trials == 8 and not outcome.log_dir.exists()


def test_changed_code_is_told_where_trials_of_the_old_one_are_kept(stage: Stage) -> None:
    study = a_study()
    stage.code = {"model.py": "py3.11:1", "s.py": "py3.11:1"}
    old = {"model.py": "py3.11:0", "s.py": "py3.11:1"}
    stage.execute(study)
    assert stage.notices == []  # nothing is kept
    stage.stored = [finished(spec, code=old) for spec in study.trials()[:2]]
    stage.execute(study)
    assert stage.notices == [CHANGED_CODE.format("2 trials", "model.py")]
    stage.notices = []
    stage.execute(study, rerun_all=True)
    stage.stored = [finished(study.trials()[0], code=stage.code), finished(study.trials()[1])]
    stage.execute(study)
    assert stage.notices == []


def test_digests_of_functions_in_an_earlier_store_are_unknown_not_changed(stage: Stage) -> None:
    study = a_study()
    stage.code = {"s.py": "py3.11:0123456789ab"}
    text = finished(study.trials()[0], code={"s.py: model": "0123456789ab", "s.py: study": "ba9876543210"}).to_json()
    stage.stored = [TrialResult.from_json(text)]
    stage.execute(study)
    assert stage.notices == []


def test_every_result_is_kept_with_the_code_that_it_ran(stage: Stage) -> None:
    stage.code = {"s.py": "py3.11:1"}
    stage.execute(a_study())
    shown = [event.result.code for event in stage.shown if isinstance(event, TrialEnded)]
    assert shown == [stage.code] * 8


def test_data_is_asked_for_once_for_each_choice_of_the_workloads_own_options() -> None:
    asked: list[Any] = []
    check_data(a_study(prepare=lambda config: asked.append(config["width"])))
    assert sorted(asked) == [4, 8]


def test_missing_data_stops_the_execution_before_anything_is_started(stage: Stage) -> None:
    def prepare(config: Any) -> None:
        raise DataError("no such folder")

    with pytest.raises(DataError):
        stage.execute(a_study(prepare=prepare))
    assert stage.happened == []


def test_a_placement_that_can_never_run_stops_the_execution_before_anything_is_started(stage: Stage) -> None:
    with pytest.raises(StudyError, match="needs 64 CPUs"):
        stage.execute(a_study(space={"num_workers": grid(1, 64)}))
    assert stage.happened == ["checked"]
