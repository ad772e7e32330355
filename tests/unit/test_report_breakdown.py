"""What people are shown of where a step's time goes."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from results import make_result
from rich.cells import cell_len
from rich.console import Console

from raypar.analysis.analyse import analyse
from raypar.analysis.breakdown import COMMUNICATION, PARTS, STRAGGLERS, Breakdown, Profile
from raypar.analysis.question import Question
from raypar.report.console import print_report
from raypar.report.profile import NAMES, print_profile, sentences


def rank(hidden_s: float = 0.0, waits_for: dict[int, float] | None = None, **parts: float) -> Breakdown:
    whole = {part: parts.get(part, 0.0) for part in PARTS}
    return Breakdown(sum(whole.values()), whole, hidden_s, waits_for or {})


TWO = Profile(
    ranks=(
        rank(0.01, {1: 0.02}, forward=0.02, backward=0.04, stragglers=0.02, exposed_communication=0.01, other=0.01),
        rank(0.01, {}, forward=0.03, backward=0.05, exposed_communication=0.01, other=0.01),
    ),
    num_steps=10,
    step_s=0.09,
    overhead=0.11,
    utilisation=0.25,
    flop_per_sample=1e6,
    peak_flops=2e11,
)


def printed(profile: Profile, width: int = 80, encoding: str = "utf-8", **more: Any) -> str:
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding=encoding)
    print_profile(Console(file=file, width=width), "tiny", profile, **more)
    file.flush()
    return buffer.getvalue().decode(encoding)


def test_every_part_of_every_rank_is_in_the_table_in_milliseconds_and_percent() -> None:
    text = printed(TWO)
    assert re.search(r"^ +rank 0 +rank 1$", text, re.MULTILINE)
    assert re.search(r"^forward pass +20\.00 ms +20 % +30\.00 ms +30 %$", text, re.MULTILINE)
    assert re.search(r"^waiting for stragglers +20\.00 ms +20 % +0\.00 ms +0 %$", text, re.MULTILINE)
    assert re.search(r"^step +100\.00 ms +100\.00 ms$", text, re.MULTILINE)
    assert re.search(r"^hidden communication +10\.00 ms +10 % +10\.00 ms +10 %$", text, re.MULTILINE)
    assert "bubble" not in text  # there is no pipeline
    assert all(cell_len(line) <= 80 for line in text.splitlines())


def test_of_many_ranks_the_mean_the_least_and_the_most_are_shown() -> None:
    ranks = tuple(rank(forward=0.01 * (i + 1), other=0.01) for i in range(8))
    text = printed(replace(TWO, ranks=ranks))
    assert re.search(r"^ +mean +least +most$", text, re.MULTILINE)
    row = re.search(r"^forward pass +([\d.]+) ms +\d+ % +([\d.]+) ms +\d+ % +([\d.]+) ms", text, re.MULTILINE)
    assert row is not None and row.groups() == ("45.00", "10.00", "80.00")
    assert all(cell_len(line) <= 80 for line in text.splitlines())


def test_the_sentences_say_what_stands_out() -> None:
    told = " ".join(sentences(TWO))
    assert "Most of a step is backward pass: 45 % (mean of the ranks)." in told
    assert "50 % of communication is hidden" in told
    assert "Exposed, it takes 10 % of a step." in told
    assert "rank 0 for rank 1 20 % of its step" in told
    assert "Model FLOP utilisation: 25.0 % of the 200 GFLOP/s" in told and "all 2 workers" in told
    assert "A step takes 90.0 ms without the profiler, which adds 11 %." in told
    assert "clocks" not in told


def test_one_rank_has_nothing_to_say_of_communication() -> None:
    told = " ".join(sentences(replace(TWO, ranks=(rank(forward=0.1, backward=0.2),))))
    assert "communication" not in told and "wait" not in told and "mean of the ranks" not in told


def test_a_pipelines_bubble_is_told() -> None:
    profile = replace(TWO, ranks=(rank(forward=0.05, bubble=0.05), rank(forward=0.05, bubble=0.05)))
    assert "For 50 % of a step, a rank waits for another stage of the pipeline." in sentences(profile)
    assert re.search(r"^pipeline bubble +50\.00 ms", printed(profile), re.MULTILINE)


def test_messages_between_stages_are_not_said_to_be_exposed() -> None:
    own = rank(forward=0.05, bubble=0.04, exposed_communication=0.01)
    told = " ".join(sentences(replace(TWO, ranks=(own, own))))
    assert "is hidden: it goes on" not in told
    assert "Starting to communicate takes 10 % of a step." in told


def test_what_could_not_be_known_is_told() -> None:
    told = " ".join(sentences(replace(TWO, utilisation=None, shares_clock=False, matches_collectives=False)))
    assert "can't be counted" in told
    assert "clocks were compared at barriers" in told
    assert "waiting for others is part of it" in told


def test_a_profiler_that_costs_nothing_is_not_said_to_save_time() -> None:
    assert "adds nothing that shows (5 % less)" in sentences(replace(TWO, overhead=-0.05))[-1]


def test_the_traces_and_where_to_open_them_are_named() -> None:
    text = printed(TWO, traces="logs/profile")
    assert "Traces: logs/profile" in text and "https://ui.perfetto.dev" in text
    assert "Traces" not in printed(TWO)


def test_a_console_without_more_than_ascii_gets_it_all_the_same() -> None:
    assert "backward pass" in printed(TWO, encoding="ascii")


def report_of(width: int, profile: Profile | None = TWO) -> str:
    results = [make_result({"num_workers": n}, r, 4.0 / n) for n in (1, 2) for r in range(2)]
    if profile is not None:
        results[2] = replace(results[2], profile=profile.to_dict())
    file = io.StringIO()
    print_report(
        analyse(Question("tiny", {"num_workers": 1}, ("num_workers",)), results), Console(file=file, width=width)
    )
    return file.getvalue()


def test_a_studys_report_has_a_line_for_each_point_that_was_looked_into() -> None:
    text = report_of(80)
    head, row = text[text.index("Where a step's time goes") :].splitlines()[1:3]
    assert head.split() == ["point", "step", "forw.", "backw.", "comm.", "waits", "other", "hidden", "MFU"]
    cells = re.split(r"\s{2,}", row.strip())
    assert cells == ["num_workers=2", "90.0 ms", "25 %", "45 %", "10 %", "10 %", "10 %", "50 %", "25.0 %"]
    assert all(cell_len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("width", [30, 40, 60])
def test_a_narrow_console_gets_the_same_in_lines(width: int) -> None:
    text = report_of(width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    told = " ".join(text.split())
    assert "forw. 25 %" in told and "backw. 45 %" in told


def test_a_study_that_was_not_looked_into_has_no_such_section() -> None:
    assert "Where a step's time goes" not in report_of(80, None)


def test_every_part_has_a_name() -> None:
    assert set(NAMES) == set(PARTS)
    assert NAMES[COMMUNICATION] != NAMES[STRAGGLERS]
