"""A study's report as one self-contained HTML file.

Figures are included twice: as SVG, which shows at once and without scripts, and as Vega-Lite with its runtime, which
replaces the SVG once it is drawn. Names and texts of a study are data and always escaped. The page's content security
policy only allows the two scripts whose hashes it lists, and loads nothing.

The page's script sorts by a cell's ``data-sort``, or else by its text. Optional end tags are omitted, so that a report
of thousands of trials stays small enough to send.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from raypar import units
from raypar.analysis.analyse import StudyAnalysis, speedups_in_blocks
from raypar.analysis.question import current_results
from raypar.errors import RayparError
from raypar.files import cache_dir, make_private_folder
from raypar.provenance import versions
from raypar.reporting.figures import figures_of
from raypar.reporting.points import point_columns
from raypar.reporting.text import Column, as_utf8, no_break_values, replacing, strip_control, value_column
from raypar.reporting.vega import Figure, OmittedFigure, for_page, static_svg
from raypar.reporting.view import StudyView
from raypar.study.quantity import WALL_TIME, View, of_view
from raypar.study.trial import TrialResult, latest, point_label

if TYPE_CHECKING:
    from jinja2 import Environment

TABLE_SCRIPT, CHART_SCRIPT = "report.js", "figures.js"
DRAWER = "vl-convert-python"  # package
FOLDER = Path(__file__).parent
COMMAND = re.compile(r"`([^`]+)`")
_GEOMETRY = re.compile(r' (?:d|transform|points|[xy][12]?|c[xy]|r|width|height)="[^"]*"')
_DECIMALS, _FONT = re.compile(r"\d+\.\d{3,}"), re.compile(r' font-family="[^"]*"')
MAX_POINTS, MAX_TRIALS = 500, 2000
MAX_COMPARISONS = 8
MAX_FIGURES = 6  # further ones are collapsed
NO_BREAK = "\N{NO-BREAK SPACE}"
MAX_FAILURE_LENGTH = 300
MAX_SEEDS = 50
_NAMES = {"command": "command", "git.commit": "git commit", "git.dirty": "uncommitted changes", "host": "host"}
_NAMES |= {"os": "operating system", "cpu": "CPU", "cores": "cores", "gpu": "GPU", "load": "load at the start"}


@dataclass(frozen=True)
class Origin:
    """Provenance of a study's numbers."""

    tags: Mapping[str, str]  # from `raypar.provenance.provenance`; others are not shown
    description: str = ""  # the study's question
    study_source: str = ""  # the text of the study's file
    partial: str = ""  # what is missing from the numbers if the execution did not finish


def html_report(view: StudyView, results: Sequence[TrialResult], origin: Origin) -> str:
    """Return the report as HTML; takes a few seconds, since every figure is drawn.

    Args:
        results: the study's trials, in any order. Trials of other settings are excluded.
    """
    analysis, verdict = view.analysis, view.analysis.verdict
    trials = latest(current_results(analysis.question, results).results)
    figures = figures_of(analysis, trials)
    points = points_table(view)
    all_trials = trials_table(analysis, trials)
    drawings = drawings_of(figures)
    return page_of(
        "report.html.jinja",
        headline=view.headline,
        verdict=verdict,
        origin=origin,
        header=", ".join(filter(None, (view.header, _subtitle(analysis, trials)))),
        description=" ".join(origin.description.split()).removeprefix(verdict.question).strip(),
        comparisons=_comparisons(view.comparisons),
        recommended=view.summary,
        objective=view.objective,
        statements=analysis.statements,
        points=points,
        parts=view.sections,
        is_repeated=any(len(p.samples) > 1 for p in analysis.points),
        figures=drawings[:MAX_FIGURES],
        more_figures=drawings[MAX_FIGURES:],
        omitted=[f for f in figures if isinstance(f, OmittedFigure)],
        trials=all_trials,
        warnings=analysis.warnings,
        caveats=units.counted(len(analysis.warnings), "caveat"),
        provenance=provenance_lines(origin.tags, trials),
        styles=[table.style for table in (points, all_trials) if table],
    )


def drawings_of(figures: Sequence[Figure | OmittedFigure]) -> list[dict[str, Any]]:
    """Return the fields of each figure with its drawing and its spec for the page; takes 0.2 s each."""
    # Drawn here, because the drawing code escapes the texts.
    return [
        {**vars(f), "svg": Markup(brief(static_svg(f))), "spec": for_page(f)} for f in figures if isinstance(f, Figure)
    ]


