"""Recommendation in a terminal: a row per point, the recommended one, and how to settle what is open.

The text is plain sentences, except for formulas. The command that would settle the choice has a separate line, for
copying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

from rich.console import Console

from raypar import units
from raypar.analysis.points import hourly_price
from raypar.analysis.question import TRAIN_TIME
from raypar.analysis.recommend import Candidate, Decision, Recommendation, Settling, could_be_worse
from raypar.analysis.stats import Estimate
from raypar.analysis.time_to_target import Start, Target, TargetStatus
from raypar.analysis.verdict import Verdict
from raypar.reporting.documents import Document
from raypar.reporting.sentences import batch_lines, distrust
from raypar.reporting.text import Column, fits_at_words, print_line, print_paragraph, print_table
from raypar.study.memory_fit import LIBRARIES_BYTES, MOST_ON_GPU, MemoryFit
from raypar.study.price import price_text
from raypar.study.quantity import PACKAGES, Quantity, View, limited, of_view
from raypar.study.trial import gain, point_label

MAX_ROWS = 15
MAX_TIED = 2  # tied points that a line lists


class Intervals(Enum):
    """Columns of the table with intervals, from the widest table to the narrowest."""

    ALL = auto()
    TIMES = auto()
    NONE = auto()


def _columns(advice: Recommendation, rows: Sequence[Candidate], intervals: Intervals) -> list[Column]:
    """Return the table's columns; quantities that no row has are omitted."""
    metric = advice.question.metric
    marks = [(">" if c is advice.chosen else " ") + ("*" if _is_starred(c) else " ") for c in rows]
    times = [units.seconds_interval(c.time_s, bounds=intervals is not Intervals.NONE) for c in rows]
    every = [
        Column("", marks),
        Column("point", [point_label(c.point) for c in rows], is_prose=True),
        Column("reached" if advice.constraints.target else "n", list(map(_count, rows)), True),
        Column("time", times, True),
        Column(metric, [advice.question.judged_by.show(_value(c.metric)) for c in rows], True),
        Column("eff.", [units.percent(_value(c.efficiency)) for c in rows], True),
        *(Column(q.head, [_shown(q, c.of(q), intervals) for c in rows], True) for q in of_view(View.CHOICE)),
        Column("excluded because", [c.exclusion for c in rows], is_prose=True),
    ]
    return [*every[:4], *(column for column in every[4:] if set(column.cells) - {units.MISSING, ""})]


def _shown(q: Quantity, estimate: Estimate | None, intervals: Intervals) -> str:
    return q.interval(estimate) if estimate and intervals is Intervals.ALL else q.text(_value(estimate))


def _is_starred(c: Candidate) -> bool:
    return c.is_on_front and not c.exclusion


def _count(c: Candidate) -> str:
    target = c.to_target
    return f"{target.num_in(TargetStatus.REACHED)}/{len(target.trials)}" if target else str(len(c.times))


def _value(estimate: Estimate | None) -> float | None:
    return estimate.value if estimate else None


MAX_NAMED = 4
_STARTS = {
    Start.FIRST_STEP: "Times run from the first timed step to the evaluation that reaches the target. They exclude "
    "start-up, warm-up and evaluation.",
    Start.LAUNCH: "Times run from the start of a trial's processes to the end of the evaluation that reaches the "
    "target. They include start-up, warm-up and evaluation.",
}


@dataclass(frozen=True)
class RecommendView(Document):
    """Recommendation of a study.

    Attributes:
        next_step: command that runs the trials that would settle the choice, or advice if there is none.
        is_command: True if `next_step` is the command.
        scope: the executions that ``--since`` selects; empty: all.
    """

    kind = "recommend"
    shown = (
        "study=advice.question.study_name scope metric=advice.question.metric mode=advice.question.mode "
        "metric_unit=advice.question.unit objective answer doubt=advice.doubt time_metric=advice.time_metric "
        "energy_source=advice.energy_source constraints=advice.constraints metric_margin=advice.metric_margin "
        "recommendation=advice to_settle command instead candidates batches=advice.batches excluded=advice.excluded"
    )
    advice: Recommendation
    next_step: str = ""
    is_command: bool = True
    scope: str = ""

    @property
    def objective(self) -> str:
        """Objective in words."""
        return objective(self.advice)

    @cached_property
    def answer_lines(self) -> list[str]:
        """Choice, its reason and the runner-up, in sentences."""
        return list(_answer_lines(self.advice))

    @property
    def answer(self) -> str:
        """Recommendation in sentences."""
        return " ".join(self.answer_lines)

    @property
    def to_settle(self) -> str:
        """Trials that would settle the choice, in a sentence; empty if nothing is to be settled."""
        return settling_line(self.advice.settling) if self.advice.settling else ""

    @property
    def command(self) -> str:
        """Command that runs these trials."""
        return self.next_step if self.is_command else ""

    @property
    def instead(self) -> str:
        """Advice if there is no command."""
        return "" if self.is_command else self.next_step

    @cached_property
    def candidates(self) -> list[Candidate]:
        """All points: the chosen one, then other eligible ones, then the rest, each by time."""
        chosen = self.advice.chosen
        return sorted(self.advice.candidates, key=lambda c: (c is not chosen, bool(c.exclusion), c.median_s))


