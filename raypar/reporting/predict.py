"""Prediction of upper bounds in a terminal: a row per worker count, the parts of a step, and the assumptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from rich.console import Console
from rich.text import Text

from raypar import units
from raypar.analysis.laws import Scaling
from raypar.analysis.stats import Estimate
from raypar.errors import RayparError
from raypar.predict.calibration import USUAL_VARIATIONS, Calibration
from raypar.predict.network import Algorithm, Network, Topology
from raypar.predict.outlook import Expected, Outlook
from raypar.predict.overhead import Facts
from raypar.predict.predict import JobSpec, Prediction, Sweep, job_step_times
from raypar.predict.step_model import Communication, Limit
from raypar.reporting.documents import Document
from raypar.reporting.text import Column, check_file, print_paragraph, print_table
from raypar.reporting.vega import (
    COLOURS,
    GREY,
    KINDS,
    WIDTH_PX,
    Figure,
    Row,
    layer,
    layers,
    nominal,
    quantity,
    workers_axis,
)

NOTE = (
    "Each value is a median, and its range holds the truth in about 9 of 10 cases. Ranges come from published "
    "trainings like this one, and each measured worker count narrows them. `At best` is the upper bound of the step "
    "model."
)
BAR_WIDTH = 50
PREDICTED, AT_BEST, IDEAL, MEASURED = "predicted", "at best", "ideal", "measured"
# Parts of a step: attribute of `StepTime`, character, style, name. Plain characters read the same in a file.
PARTS = (
    ("compute_s", "#", "green", "computing"),
    ("exposed_communication_s", "=", "red", "waiting for gradients"),
    ("straggler_s", "~", "yellow", "waiting for the slowest worker"),
    ("data_wait_s", ".", "magenta", "waiting for data"),
    ("optimizer_s", "+", "blue", "fixed time per step (optimizer, launches)"),
)
_BEYOND = {
    "workers": "more workers than were measured",
    "batch": "a batch per worker that was not measured",
    "network": "another network than the measured one",
    "sending": "other buckets, overlap or algorithm than the measured ones",
}


@dataclass(frozen=True)
class StepModel:
    """Step model of a candidate, and its upper bounds.

    Attributes:
        training: the training to predict.
        network_source: origin of the network: "as given", "fitted …".
    """

    shown: ClassVar = (
        "fastest=sweep.fastest most_workers=sweep.most_workers job=training calibration network=communication.network "
        "algorithm=communication.algorithm network_source"
    )
    calibration: Calibration
    training: JobSpec
    communication: Communication
    sweep: Sweep
    network_source: str


@dataclass(frozen=True)
class CandidateView:
    """Prediction from one study, table or rate, with its context.

    Attributes:
        title: the study and point, the file, or the workload.
        model: None: there is none.
        why_no_bound: reason; empty if there is a model.
        sources: sentences on the origin of other numbers.
        caveats: warnings of the study, a sentence or two each.
    """

    shown: ClassVar = (
        "name title base=outlook.base unit=outlook.measured.unit time=outlook.measured.time_name "
        "expected=outlook.expected advice=outlook.advice num_series=outlook.num_series step_model=model why_no_bound "
        "assumptions caveats"
    )
    name: str
    title: str
    outlook: Outlook
    model: StepModel | None = None
    why_no_bound: str = ""
    sources: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    def answer_lines(self, asked: Sequence[int]) -> list[str]:
        """Return the predictions that were asked for, what limits the largest, and what would narrow its range."""
        lines = [_sentence(e, self) for e in self.outlook.expected if e.num_workers in asked]
        if self.model is not None:
            lines += [*_with_more_variation(self.model), *_limits(self.model, asked)]
        return [*lines, *_advice(self.outlook)]

    @cached_property
    def assumptions(self) -> list[str]:
        """Assumptions of the prediction, a sentence each."""
        return _assumptions(self)


@dataclass(frozen=True)
class PredictView(Document):
    """Predictions for other worker counts, from one or several candidates.

    Attributes:
        asked: the requested worker counts.
    """

    kind = "predict"
    shown = "asked answer note candidates"
    asked: tuple[int, ...]
    candidates: tuple[CandidateView, ...]

    @property
    def answer(self) -> str:
        """Predictions that were asked for, in sentences."""
        lines = [line for each in self.candidates for line in each.answer_lines(self.asked)]
        return " ".join([*lines, *self.comparison])

    @cached_property
    def comparison(self) -> list[str]:
        """Candidates side by side at the largest worker count, in sentences; empty for one candidate."""
        return _compared(self.candidates)

    @property
    def note(self) -> str:
        """Meaning of the ranges."""
        return NOTE


def print_prediction(console: Console, view: PredictView) -> None:
    """Print predictions for other worker counts."""
    print_paragraph(console, view.note)
    for candidate in view.candidates:
        console.print()
        _print_candidate(console, candidate, view.asked)
    if view.comparison:
        console.print()
    for text in view.comparison:
        print_paragraph(console, text)


def _print_candidate(console: Console, view: CandidateView, asked: Sequence[int]) -> None:
    expected = view.outlook.expected
    print_paragraph(console, view.title)
    styles = ["dim" if e.measured is None else "" for e in expected]
    print_table(console, _columns(view.outlook), styles)
    if view.model is not None:
        console.print()
        print_paragraph(console, "Where the time of a step goes, at best:")
        bars = [_bar(prediction) for prediction in view.model.sweep.predictions]
        for bar in bars:
            console.print(bar, highlight=False, soft_wrap=True)
        marks = [f"{mark} {name}" for _, mark, _, name in PARTS if any(mark in bar.plain for bar in bars)]
        print_paragraph(console, "; ".join(marks))
    console.print()
    for text in view.answer_lines(asked):
        print_paragraph(console, text)
    lists = {"Warnings of the measured study:": view.caveats, "Assumptions:": view.assumptions}
    for heading, texts in lists.items():
        if texts:
            console.print()
            print_paragraph(console, heading)
        for text in texts:
            print_paragraph(console, f"- {text}")


def _columns(outlook: Outlook) -> list[Column]:
    unit, time_name = outlook.measured.unit, outlook.measured.time_name
    cells: dict[str, Callable[[Expected], str]] = {
        "workers": lambda e: units.count(e.num_workers),
        "efficiency": lambda e: _percent_range(e.efficiency),
        "speedup": lambda e: units.ratio(e.speedup.value),
    }
    if unit:
        cells[unit] = lambda e: units.compact(e.rate.value)
    if time_name:
        cells[time_name] = lambda e: units.seconds(e.time_s.value if e.time_s else None)
    if any(e.at_best for e in outlook.expected):
        cells["eff.,\nat best"] = lambda e: units.percent(e.at_best.efficiency.value if e.at_best else None)
        cells["limit"] = lambda e: _limit_name(e.at_best.limit) if e.at_best else units.MISSING
    cells["measured"] = _measured
    is_text = ("limit", "measured")
    return [Column(head, list(map(show, outlook.expected)), head not in is_text) for head, show in cells.items()]


def _measured(expected: Expected) -> str:
    if expected.measured_time_s is not None:
        return units.seconds(expected.measured_time_s.value)
    return units.compact(expected.measured.value if expected.measured else None)


def _limit_name(limit: Limit) -> str:
    return "small batch" if limit is Limit.BATCH else str(limit)


def _bar(prediction: Prediction) -> Text:
    """Return a bar of `BAR_WIDTH` characters, one kind per part, rounded so that the parts add up."""
    step, passed, end = prediction.step, 0.0, 0
    text = Text(f"{units.count(prediction.num_workers):>7} ")
    for name, mark, style, _ in PARTS:
        passed += getattr(step, name)
        start, end = end, round(BAR_WIDTH * passed / step.step_time_s)
        text.append(mark * (end - start), style)
    return text.append("  *" if prediction.extrapolated else "")


def _sentence(e: Expected, view: CandidateView) -> str:
    measured, model = view.outlook.measured, view.model
    nodes = f" on {units.counted(e.num_nodes, 'node')}" if e.num_nodes > 1 else ""
    batch = f", batch {units.count(round(model.training.batch_of(e.num_workers)))}" if model else ""
    parts = [f"efficiency {_percent_range(e.efficiency)}", f"speedup {_range(e.speedup, units.ratio)}"]
    if measured.unit:
        parts.append(f"{_range(e.rate, units.compact)} {measured.unit}")
    if e.time_s is not None:
        parts.append(_range(e.time_s, units.seconds) + (" per step" if measured.time_name == "step" else ""))
    text = f"{units.counted(e.num_workers, 'worker')}{nodes}{batch}: {', '.join(filter(None, parts))}."
    if model is not None and e.at_best is not None:
        step, training_s, epochs = e.at_best.step_time_s, e.at_best.training_s, model.training.epochs
        take = f"{units.counted(epochs, 'epoch')} take" if epochs > 1 else "the training takes"
        text += (
            f" At best {units.percent(e.at_best.efficiency.value, 1)}, {units.seconds(step.value)} per step, "
            f"{take} {units.seconds(training_s.value)}."
        )
        if beyond := e.at_best.extrapolated:
            text += f" Extrapolated (*): {', '.join(_BEYOND[what] for what in beyond)}."
    return text


def _range(estimate: Estimate, show: Callable[[float], str]) -> str:
    """Return a median and its range, also where the range is too wide for a measurement."""
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high:
        return show(estimate.value)
    return f"{show(estimate.value)} [{show(estimate.low)}, {show(estimate.high)}]"


def _percent_range(efficiency: Estimate) -> str:
    if efficiency.low is None or efficiency.high is None or efficiency.low == efficiency.high:
        return units.percent(efficiency.value)
    return f"{units.percent(efficiency.value)} [{100 * efficiency.low:.0f}, {100 * efficiency.high:.0f}]"


def _advice(outlook: Outlook) -> list[str]:
    """Return a sentence on the measurement that would narrow the range of the largest count."""
    advice = outlook.advice
    if advice is None:
        return []
    nodes = f" on {units.counted(advice.num_nodes, 'node')}" if advice.num_nodes > 1 else ""
    return [
        f"To narrow the range of {units.counted(advice.target, 'worker')}, measure "
        f"{units.counted(advice.num_workers, 'worker')}{nodes}: it would then be about "
        f"{round(100 * advice.width_after)} points wide instead of {round(100 * advice.width_before)}."
    ]


def _compared(candidates: Sequence[CandidateView]) -> list[str]:
    """Return sentences on the candidates at the largest worker count that all have."""
    common = set.intersection(*({e.num_workers for e in each.outlook.expected} for each in candidates))
    if len(candidates) < 2 or not common:
        return []
    count = max(common)
    rows = [(c.title, next(e for e in c.outlook.expected if e.num_workers == count)) for c in candidates]
    ordered = sorted(rows, key=lambda row: -row[1].efficiency.value)
    texts = "; ".join(f"{title}: {_percent_range(e.efficiency)}" for title, e in ordered)
    (_, best), (_, second) = ordered[:2]
    assert best.efficiency.low is not None and second.efficiency.high is not None
    is_open = best.efficiency.low <= second.efficiency.high
    end = " The ranges of the first two overlap: which is more efficient is open." if is_open else ""
    return [f"Efficiency with {units.counted(count, 'worker')}: {texts}.{end}"]


def _with_more_variation(report: StepModel) -> list[str]:
    """Return a sentence on the largest count with the higher usual variation, if none was measured."""
    calibration, last, training = report.calibration, report.sweep.predictions[-1], report.training
    if calibration.is_variation_measured or last.num_workers == 1:
        return []
    least, most = USUAL_VARIATIONS
    varied = replace(calibration, variation=most)
    counts = np.array([1, last.num_workers])
    one_s, step_s = job_step_times(varied, training, report.communication, counts).step_time_s
    batches = training.global_batch(counts)
    efficiency = (batches[1] / step_s) / (batches[0] / one_s) / last.num_workers
    return [
        f"This assumes that a worker's steps vary by {100 * least:g} %. If they vary by {100 * most:g} %, "
        f"{units.counted(last.num_workers, 'worker')} take at best {units.seconds(step_s)} per step, efficiency "
        f"{units.percent(efficiency, 1)}."
    ]


def _limits(report: StepModel, asked: Sequence[int]) -> list[str]:
    sweep, last = report.sweep, report.sweep.predictions[-1]
    step = last.step
    named = {
        Limit.COMPUTE: "computing is the limit",
        Limit.LATENCY: f"the latency of messages is the limit: {units.seconds(step.exposed_latency_s)} per step",
        Limit.BANDWIDTH: f"the network's bandwidth is the limit: {units.seconds(step.exposed_transfer_s)} per step",
        Limit.STRAGGLERS: f"the slowest worker is the limit: all wait {units.seconds(step.straggler_s)} per step",
        Limit.INPUT: f"the input pipeline is the limit: workers wait {units.seconds(step.data_wait_s)} per step",
        Limit.BATCH: f"the batch is too small: {units.seconds(step.optimizer_s)} per step do not shrink with it",
    }
    lines = [f"At best, with {units.counted(last.num_workers, 'worker')}, {named[last.limit]}."]
    if sweep.fastest < last.num_workers:
        lines.append(f"Workers beyond {units.count(sweep.fastest)} gain nothing, even at best.")
    if sweep.most_workers is not None and max(asked) > sweep.most_workers:
        most = units.count(sweep.most_workers)
        lines.append(f"More than {most} workers are not shown: a global batch of {most} has too few samples.")
    return lines


def _assumptions(view: CandidateView) -> list[str]:
    outlook = view.outlook
    counts = units.counted(outlook.num_measured, "measured worker count")
    lines = [f"ranges: {outlook.num_series} published series and {counts}; {_facts_text(outlook.facts)}"]
    lines += _model_assumptions(view.model) if view.model else [f"no bound of the step model: {view.why_no_bound}"]
    return [*lines, *view.sources]


def _facts_text(facts: Facts) -> str:
    """Return what is known of the training, in words."""
    facts_by_name = {
        "scaling": facts.scaling,
        "exchange": facts.exchange,
        "links within a node": facts.within,
        "network": facts.between,
        "model": facts.family,
        "parameters": facts.num_parameters and units.compact(facts.num_parameters),
        "step": facts.step_time_s and units.seconds(facts.step_time_s),
    }
    texts = [f"{name} {value}" for name, value in facts_by_name.items() if value]
    missing = [name for name, value in facts_by_name.items() if not value]
    return ", ".join(texts) + (f"; not known: {', '.join(missing)}" if missing else "")


def _model_assumptions(report: StepModel) -> list[str]:
    calibration, how, training = report.calibration, report.communication, report.training
    size = sum(layer.num_gradient_bytes for layer in calibration.layers)
    buckets = "in buckets of 25 MiB, the first of 1 MiB (torch's own)"
    if how.bucket_bytes is not None:
        buckets = f"in buckets of {how.bucket_bytes / 2**20:g} MiB" if how.bucket_bytes else "one by one"
    overlap = "during the backward pass" if how.overlap else "after the backward pass"
    shrunk = "" if how.compression == 1 else f", compressed to {units.percent(how.compression)}"
    strong, weak = "strong scaling: the global batch is", "weak scaling: each worker's batch is"
    lines = [
        f"{strong if training.scaling is Scaling.STRONG else weak} {units.count(training.batch_size)}",
        f"a worker takes {units.seconds(calibration.fixed_s)} per step and {units.seconds(calibration.per_sample_s)} "
        f"per sample, whatever the number of workers; its steps vary by {units.percent(calibration.variation, 1)} "
        f"({'measured' if calibration.is_variation_measured else 'assumed'}), and all wait for the slowest worker",
        f"{units.size(size)} of gradients of {units.counted(len(calibration.layers), 'layer')} are sent {buckets}, "
        f"{overlap}{shrunk}",
        *_network(how.network, how.algorithm, report.network_source),
        *calibration.notes,
    ]
    if training.accumulation_steps > 1:
        lines.append(f"gradients are sent once every {training.accumulation_steps} micro-batches")
    pipeline = "the input pipeline keeps up: its cost is part of the measured computing time"
    if training.input_samples_per_s is not None:
        pipeline = f"a node's input pipeline delivers {units.rate(training.input_samples_per_s)}"
    lines.append(pipeline)
    lines.append("at best, nothing else slows the workers: no contention between them, no other traffic, no slow node")
    predictions = report.sweep.predictions
    # A wait for the given input pipeline is not in the measured steps.
    compared = [(p.step_time_s.value, p.measured.value) for p in predictions if p.measured and not p.step.data_wait_s]
    if off := [abs(step_s / measured_s - 1) for step_s, measured_s in compared]:
        lines.append(f"the model differs from the measured steps above by at most {units.percent(max(off), 1)}")
    return lines


def _network(network: Network | Topology, algorithm: Algorithm | str, source: str) -> list[str]:
    ways = {
        Algorithm.AUTO: "for each bucket, the fastest of ring, tree and hierarchical all-reduce",
        Algorithm.RING: "all-reduce in a ring",
        Algorithm.GLOO: "all-reduce in gloo's ring on CPUs",
        Algorithm.TREE: "all-reduce over two trees",
        Algorithm.HIERARCHICAL: "all-reduce in the nodes, then between them",
    }
    way = ways[Algorithm(str(algorithm))]
    if isinstance(network, Network):
        return [f"{way}, on links of {_link(network)}, {source}"]
    return [
        f"{way}; {units.counted(network.workers_per_node, 'worker')} per node, links of {_link(network.within)} within "
        f"it, and a shared link of {_link(network.between)} to other nodes, {source}",
        "links do not slow each other: the switches have enough capacity",
    ]


def _link(network: Network) -> str:
    return f"{units.seconds(network.latency_s)} and {units.size(network.bandwidth_bytes_per_s)}/s"


def check_plot_path(path: Path) -> None:
    """Raise RayparError if no plot can be written to the path."""
    if path.suffix.lower().removeprefix(".") not in KINDS:
        raise RayparError(f"--plot {path}: unknown format", hint="end the name in .svg or .png")
    check_file(path)


def plot_of(view: CandidateView) -> Figure:
    """Draw throughput above efficiency by number of workers: the median, its range, the bound and the measurements."""
    expected, base = view.outlook.expected, view.outlook.base
    one = expected[0].rate.value / base
    lines: list[Row] = []
    for e in expected:
        n = e.num_workers
        ranges = {"low": e.rate.low, "high": e.rate.high, "least": e.efficiency.low, "most": e.efficiency.high}
        lines.append(_row(PREDICTED, n, e.rate.value, e.efficiency.value, **ranges))
        lines.append(_row(IDEAL, n, one * n, 1.0))
        if e.at_best is not None:
            lines.append(_row(AT_BEST, n, e.at_best.throughput_samples_per_s.value, e.at_best.efficiency.value))
    measured = [
        _row(MEASURED, e.num_workers, e.measured.value, e.measured.value / one / e.num_workers)
        for e in expected
        if e.measured is not None
    ]
    x = workers_axis([e.num_workers for e in expected])
    title = view.outlook.measured.unit or "rate"
    rate = quantity("rate", title, axis={"format": "~s"}, scale={"type": "log", "nice": False, "padding": 12})
    efficiency = quantity("efficiency", "efficiency", axis={"format": ".0%"}, scale={"domain": [0, 1.05]})
    names, dashes = [PREDICTED, AT_BEST, IDEAL], [[1, 0], [6, 4], [2, 3]]
    colours = {"domain": [*names, MEASURED], "range": [COLOURS[0], COLOURS[0], GREY, COLOURS[1]]}
    of_lines = {"orient": "top", "symbolType": "stroke", "symbolSize": 300}
    of_points = {"symbolSize": 150, "symbolFillColor": COLOURS[1], "symbolStrokeColor": COLOURS[1]}
    colour = nominal("series", scale=colours, legend=None)
    dash = nominal("series", scale={"domain": names, "range": dashes}, legend=of_lines)
    shape = nominal("series", scale={"domain": [MEASURED], "range": ["circle"]}, legend={"orient": "top", **of_points})
    line, encoded = {"type": "line", "strokeWidth": 1.5}, {"x": x, "color": colour, "strokeDash": dash}
    band = {"type": "area", "opacity": 0.15, "color": COLOURS[0]}
    points = layer({"type": "point", "filled": True, "size": 80}, x=x, y=rate, color=colour, shape=shape)
    predicted = {"data": {"values": [row for row in lines if row["series"] == PREDICTED]}}
    above = layers(
        lines,
        {**predicted, **layer(band, x=x, y={**rate, "field": "low"}, y2={"field": "high"})},
        layer(line, **encoded, y=rate),
        {"data": {"values": measured}, **points},
    )
    below = layers(
        [row for row in lines if row["series"] != IDEAL],
        {**predicted, **layer(band, x=x, y={**efficiency, "field": "least"}, y2={"field": "most"})},
        layer(line, **encoded, y=efficiency),
    )
    last = expected[-1]
    text = (
        "Samples per second and efficiency by number of workers: predicted medians with their ranges, upper bounds and "
        f"measurements. With {units.counted(last.num_workers, 'worker')}: efficiency "
        f"{_percent_range(last.efficiency)}."
    )
    both = [{**each, "width": WIDTH_PX} for each in (above, below)]
    return Figure("prediction", view.title, text, {"vconcat": both})


def _row(series: str, num_workers: int, rate: float, efficiency: float, **bounds: float | None) -> Row:
    return {"series": series, "workers": num_workers, "rate": rate, "efficiency": efficiency, **bounds}
