"""Trials as tables and files: values survive writing and reading, and hostile names do no harm."""

import contextlib
import csv
import json
import math
from dataclasses import replace

import pandas as pd
import pytest
from results import make_result

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.errors import RayparError
from raypar.reporting.export import check_path, frame_of, markdown_of, rows_of, write
from raypar.reporting.text import replacing
from raypar.reporting.view import StudyView
from raypar.study.trial import TrialState

QUESTION = Question("mnist", {"num_workers": 1}, ("num_workers",))
STEPS = ((0.5, 0.25), (0.5, 0.75))
HOSTILE = ('=HYPERLINK("http://x")', "a|b", "<script>alert(1)</script>", "two\nlines", 'quo"te, comma', "-1+2", "@x")


def some_results():
    return [
        make_result({"num_workers": 1}, 0, 4.0, started_at=10.0),
        make_result({"num_workers": 2}, 0, 2.5, started_at=20.0, environment={"node": ["n1", "n2"], "gang": "g"}),
        make_result({"num_workers": 4}, 0, 0.1 + 0.2, 1 / 3, started_at=30.0),
        make_result({"num_workers": 8}, 0, state=TrialState.FAILED, failure=HOSTILE[0], started_at=40.0),
    ]


def test_rows_are_in_starting_order_with_each_number_in_its_column():
    first, second, _, failed = rows_of(QUESTION, some_results()[::-1])
    assert first["identity"] == some_results()[0].spec.identity and list(first) == list(failed)
    assert (second["point.num_workers"], second["train_time_s"], second["final.accuracy"]) == (2, 2.5, 0.97)
    assert (first["speedup"], second["speedup"], failed["speedup"]) == (1.0, pytest.approx(1.6), None)
    assert (failed["state"], failed["failure_kind"], failed["failure"]) == ("failed", "error", HOSTILE[0])
    assert (first["environment.cores"], second["environment.node"]) == ("0", "n1 n2")


def test_a_column_has_one_type_and_whole_numbers_stay_exact():
    mixed = [make_result({"x": x}, config={"flag": f}) for x, f in ((1, True), ("a", None), ((1, 2), False))]
    mixed.append(make_result({"x": True}))
    frame = frame_of(QUESTION, mixed)
    assert frame["point.x"].tolist() == ["1", "a", "(1,2)", "True"]
    types = {"repeat": "Int64", "train_time_s": "float64", "config.flag": "boolean", "study": "string"}
    assert {key: str(frame[key].dtype) for key in types} == types
    seeds = [2**62 + 1, 2**63 + 1]
    both = [replace(r, spec=replace(r.spec, seed=seed)) for r, seed in zip(some_results()[:2], seeds, strict=True)]
    assert frame_of(QUESTION, both[:1])["seed"].tolist() == [2**62 + 1]
    assert frame_of(QUESTION, both)["seed"].tolist() == [str(seed) for seed in seeds]


def test_a_frame_has_the_question_of_the_study():
    assert frame_of(QUESTION, []).empty
    attrs = frame_of(replace(QUESTION, baseline={"num_workers": 1, "split": (1, 2)}), some_results()).attrs
    asked = {"study": "mnist", "metric": "accuracy", "mode": "max", "swept": ["num_workers"]}
    assert attrs == {**asked, "baseline": {"num_workers": 1, "split": [1, 2]}}


def written(folder, name, results):
    """Write a file in a format without step times, and return its path."""
    write(folder / name, QUESTION, results, {}.__getitem__)
    return folder / name


def test_parquet_gives_the_same_frame_back_and_csv_the_same_values(tmp_path):
    expected = frame_of(QUESTION, some_results()[:3])
    types = {key: str(kind) for key, kind in expected.dtypes.items()}
    path = written(tmp_path, "trials.CSV", some_results()[:3])
    from_csv = pd.read_csv(path, dtype=types, keep_default_na=False, na_values=[""])
    from_parquet = pd.read_parquet(written(tmp_path, "trials.parquet", some_results()[:3]))
    for read in (from_csv, from_parquet):
        pd.testing.assert_frame_equal(read, expected, check_exact=True)
    assert from_parquet.attrs == expected.attrs