def print_recommendation(console: Console, view: RecommendView) -> None:
    """Print what a study recommends. The line of a command is never broken."""
    advice = view.advice
    only = [f"{key}={','.join(map(units.value_of, values))}" for key, values in advice.constraints.only.items()]
    study = " ".join([advice.question.study_name, *only])
    print_paragraph(console, f"Study {study}: {view.objective}.")
    console.print()
    rows = view.candidates[:MAX_ROWS]
    every = (_columns(advice, rows, intervals) for intervals in Intervals)
    fitting = (columns for columns in every if fits_at_words(columns, console.width, console.encoding))
    columns = next(fitting, _columns(advice, rows, Intervals.NONE))
    print_table(console, columns, ["bold" if c is advice.chosen else "dim" if c.exclusion else "" for c in rows])
    console.print()
    for text in filter(None, (*view.answer_lines, view.to_settle)):
        print_paragraph(console, text)
    if view.to_settle and view.command:
        print_line(console, "  " + view.command)
    elif view.to_settle and view.instead:
        print_paragraph(console, view.instead)
    console.print()
    for group in advice.batches:
        for text in batch_lines(group):
            print_paragraph(console, text)
        console.print()
    for text in _notes(advice, view.candidates[MAX_ROWS:]):
        print_paragraph(console, text)


def recommended_lines(verdict: Verdict) -> Iterator[str]:
    """Yield the recommended point, or the leading one and how to settle the choice."""
    advice = verdict.recommendation
    if advice is None:
        return
    chosen = advice.chosen
    if chosen is None:
        yield "No recommendation: every point is excluded."
        return
    shown = [units.seconds(_value(chosen.time_s)), advice.question.judged_by.show(_value(chosen.metric))]
    name = f"{point_label(chosen.point)} ({', '.join(text for text in shown if text != units.MISSING)})"
    if advice.question.is_search:
        yield from _unchosen_metric(advice)
        return
    if advice.decision is Decision.UNCLEAR:
        yield f"Leading: {name}, unconfirmed"
        yield from _unchosen_metric(advice)
        if advice.settling is not None:
            yield settling_line(advice.settling)
        return
    yield f"Recommended: {name}{_tie(advice)}"
    yield from _unchosen_metric(advice)


def _unchosen_metric(advice: Recommendation) -> Iterator[str]:
    """Yield a note if a recommendation is based on a metric that the user did not choose."""
    question = advice.question
    is_judged = advice.constraints.target is None and any(c.metric for c in advice.candidates)
    if question.metric_chosen_by and is_judged:
        mode = "less" if question.mode == "min" else "more"
        yield (
            f"It is based on {question.metric} ({mode} is better), which {question.metric_chosen_by} chose, not you. "
            "To choose another, set metric= in the study's file."
        )


def _tie(advice: Recommendation) -> str:
    """Return which points the recommended one is tied with; empty for a clear choice."""
    if advice.decision is not Decision.TIED or not advice.rivals:
        return ""
    names = [point_label(c.point) for c in advice.rivals]
    return f", tied with {_named(names) if len(names) <= MAX_TIED else f'{len(names)} others'}"


def objective(advice: Recommendation) -> str:
    """Return the objective: ``the fastest whose accuracy is within 0.5 points of the best``."""
    constraints, question = advice.constraints, advice.question
    limits: tuple[tuple[str, float | None, Callable[[float], str]], ...] = (
        ("in {} at most", constraints.max_time_s, units.seconds),
        *((limit.phrase, constraints.limits.get(q.key), limit.show or q.show) for q, limit in limited().items()),
        ("on GPUs of {}", constraints.gpu_bytes, units.size),
        ("with an efficiency of {} or more", constraints.min_efficiency, units.percent),
        (
            "with {} at the end",
            constraints.min_metric,
            lambda m: _target(Target(question.metric, m, question.mode, question.unit)),
        ),
    )
    what = "the fastest"
    if constraints.target is not None:
        what += f" to {_target(constraints.target)}"
    elif any(c.metric for c in advice.candidates):
        what += f" whose {question.metric} is within {question.judged_by.show_difference(advice.metric_margin)} "
        what += "of the best"
    return ", ".join([what, *(text.format(show(limit)) for text, limit, show in limits if limit is not None)])


