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
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from raypar import units
from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.candidates import Ask
from raypar.analysis.recommend import recommend
from raypar.errors import RayparError
from raypar.provenance import versions
from raypar.report.effects import effect_lines
from raypar.report.figures import figures_of
from raypar.report.figures_vega import Figure, LeftOut, for_page, static_svg
from raypar.report.goodput import goodput_lines
from raypar.report.html_provenance import Origin, provenance_lines
from raypar.report.html_tables import points_table, trials_table
from raypar.report.plain import as_utf8, harmless
from raypar.report.recommend import answer_lines, asked_for, settling_line
from raypar.report.scaling import Line, scaling_lines
from raypar.report.wrapping import unbroken
from raypar.study.trial import TrialResult, latest, point_label

if TYPE_CHECKING:
    from markupsafe import Markup

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
    lines: Sequence[Line]


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
        # it have been made harmless.
        finalize=lambda value: harmless(value) if type(value) is str else value,
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
        left_out=[f for f in figures if isinstance(f, LeftOut)],
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
    found = recommend(analysis.question, trials, Ask())
    lines = [*answer_lines(found), *([settling_line(found.settling)] if found.settling else [])]
    return [f"Looked for: {asked_for(found)}.", *lines]


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

    safe = escape(harmless(unbroken(sentence)))
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
