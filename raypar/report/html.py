"""A study's report as one HTML file that needs nothing else: `html_report`.

Figures stand in it twice: as SVG, which is there at once and where scripts are not run, and as Vega-Lite, with its
runtime, which takes the SVG's place once it is drawn. Names and texts of a study are data: they are escaped wherever
they stand, and the page's content security policy lets no script run but the two whose hashes it lists, and loads
nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from raypar import units
from raypar.analysis.points import PointAnalysis
from raypar.analysis.question import TRAIN_TIME, latest
from raypar.analysis.speedup import StudyAnalysis
from raypar.analysis.stats import Estimate
from raypar.errors import RayparError
from raypar.provenance import versions
from raypar.report.effects import effect_lines
from raypar.report.figures import figures_of
from raypar.report.figures_vega import Figure, LeftOut, for_page, is_number, static_svg
from raypar.report.scaling import scaling_lines
from raypar.study.trial import TrialResult, TrialState, point_label

TEMPLATE = "report.html.jinja"
TABLE_SCRIPT = "report.js"
MAX_ROWS = 400  # of a table: a report is to be sent around, and stays below 2 MB
MAX_FAILURE_LENGTH = 300
MAX_SEEDS = 50
UNIT = re.compile(r"(?<=\d) (?=(%|s|ms|µs|min|h|workers?)(\W|$))")
# Draws every figure beside its SVG, which goes only once that has worked. The interpreter of expressions does without
# eval, which the content security policy forbids.
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
_ORDER = ("command", "git.", "version.", "host", "os", "cpu", "cores", "gpu", "load")


@dataclass(frozen=True)
class Origin:
    """Where a study's numbers come from, as its latest execution has it.

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


@dataclass(frozen=True)
class _Head:
    text: str
    is_number: bool = False


@dataclass(frozen=True)
class _Cell:
    """`sort` is what a number is sorted by; `kind` a class of the page."""

    text: str
    sort: float | None = None
    kind: str = ""


@dataclass(frozen=True)
class _Table:
    heads: Sequence[_Head]
    rows: Sequence[Sequence[_Cell]]


