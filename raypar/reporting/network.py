"""Measured all-reduces within a node and between nodes: a table, a plot, and when a second node pays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from raypar import units
from raypar.predict.all_reduces import MeasuredLink, MessageTime
from raypar.predict.network import Algorithm
from raypar.predict.second_node import NEARLY, NUM_LAYERS, SecondNode, StudyNodes
from raypar.reporting.documents import Document
from raypar.reporting.text import Column, print_paragraph, print_table
from raypar.reporting.vega import WIDTH_PX, Figure, layer, layers, quantity, series

if TYPE_CHECKING:
    from rich.console import Console

TYPICAL = 25_000_000  # parameters of the verdict, about those of ResNet-50
NUM_PARAMETERS = (1_000_000, 10_000_000, TYPICAL, 100_000_000, 1_000_000_000)
MIN_LATENCY_S = 1e-7
ALL_REDUCES = {Algorithm.GLOO: "gloo's all-reduces", Algorithm.RING: "all-reduces in a ring"}


@dataclass(frozen=True)
class NetworkView(Document):
    """Measured all-reduces, and when a second node pays.

    Attributes:
        within: between workers of one node; None: not measured.
        between: between nodes; None: not measured.
        not_measured: why one of the two was not measured; empty: both were.
        by_parameters: when more nodes pay, by number of parameters; empty without `between`.
        of_study: the same for a study; None: none was given.
    """

    kind = "network"
    shown = "within between not_measured answer note by_parameters of_study"
    within: MeasuredLink | None
    between: MeasuredLink | None
    not_measured: str = ""
    by_parameters: tuple[SecondNode, ...] = ()
    of_study: StudyNodes | None = None

    @property
    def links(self) -> tuple[MeasuredLink, ...]:
        return tuple(link for link in (self.within, self.between) if link is not None)

    @cached_property
    def answer_lines(self) -> list[str]:
        """The links, why others are missing, and when a second node pays, in sentences."""
        lines = [_fitted(link) for link in self.links]
        if self.not_measured:
            lines.append(self.not_measured)
        typical = [each for each in self.by_parameters if each.num_parameters == TYPICAL]
        lines += [_verdict(each, self.between) for each in typical if self.between]
        return [*lines, *(_of_study(self.of_study, self.between) if self.of_study and self.between else [])]

    @property
    def answer(self) -> str:
        """The links, and when a second node pays, in sentences."""
        return " ".join(self.answer_lines)

    @property
    def note(self) -> str:
        """Meaning of the figures."""
        if not self.by_parameters:
            return ""
        return (
            f"Step times are those of one node at its batch; nodes are added at the same batch each. Gradients are in "
            f"fp32, in {NUM_LAYERS} equal layers, sent in torch's buckets during the backward pass. The step model "
            "knows no other traffic: real steps have to be longer rather than shorter."
        )


def _where(link: MeasuredLink) -> str:
    workers = units.counted(link.num_workers, "worker")
    if link.num_nodes == 1:
        return f"within a node ({workers} on {link.nodes[0]})"
    return f"between {link.num_nodes} nodes ({workers} on {units.listed(link.nodes, 4)})"


def _fitted(link: MeasuredLink) -> str:
    network = link.network
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(link.measured_at))
    how = f" over {link.transport}" if link.transport else ""
    where = _where(link)
    return (
        f"{where[0].upper()}{where[1:]}: latency {units.seconds(max(network.latency_s, MIN_LATENCY_S))}, "
        f"{units.size(network.bandwidth_bytes_per_s)}/s each way{how}, fitted to {ALL_REDUCES[link.algorithm]}, {when}."
    )


def _verdict(each: SecondNode, between: MeasuredLink) -> str:
    gradients = f"{units.compact(each.num_parameters)} parameters ({units.size(each.gradient_bytes)} of gradients)"
    takes = f"an all-reduce of {gradients} takes {units.seconds(each.all_reduce_s)} between {between.num_nodes} nodes"
    if each.pays_from_s is None:
        return f"For no step time: {takes}."
    pays = f"{between.num_nodes} nodes pay if a step of one node takes longer than {units.seconds(each.pays_from_s)}"
    full = ""
    if each.nearly_full_from_s is not None:
        rate = units.ratio(NEARLY * between.num_nodes)
        full = f", and train {rate} as many samples/s from {units.seconds(each.nearly_full_from_s)} on"
    return f"{takes[0].upper()}{takes[1:]}: {pays}{full}."


def _of_study(each: StudyNodes, between: MeasuredLink) -> list[str]:
    pays = each.all_samples_per_s > each.one_samples_per_s
    workers = units.counted(each.workers_per_node, "worker")
    lines = [
        f"Study {each.study}, {workers} and {units.counted(each.batch_size, 'sample')} per node and step: at best "
        f"{units.rate(each.one_samples_per_s)} on one node, {units.rate(each.all_samples_per_s)} on "
        f"{between.num_nodes}: {'more nodes pay' if pays else 'more nodes do not pay'}."
    ]
    if each.pays_from_batch is None:
        return [*lines, "They pay at no batch."]
    if each.pays_from_batch > 1 and each.pays_from_samples_per_s is not None:
        lines.append(
            f"They pay from a batch of {units.count(each.pays_from_batch)} per node on, with which one node trains "
            f"{units.rate(each.pays_from_samples_per_s)}."
        )
    return lines


def print_network(console: Console, view: NetworkView) -> None:
    """Print a table of each link, the fitted links, and when a second node pays."""
    for link in view.links:
        print_paragraph(console, f"All-reduces {_where(link)}:")
        print_table(console, _columns(link.messages))
        console.print()
    for text in view.answer_lines:
        print_paragraph(console, text)
    if view.by_parameters:
        console.print()
        print_table(console, _node_columns(view.by_parameters))
        print_paragraph(console, view.note)


def _columns(messages: Sequence[MessageTime]) -> list[Column]:
    per_s = [(each.algorithm_bytes_per_s, each.bus_bytes_per_s) for each in messages]
    return [
        Column("message", [units.size(each.num_bytes) for each in messages], is_number=True),
        Column("time", [units.seconds(each.time_s) for each in messages], is_number=True),
        Column(
            "repeats from … to",
            [f"{units.seconds(each.least_s)} … {units.seconds(each.most_s)}" for each in messages],
            is_number=True,
        ),
        Column("algorithm\nbandwidth", [f"{units.size(each)}/s" for each, _ in per_s], is_number=True),
        Column("bus\nbandwidth", [f"{units.size(each)}/s" for _, each in per_s], is_number=True),
    ]


def _node_columns(nodes: Sequence[SecondNode]) -> list[Column]:
    def at(step_s: float | None) -> str:
        return "never" if step_s is None else units.seconds(step_s)

    return [
        Column("parameters", [units.compact(each.num_parameters) for each in nodes], is_number=True),
        Column("gradients", [units.size(each.gradient_bytes) for each in nodes], is_number=True),
        Column("all-reduce\nbetween nodes", [units.seconds(each.all_reduce_s) for each in nodes], is_number=True),
        Column("more nodes pay\nfrom a step of", [at(each.pays_from_s) for each in nodes], is_number=True),
        Column(
            f"{NEARLY:.0%} efficiency\nfrom a step of", [at(each.nearly_full_from_s) for each in nodes], is_number=True
        ),
    ]


def plot_of(view: NetworkView) -> Figure:
    """Draw the time of an all-reduce above its bus bandwidth, by message size; lines are the fitted links."""
    names = [_where(link) for link in view.links]
    colour = series(names)
    rows = [
        {"series": name, "size": each.num_bytes, "time": each.time_s, "rate": each.bus_bytes_per_s}
        for name, link in zip(names, view.links, strict=True)
        for each in link.messages
    ]
    fitted = [
        {"series": name, "size": each.num_bytes, "time": time_s, "rate": each.bus_bytes_per_s * each.time_s / time_s}
        for name, link in zip(names, view.links, strict=True)
        for each in link.messages
        if (time_s := link.time_s(each.num_bytes)) > 0
    ]
    log = {"type": "log", "base": 10}
    x = quantity("size", "message, bytes", axis={"format": "~s"}, scale=log)
    parts = []
    for name, title in (("time", "seconds"), ("rate", "bus bandwidth, bytes/s")):
        y = quantity(name, title, axis={"format": "~s"}, scale=log)
        of_line = layer({"type": "line", "strokeWidth": 1.5}, x=x, y=y, color=colour)
        points = layer(
            {"type": "point", "filled": True, "size": 60}, x=x, y=y, color=colour, shape=series(names, "shape")
        )
        parts.append({**layers(fitted, of_line, {"data": {"values": rows}, **points}), "width": WIDTH_PX})
    return Figure("network", "All-reduces by message size", view.answer, {"vconcat": parts})
