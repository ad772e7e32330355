"""``raypar fit``: the laws fitted to a CSV file, in 80 columns and without colour, or one message on what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from raypar.analysis import scaling
from raypar.cli import app

TIMES = (
    (1, (100.0, 101.0, 99.0)),
    (2, (53.0, 52.0, 52.5)),
    (4, (29.0, 28.6, 29.2)),
    (8, (18.0, 17.7, 18.2)),
    (16, (13.9, 14.2, 14.0)),
)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scaling.analyse_scaling.__kwdefaults__, "num_resamples", 60)


def table(folder: Path, text: str) -> str:
    path = folder / "times.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def times(folder: Path, num_counts: int = 5, num_repeats: int = 3) -> str:
    lines = [f"{n},{t}" for n, repeats in TIMES[:num_counts] for t in repeats[:num_repeats]]
    return table(folder, "\n".join(["workers,time", *lines]))


def fit(*args: str, width: int = 80) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["fit", *args], env={"COLUMNS": str(width)})
    return done.exit_code, done.stdout, done.stderr


def joined(text: str) -> str:
    return " ".join(text.split())


def test_a_table_of_numbers_and_a_paragraph_for_each_law(tmp_path: Path) -> None:
    code, out, err = fit(times(tmp_path))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["workers", "n", "time", "speedup", "eff.", "Karp–Flatt"]
    assert lines[1].split()[:3] == ["1", "3", "100"] and "baseline" in lines[1]
    assert lines[4].startswith("      8  3  18.0 s [")
    assert "5.56× [" in lines[4] and "69 %" in lines[4]
    text = joined(out)
    assert "Strong scaling: every worker count does the same work. Speedups are over 1 worker;" in text
    assert "Amdahl's law (S = 1 / (f + (1 - f) / N)): serial fraction f = " in text
    assert "Gunther's Universal Scalability Law (S = N / (1 + s (N - 1) + k N (N - 1))): contention s = " in text
    assert "Extrapolated: 32 workers " in text
    assert "as fast (extrapolated)" in text
    assert "It peaks at about" in text
    assert "left-out" in text


def test_it_fits_80_columns_without_colour_and_keeps_intervals_in_one_piece(tmp_path: Path) -> None:
    _, out, _ = fit(times(tmp_path))
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out and "\N{NO-BREAK SPACE}" not in out
    assert all(line.count("[") == line.count("]") for line in out.splitlines())


def test_narrow_consoles_lose_no_number(tmp_path: Path) -> None:
    _, out, _ = fit(times(tmp_path), width=40)
    assert max(map(len, out.splitlines())) <= 40
    assert "…" not in out


def test_weak_scaling_takes_gustafsons_law_and_a_baseline_of_ones_own(tmp_path: Path) -> None:
    weak = table(tmp_path, "num_workers,seconds\n" + "".join(f"{n},{100 * (1 + 0.02 * n)}\n" for n in (1, 2, 4, 8)))
    code, out, _ = fit(weak, "--scaling", "weak", "--baseline", "2")
    text = joined(out)
    assert code == 0
    assert "Weak scaling: N workers do N times the work of one. Speedups are of the rates, over 2 workers;" in text
    assert "Gustafson's law (S = N - f (N - 1)): serial fraction f = " in text
    assert "Amdahl" not in text
    assert "baseline" in out.splitlines()[2]
    assert "The laws' parameters have no intervals: 1, 2, 4, 8 workers ran only once." in text


def test_two_repeats_are_said_to_be_few(tmp_path: Path) -> None:
    assert "too narrow with two repeats: about 80 %, not 95 %" in joined(fit(times(tmp_path, num_repeats=2))[1])


def test_a_throughput_is_shown_as_such(tmp_path: Path) -> None:
    _, out, _ = fit(table(tmp_path, "workers,throughput\n1,10000\n2,19000\n4,34000\n8,55000\n"))
    assert out.splitlines()[0].split()[2] == "throughput"
    assert out.splitlines()[1].split()[2] == "10.0k"
    assert "per second" in joined(out)


def test_what_too_few_worker_counts_can_not_tell_is_said(tmp_path: Path) -> None:
    code, out, _ = fit(times(tmp_path, num_counts=3))
    text = joined(out)
    assert code == 0
    assert "Amdahl's law (S = 1 / (f + (1 - f) / N)): serial fraction" in text
    assert "is not fitted: it takes 4 distinct worker counts or more, and there are 3." in text
    assert "Which law fits better can't be told: fewer than two laws could be fitted." in text


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("workers,time\n1,ten\n", (), "line 2, time = 'ten': is no number"),
        ("", (), "the table is empty"),
        ("workers,time\n1,10\n2,6\n", ("--baseline", "4"), "no run with 4 workers to compare with"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    tmp_path: Path, text: str, flags: tuple[str, ...], message: str
) -> None:
    code, out, err = fit(table(tmp_path, text), *flags)
    assert (code, out) == (2, "")
    assert message in err and "→" in err and "Traceback" not in err


def test_a_way_to_scale_that_is_not_known_is_refused(tmp_path: Path) -> None:
    assert fit(times(tmp_path), "--scaling", "sideways")[0] == 2
