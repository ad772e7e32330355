"""What others wrote into a store can't steer a terminal, and sentences don't break where they mustn't."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import make_result
from rich.cells import cell_len
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raypar.analysis.analyse import analyse
from raypar.analysis.question import Question
from raypar.report.console import print_report
from raypar.report.listings import print_trials
from raypar.report.text import TerminalConsole, strip_control, wrap, wrap_hanging
from raypar.study.trial import TrialState

EVIL = "a\x1b[2J\x1b]0;owned\x07b\x9b31mc\r\x08"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def console(**more: object) -> tuple[TerminalConsole, io.StringIO]:
    file = io.StringIO()
    return TerminalConsole(file=file, width=80, **more), file  # type: ignore[arg-type]


def test_escape_sequences_of_a_store_do_not_reach_the_terminal() -> None:
    results = [
        make_result({"optimizer": f"{EVIL}{w}"}, r, 4.0 + w, environment={"node": [EVIL], "cores": [[0]]})
        for w in (1, 2)
        for r in (0, 1)
    ]
    results.append(make_result({"optimizer": "sgd"}, 0, state=TrialState.FAILED, failure=EVIL))
    terminal, file = console()
    print_report(analyse(Question("mnist", {}, ("optimizer",)), results), terminal)
    print_trials(terminal, results, "accuracy")
    terminal.print(EVIL, highlight=False, markup=False, soft_wrap=True)
    assert "a?[2J?]0;owned" in file.getvalue()
    assert not STEERING.search(file.getvalue())


def test_a_consoles_own_colours_and_moves_still_work() -> None:
    terminal, file = console(force_terminal=True, color_system="standard")
    terminal.print(Text(EVIL, style="red"))
    with Live(Table(title="live"), console=terminal, refresh_per_second=1):
        pass
    text = file.getvalue()
    assert "\x1b[31ma?[2J" in text and "\x1b[?25l" in text and "\x1b[2J" not in text


@given(st.text())
def test_stripped_text_keeps_all_that_does_not_steer(text: str) -> None:
    shown = strip_control(text)
    assert len(shown) == len(text) and not STEERING.search(shown)
    assert all(a in (b, "?") for a, b in zip(shown, text, strict=True))
    assert strip_control("a\tb\nc é × 漢") == "a\tb\nc é × 漢"


SENTENCE = (
    "2 workers train 1.87× [1.80, 1.95] as fast as 1 at batch_size=32 (efficiency 93 %); it took 12.3 s [11.0, 14.5] "
    "and 97.8 % [97.6, 97.9] of 1,000 samples/s were reached by 4 workers."
)


@pytest.mark.parametrize("width", [30, 40, 57, 79, 80, 81, 200])
def test_no_value_is_parted_from_its_unit_or_interval(width: int) -> None:
    lines = wrap_hanging(SENTENCE, width)
    assert max(map(cell_len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == SENTENCE
    for whole in ("1.87× [1.80, 1.95]", "93 %", "12.3 s [11.0, 14.5]", "97.8 % [97.6, 97.9]", "1,000 samples/s"):
        assert any(whole in line for line in lines), (whole, lines)
    assert all(line.startswith("  ") for line in lines[1:])


def test_a_word_longer_than_a_line_is_not_broken() -> None:
    assert wrap("see /a/path/that/is/long now", 10) == ["see", "/a/path/that/is/long", "now"]
