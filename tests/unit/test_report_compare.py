"""A comparison in a terminal: ties are called ties, what is left out is named, and 80 columns are enough."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from results import make_result
from rich.console import Console

from raypar.analysis.compare import Comparison, Side, compare
from raypar.analysis.question import Question
from raypar.report.compare import gate_lines, print_comparison, print_gate, verdict_lines
from raypar.study.space import Value
from raypar.study.trial import TrialResult, TrialState

STEADY = (4.00, 4.01, 3.99, 4.02, 3.98)


def trials(
    num_workers: Value, factor: float = 1.0, accuracy: float = 0.97, num_repeats: int = 5, **config: Value
) -> list[TrialResult]:
    return [
        make_result({"num_workers": num_workers}, r, t * factor, accuracy + r / 1000, config=config)
        for r, t in enumerate(STEADY[:num_repeats])
    ]


def compared(
    a: Sequence[TrialResult],
    b: Sequence[TrialResult],
    origins: tuple[Mapping[str, tuple[str, ...]], Mapping[str, tuple[str, ...]]] = ({}, {}),
    names: tuple[str, str] = ("old", "new"),
) -> Comparison:
    sides = [
        Side(Question(name, {}, ("num_workers",)), tuple(results), origin)
        for name, results, origin in zip(names, (a, b), origins, strict=True)
    ]
    return compare(sides[0], sides[1])


def shown(comparison: Comparison, width: int = 80) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        print_comparison(console, comparison)
    return capture.get()


def joined(text: str) -> str:
    return " ".join(text.split())


def test_a_row_has_both_times_their_ratio_and_the_change_of_the_metric() -> None:
    lines = shown(compared(trials(2), trials(2, 1.5, 0.95))).splitlines()
    assert lines[:2] == ["A: old, the reference", "B: new"]
    (row,) = [line for line in lines if line.lstrip().startswith("2 ")]
    assert "4.00 s" in row and "6.00 s" in row and "1.50× [1.4" in row and "-2.00 [-2." in row and "5/5" in row


def test_a_wide_console_has_the_metrics_themselves() -> None:
    comparison = compared(trials(2), trials(2, accuracy=0.95))
    assert "97.2 %" in shown(comparison, 100) and "95.2 %" in shown(comparison, 100)
    assert "97.2 %" not in shown(comparison)


def test_80_columns_hold_two_swept_values_and_every_interval_in_one_piece() -> None:
    a, b = (
        [make_result({"batch_size": 64, "num_workers": 2}, r, t * f, 0.9 + r / 1000) for r, t in enumerate(STEADY)]
        for f in (1.0, 1.1)
    )
    text = shown(compared(a, b))
    assert max(map(len, text.splitlines())) <= 80
    assert all(line.count("[") == line.count("]") for line in text.splitlines())
    assert "\x1b" not in text and "\N{NO-BREAK SPACE}" not in text


def test_what_is_slower_faster_and_tied_is_counted_and_the_most_is_named() -> None:
    a = [r for n in (1, 2, 4, 8, 16) for r in trials(n)]
    b = [*trials(1, 1.2), *trials(2, 1.4), *trials(4, 0.5), *trials(8), *trials(16, num_repeats=1)]
    said = verdict_lines(compared(a, b))
    assert said[0].startswith("B is slower at 2 of 5 points; most at num_workers=2, 1.40× [1.3")
    assert said[1].startswith("B is faster at 1 of 5 points; most at num_workers=4, 0.50× [0.")
    assert said[2] == "Tied, for the interval of B/A holds 1: 1 of 5 points."
    assert said[3] == "No interval, for one study has one trial there: 1 of 5 points."


def test_a_point_without_a_finished_trial_is_said_to_have_no_time() -> None:
    failed = [make_result({"num_workers": 1}, state=TrialState.FAILED)]
    comparison = compared(trials(1), failed)
    assert verdict_lines(comparison) == (
        "No time, for one study has no finished trial there: 1 of 1 point.",
        "No point has accuracy in both studies.",
    )
    assert "5/0" in shown(comparison)


def test_metrics_are_told_apart_only_where_the_data_can() -> None:
    assert verdict_lines(compared(trials(1), trials(1)))[-1] == "accuracy: no difference can be told at any of 1 point."
    worse = verdict_lines(compared(trials(1), trials(1, accuracy=0.9)))[-1]
    assert worse.startswith("accuracy: B differs from A at 1 of 1 point; most at num_workers=1, -7.00 [-7.")
    assert worse.endswith("] percentage points.")
    single = verdict_lines(compared(trials(1, num_repeats=1), trials(1, num_repeats=1)))[-1]
    assert single == "accuracy: by one trial each, so that no difference can be told."
    same = [make_result({"num_workers": 1}, r) for r in range(3)]
    assert verdict_lines(compared(same, same))[-1] == "accuracy: the same at all of 1 point."


def test_what_is_left_out_is_named_with_the_reason() -> None:
    a = [*trials(1), *trials(2), *trials(4, epochs=1)]
    b = [*trials(1), *trials(8), *trials(4, epochs=2)]
    text = joined(shown(compared(a, b)))
    assert "Only A has 1 point: num_workers=2." in text
    assert "Only B has 1 point: num_workers=8." in text
    assert "Not compared, for they do different work (A's, B's): 1 point, epochs=(1, 2)." in text


def test_studies_without_a_point_in_common_are_said_to_have_none() -> None:
    text = shown(compared(trials(1), trials(2)))
    assert "No point is in both studies: there is nothing to compare." in text and "B/A" not in text


def test_what_differs_besides_is_told() -> None:
    origins = {"version.torch": ("2.13",), "cpu": ("x",)}, {"version.torch": ("2.14", "2.15"), "cpu": ("x",)}
    changed = {**origins[1], "git.dirty": ("yes",)}
    text = joined(shown(compared(trials(1, device="cpu"), trials(1, device="cuda"), (origins[0], changed))))
    assert "They were run differently (A, B): device=(cpu, cuda)." in text
    assert "What differs where they come from (A → B): version.torch 2.13 → 2.14, 2.15." in text
    assert "B ran code with changes that no commit has." in text and "A ran code" not in text
    same = joined(shown(compared(trials(1), trials(1), (origins[0], origins[0]))))
    assert "Nothing that is known of where they come from differs (versions, machine, commit)." in same
    unknown = joined(shown(compared(trials(1), trials(1), (origins[0], {}))))
    assert "Where B comes from (versions, machine, commit) is not in its store." in unknown
    assert "Nothing that is known" not in unknown


@pytest.mark.parametrize("name", ["a|b", "<script>alert(1)</script>", "two\nlines", "[bold]x[/bold]"])
def test_hostile_names_are_shown_as_they_are(name: str) -> None:
    text = joined(shown(compared(trials(name), trials(name), names=(name, name)), 120))
    assert text.count(joined(name)) >= 3


def test_a_plain_console_gets_stand_ins() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    console = Console(file=stream, width=80, no_color=True)
    comparison = compared(trials(1), trials(1, 2.0), ({"cpu": ("x",)}, {"cpu": ("y",)}))
    print_comparison(console, comparison)
    print_gate(console, comparison, 0.05)
    text = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "2.00x [" in text and "cpu x -> y" in text


# ---- the allowance


def test_an_allowance_names_what_is_slower_and_what_can_not_be_told() -> None:
    a = [r for n in (1, 2, 4) for r in trials(n)]
    b = [*trials(1, 1.3), *trials(2), *trials(4, 1.05)]
    slower, unknown = gate_lines(compared(a, b), 0.05)
    assert slower.startswith("Slower than allowed: B takes over 5 % longer at 1 of 3 points: num_workers=1 (1.30× [")
    assert unknown.startswith("The data can't tell whether B takes over 5 % longer at 1 of 3 points: num_workers=4 (")


def test_an_allowance_that_is_kept_everywhere_is_said_to_be() -> None:
    assert gate_lines(compared(trials(1), trials(1)), 0.025) == (
        "Within what is allowed: B takes at most 2.5 % longer at all of 1 point.",
    )


def test_not_shown_to_be_slower_is_not_the_same_as_within() -> None:
    first, second = gate_lines(compared(trials(1), trials(1, num_repeats=1)), 0.05)
    assert first == "Not shown to be slower: no interval of 1 point lies wholly above 5 % longer."
    assert second.startswith("The data can't tell") and "More repeats" in second


def test_a_study_that_sweeps_nothing_has_its_only_point() -> None:
    results = tuple(replace(r, spec=replace(r.spec, point={})) for r in trials(1))
    side = Side(Question("s", {}, ()), results, {})
    assert "the only point" in shown(compare(side, side))
