"""Parts of a step in a terminal: a trial's profile in full, a study's by point."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from raypar import units
from raypar.reporting.listings import scaled
from raypar.reporting.text import (
    Column,
    encoded,
    print_line,
    print_paragraph,
    print_table,
    table_width,
    terminal_table,
    wrap_hanging,
)
from raypar.study.profile import BUBBLE, COMMUNICATION, COPY, PARTS, Breakdown, Profile
from raypar.study.space import Value
from raypar.study.trial import point_label

MAX_RANKS_SHOWN = 3  # shown individually; otherwise mean, minimum and maximum
WORTH_A_WORD = 0.02  # smallest share of a step that is shown
NAMES: Mapping[str, str] = (
    {"data_wait": "waiting for data", "copy_to_device": "copy to the GPU"}
    | {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer"}
    | {"exposed_communication": "exposed communication", "stragglers": "waiting for stragglers"}
    | {"bubble": "pipeline bubble", "other": "other"}
)
HEADS = dict(zip(NAMES, ("data", "copy", "forw.", "backw.", "opt.", "comm.", "waits", "bubble", "other"), strict=True))


@dataclass(frozen=True)
class PointProfile:
    """Parts of a point's step, mean over its ranks."""

    shown: ClassVar = (
        "point num_steps=profile.num_steps step_s=profile.step_s overhead=profile.overhead parts_s=profile.mean.parts "
        "hidden_communication_s=profile.mean.hidden_s utilisation=profile.utilisation"
    )
    point: Mapping[str, Value]
    profile: Profile


# Kinds of operations by regular expressions for their names, in the order in which they are looked for. Names are those
# of operations on a CPU (aten::addmm) or of kernels (ampere_sgemm_128x64_tn).
OPERATIONS: Mapping[str, str] = {
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter",
    "attention": r"scaled_dot_product|flash|attention|fmha",
    "convolutions": r"conv(?!ert)|winograd|fprop|dgrad|wgrad",
    "matrix products": r"gemm|gemv|matmul|cutlass|cublas|nvjet|\blinear|\b(add|b|baddb)?mm\b|\b(add)?mv\b",
    "optimizer": r"optimizer|_foreach|_fused|multi_tensor|vector_norm",
    "normalisation": r"norm(?!al)|\bbn_",
    "elementwise operations": r"elementwise|::(add|sub|mul|div|addcmul|addcdiv|pow|sqrt|relu|gelu|silu|tanh|sigmoid)",
    "copies": r"copy|memcpy|memset|contiguous|clone|\bcat\b|catarray",
    "data": r"dataloader|collate|\b(stack|select|index)",
}