def page_of(template: str, **values: Any) -> str:
    """Return a page from its template and the values in it, with the scripts and their hashes."""
    table_script, chart_script = _inline((FOLDER / TABLE_SCRIPT).read_text("utf-8")), _chart_script()
    text = (
        _environment()
        .get_template(template)
        .render(
            **values,
            version=versions().get("raypar", ""),
            table_script=Markup(table_script),
            chart_script=Markup(chart_script),
            script_hashes=[Markup(_hash(table_script)), Markup(_hash(chart_script))],
        )
    )
    return as_utf8(text)


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        # A page must not contain control characters. Markup has none: scripts are checked by their hash, and names in
        # tables and drawings are stripped.
        finalize=lambda value: strip_control(value) if type(value) is str else value,
    )
    environment.filters["kept"] = _kept
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _comparisons(columns: Sequence[Column]) -> list[tuple[str, Markup, str]]:
    """Return the comparisons with speedup and outcome; empty if there are many, as the table of points has them."""
    rows = list(zip(*(column.cells for column in columns), strict=True))
    rows = rows if len(rows) <= MAX_COMPARISONS else []
    return [(", ".join(filter(None, compared)), _value(ratio), outcome) for *compared, ratio, outcome in rows]


def brief(svg: str) -> str:
    """Return the drawing with coordinates rounded to 0.01 pixels, in the page's font; its texts are unchanged."""
    rounded = _GEOMETRY.sub(lambda each: _DECIMALS.sub(lambda n: f"{float(n[0]):.2f}", each[0]), svg)
    return _FONT.sub("", rounded)


def _kept(sentence: str) -> Markup:
    """Return the sentence as markup: no line breaks between a number and its unit, commands as code."""
    safe = escape(strip_control(no_break_values(sentence)))
    return Markup(COMMAND.sub(r"<code>\1</code>", str(safe)))


@cache
def _chart_script() -> str:
    """Return Vega-Lite's runtime with the script that draws the figures."""
    return _inline(bundled((FOLDER / CHART_SCRIPT).read_text("utf-8")))


def bundled(script: str) -> str:
    """Return a script with Vega-Lite's runtime. Takes over a second the first time; then it is in the user's cache."""
    import vl_convert

    digest = hashlib.sha256(f"{version(DRAWER)}\n{script}".encode()).hexdigest()
    path = cache_dir() / "scripts" / f"{digest[:16]}.js"
    with suppress(OSError, ValueError):
        return path.read_text("utf-8")
    text = vl_convert.javascript_bundle(script)
    with suppress(OSError, RayparError):
        make_private_folder(path.parent)
        with replacing(path) as draft:
            draft.write_text(text, "utf-8")
    return text


def _inline(script: str) -> str:
    """Return a script for use in a page: nothing in it ends the script element or is changed by the HTML parser."""
    return script.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _subtitle(analysis: StudyAnalysis, trials: Sequence[TrialResult]) -> str:
    parts = [f"workload {trials[0].spec.workload}"] if trials else []
    if analysis.question.baseline:
        parts.append(f"baseline {point_label(analysis.question.baseline)}")
    if started := [r.started_at for r in trials if r.started_at > 0]:
        parts.append(f"started {datetime.fromtimestamp(min(started)):%Y-%m-%d %H:%M}")
    return ", ".join(parts)


@dataclass(frozen=True)
class HtmlTable:
    """Table as markup, with notes below it."""

    markup: Markup
    style: Markup  # rules for its columns
    num_rows: int
    notes: Sequence[str] = ()


def points_table(view: StudyView) -> HtmlTable | None:
    """Return a table with a row for each point; None if there is no point."""
    analysis = view.analysis
    if not analysis.points:
        return None
    table = table_of("all-points", point_columns(analysis, max_points=MAX_POINTS))
    more = len(analysis.points) - table.num_rows
    omitted = [f"{units.counted(more, 'more point')} not shown."] if more else []
    return replace(table, notes=[view.legend, *omitted])


def trials_table(analysis: StudyAnalysis, trials: Sequence[TrialResult], most: int = MAX_TRIALS) -> HtmlTable:
    """Return a table with a row for each of the first trials; a note below it has the values that all trials share."""
    more, trials = len(trials) - most, trials[:most]
    metric = analysis.question.metric
    keys = list(dict.fromkeys([*analysis.question.space_keys, *(k for r in trials for k in r.spec.point)]))
    speedups = speedups_in_blocks(analysis.question, analysis.points)
    judged_by = analysis.question.judged_by
    factor = judged_by.per_cent or 1
    finals = [r.final.get(metric) for r in trials]
    columns = [
        Column("#", [str(i) for i in range(1, len(trials) + 1)], True),
        *(value_column(key, [r.spec.point.get(key) for r in trials]) for key in keys),
        Column("repeat", [str(r.spec.repeat + 1) for r in trials], True),
        Column("seed", [str(r.spec.seed) for r in trials], True),
        Column("state", [r.state.value for r in trials]),
        Column("attempts", [str(r.attempts) for r in trials], True),
        *(_numbers(q.page_head or q.head, [q.of(r) for r in trials]) for q in of_view(View.PAGE)),
        _numbers("speedup", [speedups.get(r.spec.identity) for r in trials]),
        _numbers(judged_by.head, [factor * value if units.is_number(value) else None for value in finals]),
        _started(trials),
        Column("node", [", ".join(r.conditions.names("node")) or units.MISSING for r in trials]),
        Column("failure", _failures(trials), is_prose=True),
    ]
    droppable = {"state", "attempts", "node", "speedup", "failure"}
    droppable |= {q.page_head or q.head for q in of_view(View.PAGE) if q is not WALL_TIME}
    same = {c.head: c.cells[0] for c in columns if c.head in droppable and len(set(c.cells)) == 1}
    table = table_of("all-trials", [c for c in columns if c.head not in same])
    shared = [f"{head} {text}" for head, text in same.items() if text not in ("", units.MISSING)]
    notes = [f"The same for all: {', '.join(shared)}."] if shared else []
    if more > 0:
        left_out = units.counted(more, "later trial")
        notes.append(f"{left_out} not shown: `raypar store show` and `raypar store export` include them.")
    return replace(table, notes=notes)


