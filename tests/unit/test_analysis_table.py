"""Tables from other sources: roles of columns, notation of numbers; mistakes are in tests/golden/cases/tables.txt."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raypar.analysis.columns import Role, role_of
from raypar.analysis.laws import Scaling
from raypar.analysis.scaling import Measurement, Runs, analyse_scaling
from raypar.analysis.table import Asked, read_table
from raypar.errors import RayparError


@pytest.fixture
def table(tmp_path):
    return tmp_path / "times.csv"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.integers(1, 10**6), st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=4), min_size=1, max_size=200
    )
)
def test_what_is_written_is_read(table, values):
    lines = [f"{n},{value!r}" for n, repeats in values.items() for value in repeats]
    table.write_text("\n".join(["workers,time", *lines]), encoding="utf-8")
    table_read = read_table(table, asked=Asked(scaling=Scaling.STRONG))
    assert table_read.runs == {"": Runs({n: tuple(repeats) for n, repeats in values.items()}, Measurement.TIME)}


@pytest.mark.parametrize("workers", ["workers", "num_workers", " Workers "])
@pytest.mark.parametrize("value", ["time", "time_s", "seconds", "throughput"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_columns_have_some_names_and_stand_anywhere(table, workers, value, delimiter):
    lines = [["host", value, "repeat", workers], ["a", "2.5", "1", "4"], ["a", " 2.75", "2", "4.0"]]
    table.write_text("\n".join(map(delimiter.join, lines)), encoding="utf-8")
    quantity = Measurement("throughput" if value == "throughput" else "time")
    assert read_table(table).runs == {"": Runs({4: (2.5, 2.75)}, quantity, unit=value * (value == "throughput"))}


def test_byte_order_marks_remarks_and_empty_lines_are_skipped(table):
    table.write_bytes(b'\xef\xbb\xbf# made on a cluster\r\n\r\nworkers,time\r\n1,"10"\r\n,\r\n\r\n2,6\r\n')
    assert read_table(table).runs[""].values == {1: (10.0,), 2: (6.0,)}


def test_a_quoted_cell_that_spans_lines_is_refused(table):
    assert "a quoted cell spans several lines" in refusal(table, 'workers,time,note\n1,10,"a\n2,5,b"\n')


MIXED = "workers,time,framework,batch,seed\n1,10,torch,8,0\n1,11,torch,8,1\n2,6,torch,8,0\n2,3,jax,16,0\n"


def test_runs_that_differ_in_other_columns_are_not_repeats(table):
    table.write_text(MIXED, encoding="utf-8")
    with pytest.raises(RayparError) as caught:
        read_table(table)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("2 mistakes in the table")
    assert lines[1] == "  line 5, framework = 'jax': differs from 'torch' in line 4, which has 2 workers too"
    assert lines[2].endswith("fit each value on its own with --by framework, or delete the column")
    assert "line 5, batch = '16'" in lines[3]


@pytest.mark.parametrize("by", [("framework",), ("Batch",), ("framework", "batch")])
def test_runs_are_grouped_by_named_columns(table, by):
    table.write_text(MIXED, encoding="utf-8")
    first, second = read_table(table, by).runs.values()
    assert (first.values, second.values) == ({1: (10.0, 11.0), 2: (6.0,)}, {2: (3.0,)})


def test_columns_to_group_by_must_exist_and_not_be_measured(table):
    table.write_text(MIXED, encoding="utf-8")
    with pytest.raises(RayparError, match="--by = 'time': is what was measured"):
        read_table(table, ["time"])
    with pytest.raises(RayparError, match="columns to group by: framework, batch, seed"):
        read_table(table, ["frame"])


def read(table, text, **asked):
    table.write_text(text, encoding="utf-8")
    return read_table(table, asked=Asked(**asked))


def efficiencies(table, text, **asked):
    """Return the parallel efficiency of each worker count, in percent."""
    of = read(table, text, **asked)
    return {p.num_workers: round(100 * p.efficiency.value) for p in analyse_scaling(of.runs[""], of.scaling).points}


def refusal(table, text, **asked):
    with pytest.raises(RayparError) as caught:
        read(table, text, **asked)
    return f"{caught.value.message} → {caught.value.hint}"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *((name, Role.WORKERS) for name in ("GPUs", "num_gpus", "#GPUs", "N workers", "Number of GPUs", "numWorkers")),
        *((name, Role.WORKERS) for name in ("world_size", "nproc", "np", "nodes", "total processes", "devices")),
        *((name, Role.TIME) for name in ("time (ms)", "Elapsed [s]", "wall-clock time", "s/step", "ms per step")),
        *((name, Role.TIME) for name in ("step_time_ms", "trainingTime", "seconds", "duration_h", "time/s")),
        *((name, Role.THROUGHPUT) for name in ("images/sec", "img/s", "samples_per_s", "Throughput (tokens/s)", "fps")),
        *((name, Role.THROUGHPUT) for name in ("images/sec/GPU", "tokens per second per device", "epochs/hour")),
        *((name, Role.SPEEDUP) for name in ("speedup", "Speed-up", "speedup vs 1 GPU")),
        *((name, Role.EFFICIENCY) for name in ("efficiency", "scaling efficiency (%)", "eff.")),
        *((name, None) for name in ("GPU", "n", "gpu_hours", "cpu time", "start_time", "time_std", "min", "host")),
        *((name, None) for name in ("timestamp", "", "throughput_std", "learning rate", "batch size")),
    ],
)
def test_the_role_of_a_column_follows_from_its_name_and_unit(name, role):
    column = role_of(0, name)
    assert (column and column.role) == role


@pytest.mark.parametrize(
    ("name", "unit_s"),
    [("time_ms", 1e-3), ("time (min)", 60), ("ms/step", 1e-3), ("min_time", 1), ("time/s", 1), ("duration_h", 3600)],
)
def test_times_are_read_in_their_unit(table, name, unit_s):
    values = read(table, f"workers,{name}\n1,1005\n2,521\n").runs[""].values
    assert values == {1: (pytest.approx(1005 * unit_s),), 2: (pytest.approx(521 * unit_s),)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPUs,images/sec\n1,740\n2,1481.3\n8,5000\n64,37000\n", {1: 100, 2: 100, 8: 84, 64: 78}),
        ("workers,throughput per GPU\n1,122\n2,115\n16,80\n", {1: 100, 2: 94, 16: 66}),
        ("gpus,img/s/gpu\n2,100\n4,95\n", {2: 100, 4: 95}),
        ("workers,total throughput\n1,122\n2,115\n", {1: 100, 2: 47}),
        ("workers,speedup\n1,1\n2,1.93x\n4,3.54\n", {1: 100, 2: 96, 4: 88}),
        ("workers,efficiency\n1,100 %\n2,96 %\n4,88 %\n", {1: 100, 2: 96, 4: 88}),
        ("workers,time,speedup,efficiency\n1,10,1,1\n2,6,1.67,0.83\n2,5,2,1\n", {1: 100, 2: 91}),
        ("workers;time\n1;100,5\n2;52,1\n8;17,9\n", {1: 100, 2: 96, 8: 70}),
        ("workers;time\n1;1.100,5\n2;600,0\n", {1: 100, 2: 92}),
        ("workers\ttime\n1\t1.234.500\n2\t650.000\n", {1: 100, 2: 95}),
        ('workers,time\n1,"1,100.5"\n2,"600"\n', {1: 100, 2: 92}),
        ("workers;time\n1;1 100,5\n2;600,5\n", {1: 100, 2: 92}),
        ("workers,time\n1,1.100\n2,0.600\n", {1: 100, 2: 92}),
        ("workers,time\n1,1.100\n2,1.000\n4,1.234\n", None),
        ("workers,time\n1,12.345\n2,6.789\n", {1: 100, 2: 91}),
        ("workers,time\n1,1.100\n2,1000\n", None),
        ("workers time\n1 100.5\n2  52.1\n", {1: 100, 2: 96}),
    ],
)
def test_usual_tables_are_read_correctly(table, text, expected):
    if expected is not None:
        assert efficiencies(table, text) == expected
    else:
        assert "has two readings" in refusal(table, text)


@pytest.mark.parametrize("text", ["1;1.100\n2;600\n", "1;1.100\n2;1.050\n", '1;"1,100"\n2;"600"\n'])
def test_a_mark_before_three_digits_is_ambiguous(table, text):
    text = f"workers;time\n{text}"
    message, mark = refusal(table, text), "," if "," in text else "."
    assert "has two readings: 1100, with a mark between thousands, or 1.100" in message and "--decimal" in message
    first = {d: read(table, text, decimal=d, scaling=Scaling.STRONG).runs[""].values[1] for d in ".,"}
    assert first == {mark: (1.1,), "." if mark == "," else ",": (1100.0,)}


def test_numbers_of_two_notations_are_refused(table):
    assert "52.1 has a decimal point, 100,5 a decimal comma" in refusal(table, "workers;time\n1;100,5\n2;52.1\n")
    assert "line 2, time = '1.23'" in refusal(table, "workers;time\n1;1.23\n2;9\n", decimal=",")


FALLING = "workers,throughput\n1,122\n2,115\n4,111\n8,110\n16,80\n"
CONSTANT = "workers,time\n1,49.7\n2,52.2\n16,54.3\n"


def test_a_falling_throughput_is_refused_unless_a_reading_is_chosen(table):
    message = refusal(table, FALLING)
    assert "of all workers together: 0.94× with 2 workers (47 % efficient), 0.66× with 16 workers (4 % eff" in message
    assert "of each worker: 1.89× with 2 workers (94 % efficient), 10.5× with 16 workers (66 % efficient)" in message
    assert efficiencies(table, FALLING, is_of_each=True)[2] == 94
    assert efficiencies(table, FALLING, is_of_each=False)[2] == 47
    assert efficiencies(table, FALLING.replace("2,115", "2,150"))[2] == 61  # no worker alone is as fast


def test_a_time_that_hardly_falls_is_refused_unless_a_reading_is_chosen(table):
    message = refusal(table, CONSTANT)
    assert "strong scaling, the same work for all: 0.95× with 2 workers (48 % efficient)" in message
    assert "14.6× with 16 workers (92 % efficient) → say which: --scaling strong, or --scaling weak" in message
    assert efficiencies(table, CONSTANT, scaling=Scaling.WEAK)[16] == 92
    assert efficiencies(table, CONSTANT, scaling=Scaling.STRONG)[16] == 6


def test_columns_can_be_named(table):
    text = "n,threads,t,samples/s\n1,8,10,100\n2,8,6,150\n"
    columns = {Role.WORKERS: "N", Role.TIME: "t"}
    assert read(table, text, columns=columns).runs[""].values == {1: (10.0,), 2: (6.0,)}
    columns = {Role.WORKERS: "n", Role.THROUGHPUT: "samples/s"}
    of = read(table, text, columns=columns)
    assert of.runs[""].quantity is Measurement.THROUGHPUT and of.runs[""].unit == "samples/s"
    assert of.reading == (
        "Read times.csv: workers from `n`, throughput of all workers together from `samples/s`, "
        "taken as strong scaling (--scaling weak: N workers did N times the work)."
    )
    assert read(table, text, columns=columns, scaling=Scaling.WEAK).reading.endswith("from `samples/s`.")
    assert "--time-column = 'x': no such column" in refusal(table, text, columns={Role.TIME: "x"})