def by_kind(operations: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds of each kind of operation, the largest first."""
    kinds: dict[str, float] = {}
    for name, seconds in operations:
        kind = next((kind for kind, pattern in OPERATIONS.items() if re.search(pattern, name.lower())), "others")
        kinds[kind] = kinds.get(kind, 0.0) + seconds
    return dict(sorted(kinds.items(), key=lambda entry: -entry[1]))


def operations_sentence(operations: Sequence[tuple[str, float]]) -> str:
    """Return the shares of the kinds of operations; empty if none is known."""
    kinds = by_kind(operations)
    total_s = sum(kinds.values())
    named = [f"{kind} {units.percent(s / total_s)}" for kind, s in kinds.items() if s >= WORTH_A_WORD * total_s]
    return f"Time by kind of operation: {', '.join(named)}." if named else ""


def print_profile(
    console: Console,
    title: str,
    profile: Profile,
    traces: str = "",
    operations: Sequence[tuple[str, float]] = (),
) -> None:
    """Print the parts of a step on every rank, sentences about them, and the folder of the traces, if any."""
    print_line(console, title, "bold")
    print_line(console, "")
    print_table(console, _rank_columns(profile))
    print_line(console, "")
    for sentence in sentences(profile):
        print_paragraph(console, sentence)
    if sentence := operations_sentence(operations):
        print_paragraph(console, sentence)
    if traces:
        print_line(console, f"Traces: {traces} (open one in Perfetto: https://ui.perfetto.dev)")


def sentences(profile: Profile) -> list[str]:
    """Return sentences on a profile: its largest part, communication, waiting, utilisation and overhead."""
    mean = profile.mean
    largest = max(PARTS, key=lambda part: mean.parts[part])
    of_ranks = " (mean of the ranks)" if len(profile.ranks) > 1 else ""
    lines = [f"Largest part of a step: {NAMES[largest]}, {_share(mean, largest)}{of_ranks}."]
    lines += _about_communication(profile)
    lines += _about_waiting(profile)
    used = "unknown, because this network's work can't be counted"
    if profile.utilisation is not None:
        num, peak = len(profile.ranks), scaled(profile.peak_flops or 0.0, "FLOP/s")
        workers = f"all {num} workers at once" if num > 1 else "the worker"
        used = f"{units.percent(profile.utilisation, 1)} of the {peak} that matrix products reach on {workers}"
    if profile.overhead is not None:
        lines.append(f"Model FLOP utilisation: {used}.")
        overhead = units.percent(abs(profile.overhead))
        change = f"adds {overhead}" if profile.overhead >= 0 else f"adds nothing measurable (-{overhead})"
        lines.append(f"A step takes {units.seconds(profile.step_s)} without the profiler, which {change}.")
    if not profile.shares_clock:
        lines.append("The ranks are on several machines. Their clocks were compared at barriers.")
    return lines


def breakdown_section(
    profiles: Sequence[tuple[Mapping[str, Value], Profile]], width: int, encoding: str
) -> Iterator[RenderableType]:
    """Yield a study's profiles by point, the ranks' mean in percent of the step; nothing without profiles."""
    if not profiles:
        return
    means = [profile.mean for _, profile in profiles]
    shown = [part for part in PARTS if any(mean.parts[part] >= WORTH_A_WORD * mean.step_s for mean in means)]
    communicates = any(mean.hidden_share is not None for mean in means)
    cells = {
        "point": [point_label(point) for point, _ in profiles],
        "step": [units.seconds(profile.step_s) for _, profile in profiles],
        **{HEADS[part]: [_share(mean, part) for mean in means] for part in shown},
        **({"hidden": [units.percent(mean.hidden_share) for mean in means]} if communicates else {}),
        "MFU": [units.percent(profile.utilisation, 1) for _, profile in profiles],
    }
    columns = [encoded(Column(head, each, head != "point"), encoding) for head, each in cells.items()]
    yield Text("")
    yield Text("Where a step's time goes (mean of the ranks; parts of 2 % or more):", overflow="fold")
    if table_width(columns, encoding) + 2 <= width:
        yield Padding.indent(terminal_table(columns, width, encoding), 2)
    else:
        points, *others = columns
        for i, label in enumerate(points.cells):
            yield Text("  " + label, overflow="fold")
            # Keep a part and its share on one line: textwrap breaks only at plain spaces.
            parts = ", ".join(f"{c.head} {c.cells[i]}".replace(" ", "\N{NO-BREAK SPACE}") for c in others)
            for line in textwrap.wrap(parts, max(width - 4, 20), break_on_hyphens=False):
                yield Text("    " + line.replace("\N{NO-BREAK SPACE}", " "), overflow="fold")
    if communicates:
        text = "comm.: exposed; waits: for the slowest rank; hidden: share of communication overlapping with computing."
        yield from (Text(line, style="dim", overflow="fold") for line in wrap_hanging(text, width))


def _rank_columns(profile: Profile) -> list[Column]:
    """Return the parts of a step, with a column for each rank, or for mean, minimum and maximum."""
    ranks = profile.ranks
    parts = [part for part in PARTS if part not in (COPY, BUBBLE) or any(rank.parts[part] for rank in ranks)]
    rows = {NAMES[part]: _cells([(rank.parts[part], rank.step_s) for rank in ranks]) for part in parts}
    rows["step"] = _cells([(rank.step_s, None) for rank in ranks])
    if len(ranks) > 1:
        rows["hidden communication"] = _cells([(rank.hidden_s, rank.step_s) for rank in ranks])
    heads = [f"rank {i}" for i in range(len(ranks))] if len(ranks) <= MAX_RANKS_SHOWN else ["mean", "min", "max"]
    numbers = zip(*rows.values(), strict=True)
    return [Column("", list(rows)), *(Column(head, each, True) for head, each in zip(heads, numbers, strict=True))]


def _cells(values: Sequence[tuple[float, float | None]]) -> list[str]:
    if len(values) <= MAX_RANKS_SHOWN:
        return [_cell(*value) for value in values]
    steps_s = [step_s for _, step_s in values if step_s is not None]
    mean = sum(seconds for seconds, _ in values) / len(values), sum(steps_s) / len(steps_s) if steps_s else None
    return [_cell(*mean), _cell(*min(values)), _cell(*max(values))]


def _cell(seconds: float, step_s: float | None) -> str:
    return f"{seconds * 1e3:.2f} ms" + (f" {units.percent(seconds / step_s):>5}" if step_s else " " * 6)


def _about_communication(profile: Profile) -> Iterator[str]:
    mean = profile.mean
    share = mean.hidden_share
    if share is None:
        return
    if mean.parts[BUBBLE] and not mean.hidden_s:
        yield (
            f"Starting to communicate takes {_share(mean, COMMUNICATION)} of a step. Messages between stages are part "
            "of the bubble; their hidden share is unknown."
        )
        return
    waiting = ""
    if profile.overhead is None:
        waiting = " (including waits for slower ranks)"
    elif not profile.matches_collectives:
        waiting = " (including waits: groups of ranks overlap)"
    yield (
        f"{units.percent(share)} of communication is hidden: it overlaps with computing. "
        f"Exposed communication takes {_share(mean, COMMUNICATION)} of a step{waiting}."
    )


def _about_waiting(profile: Profile) -> Iterator[str]:
    mean = profile.mean
    if mean.parts[BUBBLE] >= WORTH_A_WORD * mean.step_s:
        yield f"A rank waits {_share(mean, BUBBLE)} of a step for another stage of the pipeline."
    waits = [
        (seconds / breakdown.step_s, rank, other)
        for rank, breakdown in enumerate(profile.ranks)
        for other, seconds in breakdown.waits_for.items()
        if other != rank
    ]
    if not waits or max(waits)[0] < WORTH_A_WORD:
        return
    waiting = [
        f"rank {rank} waits {units.percent(share)} of its step for rank {other}"
        for share, rank, other in sorted(waits, reverse=True)[:MAX_RANKS_SHOWN]
        if share >= WORTH_A_WORD
    ]
    yield f"Ranks wait for slower ones: {', '.join(waiting)}."


def _share(breakdown: Breakdown, part: str) -> str:
    return units.percent(breakdown.parts[part] / breakdown.step_s)
