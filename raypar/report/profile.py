"""Where a step's time goes, shown: one trial's profile in full, and a study's by point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from raypar import units
from raypar.analysis.breakdown import BUBBLE, COMMUNICATION, PARTS, Breakdown, Profile
from raypar.report.listings import scaled
from raypar.report.text import ascii_fallback
from raypar.study.space import Value
from raypar.study.trial import point_label

GAP = "  "
MAX_RANKS_SHOWN = 3  # one by one; of more, the mean, the least and the most
WORTH_A_WORD = 0.02  # of a step
NAMES: Mapping[str, str] = {
    "data_wait": "waiting for data",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer",
    "exposed_communication": "exposed communication",
    "stragglers": "waiting for stragglers",
    "bubble": "pipeline bubble",
    "other": "other",
}
_HEADS: Mapping[str, str] = {
    "data_wait": "data",
    "forward": "forw.",
    "backward": "backw.",
    "optimizer": "opt.",
    "exposed_communication": "comm.",
    "stragglers": "waits",
    "bubble": "bubble",
    "other": "other",
}


def print_profile(console: Console, title: str, profile: Profile, traces: str = "") -> None:
    """The parts of a step on every rank, what stands out, and where the traces are.

    Args:
        traces: the folder of the ranks' traces; empty where there are none.
    """

    def line(text: str, style: str = "") -> None:
        console.print(Text(ascii_fallback(text, console.encoding), style=style), highlight=False, soft_wrap=True)

    line(title, style="bold")
    line("")
    for i, row in enumerate(_aligned(_rows(profile))):
        line(row, style="bold" if i == 0 else "")
    line("")
    for sentence in sentences(profile):
        console.print(Text(ascii_fallback(sentence, console.encoding)), highlight=False)
    if traces:
        line(f"Traces: {traces} (open one in Perfetto: https://ui.perfetto.dev)")


def sentences(profile: Profile) -> list[str]:
    """What a profile says."""
    mean = profile.mean
    largest = max(PARTS, key=lambda part: mean.parts[part])
    found = [f"Most of a step is {NAMES[largest]}: {_share(mean, largest)}{_of_ranks(profile)}."]
    found += _about_communication(profile)
    found += _about_waiting(profile)
    if profile.utilisation is not None:
        found.append(
            f"Model FLOP utilisation: {units.percent(profile.utilisation, 1)} of the "
            f"{scaled(profile.peak_flops or 0.0, 'FLOP/s')} that matrix products reach on {_all_workers(profile)}."
        )
    else:
        found.append("Model FLOP utilisation: the work of this network can't be counted.")
    overhead = units.percent(abs(profile.overhead))
    change = f"adds {overhead}" if profile.overhead >= 0 else f"adds nothing that shows ({overhead} less)"
    found.append(f"A step takes {units.seconds(profile.step_s)} without the profiler, which {change}.")
    if not profile.shares_clock:
        found.append("The ranks are on several machines: their clocks were compared at barriers.")
    return found


def breakdown_section(
    profiles: Sequence[tuple[Mapping[str, Value], Profile]], width: int, encode: Callable[[str], str]
) -> Iterator[Text]:
    """A study's profiles by point, the ranks' mean in percent of the step; nothing where there is none."""
    if not profiles:
        return
    yield Text("")
    yield Text("Where a step's time goes (mean of the ranks; parts from 2 % on):", overflow="fold")
    shown = [part for part in PARTS if any(p.mean.parts[part] >= WORTH_A_WORD * p.mean.step_s for _, p in profiles)]
    communicates = any(p.mean.hidden_share is not None for _, p in profiles)
    rows = [["point", "step", *(_HEADS[part] for part in shown), *(["hidden"] if communicates else []), "MFU"]]
    for point, profile in profiles:
        mean = profile.mean
        hidden = [units.percent(mean.hidden_share)] if communicates else []
        parts = [_share(mean, part) for part in shown]
        mfu = units.percent(profile.utilisation, 1)
        rows.append([point_label(point), units.seconds(profile.step_s), *parts, *hidden, mfu])
    rows = [[encode(cell) for cell in row] for row in rows]
    lines = _aligned(rows)
    if max(map(cell_len, lines)) + 2 <= width:
        for line in lines:
            yield Text("  " + line)
    else:
        for row in rows[1:]:
            yield Text("  " + row[0], overflow="fold")
            told = ", ".join(f"{head} {cell}" for head, cell in zip(rows[0][1:], row[1:], strict=True))
            yield Text("    " + told, overflow="fold")
    if communicates:
        yield Text("comm.: exposed; waits: for the rank that comes last; hidden: share of", style="dim")
        yield Text("communication that goes on while the rank works.", style="dim")


def _rows(profile: Profile) -> list[list[str]]:
    ranks = profile.ranks
    if len(ranks) <= MAX_RANKS_SHOWN:
        head = ["", *(f"rank {rank}" for rank in range(len(ranks)))]
    else:
        head = ["", "mean", "least", "most"]
    rows = [head]
    steps = {part: [(rank.parts[part], rank.step_s) for rank in ranks] for part in PARTS}
    for part, values in steps.items():
        if part == BUBBLE and not any(seconds for seconds, _ in values):
            continue
        rows.append([NAMES[part], *_cells(values)])
    rows.append(["step", *_cells([(rank.step_s, None) for rank in ranks])])
    if len(ranks) > 1:
        rows.append(["hidden communication", *_cells([(rank.hidden_s, rank.step_s) for rank in ranks])])
    return rows


def _cells(values: Sequence[tuple[float, float | None]]) -> list[str]:
    if len(values) <= MAX_RANKS_SHOWN:
        return [_cell(seconds, of) for seconds, of in values]
    of = [whole for _, whole in values if whole is not None]
    mean = sum(seconds for seconds, _ in values) / len(values), sum(of) / len(of) if of else None
    return [_cell(*mean), _cell(*min(values)), _cell(*max(values))]


def _cell(seconds: float, of: float | None) -> str:
    return f"{seconds * 1e3:.2f} ms" + (f" {units.percent(seconds / of):>5}" if of else " " * 6)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        padded = [" " * (width - cell_len(cell)) + cell for cell, width in zip(others, widths[1:], strict=True)]
        lines.append(GAP.join([first + " " * (widths[0] - cell_len(first)), *padded]).rstrip())
    return lines


def _about_communication(profile: Profile) -> Iterator[str]:
    mean = profile.mean
    share = mean.hidden_share
    if share is None:
        return
    if mean.parts[BUBBLE] and not mean.hidden_s:
        yield (
            f"Starting to communicate takes {_share(mean, COMMUNICATION)} of a step. What messages between stages take "
            "is part of the bubble; whether some of it is hidden can't be told."
        )
        return
    waiting = "" if profile.matches_collectives else " (waiting for others is part of it: groups of ranks overlap)"
    yield (
        f"{units.percent(share)} of communication is hidden: it goes on while the ranks work. "
        f"Exposed, it takes {_share(mean, COMMUNICATION)} of a step{waiting}."
    )


def _about_waiting(profile: Profile) -> Iterator[str]:
    mean = profile.mean
    if mean.parts[BUBBLE] >= WORTH_A_WORD * mean.step_s:
        yield f"For {_share(mean, BUBBLE)} of a step, a rank waits for another stage of the pipeline."
    waits = [
        (seconds / own.step_s, rank, other)
        for rank, own in enumerate(profile.ranks)
        for other, seconds in own.waits_for.items()
        if other != rank
    ]
    if not waits or max(waits)[0] < WORTH_A_WORD:
        return
    told = [
        f"rank {rank} for rank {other} {units.percent(share)} of its step"
        for share, rank, other in sorted(waits, reverse=True)[:MAX_RANKS_SHOWN]
        if share >= WORTH_A_WORD
    ]
    yield f"Ranks wait for those that come last: {', '.join(told)}."


def _share(own: Breakdown, part: str) -> str:
    return units.percent(own.parts[part] / own.step_s)


def _of_ranks(profile: Profile) -> str:
    return " (mean of the ranks)" if len(profile.ranks) > 1 else ""


def _all_workers(profile: Profile) -> str:
    num = len(profile.ranks)
    return f"all {num} workers at once" if num > 1 else "it"
