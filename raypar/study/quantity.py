"""Quantities measured for a trial. All tables, files, metrics and limits derive from one entry per quantity.

A new one is an entry in `BUILT_IN`, or an entry point of the group ``raypar.quantities`` in an installed package, whose
object is a `Quantity`. Its value comes from the trial's result (``of_trial``), or from a monitor on each rank.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from operator import attrgetter
from typing import Protocol

from raypar import units
from raypar.errors import RayparError
from raypar.plugins import registered
from raypar.study.gradient_noise import measured_blocks, noise_scale
from raypar.study.trial import TrialResult

GROUP = "raypar.quantities"
UNITS_J = {"": 1.0, "j": 1.0, "kj": 1e3, "mj": 1e6, "gj": 1e9, "wh": 3600.0, "kwh": 3.6e6, "mwh": 3.6e9}
PACKAGES = "CPU packages"
MIXED = "the energy of some trials includes the CPU packages, that of others doesn't"
NOT_MEASURED = "no trial has its energy recorded"


class View(Flag):
    """Places that show a quantity."""

    TRIALS = auto()  # table of `raypar store show`
    PAGE = auto()  # the page's table of trials
    RECORD = auto()  # JSON and exports of trials
    MLFLOW = auto()  # metrics of a trial's run
    POINTS = auto()  # table of points on a terminal and on a page, and the report's JSON
    SUMMARY = auto()  # points in Markdown, notebooks and MLflow
    CHOICE = auto()  # `raypar recommend`
    FRONT = auto()  # the Pareto front, on which less is better


class Repeats(Enum):
    """Rule by which the values of a point's trials become its estimate."""

    MEDIAN = auto()  # of numbers greater than 0, on a log scale
    LINEAR = auto()  # median of any numbers
    MOST = auto()  # of any trial
    DERIVED = auto()  # by the analysis, from other estimates


class Timed(Protocol):
    """Measurement on one rank, over its timed regions."""

    def start(self) -> None:
        """Begin a timed region."""
        ...

    def stop(self) -> None:
        """End a timed region."""
        ...


class Monitor(Timed, Protocol):
    """Measurement of one value."""

    def value(self) -> float | None:
        """Return the value over all regions; None where it can't be measured."""
        ...


@dataclass(frozen=True, kw_only=True)
class UpperLimit:
    """Upper limit on a quantity, an option of `raypar recommend`.

    Attributes:
        flag: ``--max-energy``.
        scales: units by lower-case name, each in the quantity's own; empty: the option takes a plain number.
        noun: name of its value, in messages.
        examples: values, for a hint.
        about: description of the limit, in the JSON Schema.
        phrase: part of the objective's sentence; ``{}`` is the limit.
        show: returns the limit as text; None: as the quantity shows its values.
        why_unknown: returns why none of these trials has the quantity; None: no result has it recorded.
        hint: fix for trials without the quantity.
    """

    flag: str
    metavar: str
    help: str
    scales: Mapping[str, float] = field(default_factory=dict)
    noun: str = "number"
    examples: str = "2.5"
    about: str = ""
    phrase: str
    show: Callable[[float], str] | None = None
    why_unknown: Callable[[Sequence[TrialResult]], str] | None = None
    hint: str = "leave it out"

    @property
    def parameter(self) -> str:
        """Name of the option's value in Python: ``max_energy``."""
        return self.flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantity:
    """A quantity of trials and points.

    Attributes:
        key: its name in JSON, files and MLflow, with the unit at its end.
        about: its meaning, in the JSON Schema.
        head: header of its column, and its name in sentences.
        show: returns a value as text, with the unit.
        show_interval: the same with the value's interval; None: `show` formats the bounds, too.
        views: where it appears.
        of_trial: returns a trial's value; None: it is measured on the ranks.
        monitor: makes the measurement of a rank.
        of_ranks: how the ranks' values combine; None: the trial as a whole has the value.
        of_repeats: how a point's trials combine; None: points don't have it.
        are_comparable: returns whether the values of these trials can be compared with each other.
        accrues: it adds up evenly over the timed steps, so that a share of the time has that share of it.
        limit: an option of `raypar recommend`; None: there is none.
        legend: text below the table of points; ``{energy_source}`` and ``{price}`` are the study's.
        spoken: form of a value in a sentence; ``{}`` is the value.
        page_head: header of the page's column, which has numbers without unit.
        min_ratio: ratio of two points from which a brief table shows the quantity.
        importance: order in which a narrow terminal drops columns: 0 first, 1 after the ±% of times; others stay.
    """

    key: str
    about: str = ""
    head: str = ""
    show: Callable[[float], str] = units.number
    show_interval: Callable[[units.Interval], str] | None = None
    views: View = ~View.FRONT
    of_trial: Callable[[TrialResult], float | None] | None = None
    monitor: Callable[[], Monitor] | None = None
    of_ranks: Callable[[Iterable[float]], float] | None = None
    of_repeats: Repeats | None = Repeats.MEDIAN
    are_comparable: Callable[[Sequence[TrialResult]], bool] = lambda _: True
    accrues: bool = False
    limit: UpperLimit | None = None
    legend: str = ""
    spoken: str = "{}"
    page_head: str = ""
    min_ratio: float = 1.0
    importance: int = 0

    def of(self, result: TrialResult) -> float | None:
        """Return a trial's value; None where it has none."""
        if self.of_trial is not None:
            return self.of_trial(result)
        values = [of_rank[self.key] for of_rank in result.conditions.of_ranks("quantities") if self.key in of_rank]
        return (self.of_ranks or max)(values) if values else None

    def text(self, value: float | None) -> str:
        """Return a value as text, including a missing one."""
        return units.MISSING if value is None else self.show(value)

    def interval(self, of: units.Interval) -> str:
        """Return an estimate with its interval."""
        return self.show_interval(of) if self.show_interval else self.show(of.value) + units.brackets(of, self.show)


