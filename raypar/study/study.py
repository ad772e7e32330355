"""Studies: declared questions about how training behaves over a space of hyperparameters."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeGuard

from raypar.errors import Mistake, StudyError, closest, shortened, suggest
from raypar.study.blocks import MIN_BLOCKS, block, num_first_blocks
from raypar.study.metric import Metric
from raypar.study.options import ON_CPU, OPTIONS, Auto, affinity_width, known_options, resolve
from raypar.study.price import Price, price_mistakes
from raypar.study.script_settings import leaves_out_nothing
from raypar.study.space import (
    DOMAINS,
    LARGEST_FLOAT,
    TUNE_DOMAINS,
    Choice,
    Domain,
    Grid,
    Value,
    examples,
    lone_surrogate,
    plain,
    problem,
)
from raypar.study.trial import TrialSpec, point_label
from raypar.study.validation import (
    KEPT,
    can_be_kept,
    is_default,
    metric_mistakes,
    unknown_option,
    validate,
    validate_value,
    workload_mistakes,
)
from raypar.study.workload import AnyWorkload, CommandWorkload, Option, Workload
from raypar.units import DURATIONS_S, SHARES, listed, parsed

if TYPE_CHECKING:
    from raypar.reporting.frame import StudyFrame

MAX_TRIALS = 100_000
MAX_BLOCKS = 100  # of a study with `until`
MAX_NAME = 150  # characters, since file names contain it
MAX_SHOWN = 20  # points that can't run
MAX_VALUES_SHOWN = 8
# Bounds of the fields that are whole numbers.
WHOLE_NUMBERS = {
    "num_repeats": (1, MAX_TRIALS),
    "max_retries": (0, MAX_TRIALS),
    "num_trials": (1, MAX_TRIALS),
    "max_concurrent_trials": (1, MAX_TRIALS),
    "seed": (0, 2**32 - 1),
}
_MAPPINGS = ("space", "config", "baseline")
# Keys that raypar's own loop reports in addition to the workload's metrics.
REPORTED = (
    "train_loss",
    "val_loss",
    "train_time_s",
    "eval_time_s",
    "throughput_samples_per_s",
    "eval_samples_per_s",
    "eval_steps_per_s",
    "grad_norm",
    "noise_scale",
)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Declared question: a workload, a space of hyperparameters, and what to compare.

    Attributes:
        workload: model, data, loss and metrics.
        space: swept hyperparameters. Grids are run in full; with any other domain the study is a search.
        baseline: values to compare with: a point's speedup is over the point that has these values and is the same
            otherwise.
        num_repeats: trials of every point, each in another block and with another seed; the minimum with `until`.
        until: "settled" repeats inconclusive points, and those that they are compared with, block by block; empty:
            every point is run `num_repeats` times.
        margin: with `until`, the difference of speedups that does not matter: 0.05, or "5%".
        max_repeats: with `until`, the maximum number of trials of a point.
        budget: with `until`, seconds (or "10m", "2h") after which no block may end; None: no limit.
        config: fixed hyperparameters.
        name: the study's name in the store; empty: the file's stem.
        seed: source of everything random in the study.
        max_retries: number of times that a trial is restarted after its gang or one of its processes died.
        num_trials: number of points that a search draws (per grid point, if the space also has grids).
        searcher: a ``ray.tune`` search algorithm; needs metric and mode.
        scheduler: a ``ray.tune`` trial scheduler (ASHA …); needs metric and mode.
        metric: key of the reports that trials are judged by, also by searcher and scheduler, or a `Metric`; empty: the
            workload's.
        mode: "max" or "min"; empty: the metric's, as the workload declares it or its name shows.
        target: value of the metric at which the trials of a search end; the searcher then looks for the point that
            reaches it in the least training time. None: trials train to their end.
        max_concurrent_trials: None: trials share no machine, so they run one at a time on each. A number: this many
            trials run at a time and may share machines, each on separate cores; 1: one at a time, wherever it runs.
        description: the question, for people; empty: the file's docstring.
        price_per_node_hour: cost of a machine for an hour, in any currency, or the cost of each kind of machine by
            ``node_label``: ``{"type=a": 0.8, "type=b": 4.1}``; None: no costs are shown. A new price doesn't rerun
            trials.

    Raises:
        StudyError: with every mistake in it.
    """

    workload: AnyWorkload
    space: Mapping[str, Domain] = field(default_factory=dict)
    baseline: Mapping[str, Value] = field(default_factory=dict)
    num_repeats: int = 3
    until: str = ""
    margin: float | str = 0.05
    max_repeats: int = 30
    budget: float | str | None = None
    config: Mapping[str, Value] = field(default_factory=dict)
    name: str = ""
    seed: int = 0
    max_retries: int = 2
    num_trials: int = 20
    searcher: Any = None
    scheduler: Any = None
    metric: str | Metric = ""
    mode: str = ""
    target: float | None = None
    max_concurrent_trials: int | None = None
    description: str = ""
    price_per_node_hour: Price | None = None

    def __post_init__(self) -> None:
        for key in _MAPPINGS:
            if isinstance(chosen := getattr(self, key), Mapping):
                object.__setattr__(self, key, {name: plain(value) for name, value in chosen.items()})
        for key, scales in (("margin", SHARES), ("budget", DURATIONS_S)):
            if isinstance(text := getattr(self, key), str) and (value := parsed(text, scales)) is not None:
                object.__setattr__(self, key, value)
        if mistakes := _mistakes(self):
            raise StudyError(mistakes, of=self)

    @property
    def is_search(self) -> bool:
        """True if points are drawn rather than listed: by a searcher, or from a domain other than a grid."""
        return self.searcher is not None or any(domain.is_drawn for domain in self.space.values())

    @property
    def judged_by(self) -> Metric:
        """Metric that trials are judged by: the study's, else the workload's."""
        return self.workload.metric_of(self.metric, self.mode)

    def points(self) -> tuple[dict[str, Value], ...]:
        """Return every assignment of the grids, the last key varying fastest, without points that equal another."""
        grids = {k: d.values for k, d in self.space.items() if isinstance(d, Grid)}
        points = (dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values()))
        return tuple(point for point in points if not leaves_out_nothing({**self.config, **point}))

    @property
    def num_points(self) -> int:
        """Number of combinations of the grids."""
        return math.prod(len(domain.values) for domain in self.space.values() if isinstance(domain, Grid))

    def run(self, **flags: Any) -> StudyFrame:
        """Run the study's missing trials in another process, and show its progress and its report.

        In a notebook, the progress and the report are output of the cell. An interrupt ends the trials and all
        processes; finished trials are kept, and the next call continues. Functions and classes that the notebook
        defines are sent along. The store is that of the current folder.

        Args:
            flags: flags of ``raypar study``, with underscores: ``repeats=5``, ``set=["epochs=1"]``, ``no_ray=True``.

        Returns:
            The trials, as `raypar.load` returns them.

        Raises:
            RayparError: the study has no name, its flags are wrong, or it can't run.
            KeyboardInterrupt: it was interrupted.
        """
        from raypar.cli.notebook import run_study

        return run_study(self, **flags)

    def trial(self, point: Mapping[str, Value], repeat: int, *, order: int = 0, auto: Auto = ON_CPU) -> TrialSpec:
        """Return the spec of one point and repeat; `auto` has the values that the study leaves to the machines."""
        return TrialSpec(
            study=self.name,
            workload=self.workload.name,
            point=dict(point),
            config=resolve(self.workload, {**self.config, **point}, auto),
            repeat=repeat,
            seed=self.seed + repeat,
            order=order,
        )

    def trials(self, *, auto: Auto = ON_CPU, first_repeat: int = 0) -> tuple[TrialSpec, ...]:
        """Return all trials in execution order, which is deterministic; with `until`, the first ones.

        Args:
            first_repeat: number of the first block.
        """
        points, repeats = self.points(), range(first_repeat, first_repeat + num_first_blocks(self))
        return tuple(spec for repeat in repeats for spec in block(self, repeat, points, auto=auto))


