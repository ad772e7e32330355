"""What a terminal, a pipe and a narrow console are shown."""

from __future__ import annotations

import io
import re

import pytest
from results import make_result
from rich.cells import cell_len
from rich.console import Console

from raypar.analysis.analyse import Question, StudyAnalysis, analyse
from raypar.report.console import StudyReport, print_report
from raypar.study.trial import TrialResult, TrialState

QUESTION = Question("mnist", {"num_workers": 1}, ("batch_size", "num_workers"), num_repeats=3)


def results(num_repeats: int = 3) -> list[TrialResult]:
    return [
        make_result({"batch_size": b, "num_workers": w}, r, 200 / b**0.5 / w**0.8 * (1 + 0.01 * ((r * 3 + w) % 4)))
        for b in (32, 64, 128, 256, 512)
        for w in (1, 2)
        for r in range(num_repeats)
    ]


def shown(analysis: StudyAnalysis, width: int = 80, encoding: str = "utf-8", **console) -> str:
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding)  # raises where a character can't be encoded
    print_report(analysis, Console(file=file, width=width, **console))
    file.flush()
    return buffer.getvalue().decode(encoding)


def rows(text: str) -> list[list[str]]:
    """The table's cells."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if re.fullmatch(r"[-─ ]+", line) and line.strip())
    return [re.split(r"\s{2,}", line.strip()) for line in lines[start + 1 : lines.index("", start)]]


def test_a_study_of_two_swept_keys_fits_80_columns_with_all_it_has() -> None:
    text = shown(analyse(QUESTION, results()))
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    first, second = rows(text)[:2]
    assert first == ["32", "1", "35.7 s ±5 %", "baseline", "–", "97.0 %", "5.04k", "3"]
    assert second[:2] == ["32", "2"]
    assert re.fullmatch(r"1\.7\d× \[1\.\d\d, 1\.\d\d\]", second[3])
    assert re.fullmatch(r"8\d %", second[4])


def test_a_wide_console_shows_every_interval() -> None:
    text = shown(analyse(QUESTION, results()), width=130)
    assert re.search(r"35\.7 s \[3\d\.\d, 3\d\.\d\]", text)
    assert "batch_size  num_workers" in text


@pytest.mark.parametrize("width", [130, 100, 80, 70, 60, 50, 40, 30])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_width_cuts_a_number_or_overflows(width: int, encoding: str) -> None:
    analysis = analyse(QUESTION, results())
    text = shown(analysis, width=width, encoding=encoding)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "…" not in text and "..." not in text
    for point in analysis.points:
        if not point.is_baseline:
            assert f"{point.speedup.value:.2f}" in text
        assert f"{point.time_s.value:.1f} s" in text or f"{point.time_s.value:.2f} s" in text


def test_a_pipe_gets_no_escape_codes() -> None:
    assert "\x1b" not in shown(analyse(QUESTION, results()))


def test_colour_adds_nothing_to_the_words() -> None:
    analysis = analyse(QUESTION, results())
    coloured = shown(analysis, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == shown(analysis)


def test_brackets_are_not_taken_for_markup() -> None:
    question = Question("s", {}, ("note",))
    text = shown(analyse(question, [make_result({"note": "[red]hot[/red]"})]))
    assert "[red]hot[/red]" in text


def test_an_interval_is_not_torn_apart_at_the_end_of_a_line() -> None:
    for width in range(40, 90, 7):
        for line in shown(analyse(QUESTION, results()), width=width).splitlines():
            assert line.count("[") == line.count("]")


def test_failed_stopped_and_missing_points_are_shown() -> None:
    points = tuple({"batch_size": b, "num_workers": w} for b in (32, 64) for w in (1, 2))
    question = Question("s", {"num_workers": 1}, ("batch_size", "num_workers"), points=points, num_repeats=3)
    some = [
        *(make_result(points[0], r, 4.0 + r) for r in range(3)),
        make_result(points[1], 0, 2.0),
        make_result(points[1], 1, state=TrialState.FAILED, failure="rank 1 was killed"),
        make_result(points[2], 0, state=TrialState.STOPPED),
    ]
    text = shown(analyse(question, some))
    table = {tuple(row[:2]): row[2:] for row in rows(text)}
    assert table["32", "1"][-1] == "3"
    assert table["32", "2"][-1] == "1/3"
    assert table["64", "1"] == ["–", "–", "–", "–", "–", "0/3"]
    assert table["64", "2"][-1] == "0/3"
    assert "rank 1 was killed" in text
    assert "n: finished of all (1 stopped early, not in the times)" in " ".join(text.split())


def test_without_a_baseline_there_is_no_speedup_column() -> None:
    text = shown(analyse(Question("s", {}, ("batch_size", "num_workers")), results()))
    head = text[: text.index("─")]
    assert "speedup" not in head and "eff." not in head and "baseline" not in text


def test_a_study_that_sweeps_nothing_has_one_row() -> None:
    text = shown(analyse(Question("s", {}, ()), [make_result({}, r, 4.0 + 0.1 * r) for r in range(3)]))
    assert rows(text)[0][:2] == ["the only point", "4.10 s [3.80, 4.42]"]


def test_the_report_says_what_its_intervals_assume() -> None:
    def text_of(num_repeats: int) -> str:
        return " ".join(shown(analyse(QUESTION, results(num_repeats))).split())

    assert "95 %, Student t on logarithms, assumes log-normal times" in text_of(3)
    assert "96.9 %, order statistics, assumes no distribution or bootstrap over blocks" in text_of(6)
    assert "intervals:" not in text_of(1)


def test_warnings_come_last_each_with_its_advice() -> None:
    text = shown(analyse(QUESTION, results()))
    assert text.index("as fast as") < text.index("Warning: 3 repeats a point") < text.index("→ Add repeats")


def scaled(counts: tuple[int, ...]) -> StudyAnalysis:
    question = Question("mnist", {"num_workers": 1}, ("num_workers",), num_repeats=3)
    return analyse(
        question,
        [
            make_result({"num_workers": w}, r, 60 / w**0.8 * (1 + 0.01 * ((r + w) % 3)))
            for w in counts
            for r in range(3)
        ],
    )


def test_what_scaling_says_stands_between_the_verdicts_and_the_warnings() -> None:
    text = shown(scaled((1, 2, 4, 8)))
    places = [
        text.index(part)
        for part in (
            "is the fastest",
            "\n\nScaling (strong",
            "\n  Karp–Flatt serial fraction: ",
            "\n\nWarning: 3 repeats",
        )
    ]
    assert places == sorted(places)
    text = shown(scaled((1, 2)))
    assert "\n\nKarp–Flatt serial fraction of 2 workers: " in text and "Scaling" not in text


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_scaling_says_fits_its_console_and_keeps_intervals_whole(encoding: str) -> None:
    analysis = scaled((1, 2, 4, 8))
    for width in (80, 45):
        text = shown(analysis, width=width, encoding=encoding)
        assert max(cell_len(line) for line in text.splitlines()) <= width
        assert "\x1b" not in text
        assert all(line.count("[") == line.count("]") for line in text.splitlines())
        assert "Amdahl's law: " in text and "serial fraction: " in text


def test_effects_of_several_hyperparameters_stand_before_the_warnings() -> None:
    text = shown(analyse(QUESTION, results()))
    assert text.index("serial fraction") < text.index("\n\nWhat each hyperparameter does") < text.index("Warning: ")
    assert "What each hyperparameter does" not in shown(scaled((1, 2, 4, 8)))


def test_a_study_without_results_says_so() -> None:
    assert "No trial finished" in shown(analyse(QUESTION, []))


def test_the_report_can_be_put_into_other_rich_output() -> None:
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(StudyReport(analyse(QUESTION, results())))
    assert "2 workers train" in console.export_text()


def test_a_price_makes_a_column_of_costs_and_says_of_what() -> None:
    results_of_two = [
        make_result({"num_workers": w}, r, 3600.0 / w * (1 + r / 100), environment={"node": ["a", "b"][:w]})
        for w in (1, 2)
        for r in range(3)
    ]
    question = Question("mnist", {"num_workers": 1}, ("num_workers",), num_repeats=3, price_per_node_hour=2.5)
    analysis = analyse(question, results_of_two)
    assert [p.cost.value for p in analysis.points] == pytest.approx([2.525, 2.525])  # half as long, on two machines
    cost = analysis.points[0].cost
    assert cost.low / cost.value == pytest.approx(analysis.points[0].time_s.low / analysis.points[0].time_s.value)
    text = " ".join(shown(analysis).split())
    assert "cost: nodes × hours of that time × 2.5, the price of a node-hour" in text
    assert sum(line.count("2.52") for line in shown(analysis).splitlines()) == 2
    assert max(cell_len(line) for line in shown(analysis).splitlines()) <= 80
    assert "cost" not in shown(analyse(QUESTION, results_of_two))
