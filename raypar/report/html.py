"""A study's report as one self-contained HTML file.

Figures stand in it twice: as SVG, which is there at once and where scripts are not run, and as Vega-Lite, with its
runtime, which takes the SVG's place once it is drawn. Names and texts of a study are data: they are escaped wherever
they stand, and the page's content security policy lets no script run but the two whose hashes it lists, and loads
nothing at all.

The page's script sorts by a cell's ``data-sort``, or else by its text: numbers stand in the trials' table without their
units, which are in the heads. End tags that HTML does without are left out: a report of thousands of trials is still to
be sent around.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from raypar import units
from raypar.analysis.analyse import StudyAnalysis, pair_speedups
from raypar.analysis.candidates import Constraints
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME
from raypar.analysis.recommend import recommend
from raypar.analysis.stats import Estimate, Method
from raypar.errors import RayparError
from raypar.provenance import versions
from raypar.report.figures import figures_of
from raypar.report.recommend import answer_lines, objective, settling_line
from raypar.report.sentences import IndentedLine, effect_lines, goodput_lines, scaling_lines
from raypar.report.text import as_utf8, no_break_values, strip_control
from raypar.report.vega import Figure, OmittedFigure, for_page, is_number, static_svg
from raypar.study.trial import TrialResult, TrialState, latest, point_label

if TYPE_CHECKING:
    from markupsafe import Markup


MAX_TABLE_BYTES = 650_000
MAX_POINTS = 500
MAX_FAILURE_LENGTH, MAX_FAILURE_BYTES = 300, 100_000  # of one message, of all
MIN_FAILURE_LENGTH = 40


@dataclass(frozen=True)
class HtmlColumn:
    """A column of a table.

    Attributes:
        cells: their texts, one for each row.
        sort: what rows are sorted by; empty: the texts.
        is_wide: may be broken over several lines.
    """

    head: str
    cells: Sequence[str]
    is_number: bool = False
    sort: Sequence[float | None] = ()
    is_wide: bool = False


@dataclass(frozen=True)
class HtmlTable:
    """A table as markup, and what is to be said below it.

    Attributes:
        style: rules for its columns.
        is_long: more rows than fit on a screen.
    """

    markup: Markup
    style: Markup
    notes: tuple[str, ...] = ()
    is_long: bool = False


def points_table(analysis: StudyAnalysis) -> HtmlTable | None:
    """A row for each point, in the order of their values; None where there is no point."""
    points = analysis.points[:MAX_POINTS]
    if not points:
        return None
    columns = [_values(key, [p.point.get(key) for p in points]) for key in analysis.space_keys]
    columns = columns or [HtmlColumn("point", [point_label(p.point) for p in points])]

    def add(head: str, of: Callable[[PointAnalysis], Estimate | None], show: Callable[..., str]) -> None:
        found = [of(p) for p in points]
        if any(found):
            columns.append(
                HtmlColumn(
                    head,
                    [show(e.value, e.low, e.high) if e else units.MISSING for e in found],
                    True,
                    [e.value if e else None for e in found],
                )
            )

    add("time", lambda p: p.time_s, units.seconds_interval)
    if analysis.baseline:
        ratios = [p.speedup for p in points]
        shown = [units.ratio_interval(s.value, s.low, s.high) if s else units.MISSING for s in ratios]
        bases = [p.is_baseline and p.speedup is not None for p in points]
        texts = ["baseline" if is_base else text for text, is_base in zip(shown, bases, strict=True)]
        columns.append(HtmlColumn("speedup", texts, True, [s.value if s else None for s in ratios]))
        add("efficiency", lambda p: None if p.is_baseline else p.efficiency, units.percent_interval)
    add(analysis.metric, lambda p: p.metric, lambda *e: units.score_interval(analysis.metric, *e))
    add("samples/s", lambda p: p.throughput, _rate)
    if analysis.energy_source:
        add("energy", lambda p: p.energy_j, units.energy_interval)
    wanted = [max(analysis.num_repeats or 0, p.num_trials) for p in points]
    counts = [(p.num_finished, n) for p, n in zip(points, wanted, strict=True)]
    texts = [str(n) if finished == n else f"{finished} of {n}" for finished, n in counts]
    columns.append(HtmlColumn("n", texts, True, [p.num_finished for p in points]))
    markup, style, num_rows = _markup("all-points", columns)
    more = len(analysis.points) - num_rows
    notes = (_legend(analysis), *([f"{units.counted(more, 'more point')} left out."] if more else []))
    return HtmlTable(markup, style, notes, num_rows > 15)


def trials_table(analysis: StudyAnalysis, trials: Sequence[TrialResult], *, max_bytes: int | None = None) -> HtmlTable:
    """A row for each trial, in the order given. What is the same for all is told below it, not in each row."""
    keys = list(dict.fromkeys([*analysis.space_keys, *(k for r in trials for k in r.spec.point)]))
    columns = [HtmlColumn("#", [str(i) for i in range(1, len(trials) + 1)], True)]
    columns += [_values(key, [r.spec.point.get(key) for r in trials]) for key in keys]
    columns += [
        HtmlColumn("repeat", [str(r.spec.repeat + 1) for r in trials], True),
        HtmlColumn("seed", [str(r.spec.seed) for r in trials], True),
        HtmlColumn("state", [r.state.value for r in trials]),
        HtmlColumn("attempts", [str(r.attempts) for r in trials], True),
        _numbers("trained, s", [r.train_time_s for r in trials]),
        _numbers("in all, s", [r.wall_s for r in trials]),
        _numbers("samples/s", [r.throughput_samples_per_s for r in trials]),
    ]
    speedups = pair_speedups(analysis.question, trials)
    columns.append(_numbers("speedup", [speedups.get(r.spec.identity) for r in trials]))
    factor, head = (100, f"{analysis.metric}, %") if units.is_share(analysis.metric) else (1, analysis.metric)
    finals = [r.final.get(analysis.metric) for r in trials]
    columns.append(_numbers(head, [factor * value if is_number(value) else None for value in finals]))
    started, moments = _started(trials)
    columns += [
        HtmlColumn(started, moments),
        HtmlColumn("node", [", ".join(by_rank(r, "node")) or units.MISSING for r in trials]),
        HtmlColumn("failure", _failures(trials), is_wide=True),
    ]
    droppable = {"state", "attempts", "node", "trained, s", "samples/s", "speedup", "failure"}
    same = {c.head: c.cells[0] for c in columns if c.head in droppable and len(set(c.cells)) == 1}
    markup, style, num_rows = _markup("all-trials", [c for c in columns if c.head not in same], max_bytes)
    told = [f"{head} {text}" for head, text in same.items() if text not in ("", units.MISSING)]
    notes = [f"The same for all: {', '.join(told)}."] if told else []
    if more := len(trials) - num_rows:
        notes.append(f"{units.counted(more, 'later trial')} left out: `raypar show` and `raypar export` have all.")
    return HtmlTable(markup, style, tuple(notes), num_rows > 15)


def by_rank(result: TrialResult, key: str) -> list[str]:
    """The distinct values of the ranks in a trial's environment, as text."""
    value = result.environment.get(key)
    listed = value if isinstance(value, (list, tuple)) else [value]
    return list(dict.fromkeys(str(each) for each in listed if each not in (None, "")))


