"""A trial's result comes back from the tags and files of its MLflow run (`golden/cases/runs.txt` shows a run)."""

import random
from dataclasses import replace

import pytest
from recording import make_result

from raypar.study.trial import TrialResult, TrialState, latest
from raypar.track.names import MAX_TAG_LENGTH, MAX_TAG_PARTS
from raypar.track.runs import SECTIONS, child_run, result_from_tags, result_tags, series_keys, without_step_times

RESULT = make_result()


@pytest.mark.parametrize("num_reports", [0, 2, 500, 5000])
def test_a_result_comes_back_from_its_tags_or_with_thousands_of_evaluations_from_its_file(num_reports):
    draw = random.Random(num_reports).random  # numbers of as many digits as measured ones
    reports = tuple({**{key: draw() for key in SECTIONS}, "step": i, "epoch": i / 938} for i in range(num_reports))
    result = replace(RESULT, reports=reports)
    assert "step" not in series_keys(result)
    tags, run = result_tags(result), child_run(result, result_json=result.to_json(), recorded_at=2000.0)
    assert (tags is None) is (num_reports == 5000)
    if tags is None:
        assert not any(key.startswith("raypar.result") for key in run.tags)
    else:
        assert max(map(len, tags.values())) <= MAX_TAG_LENGTH and len(tags) <= MAX_TAG_PARTS
        assert result_from_tags(run.tags) == without_step_times(result)
    assert TrialResult.from_json(run.files["trial.json"]) == result


@pytest.mark.parametrize("text", ["", "{}", "null", "[]", '{"spec": 1}', "zlib;!!", '{"failure": null}'])
def test_a_damaged_tag_is_no_result(text):
    assert result_from_tags({"raypar.result": text}) is None


def test_the_latest_complete_result_of_an_identity_wins_or_the_latest_failed_one():
    first, second = replace(RESULT, started_at=1.0), replace(RESULT, started_at=2.0, state=TrialState.STOPPED)
    failed = [replace(RESULT, started_at=t, state=TrialState.FAILED) for t in (3.0, 5.0, 4.0)]
    assert latest([second, *failed, first]) == (second,)
    assert latest(failed) == (failed[1],)
