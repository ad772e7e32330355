"""How the workloads that ship are shown."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypar import units
from raypar.study.options import OPTIONS, known_options
from raypar.study.workload import Workload


def print_workloads(console: Console, workloads: Iterable[Workload]) -> None:
    """One row each: name, data set with its size, metric, what it is."""
    table = Table("workload", "data set", "metric", "what", box=None, header_style="bold", pad_edge=False)
    for workload in workloads:
        table.add_row(workload.name, workload.dataset, workload.metric, workload.description)
    console.print(table)


def print_workload(console: Console, workload: Workload) -> None:
    """One workload with its own options and what raypar's are for it."""
    for text in (f"{workload.name}: {workload.description}", f"data set: {workload.dataset}"):
        console.print(Text(text), highlight=False)
    goal = "the larger the better" if workload.mode == "max" else "the smaller the better"
    console.print(Text(f"metric: {workload.metric}, {goal}"), highlight=False)
    table = Table("option", "default", "what", box=None, header_style="bold", pad_edge=False)
    known = known_options(workload)
    for key in (*workload.options, *(key for key in OPTIONS if key not in workload.options)):
        option = known[key]
        table.add_row(key, units.MISSING if option.default is None else units.value_of(option.default), option.doc)
    console.print(table)