@dataclass(frozen=True, kw_only=True)
class ListedStudy(Study):
    """Study of listed points, instead of every combination of its grids.

    Attributes:
        listed: assignments of the swept hyperparameters, a subset of the combinations.
        leader: the one that led a search, whose leading points the study repeats; empty for other studies.
    """

    listed: tuple[Mapping[str, Value], ...] = ()
    leader: Mapping[str, Value] = field(default_factory=dict)

    @property
    def num_points(self) -> int:
        return len(self.listed)

    def points(self) -> tuple[dict[str, Value], ...]:
        return tuple(map(dict, self.listed))


def _mistakes(study: Study) -> list[Mistake]:
    """Return all mistakes of a study with any values, without those that only follow from another."""
    mistakes = [*_field_mistakes(study), *_text_mistakes(study)]
    for key in _MAPPINGS:
        if not isinstance(getattr(study, key), Mapping):
            hint = f'set {key}={{"batch_size": …}}'
            mistakes.append(Mistake(key, getattr(study, key), "must be a dict of hyperparameters", hint=hint))
    if isinstance(study.workload, AnyWorkload):
        mistakes += workload_mistakes(study.workload)
    else:
        wrong = f"is a {type(study.workload).__name__}, not a Workload"
        hint = "take one from raypar.workloads, or make a raypar.Workload"
        mistakes.append(Mistake("workload", study.workload, wrong, hint=hint))
    options, is_complete = options_of(study)
    mistakes += _metric_mistakes(study)
    mistakes += _config_mistakes(study, options, is_complete)
    mistakes += _space_mistakes(study, options, is_complete)
    if isinstance(study.space, Mapping):
        mistakes += _baseline_mistakes(_mapping(study, "baseline"), study.space, options)
    elif is_complete:
        baseline = _mapping(study, "baseline")
        mistakes += [
            unknown_option(f"baseline[{key!r}]", value, str(key), options)
            for key, value in baseline.items()
            if key not in options
        ]
    return mistakes or _size_mistakes(study) or _point_mistakes(study)