def _target(target: Target) -> str:
    side = "or more" if target.mode == "max" else "or less"
    return f"{target.metric} {target.show(target.value)} {side}"


def _answer_lines(advice: Recommendation) -> Iterator[str]:
    """Yield the choice, its reason and the runner-up."""
    chosen = advice.chosen
    if chosen is None:
        yield from _nothing(advice)
        return
    standing = "Not settled yet. Leading" if advice.decision is Decision.UNCLEAR else "Recommended"
    yield f"{standing}: {point_label(chosen.point)}, {_what(advice, chosen)}{_why(advice, chosen)}."
    yield from _unchosen_metric(advice)
    if advice.runner_up is None or advice.lead is None:
        left = "point" if len(advice.candidates) == 1 else "one that qualifies"
        yield f"There is no runner-up: it is the only {left}."
    else:
        runner_up = point_label(advice.runner_up.point)
        yield f"Runner-up: {runner_up}, which takes {units.ratio_interval(advice.lead)} as long."
    if advice.doubt:
        yield distrust(advice.doubt)
    if doubted := [r.candidate for r in advice.open_rivals if r.candidate.exclusion]:
        yield _doubt(advice, doubted)
    if len(advice.candidates) > 1 and len(chosen.times) < 2:
        yield "One trial per point confirms nothing."


def _doubt(advice: Recommendation, doubted: Sequence[Candidate]) -> str:
    metric, sign = advice.question.judged_by, gain(advice.question.mode, 1.0)
    gaps = [c.metric_gap for c in doubted if c.metric_gap]
    most = max(-sign * bound for gap in gaps for bound in (gap.low, gap.value, gap.high) if bound is not None)
    names = _named([point_label(c.point) for c in doubted])
    best = advice.best.metric.value if advice.best and advice.best.metric else 0.0
    return f"{names} may be faster, but {could_be_worse(metric, most, best)}."


def _what(advice: Recommendation, chosen: Candidate) -> str:
    target = f" to {_target(advice.constraints.target)}" if advice.constraints.target else ""
    used = [q.spoken.format(q.show(e.value)) for q in of_view(View.FRONT) if (e := chosen.of(q))]
    return ", ".join([f"{units.seconds_interval(chosen.time_s)}{target}", *used])


def _why(advice: Recommendation, chosen: Candidate) -> str:
    is_single = len(chosen.times) < 2
    if advice.doubt:
        return ""
    if not advice.rivals:
        num = sum(not c.exclusion for c in advice.candidates) - 1
        others = "other one" if num == 1 else f"{num} others"
        if num + 1 < len(advice.candidates):
            others += " that qualifies" if num == 1 else " that qualify"
        return f", faster than the {others}" if num > 0 and not is_single else ""
    tied = _named([point_label(c.point) for c in advice.rivals])
    num_workers = chosen.num_workers or 0
    counts = [c.num_workers or 0 for c in advice.rivals]
    name = point_label(chosen.point)
    reason = f"{name} has the fewest workers"
    price = advice.question.price_per_node_hour
    hourly = [hourly_price(c, price) or 0.0 for c in (chosen, *advice.rivals)]
    if isinstance(price, Mapping) and len({*hourly}) > 1:
        reason = f"machines of {name} cost the least"
        if hourly[0] > min(hourly):
            reason = f"cheaper machines are slower by more than {units.percent(advice.question.margin)} (medians)"
    elif min(counts) < num_workers:
        reason = f"those with fewer workers are slower by more than {units.percent(advice.question.margin)} (medians)"
    elif min(counts) == num_workers:
        reason = f"{name} has the smallest median time of those with as few workers"
    if advice.decision is Decision.TIED:
        return f"; it is tied with {tied}, but {reason}"
    return f"; {tied} may be as fast" + (f", but {reason}" if chosen is not advice.leader else "")


