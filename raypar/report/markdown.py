"""A study's findings as GitHub's Markdown: `markdown_of`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.question import TRAIN_TIME
from raypar.analysis.stats import Estimate
from raypar.report.plain import as_utf8
from raypar.study.trial import point_label


def markdown_of(analysis: StudyAnalysis, origin: Mapping[str, Sequence[str]], description: str = "") -> str:
    """The study's findings for a paper or a pull request. Names stand in it as they are.

    Args:
        origin: the provenance of its executions, each key with every value that occurred; empty: not known.
        description: what the study asks, in its author's words.
    """
    swept = ", ".join(analysis.space_keys) or "nothing"
    asked = f"Swept: {swept}. "
    if analysis.baseline:
        asked += f"Compared with: {point_label(analysis.baseline)}. "
    asked += f"{units.counted(len(analysis.points), 'point')}, {units.counted(analysis.num_trials, 'trial')}."
    parts = [f"# {analysis.study_name}", description, asked]
    if analysis.points:
        timed = "the training steps alone" if analysis.time_metric == TRAIN_TIME else "the whole trial"
        note = f"Time: {timed}. Medians with 95 % intervals; n: finished trials."
        parts += ["\n".join(_markdown_table(analysis)), note]
    parts.append("\n".join(f"- {verdict}" for verdict in analysis.verdicts))
    warnings = [f"- **Warning:** {w.detail} {w.advice}" for w in analysis.warnings]
    parts += ["\n".join(warnings), f"Provenance: {provenance_line(origin)}"]
    return as_utf8("\n\n".join(part for part in parts if part)) + "\n"


def provenance_line(origin: Mapping[str, Sequence[str]]) -> str:
    """Versions, machine and commit in a sentence; several values of several executions with "or" between."""
    if not origin:
        return "not in the store."
    told = {key: " or ".join(values) for key, values in origin.items()}
    versions = [f"{key.removeprefix('version.')} {told[key]}" for key in told if key.startswith("version.")]
    machine = [told[key] for key in ("cpu", "os") if key in told]
    machine += [f"{told[key]} {what}" for key, what in (("cores", "cores"),) if key in told]
    machine += [f"GPU {told['gpu']}"] if told.get("gpu", "none") != "none" else []
    parts = [", ".join(versions), f"on {told['host']} ({'; '.join(machine)})" if "host" in told else "; ".join(machine)]
    if "git.commit" in told:
        changed = " with changes that no commit has" if "yes" in origin.get("git.dirty", ()) else ""
        parts.append(f"commit {told['git.commit']}{changed}")
    return "; ".join(part for part in parts if part) + "."


def _markdown_table(analysis: StudyAnalysis) -> Iterator[str]:
    points = analysis.points
    texts = [(key, [units.value_of(p.point.get(key)) for p in points]) for key in analysis.space_keys]
    texts = texts or [("point", [point_label(p.point) for p in points])]
    columns = list(texts)
    columns.append(("time", [_shown(units.seconds_interval, p.time_s) for p in points]))
    if analysis.baseline:
        speedups = [_shown(units.ratio_interval, p.speedup) for p in points]
        bases = [p.is_baseline and p.speedup is not None for p in points]
        columns.append(("speedup", ["baseline" if b else s for s, b in zip(speedups, bases, strict=True)]))
    if any(p.efficiency for p in points):
        shares = [None if p.is_baseline else p.efficiency for p in points]
        columns.append(("efficiency", [_shown(units.percent_interval, share) for share in shares]))
    show = partial(units.score_interval, analysis.metric)
    columns.append((analysis.metric, [_shown(show, p.metric) for p in points]))
    if analysis.energy_source:
        head = f"energy of {analysis.energy_source}"
        columns.append((head, [_shown(units.energy_interval, p.energy_j) for p in points]))
    wanted = [max(analysis.num_repeats or 0, p.num_trials) for p in points]
    counts = [(p.num_finished, n) for p, n in zip(points, wanted, strict=True)]
    columns.append(("n", [str(n) if finished == n else f"{finished} of {n}" for finished, n in counts]))
    yield f"| {' | '.join(head for head, _ in columns)} |"
    yield f"|{' --- |' * len(texts)}{' ---: |' * (len(columns) - len(texts))}"
    for cells in zip(*(cells for _, cells in columns), strict=True):
        yield f"| {' | '.join(cells)} |"


def _shown(show: Callable[[float, float | None, float | None], str], estimate: Estimate | None) -> str:
    return show(estimate.value, estimate.low, estimate.high) if estimate else units.MISSING