def _metric_mistakes(study: Study) -> Iterator[Mistake]:
    """Yield the mistake of a metric that no trial will report; what a train loop or command reports is unknown."""
    workload = study.workload
    if not isinstance(workload, Workload):
        return
    name, reported = study.judged_by.name, [*workload.metric_names, *REPORTED]
    if isinstance(workload.metrics, Mapping | None) and name not in reported:
        shown = ", ".join([*workload.metric_names, "val_loss", "train_loss"])
        hint = f"it reports {shown}; for another give the Workload metrics={{{name!r}: function}}"
        if near := closest(str(name), reported):
            hint = f"did you mean '{near[0]}'?"
        elif name == "accuracy":
            hint = 'the loss does not show that outputs are classes: if they are, give the Workload metric="accuracy"'
            hint += ', or one of yours, metrics={"accuracy": function}'
        yield Mistake("metric", name, f"is not reported by workload {workload.name}", hint=hint)


def _mapping(study: Study, key: str) -> Mapping[str, Any]:
    value = getattr(study, key)
    return value if isinstance(value, Mapping) else {}


def name_problem(name: str) -> str:
    """Return why a text can't be a study's name; empty if it can."""
    if not re.fullmatch(r"[\w][\w .-]*", name):
        return "may hold letters, digits, space, '_', '-' and '.'"
    return f"is longer than {MAX_NAME} characters" if len(name) > MAX_NAME else ""


def _field_mistakes(study: Study) -> Iterator[Mistake]:
    for key in ("name", "metric", "mode", "description"):
        value = getattr(study, key)
        if not isinstance(value, str) and not (key == "metric" and isinstance(value, Metric)):
            yield Mistake(key, value, f"must be text, not {type(value).__name__}", hint="put it in quotes")
    if isinstance(study.name, str) and study.name and (wrong := name_problem(study.name)):
        yield Mistake("name", study.name, wrong, hint="choose another name")
    for key in WHOLE_NUMBERS:
        value = getattr(study, key)
        if value is not None or key != "max_concurrent_trials":
            yield from filter(None, [whole_number_mistake(key, key, value)])
    yield from _until_mistakes(study)
    yield from _target_mistakes(study)
    yield from price_mistakes(study.price_per_node_hour, _node_labels(study))
    if isinstance(study.mode, str) and study.mode not in ("max", "min", ""):
        yield Mistake("mode", study.mode, 'must be "max" or "min"', hint='set mode="max" for an accuracy')
    if isinstance(study.metric, Metric):
        yield from metric_mistakes("metric", study.metric)
    for key, example in (("searcher", "OptunaSearch()"), ("scheduler", "ASHAScheduler()")):
        value = getattr(study, key)
        if isinstance(value, (str, int, float, type, Mapping, list, tuple)):
            what = "a class, not one of its objects" if isinstance(value, type) else f"a {type(value).__name__}"
            yield Mistake(key, value, f"is {what}", hint=f"give an object of ray.tune: {key}={example}")