def _rate(value: float, low: float | None, high: float | None) -> str:
    """Without the unit, which stands in the head."""
    return units.rate_interval(value, low, high, "").replace("  ", " ").strip()


def _values(key: str, values: Sequence[object]) -> HtmlColumn:
    return HtmlColumn(key, [units.value_of(v) for v in values], all(map(is_number, values)))


def _numbers(head: str, values: Sequence[float | None]) -> HtmlColumn:
    return HtmlColumn(head, [units.number(v) if is_number(v) else units.MISSING for v in values], True)


def _started(trials: Sequence[TrialResult]) -> tuple[str, list[str]]:
    """The column's head and its cells; the day stands in the head where it is the same for all."""
    moments = [datetime.fromtimestamp(r.started_at) if r.started_at > 0 else None for r in trials]
    days = {f"{at:%Y-%m-%d}" for at in moments if at}
    head, form = (f"started {days.pop()}", "%H:%M:%S") if len(days) == 1 else ("started", "%Y-%m-%d %H:%M:%S")
    return head, [at.strftime(form) if at else units.MISSING for at in moments]


def _failures(trials: Sequence[TrialResult]) -> list[str]:
    messages = [r.failure.message if r.failure and r.state is TrialState.FAILED else "" for r in trials]
    num = max(1, sum(map(bool, messages)))
    longest = max(MIN_FAILURE_LENGTH, min(MAX_FAILURE_LENGTH, MAX_FAILURE_BYTES // num))
    return [text if len(text) <= longest else text[: longest - 1] + "…" for text in messages]


def _markup(name: str, columns: Sequence[HtmlColumn], max_bytes: int | None = None) -> tuple[Markup, Markup, int]:
    """The table, rules for its columns, and how many of its rows it has: as many as fit into `MAX_TABLE_BYTES`, and
    into `max_bytes`."""
    rules = [_rule(name, [i for i, c in enumerate(columns, 1) if c.is_number], "text-align:right")]
    rules.append(_rule(name, [i for i, c in enumerate(columns, 1) if c.is_wide], "white-space:normal;min-width:12rem"))
    heads = "".join(f'<th scope="col">{escape(strip_control(c.head))}</th>' for c in columns)
    rows: list[str] = []
    left = min(MAX_TABLE_BYTES, MAX_TABLE_BYTES if max_bytes is None else max_bytes)
    for i in range(len(columns[0].cells)):
        row = "<tr>" + "".join(map(_cell, _row(columns, i)))
        left -= len(row.encode("utf-8", "replace")) + 1
        if left < 0:
            break
        rows.append(row)
    body = "\n".join(rows)
    text = f'<table id="{name}" data-sortable><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return Markup(text), Markup("".join(rules)), len(rows)  # every text of a study is escaped above


def _row(columns: Sequence[HtmlColumn], i: int) -> Iterable[tuple[str, float | None]]:
    for column in columns:
        yield column.cells[i], column.sort[i] if column.sort else None


def _cell(content: tuple[str, float | None]) -> str:
    text, sort = content
    shown = escape(strip_control(text))
    return f"<td>{shown}" if not is_number(sort) else f'<td data-sort="{sort:.6g}">{shown}'


def _rule(name: str, columns: Sequence[int], style: str) -> str:
    picked = ",".join(f":nth-child({i})" for i in columns)
    return f"#{name} :is(td,th):is({picked}){{{style}}}" if columns else ""


def _legend(analysis: StudyAnalysis) -> str:
    timed = "of the training steps alone" if analysis.time_metric == TRAIN_TIME else "of the whole trial"
    methods = [e.method for p in analysis.points for e in (p.time_s, p.speedup) if e and e.low is not None]
    told = "; ".join(dict.fromkeys(str(method) for method in methods if method is not Method.REFERENCE))
    energy = f" Energy: of {analysis.energy_source} in that time." if analysis.energy_source else ""
    return (
        f"Medians; times are {timed}; n: finished trials. "
        + (f"In brackets 95 % intervals: {told}." if told else "No intervals.")
        + energy
    )


def same_for_all(trials: Sequence[TrialResult]) -> Mapping[str, str]:
    """The hyperparameters that all trials share, as text."""
    found = {}
    for key in dict.fromkeys(k for r in trials for k in r.spec.config):
        given = {units.value_of(r.spec.config.get(key)) for r in trials}
        if len(given) == 1:
            found[key] = given.pop()
    return found


MAX_SEEDS = 50
_NAMES = {
    "command": "command",
    "git.commit": "git commit",
    "git.dirty": "changes that no commit has",
    "host": "host",
    "os": "operating system",
    "cpu": "CPU",
    "cores": "cores",
    "gpu": "GPU",
    "load": "load at the start",
}
_VERSION = "version."


@dataclass(frozen=True)
class Origin:
    """Where a study's numbers come from, as its executions have it.

    Attributes:
        tags: of `raypar.provenance.provenance`; others are not shown.
        description: what the study asks.
        study_source: the text of the study's file.
        partial: what the numbers lack, where the execution did not get to its end.
    """

    tags: Mapping[str, str]
    description: str = ""
    study_source: str = ""
    partial: str = ""


def provenance_lines(tags: Mapping[str, str], trials: Sequence[TrialResult]) -> list[tuple[str, str]]:
    """Name and value: command, commit, versions and machine, then what the trials ran on and with."""
    found = [(name, tags[key]) for key, name in _NAMES.items() if key in tags]
    if found and "git.commit" not in tags:
        found.insert(1, ("git commit", "none: the study's file is in no git repository"))
    versions = [f"{key.removeprefix(_VERSION)} {tags[key]}" for key in tags if key.startswith(_VERSION)]
    if versions:
        found.append(("versions", ", ".join(sorted(versions))))
    for key, called in (("node", "nodes of the trials"), ("device_name", "devices of the trials")):
        if values := dict.fromkeys(value for r in trials for value in by_rank(r, key)):
            found.append((called, ", ".join(values)))
    if seeds := sorted({r.spec.seed for r in trials}):
        found.append(("seeds", units.listed(map(str, seeds), MAX_SEEDS)))
    if same := same_for_all(trials):
        found.append(("the same for all trials", ", ".join(f"{key}={value}" for key, value in same.items())))
    return found


__all__ = ["Origin", "html_report", "write_html"]

TEMPLATE = "report.html.jinja"
TABLE_SCRIPT = "report.js"
MAX_PAGE_BYTES = 1_950_000  # so many trials are in its table that it stays below 2 MB …
MAX_WORDS_BYTES = 80_000  # … whatever is said beside the figures
COMMAND = re.compile(r"`([^`]+)`")
# Draws every figure beside its SVG, which goes only once that has worked. The interpreter of expressions does without
# eval, which the content security policy forbids.
_GEOMETRY = re.compile(r' (?:d|transform|points|[xy][12]?|c[xy]|r|width|height)="[^"]*"')
_DECIMALS = re.compile(r"\d+\.\d{3,}")
_FONT = re.compile(r' font-family="[^"]*"')
DRAW = """
for (const figure of document.querySelectorAll("figure[data-figure]")) {
  const chart = figure.querySelector(".chart");
  const still = chart.querySelector("svg");
  const live = document.createElement("div");
  chart.append(live);
  const spec = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
  vegaEmbed(live, spec, { renderer: "svg", actions: false, ast: true, mode: "vega-lite" }).then(
    () => still.remove(),
    () => live.remove(),
  );
}
"""


@dataclass(frozen=True)
class _Part:
    """A part of what the numbers say: a heading, and lines with their indent."""

    heading: str
    lines: Sequence[IndentedLine]


def html_report(analysis: StudyAnalysis, results: Sequence[TrialResult], origin: Origin) -> str:
    """The report as HTML, from what a store holds. Takes a few seconds: every figure is drawn.

    Args:
        analysis: what the results say.
        results: the study's trials, in any order.
        origin: where they come from.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    trials = latest(results)
    figures = figures_of(analysis, trials)
    table_script, chart_script = _inline((Path(__file__).parent / TABLE_SCRIPT).read_text("utf-8")), _chart_script()
    title = analysis.study_name or "study"
    points = points_table(analysis)
    drawings = [
        {
            "key": f.key,
            "title": f.title,
            "alternative": f.alternative,
            # Drawn here: its texts are escaped by who draws it.
            "svg": Markup(brief(static_svg(f))),
            "spec": for_page(f),
        }
        for f in figures
        if isinstance(f, Figure)
    ]
    taken = sum(len(str(part).encode("utf-8", "replace")) for part in (table_script, chart_script, origin.study_source))
    taken += sum(len(str(drawing).encode("utf-8", "replace")) for drawing in drawings)
    taken += len(points.markup.encode("utf-8", "replace")) if points else 0
    every_trial = trials_table(analysis, trials, max_bytes=MAX_PAGE_BYTES - MAX_WORDS_BYTES - taken)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        # A page can't have control characters. What is Markup has none: scripts are checked by their hash, names in
        # it have been stripped of control characters.
        finalize=lambda value: strip_control(value) if type(value) is str else value,
    )
    environment.filters["kept"] = _kept
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    text = environment.get_template(TEMPLATE).render(
        title=title,
        version=versions().get("raypar", ""),
        description=origin.description,
        partial=origin.partial,
        subtitle=_subtitle(analysis, trials),
        advice=_advice(analysis, trials),
        verdicts=analysis.verdicts,
        points=points,
        parts=_parts(analysis),
        figures=drawings,
        left_out=[f for f in figures if isinstance(f, OmittedFigure)],
        trials=every_trial,
        warnings=analysis.warnings,
        minded=units.counted(len(analysis.warnings), "thing") + " to mind",
        provenance=provenance_lines(origin.tags, trials),
        study_source=origin.study_source,
        table_script=Markup(table_script),
        chart_script=Markup(chart_script),
        script_hashes=[Markup(_hash(table_script)), Markup(_hash(chart_script))],
    )
    return as_utf8(text)


def _advice(analysis: StudyAnalysis, trials: Sequence[TrialResult]) -> list[str]:
    """Which configuration to take, or that the study can't tell; empty where nothing is to be chosen from."""
    if not any(p.time_s for p in analysis.points) or len(analysis.points) < 2:
        return []
    found = recommend(analysis.question, trials, Constraints())
    lines = [*answer_lines(found), *([settling_line(found.settling)] if found.settling else [])]
    return [f"Looked for: {objective(found)}.", *lines]


def _parts(analysis: StudyAnalysis) -> list[_Part]:
    """What the numbers say beside the verdicts; a part without lines is none."""
    name = analysis.study_name
    parts = (
        _Part("Scaling", scaling_lines(name, analysis.worker_groups)),
        _Part("Effects of the hyperparameters", effect_lines(analysis)),
        _Part("Batch sizes: throughput and progress", goodput_lines(analysis)),
    )
    return [part for part in parts if part.lines]


def brief(svg: str) -> str:
    """The drawing to a hundredth of a pixel, in the page's font; its texts as they are."""
    in_short = _GEOMETRY.sub(lambda found: _DECIMALS.sub(lambda n: f"{float(n[0]):.2f}", found[0]), svg)
    return _FONT.sub("", in_short)


def _kept(sentence: str) -> Markup:
    """The sentence, in which no line is broken between a number and its unit, and commands look like such."""
    from markupsafe import Markup, escape

    safe = escape(strip_control(no_break_values(sentence)))
    return Markup(COMMAND.sub(r"<code>\1</code>", str(safe)))


def write_html(path: Path, text: str) -> None:
    """Raises RayparError where the file can't be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RayparError(f"--html {path}: can't be written: {error.strerror}", hint="choose another file") from None


@cache
def _chart_script() -> str:
    """Vega-Lite's runtime and what draws the figures; takes about a second the first time."""
    import vl_convert

    return _inline(vl_convert.javascript_bundle(DRAW))


def _inline(script: str) -> str:
    """A script as it can stand in a page: nothing in it ends its element, or is changed by the page's parser."""
    return script.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _subtitle(analysis: StudyAnalysis, trials: Sequence[TrialResult]) -> str:
    parts = [units.counted(len(analysis.points), "point"), units.counted(len(trials), "trial")]
    if trials:
        parts.insert(0, f"workload {trials[0].spec.workload}")
    if analysis.baseline:
        parts.append(f"compared with {point_label(analysis.baseline)}")
    started = [r.started_at for r in trials if r.started_at > 0]
    if started:
        days = dict.fromkeys(f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}" for at in (min(started), max(started)))
        parts.append("started " + " to ".join(days))
    return ", ".join(parts)
