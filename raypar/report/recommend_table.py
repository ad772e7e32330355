"""The points of a recommendation in a table: what each takes, what speaks against it, which one is taken."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypar import units
from raypar.analysis.candidates import Candidate, median_s
from raypar.analysis.recommend import Recommendation
from raypar.analysis.stats import Estimate
from raypar.analysis.time_to_target import Fate
from raypar.report.plain import encodable
from raypar.study.trial import point_label

MAX_ROWS = 15
MIN_WIDTH = 75  # of a table whose numbers stay in one piece


def table_of(console: Console, found: Recommendation) -> Table:
    rows = ranked(found)[:MAX_ROWS]
    heads = [
        "",
        "point",
        "reached" if found.ask.target else "n",
        "time",
        found.question.metric,
        "eff.",
        "cost",
        "energy",
        "left out because",
    ]
    shown = [True, True, True, True]
    shown += [
        any(values)
        for values in zip(*((c.metric, c.efficiency, c.cost, c.energy_j, c.why_not) for c in rows), strict=True)
    ]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for head, is_shown in zip(heads, shown, strict=True):
        is_text = head in ("", "point", "time", "left out because")
        if is_shown:
            table.add_column(
                Text(encodable(head, console.encoding)),
                justify="left" if is_text else "right",
                overflow="fold",
                # What must not wrap is cut where there is no room for it at all.
                no_wrap=console.width >= MIN_WIDTH and head not in ("point", "left out because"),
            )
    for c in rows:
        cells = [cell for cell, is_shown in zip(_cells(found, c), shown, strict=True) if is_shown]
        style = "bold" if c is found.chosen else "dim" if c.why_not else ""
        table.add_row(*(Text(encodable(cell, console.encoding)) for cell in cells), style=style)
    return table


def ranked(found: Recommendation) -> list[Candidate]:
    """The chosen one first, then the others that may be, by their time, then the rest."""
    return sorted(found.candidates, key=lambda c: (c is not found.chosen, bool(c.why_not), median_s(c)))


def _cells(found: Recommendation, c: Candidate) -> tuple[str, ...]:
    if c.to_target is not None:
        num = f"{c.to_target.num_in(Fate.REACHED)}/{len(c.to_target.trials)}"
    else:
        num = str(len(c.times))
    return (
        (">" if c is found.chosen else " ") + ("*" if c.is_on_front else " "),
        point_label(c.point),
        num,
        time_told(c.time_s),
        units.score(found.question.metric, c.metric.value) if c.metric else units.MISSING,
        units.percent(c.efficiency.value) if c.efficiency else units.MISSING,
        units.number(c.cost.value, 3) if c.cost else units.MISSING,
        units.energy(c.energy_j.value) if c.energy_j else units.MISSING,
        c.why_not,
    )


def time_told(time_s: Estimate | None) -> str:
    return units.seconds_interval(time_s.value, time_s.low, time_s.high) if time_s else units.MISSING
