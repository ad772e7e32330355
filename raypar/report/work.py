"""How the work of a network is shown, and the least time that its training takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypar import units

if TYPE_CHECKING:
    from raypar.train.flops import LayerWork, Work

_LARGE = ((1e18, "E"), (1e15, "P"), (1e12, "T"))


@dataclass(frozen=True)
class Plan:
    """What training is reckoned with.

    Attributes:
        num_samples: of the training set; None: unknown.
        peak_flops: FLOP/s that the hardware reaches at most.
        peak_source: where that is from, for people.
    """

    batch_size: int
    epochs: int
    num_samples: int | None
    peak_flops: float
    peak_source: str


def print_work(console: Console, title: str, work: Work, plan: Plan) -> None:
    """Weights, work by type of layer, and the least time of an iteration and of the training."""

    def line(text: str) -> None:
        console.print(Text(text), highlight=False, soft_wrap=True)

    line(f"{title}: {units.count(work.num_parameters)} weights")
    of_macs = [layer for layer in work.layers if layer.is_of_macs]
    others = [layer for layer in work.layers if not layer.is_of_macs]
    line("\nof one sample, multiply-accumulates:")
    console.print(_table(of_macs))
    if others:
        line("\nof one sample, operations of layers without multiply-accumulates:")
        console.print(_table(others))
    times = units.number(work.macs / work.macs_forward, 3) if work.macs_forward else units.MISSING
    line(
        f"\nforward and backward: {scaled(work.macs, 'MAC')} = {scaled(work.flop, 'FLOP')} a sample, "
        f"{times} times the forward pass"
    )
    line(f"peak: {scaled(plan.peak_flops, 'FLOP/s')} ({plan.peak_source})")
    _print_time(line, f"an iteration of {units.counted(plan.batch_size, 'sample')}", work, plan, plan.batch_size)
    if plan.num_samples is None:
        line("training: the size of the training set is not known; give it with --samples N")
        return
    what = f"training, {units.counted(plan.epochs, 'epoch')} of {units.counted(plan.num_samples, 'sample')}"
    _print_time(line, what, work, plan, plan.epochs * plan.num_samples)


def scaled(value: float, unit: str) -> str:
    """Three significant digits with a prefix: ``4.09 GMAC``, ``112 TFLOP/s``."""
    for factor, prefix in _LARGE:
        if value >= factor * 0.9995:
            return f"{units.number(value / factor, 3)} {prefix}{unit}"
    text = units.compact(value)
    return f"{text[:-1]} {text[-1]}{unit}" if text[-1].isalpha() else f"{text} {unit}"


def _print_time(line: Callable[[str], None], what: str, work: Work, plan: Plan, num_samples: int) -> None:
    flop = scaled(work.flop * num_samples, "FLOP")
    line(f"{what}: {flop}, at least {units.seconds(work.min_time_s(num_samples, plan.peak_flops))}")


def _table(layers: list[LayerWork]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layers")
    for name in ("forward", "by weights", "by inputs"):
        table.add_column(name, justify="right")
    rows = {layer.kind: [layer.forward, layer.by_weights, layer.by_inputs] for layer in layers}
    rows["total"] = [sum(counts[i] for counts in rows.values()) for i in range(3)]
    for kind, counts in rows.items():
        table.add_row(kind, *(units.compact(count) if count >= 1000 else str(count) for count in counts))
    return table