def _numbers(head: str, values: Sequence[float | None]) -> Column:
    return Column(head, [units.number(v) if units.is_number(v) else units.MISSING for v in values], True)


def _started(trials: Sequence[TrialResult]) -> Column:
    """Return the column of starting times; the head has the day if it is the same for all."""
    moments = [datetime.fromtimestamp(r.started_at) if r.started_at > 0 else None for r in trials]
    days = {f"{at:%Y-%m-%d}" for at in moments if at}
    head, form = (f"started {days.pop()}", "%H:%M:%S") if len(days) == 1 else ("started", "%Y-%m-%d %H:%M:%S")
    return Column(head, [at.strftime(form) if at else units.MISSING for at in moments])


def _failures(trials: Sequence[TrialResult]) -> list[str]:
    messages = [r.failure.message if r.failure else r.reason for r in trials]
    return [text if len(text) <= MAX_FAILURE_LENGTH else text[: MAX_FAILURE_LENGTH - 1] + "…" for text in messages]


def table_of(name: str, columns: Sequence[Column]) -> HtmlTable:
    """Return the columns as a sortable table with this id."""
    rules = _rule(name, [c.is_number for c in columns], "text-align:right")
    rules += _rule(name, [c.is_prose for c in columns], "white-space:normal;min-width:12rem")
    # Heads may break after an underscore.
    heads = "".join(
        f'<th scope="col">{escape(strip_control(c.head)).replace("_", Markup("_<wbr>"))}</th>' for c in columns
    )
    rows = [
        "<tr>" + "".join(_cell(c.cells[i], c.sort[i] if c.sort else None) for c in columns)
        for i in range(len(columns[0].cells))
    ]
    body = "\n".join(rows)
    text = f'<table id="{name}" data-sortable><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table>'
    return HtmlTable(Markup(text), Markup(rules), len(rows))  # every text of a study is escaped above


def _cell(text: str, sort: float | None) -> str:
    """Return a cell in which a value may only break before its interval."""
    if not units.is_number(sort):
        return f"<td>{escape(strip_control(text))}"
    return f'<td data-sort="{sort:.6g}">{_value(text)}'


def _value(text: str) -> Markup:
    """Return a value that may only break before its interval or before ``(too noisy)``."""
    value, *interval = re.split(r" (?=[\[(])", strip_control(text), maxsplit=1)
    shown = escape(value.replace(" ", NO_BREAK))
    return shown + (Markup(' <span class="interval">{}</span>').format(interval[0]) if interval else "")


def _rule(name: str, picked: Iterable[bool], style: str) -> str:
    columns = ",".join(f":nth-child({i})" for i, is_picked in enumerate(picked, 1) if is_picked)
    return f"#{name} :is(td,th):is({columns}){{{style}}}" if columns else ""


def provenance_lines(tags: Mapping[str, str], trials: Sequence[TrialResult]) -> list[tuple[str, str]]:
    """Return names and values: command, commit, versions, machine, seeds, shared hyperparameters."""
    lines = [(name, tags[key]) for key, name in _NAMES.items() if key in tags]
    if lines and "git.commit" not in tags:
        lines.insert(1, ("git commit", "none: the study's file is not in a git repository"))
    if packages := sorted(f"{key[8:]} {tag}" for key, tag in tags.items() if key.startswith("version.")):
        lines.append(("versions", ", ".join(packages)))
    if seeds := sorted({r.spec.seed for r in trials}):
        lines.append(("seeds", units.listed(map(str, seeds), MAX_SEEDS)))
    keys = dict.fromkeys(key for r in trials for key in r.spec.config)
    values_of = {key: {units.value_of(r.spec.config.get(key)) for r in trials} for key in keys}
    if shared := [f"{key}={values.pop()}" for key, values in values_of.items() if len(values) == 1]:
        lines.append(("the same for all trials", ", ".join(shared)))
    return lines