def _nothing(advice: Recommendation) -> Iterator[str]:
    yield "No point meets the constraints."
    target = advice.constraints.target
    trials = [t for c in advice.candidates if c.to_target for t in c.to_target.trials]
    if target is not None and any(t.status is TargetStatus.UNKNOWN and target.is_reached_by(t.best) for t in trials):
        yield "Some reached the target, but their reports don't show when: leave --target out, or use --min-metric."
    elif target is not None and all(not c.to_target or not c.to_target.is_always_reached for c in advice.candidates):
        seen = [(t.best, c) for c in advice.candidates if c.to_target for t in c.to_target.trials if t.best is not None]
        if seen:
            best, where = max(seen, key=lambda entry: gain(target.mode, entry[0]))
            value = f"{target.show(best)}, at {point_label(where.point)}"
            advised = "ask for less, or train longer (--set epochs=…)"
            yield f"The best {target.metric} of any evaluation was {value}: {advised}."
    else:
        yield "Ask for less: the table shows which limit each point misses."


def settling_line(settling: Settling) -> str:
    """Return the trials that would settle which point is the fastest."""
    names, num = _named([point_label(point) for point in settling.points]), settling.num_repeats
    if num is None:
        return (
            f"Settling this takes more than a hundred repeats of {names}. Make trials longer, or keep other load off "
            "the machine."
        )
    if not settling.spread_is_known:
        text = f"To settle this, run {num} repeats each of {names} to begin with"
        return f"{text}. One trial each does not show how much they vary."
    return f"To settle this, run about {num} repeats each of {names} (80 % power, by the spread so far)."


def _notes(advice: Recommendation, hidden: Sequence[Candidate]) -> Iterator[str]:
    """Yield caveats and the meaning of the marks; `hidden`: candidates that the table leaves out."""
    if advice.excluded:
        yield advice.excluded
    if hidden:
        num_excluded = sum(bool(c.exclusion) for c in hidden)
        yield f"{units.counted(len(hidden), 'more point')} not shown, {num_excluded} excluded."
    timed = [c for c in advice.candidates if c.time_s]
    if any(_is_starred(c) for c in advice.candidates):
        more = [q.head for q in of_view(View.FRONT) if timed and all(c.of(q) for c in timed)]
        axes = units.listed(["time", advice.question.metric, *more], 4, word="and")
        better = "significantly better" if any(len(c.times) > 1 for c in advice.candidates) else "better"
        text = f"no other point is at least as good in all of them by its median, and {better} in one"
        yield f"* on the Pareto front of {axes}: {text}."
    if advice.constraints.target is not None:
        yield _STARTS[advice.constraints.start]
        yield from _censored(advice.candidates)
    elif advice.time_metric != TRAIN_TIME:
        yield "Times are of whole trials: raypar can't instrument this training code."
    if any(c.cost for c in advice.candidates):
        price = price_text(advice.question.price_per_node_hour)
        yield f"Cost: nodes × hours of the time shown × {price}, the price of a node-hour."
    if any(c.energy_j for c in timed):
        source, shared = advice.energy_source, "; a package's energy includes everything that runs on it, and idling"
        yield f"Energy: of {source} in the time shown{shared if PACKAGES in source else ''}."
    if (gpu_bytes := advice.constraints.gpu_bytes) is not None:
        yield from _too_large(advice.candidates, gpu_bytes)
    close = [point_label(c.point) for c in advice.candidates if c.is_close_call]
    if close:
        yield f"Excluded by a close call (the interval includes the limit, or there is one trial): {_named(close)}."


def _too_large(candidates: Sequence[Candidate], gpu_bytes: float) -> Iterator[str]:
    least, most = map(units.size, LIBRARIES_BYTES)
    for fit, phrase in ((MemoryFit.NO, "don't fit"), (MemoryFit.UNCERTAIN, "may not fit")):
        if labels := [point_label(c.point) for c in candidates if c.fit is fit]:
            yield f"Workers of these points {phrase} into a GPU of {units.size(gpu_bytes)}: {_named(labels)}."
    yield (
        f"On a GPU, a worker is assumed to need up to {units.percent(MOST_ON_GPU - 1)} more than the measured peak of "
        f"its training, and {least} to {most} for CUDA and libraries."
    )


def _censored(candidates: Sequence[Candidate]) -> Iterator[str]:
    some = [
        point_label(c.point)
        for c in candidates
        if c.to_target and all(c.to_target.num_in(status) for status in (TargetStatus.REACHED, TargetStatus.MISSED))
    ]
    if some:
        text = "The others count as longer. There is no median if they are half or more."
        yield f"Not every trial reached the target at {_named(some)}. {text}"


def _named(labels: Sequence[str]) -> str:
    return units.listed(labels, MAX_NAMED, word="and")
