"""Tables from elsewhere: what is read, and how mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raypar.analysis.scaling import MAX_MISTAKES, Quantity, read_table
from raypar.errors import RayparError


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "times.csv"


def told(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RayparError) as error:
        read_table(path)
    return str(error.value).replace(str(path), "FILE")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.integers(1, 10**6), st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=4), min_size=1))
def test_what_is_written_is_read(table: Path, values: dict[int, list[float]]) -> None:
    lines = [f"{n},{value!r}" for n, repeats in values.items() for value in repeats]
    table.write_text("\n".join(["workers,time", *lines]), encoding="utf-8")
    runs = read_table(table)
    assert runs.quantity is Quantity.TIME
    assert runs.values == {n: tuple(repeats) for n, repeats in values.items()}


@pytest.mark.parametrize("workers", ["workers", "num_workers", " Workers "])
@pytest.mark.parametrize("value", ["time", "time_s", "seconds", "throughput"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_columns_have_some_names_and_stand_anywhere(table: Path, workers: str, value: str, delimiter: str) -> None:
    lines = [["host", value, "repeat", workers], ["a", "2.5", "1", "4"], ["b", " 2.75", "2", "4.0"]]
    table.write_text("\n".join(map(delimiter.join, lines)), encoding="utf-8")
    runs = read_table(table)
    assert runs.values == {4: (2.5, 2.75)}
    assert (runs.quantity is Quantity.THROUGHPUT) == (value == "throughput")


def test_marks_of_other_programs_remarks_and_empty_lines_are_no_trouble(table: Path) -> None:
    table.write_bytes(b'\xef\xbb\xbf# made on a cluster\r\n\r\nworkers,time\r\n1,"10"\r\n,\r\n\r\n2,6\r\n')
    assert read_table(table).values == {1: (10.0,), 2: (6.0,)}


def test_all_mistakes_are_told_at_once_with_line_value_and_way_out(table: Path) -> None:
    text = "workers,time_s\n1,10\n# a remark\ntwo,5.5s\n2.5,0\n\n-4,nan\n8\n0,1e99\n"
    assert told(table, text).splitlines() == [
        "FILE: 9 mistakes in the table",
        "  line 4, workers = 'two': is no whole number from 1 to 1,000,000",
        "      → write the worker count, such as 4",
        "  line 4, time_s = '5.5s': is no number",
        "      → write it without a unit and with a point, such as 12.5",
        "  line 5, workers = '2.5': is no whole number from 1 to 1,000,000",
        "      → write the worker count, such as 4",
        "  line 5, time_s = '0': is not greater than 0",
        "      → leave out the line of a run that failed",
        "  line 7, workers = '-4': is no whole number from 1 to 1,000,000",
        "      → write the worker count, such as 4",
        "  line 7, time_s = 'nan': is no number",
        "      → write it without a unit and with a point, such as 12.5",
        "  line 8, time_s = '': is missing",
        "      → leave out the line of a run that failed",
        "  line 9, workers = '0': is no whole number from 1 to 1,000,000",
        "      → write the worker count, such as 4",
        "  line 9, time_s = '1e99': is not within 1e-15 to 1e+15",
        "      → write times in seconds",
    ]


def test_of_very_many_mistakes_some_are_told_and_the_rest_counted(table: Path) -> None:
    text = told(table, "workers,time\n" + "1,x\n" * (MAX_MISTAKES + 5))
    assert text.startswith(f"FILE: {MAX_MISTAKES + 5} mistakes in the table")
    assert text.count("= 'x'") == MAX_MISTAKES
    assert text.endswith("  and 5 more")


def test_columns_that_are_missing_or_said_twice_are_told(table: Path) -> None:
    assert told(table, "n,elapsed\n1,2\n").splitlines() == [
        "FILE: 2 mistakes in the table",
        "  line 1, head = 'n,elapsed': no column says how many workers",
        "      → name a column workers or num_workers",
        "  line 1, head = 'n,elapsed': no column says how long they took",
        "      → name a column time or time_s or seconds or throughput",
    ]
    assert "line 1, head = 'time,throughput': 2 columns say how long they took" in told(
        table, "workers,time,throughput\n1,2,3\n"
    )


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "FILE: the table is empty"),
        (b"\n# nothing\n", "FILE: the table is empty"),
        (b"workers,time\n", "FILE: the table has a head and no runs below it"),
        (b"workers,time\n1,\xff\n", "FILE: is not text in UTF-8, at byte 15"),
        (b"workers,time\n1," + b"1" * 200_000, "FILE: is no CSV file: field larger than field limit (131072)"),
    ],
)
def test_what_is_no_table_is_told_with_a_way_out(table: Path, content: bytes, what: str) -> None:
    first, way_out = told(table, content).splitlines()
    assert first == what
    assert way_out.startswith("  → ")


def test_pythons_own_way_to_write_a_number_is_none_here(table: Path) -> None:
    assert "line 2, time = '1_000': is no number" in told(table, "workers,time\n1,1_000\n")


def test_files_that_can_not_be_opened_are_told(tmp_path: Path) -> None:
    with pytest.raises(RayparError, match="there is no such file"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(RayparError, match="be read: Is a directory"):
        read_table(tmp_path)