def _time(key: str, about: str = "", views: View = View.RECORD, head: str = "", page_head: str = "") -> Quantity:
    """Return a time of a trial, that of its slowest rank."""
    return Quantity(
        key=key,
        about=about,
        head=head,
        show=units.seconds,
        views=views,
        of_trial=attrgetter(key),
        of_ranks=max,
        of_repeats=None,
        page_head=page_head,
    )


def energy_source(results: Iterable[TrialResult]) -> str:
    """Return what trials' energies include: "CPU packages", "GPUs" or both; empty if none can be compared."""
    sources = {r.conditions.energy_of for r in results if r.energy_j is not None}
    if len({PACKAGES in source for source in sources}) != 1:
        return ""
    return max(sources, key=len)  # on CPUs alone some trials have no GPUs to count


def _why_energy_unknown(results: Sequence[TrialResult]) -> str:
    """Return why no energies can be compared: the machines' reasons, if they stored some."""
    if any(r.energy_j is not None for r in results):
        return MIXED
    reasons = dict.fromkeys(r.conditions.no_energy for r in results if r.conditions.no_energy)
    return "; ".join(reasons) or NOT_MEASURED


_OF_TRIALS = View.TRIALS | View.PAGE | View.RECORD | View.MLFLOW
_OF_POINTS = View.POINTS | View.SUMMARY | View.CHOICE
WALL_TIME = _time("wall_s", "from the start of its ranks to their end.", _OF_TRIALS, head="wall", page_head="in all, s")
TRAIN_TIME = _time(
    "train_time_s",
    "the timed steps alone; None where raypar can't instrument the training code.",
    _OF_TRIALS,
    head="train time",
    page_head="trained, s",
)
THROUGHPUT = Quantity(
    key="throughput_samples_per_s",
    head="samples/s",
    show=units.compact,
    views=View.PAGE | View.RECORD | View.MLFLOW | View.POINTS,
    of_trial=attrgetter("throughput_samples_per_s"),
    page_head="samples/s",
)
TOKENS = Quantity(
    key="throughput_tokens_per_s",
    about="of all workers; known for a script whose loader returns token numbers.",
    head="tokens/s",
    show=units.compact,
    views=View.RECORD | View.MLFLOW | View.POINTS,
    of_trial=lambda r: r.observation.tokens_per_s if r.observation else None,
    page_head="tokens/s",
)
COST = Quantity(
    key="cost",
    about="in the currency of the price.",
    head="cost",
    show=functools.partial(units.number, significant=3),
    views=_OF_POINTS | View.FRONT,
    of_trial=lambda _: None,
    of_repeats=Repeats.DERIVED,
    limit=UpperLimit(
        flag="--max-cost",
        metavar="X",
        help="Maximum cost, in the price's currency.",
        about="in the currency of the price.",
        phrase="for at most {}",
        show="{:g}".format,
        why_unknown=lambda _: "no result has its number of nodes recorded",
        hint="leave it out, or run the study again: new results record their nodes",
    ),
    legend="nodes × hours of that time × {price}, the price of a node-hour",
    spoken="cost {}",
    importance=2,
)
ENERGY = Quantity(
    key="energy_j",
    about="joules of the timed steps.",
    head="energy",
    show=units.energy,
    show_interval=units.energy_interval,
    views=View.RECORD | View.MLFLOW | _OF_POINTS | View.FRONT,
    of_trial=attrgetter("energy_j"),
    are_comparable=lambda results: bool(energy_source(results)),
    accrues=True,
    limit=UpperLimit(
        flag="--max-energy",
        metavar="ENERGY",
        help="Maximum energy, where it can be read: 500J, 5kJ, 2Wh.",
        scales=UNITS_J,
        noun="energy",
        examples="500J, 5kJ or 2Wh",
        about="joules of the time that counts.",
        phrase="with at most {}",
        why_unknown=_why_energy_unknown,
        hint="leave it out, or run the study where it can be read",
    ),
    legend="of {energy_source} in that time",
    importance=1,
)
MEMORY = Quantity(
    key="memory_bytes",
    about="peak memory of a worker in bytes, the largest of all trials.",
    head="memory",
    show=units.size,
    views=_OF_POINTS,
    # What the training allocates if that was counted, else what it takes from the machine.
    of_trial=lambda r: r.conditions.largest("peak_memory_bytes") or r.conditions.largest("peak_rss_bytes"),
    of_repeats=Repeats.MOST,
    limit=UpperLimit(
        flag="--max-memory",
        metavar="SIZE",
        help="Maximum memory of a worker: 20GB, 512MiB.",
        scales=units.SIZES_BYTES,
        noun="size",
        examples="20GB or 512MiB",
        about="peak memory of a worker in bytes.",
        phrase="with at most {} of memory per worker",
        hint="run the study again with --fresh: new results have it",
    ),
    legend="peak of a worker's training",
    min_ratio=1.1,
)
NOISE_SCALE = Quantity(
    key="noise_scale_samples",
    about="gradient noise scale of a trial, weighted by progress, see `raypar.study.gradient_noise`.",
    head="noise scale",
    show=units.whole,
    views=View.PAGE | View.RECORD | View.MLFLOW | View.POINTS,
    of_trial=lambda r: noise_scale(measured_blocks(r.conditions)),
    legend="gradient noise scale in samples: larger batches make little more progress per step",
    page_head="noise scale",
)