def _node_labels(study: Study) -> dict[str, list[Value]]:
    """Return every ``node_label`` of the study that is text or None, by the place where it is given."""
    for name in ("space", "config"):
        if "node_label" in (given := _mapping(study, name)):
            value = given["node_label"]
            values = examples(value) if isinstance(value, DOMAINS) else (value,)
            return {f"{name}['node_label']": [each for each in values if isinstance(each, str | None)]}
    return {}


def whole_number_mistake(key: str, where: str, value: object) -> Mistake | None:
    """Return the mistake of a value of a field in `WHOLE_NUMBERS`; `where` is its name in the message."""
    low, high = WHOLE_NUMBERS[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        return Mistake(where, value, f"must be a whole number of at least {low}", hint=f"set {where}={low}")
    return Mistake(where, value, f"is more than {high:,}", hint=f"set {where}={low}") if value > high else None


def _text_mistakes(study: Study) -> Iterator[Mistake]:
    """Yield the values with half of a character (a lone surrogate), which can't be stored."""
    values: list[tuple[str, object, object]] = [(key, "", getattr(study, key)) for key in ("metric", "description")]
    if isinstance(study.workload, AnyWorkload):
        names = [part.name for part in fields(study.workload)]
        values += [(f"workload.{name}", "", getattr(study.workload, name)) for name in names]
    for name in _MAPPINGS:
        values += [(f"{name}[{key!r}]", key, value) for key, value in _mapping(study, name).items()]
    for where, key, value in values:
        if (char := lone_surrogate((key, value))) is not None:
            wrong = f"holds {char!a}, half of a character, which can't be stored"
            yield Mistake(where, value, wrong, hint="write the whole character, or leave it out")


def _until_mistakes(study: Study) -> Iterator[Mistake]:
    until, repeats, most = study.until, study.num_repeats, study.max_repeats
    if until not in ("", "settled"):
        hint = 'set "settled", which repeats inconclusive points, or leave it out'
        yield Mistake("until", until, "is unknown", hint=hint)
    drawn = [key for key, domain in _mapping(study, "space").items() if not isinstance(domain, Grid)]
    if until and (study.searcher is not None or study.scheduler is not None or drawn):
        wrong, hint = "a search runs each point once", "leave it out, or list the points: grid(...) without a searcher"
        if not drawn and study.searcher is None:
            wrong, hint = "a scheduler stops trials, which then have no time", "leave one of the two out"
        yield Mistake("until", until, wrong, hint=hint)
    if not _is_number(study.margin) or not 0 < study.margin < 1:
        yield Mistake("margin", study.margin, "must lie between 0 and 1", hint="a share, such as 0.05 or 5%")
    if not isinstance(most, int) or isinstance(most, bool) or not MIN_BLOCKS <= most <= MAX_BLOCKS:
        wrong = f"must be a whole number from {MIN_BLOCKS} to {MAX_BLOCKS}"
        yield Mistake("max_repeats", most, wrong, hint="the default is 30")
    elif until and isinstance(repeats, int) and most < repeats <= MAX_TRIALS:
        wrong = f"is more than max_repeats={most}"
        yield Mistake("num_repeats", repeats, wrong, hint="lower it, or raise max_repeats (--max-repeats)")
    budget = study.budget
    if budget is not None and not (_is_number(budget) and budget > 0):
        yield Mistake("budget", budget, "must be a time greater than 0", hint="such as 90s, 10m or 2h; or leave it out")
    elif budget is not None and not until:
        hint = 'add --until settled (in a file until="settled"), or leave it out'
        yield Mistake("budget", budget, "limits a study that runs until it is settled", hint=hint)


def _target_mistakes(study: Study) -> Iterator[Mistake]:
    target, num_at_a_time = study.target, study.max_concurrent_trials
    if target is None:
        return
    if not _is_number(target):
        yield Mistake("target", target, "must be a number", hint="a value of the metric, such as target=0.97")
    elif study.searcher is None and all(isinstance(domain, Grid) for domain in _mapping(study, "space").values()):
        hint = "leave it out: `raypar recommend STUDY --target METRIC=VALUE` finds the fastest of listed points"
        yield Mistake("target", target, "ends the trials of a search, and the points are listed", hint=hint)
    elif isinstance(num_at_a_time, int) and num_at_a_time > 1:
        wrong = "lets trials share a machine, and the search compares their times to the target"
        yield Mistake("max_concurrent_trials", num_at_a_time, wrong, hint="leave it out: trials then run alone")


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number within the range of floats."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_FLOAT


def options_of(study: Study) -> tuple[Mapping[str, Option], bool]:
    """Return the options that a study can set, and whether there are no others; its workload may be faulty."""
    workload = study.workload
    if not (isinstance(workload, AnyWorkload) and isinstance(workload.options, Mapping)):
        return OPTIONS, False
    if not isinstance(workload.defaults, Mapping):
        return OPTIONS, False
    options = known_options(workload)
    for key, default in workload.options.items():
        if not is_default(default):  # its type is unknown, so any value is valid
            options[key] = Option(None, object, "", optional=True)
    return options, not workload.takes_any_key


def _config_mistakes(study: Study, options: Mapping[str, Option], is_complete: bool) -> Iterator[Mistake]:
    space, config = _mapping(study, "space"), _mapping(study, "config")
    for key, value in config.items():
        where = f"config[{key!r}]"
        if key in space:
            yield Mistake(where, value, "is also swept in `space`", hint="give it in one of the two")
        if isinstance(value, DOMAINS):
            yield Mistake(where, value, "must be a single value", hint=f"put it into space={{{key!r}: …}}")
        else:
            wrong = _key_mistake(study, where, key, value, options, is_complete)
            yield from filter(None, [wrong or _setting_mistake(where, key, value, options)])
    both = {**config, **space}
    if "batch_size" in both and "per_worker_batch_size" in both and "epochs" in options:
        hint = (
            "batch_size fixes the global batch (strong scaling), per_worker_batch_size a worker's (weak): leave one out"
        )
        value = both["per_worker_batch_size"]
        yield Mistake("per_worker_batch_size", value, "is given in addition to batch_size", hint=hint)


def _space_mistakes(study: Study, options: Mapping[str, Option], is_complete: bool) -> Iterator[Mistake]:
    for key, domain in _mapping(study, "space").items():
        where = f"space[{key!r}]"
        yield from filter(None, [_key_mistake(study, where, key, domain, options, is_complete)])
        if not isinstance(domain, DOMAINS):
            values = domain if isinstance(domain, (list, tuple)) else (domain,)
            hint = f"write grid({_listed(values)})"
            if type(domain).__module__ == TUNE_DOMAINS:
                hint = "of Ray Tune's domains, choice, uniform, loguniform, randint and grid_search are supported"
            yield Mistake(where, domain, "is not a grid, choice or range", hint=hint)
        elif wrong := problem(domain):
            hint = "a grid needs values that differ, a range two numbers with low < high"
            if isinstance(domain, (Grid, Choice)) and len(domain.values) > MAX_TRIALS:
                hint = "narrow it, or search in a range with num_trials: uniform, loguniform or randint(low, high)"
            yield Mistake(where, domain, wrong, hint=hint)
        elif isinstance(domain, (Grid, Choice)) and isinstance(domain.values[0], list) and len(domain.values) == 1:
            hint = f"write {type(domain).__name__.lower()}({_listed(domain.values[0])})"
            yield Mistake(where, domain, "has a list as its only value", hint=hint)
        elif study.searcher is not None and isinstance(domain, Grid):
            hint = f"write choice({_listed(domain.values)})"
            yield Mistake(where, domain, "is a grid, but a searcher draws every value", hint=hint)
        else:
            yield from filter(None, (_setting_mistake(where, key, value, options) for value in examples(domain)))


def _listed(values: Sequence[object]) -> str:
    return listed([shortened(value, 40) for value in values], MAX_VALUES_SHOWN)


def _key_mistake(
    study: Study, where: str, key: object, value: object, options: Mapping[str, Option], is_complete: bool
) -> Mistake | None:
    if not isinstance(key, str):
        hint = f"put it in quotes: {str(key)!r}"
        return Mistake(where, value, f"its name must be text, not {type(key).__name__}", hint=hint)
    if not is_complete or key in options:
        return None
    hint = f"; the command has no {{{key}}}" if isinstance(study.workload, CommandWorkload) else ""
    return unknown_option(where, value, key, options, hint)


def _setting_mistake(where: str, key: Any, value: Any, options: Mapping[str, Option]) -> Mistake | None:
    if key in options:
        return validate_value(where, key, value, options[key])
    if can_be_kept(value):
        return None
    what = str(value) if isinstance(value, float) else f"a {type(value).__name__}"
    return Mistake(where, value, f"{what} can't be kept with the results", hint=f"give {KEPT}")


def _baseline_mistakes(
    baseline: Mapping[str, Any], space: Mapping[str, Any], options: Mapping[str, Option]
) -> Iterator[Mistake]:
    misspelt = [key for key in space if isinstance(key, str) and key not in options]
    for key, value in baseline.items():
        where = f"baseline[{key!r}]"
        if key not in space:
            if closest(str(key), misspelt):
                continue
            hint = suggest(str(key), [str(k) for k in space]) if space else "add it to `space`"
            yield Mistake(where, value, f"`{key}` is not swept, so no point differs in it", hint=hint)
            continue
        domain = space[key]
        if not isinstance(domain, DOMAINS) or problem(domain):
            continue
        if not isinstance(domain, (Grid, Choice)):
            wrong, hint = "a drawn range may have no point that matches", "a baseline needs grid(...) or choice(...)"
            yield Mistake(where, value, wrong, hint=hint)
        elif not any(_is_same(value, v) for v in domain.values):
            valid = [v for v in domain.values if _setting_mistake(where, key, v, options) is None]
            hint = f"take one of {_listed(valid)}" if valid else ""
            if _setting_mistake(where, key, value, options) is None:
                hint = f"{hint}, or add it to the space" if hint else "add it to the space"
            yield Mistake(where, value, "matches no point", hint=hint)


def _is_same(one: Any, other: Any) -> bool:
    # In Python True == 1, and comparing an array doesn't give a bool.
    return isinstance(one, bool) == isinstance(other, bool) and bool(one is other or (one == other) is True)


def _size_mistakes(study: Study) -> list[Mistake]:
    """Return the mistake of too many trials. Their points are not validated, which would take too long."""
    num_points = study.num_points
    if num_points > MAX_TRIALS:
        hint = "narrow the grids, or search with choice/uniform and num_trials"
        return [Mistake("space", f"{num_points:,} points", f"is more than {MAX_TRIALS:,}", hint=hint)]
    key = "num_trials" if study.is_search else "max_repeats" if study.until else "num_repeats"
    num_trials = num_points * getattr(study, key)
    if num_trials > MAX_TRIALS:
        wrong = f"makes {num_trials:,} trials of {num_points:,} points, more than {MAX_TRIALS:,}"
        return [Mistake(key, getattr(study, key), wrong, hint=f"narrow the grids, or lower {key}")]
    return []


def _point_mistakes(study: Study) -> list[Mistake]:
    chosen = {**study.config, **study.space}
    if "cpus_per_worker" in chosen and "cpu_affinity" in chosen:
        affinity = chosen["cpu_affinity"]
        values = examples(affinity) if isinstance(affinity, DOMAINS) else (affinity,)
        if counts := [value for value in values if affinity_width(value, 1) is not None]:
            wrong = f"is given in addition to cpu_affinity={counts[0]!r}, which sets the number of cores too"
            hint = 'leave cpus_per_worker out, or set cpu_affinity="spread", "compact" or "off"'
            return [Mistake("cpus_per_worker", chosen["cpus_per_worker"], wrong, hint=hint)]
    mistakes: dict[str, Mistake] = {}
    drawn = {key: examples(domain)[0] for key, domain in study.space.items() if not isinstance(domain, Grid)}
    # Each value that may be drawn, with the first of the others.
    first = {**study.config, **drawn, **study.points()[0]}
    for key in drawn:
        for value in examples(study.space[key])[1:]:
            config = resolve(study.workload, {**first, key: value})
            for mistake in study.workload.point_mistakes(config, f"{point_label({key: value})}."):
                mistakes.setdefault(mistake.problem, mistake)
    for point in study.points():
        config = resolve(study.workload, {**study.config, **drawn, **point})
        for mistake in validate(config, study.workload, where=point_label(point), swept=study.space):
            mistakes.setdefault(str(mistake), mistake)
        if len(mistakes) > MAX_SHOWN:
            hint = "fix these first: others may follow from the same value"
            last = Mistake("space", f"{len(study.points()):,} points", "more of them can't run", hint=hint)
            return [*list(mistakes.values())[:MAX_SHOWN], last]
    return list(mistakes.values())