def html_report(analysis: StudyAnalysis, results: Sequence[TrialResult], origin: Origin) -> str:
    """The report as HTML, from what a store holds. Takes a few seconds: every figure is drawn.

    Args:
        analysis: what the results say.
        results: the study's trials, in any order.
        origin: where they come from.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    trials = sorted(latest(results), key=lambda r: (r.started_at, r.spec.order))
    figures = figures_of(analysis, trials)
    table_script, chart_script = _inline((Path(__file__).parent / TABLE_SCRIPT).read_text("utf-8")), _chart_script()
    title = analysis.study_name or "study"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["kept"] = _kept
    more = len(trials) - MAX_ROWS
    text = environment.get_template(TEMPLATE).render(
        title=title,
        version=versions().get("raypar", ""),
        description=origin.description,
        partial=origin.partial,
        subtitle=_subtitle(analysis, trials),
        verdicts=analysis.verdicts,
        points=_points_table(analysis),
        legend=_legend(analysis),
        sections=[scaling_lines(title, analysis.worker_groups), effect_lines(analysis)],
        figures=[
            {
                "key": f.key,
                "title": f.title,
                "alternative": f.alternative,
                # Drawn here: its texts are escaped by who draws it.
                "svg": Markup(static_svg(f)),
                "spec": for_page(f),
            }
            for f in figures
            if isinstance(f, Figure)
        ],
        left_out=[f for f in figures if isinstance(f, LeftOut)],
        trials=_trials_table(analysis, trials[:MAX_ROWS]),
        trials_left_out=f"{units.counted(more, 'later trial')} left out: `raypar show` has all." if more > 0 else "",
        warnings=analysis.warnings,
        provenance=_provenance(origin.tags, trials),
        study_source=origin.study_source,
        table_script=Markup(table_script),
        chart_script=Markup(chart_script),
        script_hashes=[Markup(_hash(table_script)), Markup(_hash(chart_script))],
    )
    return text.encode("utf-8", "replace").decode()  # a lone surrogate in a name can't be written


def _kept(sentence: str) -> str:
    """The sentence with values in one piece: no line is broken between a number and its unit."""
    return UNIT.sub("\N{NO-BREAK SPACE}", sentence)


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


def _points_table(analysis: StudyAnalysis) -> _Table:
    points = analysis.points[:MAX_ROWS]
    has_rate, has_metric = any(p.throughput for p in points), any(p.metric for p in points)
    heads = [_Head("point"), _Head("time", True)]
    heads += [_Head("speedup", True), _Head("efficiency", True)] if analysis.baseline else []
    heads += [_Head(analysis.metric, True)] if has_metric else []
    heads += [_Head("samples/s", True)] if has_rate else []
    heads += [_Head("energy", True)] if analysis.energy_source else []
    heads.append(_Head("finished", True))

    def cells(p: PointAnalysis) -> Iterable[_Cell]:
        yield _Cell(point_label(p.point))
        yield _estimate(p.time_s, units.seconds_interval)
        if analysis.baseline:
            yield _number("baseline", 1.0) if p.is_baseline else _estimate(p.speedup, units.ratio_interval)
            yield _number(units.MISSING) if p.is_baseline else _estimate(p.efficiency, units.percent_interval)
        if has_metric:
            yield _estimate(p.metric, lambda *e: units.score_interval(analysis.metric, *e))
        if has_rate:
            yield _estimate(p.throughput, lambda value, low, high: units.rate_interval(value, low, high, "").strip())
        if analysis.energy_source:
            yield _estimate(p.energy_j, units.energy_interval)
        yield _number(f"{p.num_finished} of {max(analysis.num_repeats or 0, p.num_trials)}", p.num_finished)

    return _Table(heads, [list(cells(p)) for p in points])


def _legend(analysis: StudyAnalysis) -> str:
    timed = "of the training steps alone" if analysis.time_metric == TRAIN_TIME else "of the whole trial"
    methods = [e.method for p in analysis.points for e in (p.time_s, p.speedup) if e and e.low is not None]
    told = "; ".join(dict.fromkeys(method for method in methods if method != "1 by definition"))
    text = f"Medians; times are {timed}. " + (f"In brackets 95 % intervals: {told}." if told else "No intervals.")
    if analysis.energy_source:
        text += f" Energy: of {analysis.energy_source} in that time."
    more = len(analysis.points) - MAX_ROWS
    return f"{text} {units.counted(more, 'more point')} left out." if more > 0 else text


def _trials_table(analysis: StudyAnalysis, trials: Sequence[TrialResult]) -> _Table:
    keys = list(dict.fromkeys([*analysis.space_keys, *(k for r in trials for k in r.spec.point)]))
    has_failures = any(r.failure for r in trials)
    heads = [_Head("#", True), *(_Head(key) for key in keys)]
    heads += [_Head(text, True) for text in ("repeat", "seed")]
    heads += [_Head("state"), *(_Head(t, True) for t in ("trained", "in all", "samples/s", analysis.metric))]
    heads += [_Head("started"), _Head("node"), *([_Head("failure")] if has_failures else [])]

    def cells(i: int, r: TrialResult) -> Iterable[_Cell]:
        yield _number(str(i), i)
        for key in keys:
            value = r.spec.point.get(key)
            yield _Cell(units.value_of(value), float(value) if is_number(value) else None)
        yield _number(str(r.spec.repeat + 1), r.spec.repeat + 1)
        yield _number(str(r.spec.seed), r.spec.seed)
        yield _Cell(r.state.value + (f", attempt {r.attempts}" if r.attempts > 1 else ""))
        metric = r.final.get(analysis.metric)
        yield _number(units.seconds(r.train_time_s), r.train_time_s)
        yield _number(units.seconds(r.wall_s), r.wall_s)
        yield _number(units.compact(r.throughput_samples_per_s), r.throughput_samples_per_s)
        yield _number(units.score(analysis.metric, metric), metric)
        at = r.started_at
        yield _Cell(f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}" if at > 0 else units.MISSING, at)
        yield _Cell(", ".join(_by_rank(r, "node")) or units.MISSING)
        if has_failures:
            message = r.failure.message if r.failure and r.state is TrialState.FAILED else ""
            short = message if len(message) <= MAX_FAILURE_LENGTH else message[: MAX_FAILURE_LENGTH - 1] + "…"
            yield _Cell(short, kind="text")

    return _Table(heads, [list(cells(i, r)) for i, r in enumerate(trials, 1)])


def _estimate(estimate: Estimate | None, show: Any) -> _Cell:
    if estimate is None:
        return _number(units.MISSING)
    return _number(show(estimate.value, estimate.low, estimate.high), estimate.value)


def _number(text: str, value: float | None = None) -> _Cell:
    return _Cell(text, value if is_number(value) else None, "number")


def _by_rank(result: TrialResult, key: str) -> list[str]:
    """The distinct values of the ranks, as text."""
    value = result.environment.get(key)
    listed = value if isinstance(value, (list, tuple)) else [value]
    return list(dict.fromkeys(str(each) for each in listed if each not in (None, "")))


def _provenance(tags: Mapping[str, str], trials: Sequence[TrialResult]) -> list[tuple[str, str]]:
    """Name and value: the execution's tags in the order of `_ORDER`, then what the trials ran with and on."""
    found = [(name, tags[name]) for start in _ORDER for name in tags if name == start or _is_in(name, start)]
    for key, called in (("node", "nodes of the trials"), ("device_name", "devices of the trials")):
        if values := dict.fromkeys(value for r in trials for value in _by_rank(r, key)):
            found.append((called, ", ".join(values)))
    if seeds := sorted({r.spec.seed for r in trials}):
        more = f" and {units.count(len(seeds) - MAX_SEEDS)} more" if len(seeds) > MAX_SEEDS else ""
        found.append(("seeds", ", ".join(map(str, seeds[:MAX_SEEDS])) + more))
    same = {}
    for key in dict.fromkeys(k for r in trials for k in r.spec.config):
        given = {units.value_of(r.spec.config.get(key)) for r in trials}
        if len(given) == 1:
            same[key] = given.pop()
    if same:
        found.append(("the same for all trials", ", ".join(f"{key}={value}" for key, value in same.items())))
    return found


def _is_in(name: str, start: str) -> bool:
    return start.endswith(".") and name.startswith(start)