def _largest(key: str, about: str, views: View) -> Quantity:
    """Return a quantity of trials only: the largest value of any rank in their conditions."""
    return Quantity(key=key, about=about, views=views, of_trial=lambda r: r.conditions.largest(key), of_repeats=None)


# In the order of tables and files; those of a trial first.
BUILT_IN = (
    WALL_TIME,
    _time("startup_s"),
    _time("data_time_s"),
    _time("warmup_s"),
    TRAIN_TIME,
    _time("eval_time_s"),
    THROUGHPUT,
    TOKENS,
    COST,
    ENERGY,
    _largest("other_load_cores", "cores that were busy with other work.", View.MLFLOW),
    _largest(
        "peak_memory_bytes",
        "peak memory allocated by the training on a worker, the largest of all workers.",
        View.RECORD | View.MLFLOW,
    ),
    _largest(
        "peak_rss_bytes",
        "peak memory that a worker takes from its machine, the largest of all workers.",
        View.RECORD | View.MLFLOW,
    ),
    MEMORY,
    NOISE_SCALE,
)


@functools.cache
def quantities() -> tuple[Quantity, ...]:
    """Return all quantities, those of installed packages last.

    Raises:
        RayparError: an entry point of a package can't be loaded, or has the key of another quantity.
    """
    every = (*BUILT_IN, *registered(GROUP, Quantity, {}).values())
    twice = [key for key, num in Counter(quantity.key for quantity in every).items() if num > 1]
    if twice:
        problem = f"several quantities have the key {', '.join(twice)}"
        raise RayparError(problem, hint=f"uninstall the package whose entry point in {GROUP} repeats it")
    return every


def of_view(view: View) -> list[Quantity]:
    """Return the quantities that a view shows, in its order.

    Records have times as they pass; elsewhere the time that trials are compared by stands first.
    """
    shown = [quantity for quantity in quantities() if view in quantity.views]
    return shown if view is View.RECORD else sorted(shown, key=lambda quantity: quantity is not TRAIN_TIME)


def limited() -> dict[Quantity, UpperLimit]:
    """Return the quantities on which there may be a limit, with its option."""
    return {quantity: quantity.limit for quantity in quantities() if quantity.limit is not None}
