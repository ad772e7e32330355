"""Prediction of upper bounds in a terminal: a row per worker count, the parts of a step, and the assumptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from raypar import units
from raypar.analysis.laws import Scaling
from raypar.errors import RayparError
from raypar.predict.calibration import USUAL_VARIATIONS, Calibration
from raypar.predict.network import Algorithm, Network, Topology
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

AT_BEST = (
    "These are upper bounds, not estimates. The efficiency of published systems was up to 12 points lower than the "
    "model's."
)
BAR_WIDTH = 50
NUM_CURVE_POINTS = 200
PREDICTED, EXTRAPOLATED, IDEAL, MEASURED = "predicted, at best", "extrapolated, at best", "ideal", "measured"
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
class PredictView(Document):
    """Prediction for other worker counts, with its context.

    Attributes:
        title: the study and point.
        asked: the requested worker counts.
        training: the training to predict.
        network_source: origin of the network: "as given", "fitted …".
        sources: sentences on the origin of other numbers.
        caveats: warnings of the study, a sentence or two each.
    """

    kind = "predict"
    shown = (
        "study title answer note asked predictions=sweep.predictions fastest=sweep.fastest "
        "most_workers=sweep.most_workers job=training calibration network=communication.network "
        "algorithm=communication.algorithm network_source assumptions caveats"
    )
    study: str
    title: str
    asked: tuple[int, ...]
    calibration: Calibration
    training: JobSpec
    communication: Communication
    sweep: Sweep
    network_source: str
    sources: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()

    @cached_property
    def answer_lines(self) -> list[str]:
        """Predictions that were asked for, and what limits the largest, in sentences."""
        asked = [_sentence(p, self.training) for p in self.sweep.predictions if p.num_workers in self.asked]
        return [*asked, *_with_more_variation(self), *_limits(self)]

    @property
    def answer(self) -> str:
        """Predictions that were asked for, and what limits the largest, in sentences."""
        return " ".join(self.answer_lines)

    @property
    def note(self) -> str:
        """Sense in which these are bounds."""
        return AT_BEST

    @cached_property
    def assumptions(self) -> list[str]:
        """Assumptions of the prediction, a sentence each."""
        return _assumptions(self)


def print_prediction(console: Console, view: PredictView) -> None:
    """Print upper bounds for other worker counts."""
    predictions = view.sweep.predictions
    print_paragraph(console, view.title)
    print_paragraph(console, view.note)
    console.print()
    styles = ["dim" if p.extrapolated and p.measured is None else "" for p in predictions]
    print_table(console, _columns(predictions), styles)
    console.print()
    print_paragraph(console, "Where the time of a step goes:")
    bars = [_bar(prediction) for prediction in predictions]
    for bar in bars:
        console.print(bar, highlight=False, soft_wrap=True)
    marks = [f"{mark} {name}" for _, mark, _, name in PARTS if any(mark in bar.plain for bar in bars)]
    print_paragraph(console, "; ".join(marks))
    console.print()
    for text in view.answer_lines:
        print_paragraph(console, text)
    lists = {"Warnings of the measured study:": view.caveats, "Assumptions:": view.assumptions}
    for heading, texts in lists.items():
        if texts:
            console.print()
            print_paragraph(console, heading)
        for text in texts:
            print_paragraph(console, f"- {text}")


def _columns(predictions: Sequence[Prediction]) -> list[Column]:
    def measured(p: Prediction) -> str:
        if p.measured is not None:
            return units.seconds(p.measured.value)
        return "extrapolated" if p.extrapolated else units.MISSING

    cells: Mapping[str, Callable[[Prediction], str]] = {
        "workers": lambda p: units.count(p.num_workers),
        "step,\nat best": lambda p: units.seconds(p.step_time_s.value),
        "samples/s,\nat best": lambda p: units.compact(p.throughput_samples_per_s.value),
        "speedup,\nat best": lambda p: units.ratio(p.speedup.value),
        "eff.,\nat best": lambda p: units.percent(p.efficiency.value),
        "epoch,\nat best": lambda p: units.seconds(p.epoch_s.value),
        "limit": lambda p: "small batch" if p.limit is Limit.BATCH else str(p.limit),
        "measured": measured,
    }
    is_text = ("limit", "measured")
    return [Column(head, list(map(show, predictions)), head not in is_text) for head, show in cells.items()]


def _bar(prediction: Prediction) -> Text:
    """Return a bar of `BAR_WIDTH` characters, one kind per part, rounded so that the parts add up."""
    step, passed, end = prediction.step, 0.0, 0
    text = Text(f"{units.count(prediction.num_workers):>7} ")
    for name, mark, style, _ in PARTS:
        passed += getattr(step, name)
        start, end = end, round(BAR_WIDTH * passed / step.step_time_s)
        text.append(mark * (end - start), style)
    return text.append("  *" if prediction.extrapolated else "")


def _sentence(p: Prediction, training: JobSpec) -> str:
    step, rate, efficiency, training_s = p.step_time_s, p.throughput_samples_per_s, p.efficiency, p.training_s
    time = units.seconds_interval(step)
    take = "take" if training.epochs > 1 else "takes"
    text = (
        f"{units.counted(p.num_workers, 'worker')}, batch {units.count(p.batch_size)}: at best {time} per step, "
        f"{units.rate_interval(rate)}, speedup {units.ratio(p.speedup.value)}, efficiency "
        f"{units.percent_interval(efficiency, 1)}; "
        f"{units.counted(training.epochs, 'epoch')} {take} {units.seconds(training_s.value)} at best."
    )
    if p.extrapolated:
        text += f" Extrapolated (*): {', '.join(_BEYOND[what] for what in p.extrapolated)}."
    return text


def _with_more_variation(report: PredictView) -> list[str]:
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


def _limits(report: PredictView) -> list[str]:
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
    lines = [f"With {units.counted(last.num_workers, 'worker')}, {named[last.limit]}."]
    if sweep.fastest < last.num_workers:
        lines.append(f"Workers beyond {units.count(sweep.fastest)} gain nothing, even at best.")
    if sweep.most_workers is not None and max(report.asked) > sweep.most_workers:
        most = units.count(sweep.most_workers)
        lines.append(f"More than {most} workers are not shown: a global batch of {most} has too few samples.")
    return lines


def _assumptions(report: PredictView) -> list[str]:
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
        *report.sources,
        *calibration.notes,
    ]
    if training.accumulation_steps > 1:
        lines.append(f"gradients are sent once every {training.accumulation_steps} micro-batches")
    pipeline = "the input pipeline keeps up: its cost is part of the measured computing time"
    if training.input_samples_per_s is not None:
        pipeline = f"a node's input pipeline delivers {units.rate(training.input_samples_per_s)}"
    lines.append(pipeline)
    lines.append("nothing else slows the workers: no contention between them, no other traffic, no slow node")
    predictions = report.sweep.predictions
    # A wait for the given input pipeline is not in the measured steps.
    compared = [(p.step_time_s.value, p.measured.value) for p in predictions if p.measured and not p.step.data_wait_s]
    if off := [abs(step_s / measured_s - 1) for step_s, measured_s in compared]:
        lines.append(f"the model differs from the measured steps above by at most {units.percent(max(off), 1)}")
    if calibration.draws is None:
        return [*lines, "no intervals: a point ran only once"]
    if any(not p.extrapolated for p in predictions):
        lines.append(
            "intervals cover the noise of the measurements (95 %, bootstrap over repeats), not the model's error"
        )
    if any(p.extrapolated for p in predictions):
        lines.append("extrapolated values have no interval: the model's error is unknown and larger than the noise")
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


def plot_of(report: PredictView) -> Figure:
    """Draw throughput above efficiency by number of workers; extrapolated parts are dashed."""
    sweep = report.sweep
    curve = _curve(sweep)
    measured = [
        {"series": MEASURED, "workers": p.num_workers, "rate": p.batch_size / p.measured.value}
        for p in sweep.predictions
        if p.measured is not None
    ]
    x = workers_axis([p.num_workers for p in sweep.predictions])
    rate = quantity("rate", "samples/s", axis={"format": "~s"}, scale={"type": "log", "nice": False, "padding": 12})
    efficiency = quantity("efficiency", "efficiency", axis={"format": ".0%"}, scale={"domain": [0, 1.05]})
    names, dashes = [PREDICTED, EXTRAPOLATED, IDEAL], [[1, 0], [6, 4], [2, 3]]
    colours = {"domain": [*names, MEASURED], "range": [COLOURS[0], COLOURS[0], GREY, COLOURS[1]]}
    of_lines = {"orient": "top", "symbolType": "stroke", "symbolSize": 300}
    of_points = {"symbolSize": 150, "symbolFillColor": COLOURS[1], "symbolStrokeColor": COLOURS[1]}
    colour = nominal("series", scale=colours, legend=None)
    dash = nominal("series", scale={"domain": names, "range": dashes}, legend=of_lines)
    shape = nominal("series", scale={"domain": [MEASURED], "range": ["circle"]}, legend={"orient": "top", **of_points})
    line, lines = {"type": "line", "strokeWidth": 1.5}, {"x": x, "color": colour, "strokeDash": dash}
    points = layer({"type": "point", "filled": True, "size": 80}, x=x, y=rate, color=colour, shape=shape)
    above = layers(curve, layer(line, **lines, y=rate), {"data": {"values": measured}, **points})
    below = layers([row for row in curve if row["series"] != IDEAL], layer(line, **lines, y=efficiency))
    last = sweep.predictions[-1]
    text = (
        "Upper bounds of samples per second and efficiency by number of workers, and the measurements. With "
        f"{units.counted(last.num_workers, 'worker')}: {units.rate(last.throughput_samples_per_s.value)}, efficiency "
        f"{units.percent(last.efficiency.value)}."
    )
    both = [{**each, "width": WIDTH_PX} for each in (above, below)]
    return Figure("prediction", report.title, text, {"vconcat": both})


def _curve(sweep: Sweep) -> list[Row]:
    """Return rows of the ideal and predicted curves, the latter extrapolated from the largest measured count on."""
    workers, rates = sweep.curve
    ideal = rates[0] * workers
    until = max((p.num_workers for p in sweep.predictions if not p.extrapolated), default=1)
    picked = np.unique(np.append(np.geomspace(1, len(workers), NUM_CURVE_POINTS).astype(int), until)) - 1
    parts = ((IDEAL, ideal, workers > 0), (PREDICTED, rates, workers <= until), (EXTRAPOLATED, rates, workers >= until))
    return [
        {"series": name, "workers": int(workers[i]), "rate": float(of[i]), "efficiency": float(of[i] / ideal[i])}
        for name, of, kept in parts
        for i in picked
        if kept[i]
    ]
