"""Trials as tables and files: what is written is what is read back, and hostile names do no harm."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from results import make_result

from raypar.analysis.question import Question
from raypar.errors import RayparError
from raypar.report.export import check_path, frame_of, rows_of, write
from raypar.report.text import replacing
from raypar.study.trial import TrialResult, TrialState

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))
STEPS = ((0.5, 0.25), (0.5, 0.75))
HOSTILE = ('=HYPERLINK("http://x")', "a|b", "<script>alert(1)</script>", "two\nlines", 'quo"te, comma', "-1+2", "@x")


def no_step_times(identity: str) -> Sequence[Sequence[float]]:
    raise AssertionError("step times are for JSON alone")


def some_results() -> list[TrialResult]:
    return [
        make_result({"num_workers": 1}, 0, 4.0, started_at=10.0),
        make_result({"num_workers": 2}, 0, 2.5, started_at=20.0, environment={"node": ["n1", "n2"], "gang": "g"}),
        make_result({"num_workers": 4}, 0, 0.1 + 0.2, 1 / 3, started_at=30.0),
        make_result({"num_workers": 8}, 0, state=TrialState.FAILED, failure=HOSTILE[0], started_at=40.0),
    ]


def test_a_trial_is_a_row_and_every_column_has_its_unit_or_kind_in_its_name() -> None:
    first, second, _, failed = rows_of(QUESTION, some_results())
    assert first["study"] == "mnist" and first["identity"] == some_results()[0].spec.identity
    assert (second["point.num_workers"], second["config.num_workers"], second["config.lr"]) == (2, 2, 0.1)
    assert (second["train_time_s"], second["wall_s"], second["final.accuracy"]) == (2.5, 3.5, 0.97)
    assert second["throughput_samples_per_s"] == pytest.approx(180_000 / 2.5)
    assert (first["speedup"], second["speedup"], failed["speedup"]) == (1.0, pytest.approx(1.6), None)
    assert (failed["state"], failed["failure_kind"], failed["failure"]) == ("failed", "error", HOSTILE[0])
    assert list(first) == list(failed)


def test_what_all_ranks_share_is_told_once() -> None:
    first, second = rows_of(QUESTION, some_results())[:2]
    assert (first["environment.cores"], first["environment.foreign_cpu_share"]) == ("0", 0.01)
    assert (second["environment.node"], second["environment.gang"]) == ("n1 n2", "g")


def test_trials_stand_in_the_order_in_which_they_were_started() -> None:
    rows = rows_of(QUESTION, some_results()[::-1])
    assert [row["started_at_s"] for row in rows] == [10.0, 20.0, 30.0, 40.0]


def test_a_column_has_one_type() -> None:
    mixed = [make_result({"x": x}, config={"flag": f}) for x, f in ((1, True), ("a", None), ((1, 2), False))]
    mixed.append(make_result({"x": True}))
    frame = frame_of(QUESTION, mixed)
    assert frame["point.x"].tolist() == ["1", "a", "(1,2)", "True"]
    types = {key: str(frame[key].dtype) for key in ("repeat", "train_time_s", "config.flag", "study", "final.accuracy")}
    assert types == {
        "repeat": "Int64",
        "train_time_s": "float64",
        "config.flag": "boolean",
        "study": "string",
        "final.accuracy": "float64",
    }


def test_whole_numbers_stay_exact() -> None:
    seeds = [2**62 + 1, 2**63 + 1]
    first, second = (
        replace(make_result({"x": i}), spec=replace(make_result({"x": i}).spec, seed=s)) for i, s in enumerate(seeds)
    )
    assert frame_of(QUESTION, [first])["seed"].tolist() == [2**62 + 1]
    assert frame_of(QUESTION, [first, second])["seed"].tolist() == [str(seed) for seed in seeds]


def test_a_frame_knows_what_the_study_asks() -> None:
    attrs = frame_of(replace(QUESTION, baseline={"num_workers": 1, "split": (1, 2)}), some_results()).attrs
    assert (attrs["study"], attrs["metric"], attrs["mode"], attrs["swept"]) == (
        "mnist",
        "accuracy",
        "max",
        ["num_workers"],
    )
    assert attrs["baseline"] == {"num_workers": 1, "split": [1, 2]}


def test_no_trial_is_an_empty_frame() -> None:
    assert frame_of(QUESTION, []).empty


# ---- files


def written(folder: Path, name: str, results: Sequence[TrialResult]) -> Path:
    path = folder / name
    write(path, QUESTION, results, no_step_times)
    return path


def test_parquet_gives_the_same_frame_back(tmp_path: Path) -> None:
    read = pd.read_parquet(written(tmp_path, "trials.parquet", some_results()))
    expected = frame_of(QUESTION, some_results())
    pd.testing.assert_frame_equal(read, expected, check_exact=True)
    assert read.attrs == expected.attrs


def test_csv_gives_the_same_values_back(tmp_path: Path) -> None:
    expected = frame_of(QUESTION, some_results()[:3])
    types = {key: str(kind) for key, kind in expected.dtypes.items()}
    read = pd.read_csv(
        written(tmp_path, "trials.CSV", some_results()[:3]), dtype=types, keep_default_na=False, na_values=[""]
    )
    pd.testing.assert_frame_equal(read, expected, check_exact=True)


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_comes_back_from_every_file(tmp_path: Path, text: str) -> None:
    results = [make_result({"x": text}), make_result({"x": "b"}, state=TrialState.FAILED, failure=text)]
    rows = list(csv.DictReader(written(tmp_path, "t.csv", results).open(encoding="utf-8", newline="")))
    assert rows[0]["point.x"] == text == rows[1]["failure"]
    read = pd.read_parquet(written(tmp_path, "t.parquet", results))
    assert read["point.x"].tolist() == [text, "b"] and read["failure"].tolist()[1] == text


def test_text_that_utf_8_does_not_have_is_written_all_the_same(tmp_path: Path) -> None:
    results = [make_result({"x": 1}, state=TrialState.FAILED, failure="bad \udc80 byte")]
    for name in ("t.csv", "t.parquet", "t.json"):
        write(tmp_path / name, QUESTION, results, lambda identity: ())
    assert pd.read_parquet(tmp_path / "t.parquet")["failure"].tolist() == ["bad ? byte"]


def test_json_has_reports_and_step_times_and_is_json(tmp_path: Path) -> None:
    diverged = replace(make_result({"x": 1}), reports=({"loss": 1.5}, {"loss": math.nan, "best": math.inf}))
    write(tmp_path / "t.json", QUESTION, [diverged], {diverged.spec.identity: STEPS}.__getitem__)

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    read = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"), parse_constant=refuse)
    (trial,) = read["trials"]
    assert (read["study"], read["baseline"], read["swept"]) == ("mnist", {"num_workers": 1}, ["num_workers"])
    assert trial["reports"] == [{"loss": 1.5}, {"loss": "NaN", "best": "Infinity"}]
    assert trial["step_times_s"] == [[0.5, 0.25], [0.5, 0.75]]
    assert trial["train_time_s"] == 4.0 and trial["failure"] is None


def begin(path: Path) -> None:
    with replacing(path) as there:
        there.write_text("half")
        raise KeyboardInterrupt


def test_an_interrupted_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        begin(path)
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"] and path.read_text() == "old"


def test_a_file_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RayparError, match=r"no/t\.csv: can't be written"):
        written(tmp_path / "no", "t.csv", some_results())


# ---- paths


@pytest.mark.parametrize("name", ["t.xlsx", "t", "csv"])
def test_an_ending_that_is_not_known_is_told_with_those_that_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(RayparError, match=r"\.parquet") as error:
        check_path(tmp_path / name, force=True)
    assert str(tmp_path / name) in error.value.message


def test_a_file_that_is_there_is_replaced_only_if_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    check_path(path, force=False)
    path.touch()
    with pytest.raises(RayparError, match="--force"):
        check_path(path, force=False)
    check_path(path, force=True)
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(RayparError, match="is a folder"):
        check_path(tmp_path / "d.csv", force=True)
