"""``raypar fit``: the laws fitted to a study or a CSV file, in 80 columns and without colour, or what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from recording import recorded
from results import make_result
from typer.testing import CliRunner

from raypar.analysis import scaling
from raypar.analysis.question import Question
from raypar.cli.app import app
from raypar.study.trial import TrialState

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


# ---- studies


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a store with three studies."""
    folder = tmp_path_factory.mktemp("project")
    uri = f"sqlite:///{folder}/mlflow.db"
    swept = [
        make_result({"batch_size": b, "num_workers": n}, r, t)
        for b in (64, 128)
        for n, repeats in TIMES[: 4 if b == 64 else 3]
        for r, t in enumerate(repeats)
    ]
    swept.append(make_result({"batch_size": 128, "num_workers": 16}, 0, state=TrialState.FAILED))
    weak = [
        make_result({"num_workers": n}, r, t, config={"per_worker_batch_size": 32})
        for n, repeats in TIMES[:3]
        for r, t in enumerate(repeats[:1])
    ]
    alone = [make_result({"batch_size": b}, 0) for b in (32, 64)]
    recorded(folder, Question("swept", {"num_workers": 1}, ("batch_size", "num_workers")), swept)
    recorded(folder, Question("weak", {"num_workers": 1}, ("num_workers",)), weak)
    recorded(folder, Question("alone", {}, ("batch_size",)), alone)
    return uri


def test_a_study_shows_each_group_of_points_that_differ_only_in_their_workers(store: str) -> None:
    code, out, err = fit("swept", "--tracking-uri", store)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    titles = [lines.index(f"swept: batch_size={b}") for b in (64, 128)]
    for title in titles:
        assert lines[title + 2].split() == ["workers", "n", "samples/s", "speedup", "eff.", "Karp–Flatt"]
        assert lines[title + 3].split()[:3] == ["1", "3", "1.80k"] and "baseline" in lines[title + 3]
    assert out.count("Strong scaling: ") == out.count("Amdahl's law (") == 2
    assert "samples/s [" in joined(out)
    assert joined(out).endswith("Left out: 16 workers (failed).")
    assert max(map(len, lines)) <= 80 and "\x1b" not in out


def test_whether_a_study_scales_strongly_or_weakly_is_known_from_its_config(store: str) -> None:
    code, out, _ = fit("weak", "--tracking-uri", store, "--baseline", "2")
    assert code == 0
    assert "Gustafson's law (" in out and "Amdahl" not in out
    assert "over 2 workers;" in joined(out)
    code, _, err = fit("weak", "--tracking-uri", store, "--scaling", "strong")
    assert code == 2 and "--scaling strong is for files, and `weak` is none" in err


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("swepd", (), "no study `swepd` in the store"),
        ("alone", (), "study `alone` has no finished trials that differ only in num_workers"),
        ("swept", ("--baseline", "3"), "no finished trial with 3 workers at batch_size=64 to compare with"),
    ],
)
def test_a_study_that_can_not_be_fitted_is_one_message_and_exit_code_2(
    store: str, name: str, flags: tuple[str, ...], message: str
) -> None:
    code, out, err = fit(name, "--tracking-uri", store, *flags)
    assert (code, out) == (2, "")
    assert message in err and "→" in err and "Traceback" not in err


def test_a_study_that_is_not_there_is_told_with_the_same_words_as_by_the_report(store: str) -> None:
    report = CliRunner().invoke(app, ["report", "swepd", "--tracking-uri", store])
    assert fit("swepd", "--tracking-uri", store) == (report.exit_code, report.stdout, report.stderr)
    assert "swept" in report.stderr


def test_the_report_of_a_study_says_what_scaling_it_found(store: str) -> None:
    done = CliRunner().invoke(app, ["report", "swept", "--tracking-uri", store], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "Scaling at batch_size=128 (strong: the batch is fixed), over 1 worker:" in done.stdout
    assert "Left out: 16 workers (failed)." in done.stdout


def test_a_file_is_a_file_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(times(tmp_path)).rename("swept")
    code, out, _ = fit("swept", "--scaling", "strong")
    assert code == 0 and out.splitlines()[0].split()[2] == "time"
    code, _, err = fit("missing.csv")
    assert code == 2 and "missing.csv: there is no such file" in err