def test_any_text_comes_back_from_every_file(tmp_path):
    results = [
        make_result({"x": text}, state=TrialState.FAILED, failure=text) for text in (*HOSTILE, "bad \udc80 byte")
    ]
    write(tmp_path / "t.json", QUESTION, results, lambda identity: ())
    from_json = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["trials"]
    from_parquet = pd.read_parquet(written(tmp_path, "t.parquet", results)).to_dict("records")
    for rows in (from_json, from_parquet):
        assert [(row["point.x"], row["failure"]) for row in rows] == [(t, t) for t in (*HOSTILE, "bad ? byte")]
    from_csv = csv.DictReader(written(tmp_path, "t.csv", results).open(encoding="utf-8", newline=""))
    formulas = {HOSTILE[0], "-1+2", "@x"}
    texts = ["'" * (text in formulas) + text for text in (*HOSTILE, "bad ? byte")]
    assert [(row["point.x"], row["failure"]) for row in from_csv] == [(t, t) for t in texts]


def test_numbers_in_a_table_are_no_formulas(tmp_path):
    results = [make_result({"x": x}, accuracy=-0.5) for x in (-1, "a", "+2.5", "-inf", "=1")]
    rows = [*csv.DictReader(written(tmp_path, "t.csv", results).open(encoding="utf-8", newline=""))]
    assert [row["point.x"] for row in rows] == ["-1", "a", "+2.5", "-inf", "'=1"]
    assert {row["final.accuracy"] for row in rows} == {"-0.5"}


def test_json_has_reports_and_step_times_and_is_json(tmp_path):
    diverged = replace(make_result({"x": 1}), reports=({"loss": 1.5}, {"loss": math.nan, "best": math.inf}))
    write(tmp_path / "t.json", QUESTION, [diverged], {diverged.spec.identity: STEPS}.__getitem__)

    read = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    (trial,) = read["trials"]
    assert (read["study"], read["baseline"], read["swept"]) == ("mnist", {"num_workers": 1}, ["num_workers"])
    assert trial["reports"] == [{"loss": 1.5}, {"loss": "NaN", "best": "Infinity"}]
    assert trial["step_times_s"] == [[0.5, 0.25], [0.5, 0.75]]
    assert trial["train_time_s"] == 4.0 and trial["failure"] is None


def test_a_value_with_a_line_break_or_a_bar_stays_in_its_cell_of_a_summary():
    results = [make_result({"x": text}) for text in ("two\nlines", "a|b")]
    rows = markdown_of(StudyView(analyse(Question("s", {}, ("x",)), results)), {}).splitlines()
    assert [row for row in rows if row.startswith("|")][2:] == [
        "| a&#124;b | 4.00 s | 97.0 % | 1 |",
        "| two lines | 4.00 s | 97.0 % | 1 |",
    ]


def test_the_texts_of_a_summary_contain_neither_html_nor_links_that_run_something():
    name, question = (
        "<img src=x onerror=alert(1)>",
        "Does <b>it</b> [scale](javascript:alert(1))? See [us](https://x.y).",
    )
    results = [
        make_result({"x": "[y](data:text/html,z)"}, failure=name, state=TrialState.FAILED),
        make_result({"x": 1}),
    ]
    text = markdown_of(StudyView(analyse(Question(name, {}, ("x",)), results)), {"host": [name]}, question)
    assert "<img" not in text and "<b>" not in text and "&lt;img src=x onerror=alert(1)>" in text
    assert "](javascript" not in text and "](data" not in text and "[us](https://x.y)" in text


def test_an_interrupted_writer_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("old")
    with contextlib.suppress(KeyboardInterrupt), replacing(path) as there:
        there.write_text("half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"] and path.read_text() == "old"


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(RayparError, match="is a folder"):
        check_path(tmp_path / "d.csv", force=True)
