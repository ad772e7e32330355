"""Validation: every mistake of a study at once, and whether a config can run on a cluster.

`validate_study` is asked when a `Study` is made, `validate` for each config: then without a cluster, and again with
the cluster that it is to run on. The allowed values of an option, and what it excludes, are in `raypar.study.options`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from raypar.errors import Mistake, RayparError, closest, shortened, suggest
from raypar.study.metric import UNITS, Metric
from raypar.study.options import (
    LOADERS,
    OPTIONS,
    STRATEGIES,
    absent_cores,
    affinity_width,
    conflicts,
    cores_text,
    known_options,
    resolve,
)
from raypar.study.space import DOMAINS, LARGEST, Choice, Grid, Value, examples, lone_surrogate, problem
from raypar.study.trial import Placement, point_label
from raypar.study.workload import Config, Option, Workload
from raypar.units import listed

if TYPE_CHECKING:
    from raypar.study.study import Study

MAX_TRIALS = 100_000
MIN_BLOCKS = 3  # before a study that runs until it is settled first looks at its results
MAX_BLOCKS = 100  # of such a study: more than that nobody waits for
MAX_NAME = 150  # file names are made of it
MAX_SHOWN = 20  # points that can't run
MAX_VALUES_SHOWN = 8
_MAPPINGS = ("space", "config", "baseline")
KEPT = "a finite number, text, True, False, None, or tuples or dicts of these"

StrategyCheck = Callable[[Workload, Config], tuple[str, str] | None]  # what is wrong, and the fix


class Machines(Protocol):
    """Part of `raypar.run.cluster.Cluster` that validation reads."""

    @property
    def nodes(self) -> Sequence[Mapping[str, float]]: ...
    @property
    def is_own(self) -> bool: ...
    @property
    def may_grow(self) -> bool: ...
    @property
    def cores(self) -> Sequence[Any] | None: ...
    @property
    def has_mps(self) -> bool: ...
    def refusals(self, placements: Sequence[Placement]) -> Mapping[Placement, str]: ...


def validate(
    config: Config,
    workload: Workload,
    cluster: Machines | None = None,
    *,
    where: str = "",
    swept: Collection[str] = (),
    must_fit: bool = True,
    check_strategy: StrategyCheck | None = None,
) -> list[Mistake]:
    """Return what keeps a complete config, whose values are each fine alone, from running.

    Args:
        cluster: where it is to run; None: undecided, so only what holds everywhere is checked.
        where: prefix of the mistakes' fields, say the point.
        swept: hyperparameters that the study varies.
        must_fit: on a cluster, its gang has to fit on the nodes.
        check_strategy: tells whether the model and the installed packages allow the strategy. Needs torch, so it is
            called on a cluster only, and only for strategies that depend on the model.
    """
    size = None
    if not workload.foreign_kind:
        try:
            size = workload.train_size(config)
            wrong = None if isinstance(size, int | None) else f"returns a {type(size).__name__}, not a whole number"
        except RayparError:
            raise
        except Exception as error:  # the user's own function
            wrong = f"raises {type(error).__name__}: {error}"
        if wrong:
            return [Mistake("workload.num_train_samples", where, wrong, hint="fix that function, or leave it out")]
    prefix, wrongs = f"{where}." if where else "", conflicts(config, workload, size, swept)
    mistakes = [Mistake(f"{prefix}{key}", config[key], wrong, hint=hint) for key, wrong, hint in wrongs]
    if workload.command is not None and not mistakes and (wrong := workload.command.problem(config)):
        mistakes.append(_unfillable(prefix, workload, wrong))
    if cluster is None:
        return mistakes
    mistakes += _unavailable(config, workload, cluster)
    strategy = "" if workload.foreign_kind or config["num_workers"] == 1 else config["strategy"]
    depends_on_model = bool(strategy) and STRATEGIES[strategy].depends_on_model
    if check_strategy and depends_on_model and (refusal := check_strategy(workload, config)):
        mistakes.append(Mistake("strategy", strategy, f"{refusal[0]} (workload {workload.name})", hint=refusal[1]))
    if must_fit and not mistakes:
        for placement, wrong in cluster.refusals([Placement.of(config)]).items():
            hint = "drop the point, ask for less, or give the --address of a larger cluster"
            if placement.device == "cuda" and "GPU" in wrong:
                hint = "use --set device=cpu, or give the --address of a cluster with GPUs enough"
            mistakes.append(Mistake("placement", str(placement), wrong, hint=hint))
    return mistakes


def _unfillable(prefix: str, workload: Workload, wrong: str) -> Mistake:
    template = workload.command.template if workload.command else ""
    return Mistake(f"{prefix}workload.command", template, wrong, hint="change the format in braces, or the value")


def _unavailable(config: Config, workload: Workload, cluster: Machines) -> Iterator[Mistake]:
    """Yield what the config names that the cluster's machines lack."""
    affinity, device = config["cpu_affinity"], config["device"]
    if cluster.cores == () and isinstance(affinity, (str, tuple)):
        hint = "leave it out, or give the number of cores of each worker: cpu_affinity=2"
        yield Mistake("cpu_affinity", affinity, "this system can't bind processes to cores", hint=hint)
    elif cluster.cores is not None:
        numbers = [core.number for core in cluster.cores]
        if (wrong := absent_cores(affinity, numbers)) is not None:
            hint = f"list cores of {cores_text(numbers)}, or give the number of cores of each worker: cpu_affinity=1"
            yield Mistake("cpu_affinity", affinity, wrong, hint=hint)
    num_usable_nodes = sum(node.get("CPU", 0) >= 1 for node in cluster.nodes)
    if config["nodes"] == "spread" and config["num_workers"] > 1 and num_usable_nodes < 2 and not cluster.may_grow:
        hint = "leave it out, or give the --address of a cluster of several nodes"
        yield Mistake("nodes", "spread", "there is one node, and nothing to spread over", hint=hint)
    if device == "mps" and cluster.is_own and not cluster.has_mps:
        wrong = "this machine has no Apple GPU: mps needs macOS on arm64"
        yield Mistake("device", device, wrong, hint="use --set device=cpu, or device=auto")
    if not workload.foreign_kind and config["precision"] == "tf32" and device != "cuda":
        wrong = f"tf32 exists on NVIDIA GPUs only, and the device is {device}"
        yield Mistake("precision", "tf32", wrong, hint="set precision=fp32 or bf16, or run it where there is a GPU")


def validate_value(field: str, key: str, value: Value, option: Option) -> Mistake | None:
    """Return what is wrong with one value of one option, or None."""
    default = "" if option.default is None else f", by default {option.default}"
    kind = "" if option.kind is object else f"; {option.kind.__name__}"
    hint = f"{option.doc}{kind}{default}"
    if value is None:
        return None if option.optional else Mistake(field, value, f"`{key}` needs a value", hint=hint)
    types = (int, float) if option.kind is float else (option.kind,)
    # bool is an int in Python, but `epochs=True` is a slip.
    if not isinstance(value, types) or (isinstance(value, bool) and option.kind not in (bool, object)):
        wrong = f"`{key}` is of type {option.kind.__name__}, not {type(value).__name__}"
        return Mistake(field, value, wrong, hint=hint)
    if isinstance(value, int) and abs(value) > LARGEST:
        return Mistake(field, value, f"`{key}` is beyond 2^53", hint=hint)
    try:
        wrong_value = option.check(value)
    except Exception as error:  # the workload's own check
        wrong_value = f"can't be checked: {type(error).__name__}: {error}"
    if wrong_value is None and isinstance(value, float) and not math.isfinite(value):
        wrong_value = "must be a finite number"
    if wrong_value is None and not _can_be_kept(value):
        wrong_value = f"can't be kept with the results: {KEPT}"
    return Mistake(field, value, f"`{key}` {wrong_value}", hint=hint) if wrong_value else None


def unknown_option(field: str, value: object, key: str, options: Collection[str], hint: str = "") -> Mistake:
    """Return the mistake of a key that is no option, with the closest one that is."""
    return Mistake(field, value, f"unknown option '{key}'", hint=suggest(key, list(options)) + hint)


def _is_default(value: object) -> bool:
    """Return whether an option's type follows from this default, or it is an `Option`."""
    return isinstance(value, (str, int, float, bool, tuple, Option))


def _metric_mistakes(where: str, metric: Metric) -> Iterator[Mistake]:
    if not isinstance(metric.name, str) or not metric.name:
        yield Mistake(where, metric.name, "is no name of a metric", hint='set metric="val_loss"')
    if metric.mode not in ("max", "min"):
        part = where.removesuffix("metric") + "mode"
        yield Mistake(part, metric.mode, 'must be "max" or "min"', 'set mode="max" for an accuracy')
    if metric.unit not in ("", *UNITS):
        hint = 'such as Metric("f1", "max", "share"), whose values are 0 to 1'
        yield Mistake(where, metric.unit, f"its unit must be one of {', '.join(UNITS)}", hint=hint)


def _validate_workload(workload: Workload) -> Iterator[Mistake]:
    if not isinstance(workload.name, str) or not workload.name:
        yield Mistake("workload.name", workload.name, "is no name", hint='set name="mine"')
    yield from _metric_mistakes("workload.metric", workload.metric_of())
    if not workload.metric and not workload.foreign_kind and workload.metric_of() == Metric("val_loss", "max"):
        hint = 'name the metric, metric="f1", or leave mode out'
        yield Mistake("workload.mode", "max", "is given without metric=, so it would be that of val_loss", hint)
    optional_hint = "give a function, or leave it out"
    functions = {
        **{part: f"give the Workload {part}=, a function of the trial's config" for part in ("model", "data")},
        **dict.fromkeys(("optimizer", "loss", "prepare", "save", "generate", "layers", "tensor_plan"), optional_hint),
    }
    if workload.train_loop is not None:
        functions = {"train_loop": "give Workload.from_train_loop a function of the config"}
    elif workload.command is not None:
        functions = {"prepare": optional_hint}
        yield from workload.command.mistakes()
    for part, hint in functions.items():
        value = getattr(workload, part)
        if not callable(value) and not (value is None and hint == optional_hint):
            yield Mistake(f"workload.{part}", value, "is no function", hint=hint)
    if not workload.foreign_kind:
        yield from _validate_data(workload)
    for part in ("options", "defaults", "metrics"):
        value = getattr(workload, part)
        if not isinstance(value, Mapping) and not (part == "metrics" and value is None):
            yield Mistake(f"workload.{part}", value, "must be a dict", hint=f'set {part}={{"name": …}}')
    if not isinstance(workload.options, Mapping) or not isinstance(workload.defaults, Mapping):
        return
    for key, value in workload.options.items():
        if not _is_default(value):
            hint = "a default is a str, int, float, bool or tuple (its type is the option's), or a raypar.Option"
            yield Mistake(f"workload.options[{key!r}]", value, "is no default for an option", hint=hint)
    options = known_options(replace(workload, defaults={}))
    for key, value in workload.defaults.items():
        where = f"workload.defaults[{key!r}]"
        if key not in options:
            hint = "; the workload's own hyperparameters go into options={...}"
            yield unknown_option(where, value, str(key), options, hint)
        elif _is_default(workload.options.get(key, 0)) and (wrong := validate_value(where, key, value, options[key])):
            yield wrong


def _validate_data(workload: Workload) -> Iterator[Mistake]:
    size = workload.num_train_samples
    if size is not None and not callable(size) and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        hint = "give a number, or a function of the config that returns it, or leave it out"
        yield Mistake("workload.num_train_samples", size, "is no whole number of at least 1", hint=hint)
    if not isinstance(workload.loaders, (tuple, list)) or not workload.loaders or set(workload.loaders) - {*LOADERS}:
        hint = f"give a tuple of them: loaders={LOADERS}"
        yield Mistake("workload.loaders", workload.loaders, f"are not some of {', '.join(LOADERS)}", hint=hint)


def validate_study(study: Study) -> list[Mistake]:
    """Return all mistakes of a study, whatever its fields hold, without those that only follow from another."""
    mistakes = [*_validate_fields(study), *_validate_texts(study)]
    for key in _MAPPINGS:
        if not isinstance(getattr(study, key), Mapping):
            hint = f'set {key}={{"batch_size": …}}'
            mistakes.append(Mistake(key, getattr(study, key), "must be a dict of hyperparameters", hint=hint))
    if isinstance(study.workload, Workload):
        mistakes += _validate_workload(study.workload)
    else:
        wrong = f"is a {type(study.workload).__name__}, not a Workload"
        hint = "take one from raypar.workloads, or make a raypar.Workload"
        mistakes.append(Mistake("workload", study.workload, wrong, hint=hint))
    options, is_complete = _options_of(study)
    mistakes += _validate_metric(study)
    mistakes += _validate_config(study, options, is_complete)
    mistakes += _validate_space(study, options, is_complete)
    if isinstance(study.space, Mapping):
        mistakes += _validate_baseline(_mapping(study, "baseline"), study.space, options)
    elif is_complete:
        baseline = _mapping(study, "baseline")
        mistakes += [
            unknown_option(f"baseline[{key!r}]", value, str(key), options)
            for key, value in baseline.items()
            if key not in options
        ]
    return mistakes or _validate_size(study) or _validate_points(study)


# What a trial of raypar's own loop reports of itself, beside its metrics.
REPORTED = (
    "train_loss",
    "val_loss",
    "train_time_s",
    "eval_time_s",
    "throughput_samples_per_s",
    "eval_samples_per_s",
    "eval_steps_per_s",
    "grad_norm",
)


def _validate_metric(study: Study) -> Iterator[Mistake]:
    """Yield the mistake of a metric that no trial will report; what a train loop or command reports is unknown."""
    workload = study.workload
    if not isinstance(workload, Workload) or workload.foreign_kind:
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
        yield Mistake("metric", name, f"is nothing that workload {workload.name} reports", hint=hint)


def _mapping(study: Study, key: str) -> Mapping[str, Any]:
    value = getattr(study, key)
    return value if isinstance(value, Mapping) else {}


def name_problem(name: str) -> str:
    """Return what keeps a text from being a study's name; empty where nothing does."""
    if not re.fullmatch(r"[\w][\w .-]*", name):
        return "may hold letters, digits, space, '_', '-' and '.'"
    return f"is longer than {MAX_NAME} characters" if len(name) > MAX_NAME else ""


def _validate_fields(study: Study) -> Iterator[Mistake]:
    for key in ("name", "metric", "mode", "description"):
        value = getattr(study, key)
        if not isinstance(value, str) and not (key == "metric" and isinstance(value, Metric)):
            yield Mistake(key, value, f"must be text, not {type(value).__name__}", hint="put it in quotes")
    if isinstance(study.name, str) and study.name and (wrong := name_problem(study.name)):
        yield Mistake("name", study.name, wrong, hint="choose another name")
    for key, low in (("num_repeats", 1), ("max_retries", 0), ("num_trials", 1), ("max_concurrent_trials", 1)):
        value = getattr(study, key)
        if value is None and key == "max_concurrent_trials":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            yield Mistake(key, value, f"must be a whole number of at least {low}", hint=f"set {key}={low}")
        elif value > MAX_TRIALS:
            yield Mistake(key, value, f"is more than {MAX_TRIALS:,}", hint=f"set {key}={low}")
    yield from _validate_until(study)
    price = study.price_per_node_hour
    if price is not None and not (_is_number(price) and 0 < price < math.inf):
        hint = "set price_per_node_hour=2.5, or leave it out"
        yield Mistake("price_per_node_hour", price, "must be a number greater than 0", hint=hint)
    if isinstance(study.mode, str) and study.mode not in ("max", "min", ""):
        yield Mistake("mode", study.mode, 'must be "max" or "min"', hint='set mode="max" for an accuracy')
    if isinstance(study.metric, Metric):
        yield from _metric_mistakes("metric", study.metric)
    if not isinstance(study.seed, int) or isinstance(study.seed, bool) or not 0 <= study.seed < 2**32:
        yield Mistake("seed", study.seed, "must be a whole number from 0 to 4294967295", hint="set seed=0")
    for key, example in (("searcher", "OptunaSearch()"), ("scheduler", "ASHAScheduler()")):
        value = getattr(study, key)
        if isinstance(value, (str, int, float, type, Mapping, list, tuple)):
            what = "a class, not one of its objects" if isinstance(value, type) else f"a {type(value).__name__}"
            yield Mistake(key, value, f"is {what}", hint=f"give an object of ray.tune: {key}={example}")


def _validate_texts(study: Study) -> Iterator[Mistake]:
    """Yield what is stored of a study and holds half of a character."""
    texts: dict[str, object] = {"metric": study.metric, "description": study.description}
    if isinstance(workload := study.workload, Workload):
        parts = ("name", "description", "dataset", "options", "defaults", "metrics")
        texts |= {f"workload.{part}": getattr(workload, part) for part in parts}
        if (command := workload.command) is not None:
            texts["workload.command"] = [command.template, command.metrics, command.tensorboard, command.folder]
    for field in _MAPPINGS:
        texts |= {f"{field}[{key!r}]": (key, value) for key, value in _mapping(study, field).items()}
    for field, value in texts.items():
        if (char := lone_surrogate(value)) is not None:
            wrong = f"holds {char!a}, half of a character, which no file and no database takes"
            shown = value[1] if isinstance(value, tuple) else value
            yield Mistake(field, shown, wrong, hint="write the whole character, or leave it out")


def _validate_until(study: Study) -> Iterator[Mistake]:
    until, repeats, most = study.until, study.num_repeats, study.max_repeats
    if until not in ("", "settled"):
        hint = '"settled" repeats what is open until it is settled; or leave it out'
        yield Mistake("until", until, "is unknown", hint=hint)
    drawn = [key for key, domain in _mapping(study, "space").items() if not isinstance(domain, Grid)]
    if until and (study.searcher is not None or study.scheduler is not None or drawn):
        wrong, hint = "a search runs each point once", "leave it out, or list the points: grid(...) without a searcher"
        if not drawn and study.searcher is None:
            wrong, hint = "a scheduler stops trials, which then have no time", "leave one of the two out"
        yield Mistake("until", until, wrong, hint=hint)
    if not _is_number(study.margin) or not 0 < float(study.margin) < 1:
        yield Mistake("margin", study.margin, "must lie between 0 and 1", hint="a share, such as 0.05 or 5%")
    if not isinstance(most, int) or isinstance(most, bool) or not MIN_BLOCKS <= most <= MAX_BLOCKS:
        wrong = f"must be a whole number from {MIN_BLOCKS} to {MAX_BLOCKS}"
        yield Mistake("max_repeats", most, wrong, hint="30 are the default")
    elif until and isinstance(repeats, int) and most < repeats <= MAX_TRIALS:
        wrong = f"is more than the most repeats of a point, {most}"
        yield Mistake("num_repeats", repeats, wrong, hint="lower it, or raise max_repeats (--max-repeats)")
    budget = study.budget
    if budget is not None and (not _is_number(budget) or not 0 < float(budget) < math.inf):
        yield Mistake("budget", budget, "is no time greater than 0", hint="such as 90s, 10m or 2h; or leave it out")
    elif budget is not None and not until:
        hint = 'add --until settled (in a file until="settled"), or leave it out'
        yield Mistake("budget", budget, "limits a study that runs until it is settled", hint=hint)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _options_of(study: Study) -> tuple[Mapping[str, Option], bool]:
    """Return the options that a study can set, and whether there are no others."""
    workload = study.workload
    if not (isinstance(workload, Workload) and isinstance(workload.options, Mapping)):
        return OPTIONS, False
    if not isinstance(workload.defaults, Mapping):
        return OPTIONS, False
    options = known_options(workload)
    for key, default in workload.options.items():
        if not _is_default(default):  # its type is unknown: any value will do
            options[key] = Option(None, object, "", optional=True)
    return options, workload.train_loop is None


def _validate_config(study: Study, options: Mapping[str, Option], is_complete: bool) -> Iterator[Mistake]:
    space, config = _mapping(study, "space"), _mapping(study, "config")
    for key, value in config.items():
        where = f"config[{key!r}]"
        if key in space:
            yield Mistake(where, value, "is also swept in `space`", hint="give it in one of the two")
        if isinstance(value, DOMAINS):
            yield Mistake(where, value, "is no single value", hint=f"put it into space={{{key!r}: …}}")
        else:
            wrong = _validate_key(study, where, key, value, options, is_complete)
            yield from filter(None, [wrong or _validate_setting(where, key, value, options)])
    both = {**config, **space}
    if "batch_size" in both and "per_worker_batch_size" in both and "epochs" in options:
        hint = (
            "batch_size fixes the global batch (strong scaling), per_worker_batch_size a worker's (weak): leave one out"
        )
        value = both["per_worker_batch_size"]
        yield Mistake("per_worker_batch_size", value, "is given beside batch_size", hint=hint)


def _validate_space(study: Study, options: Mapping[str, Option], is_complete: bool) -> Iterator[Mistake]:
    for key, domain in _mapping(study, "space").items():
        where = f"space[{key!r}]"
        yield from filter(None, [_validate_key(study, where, key, domain, options, is_complete)])
        if not isinstance(domain, DOMAINS):
            values = domain if isinstance(domain, (list, tuple)) else (domain,)
            yield Mistake(where, domain, "is not a grid, choice or range", hint=f"write grid({_listed(values)})")
        elif wrong := problem(domain):
            hint = "a grid needs values that differ, a range two numbers with low < high"
            if isinstance(domain, (Grid, Choice)) and len(domain.values) > MAX_TRIALS:
                hint = "narrow it, or search in a range with num_trials: uniform, loguniform or randint(low, high)"
            yield Mistake(where, domain, wrong, hint=hint)
        elif study.searcher is not None and isinstance(domain, Grid):
            hint = f"write choice({_listed(domain.values)})"
            yield Mistake(where, domain, "is a grid, but a searcher draws every value", hint=hint)
        else:
            yield from filter(None, (_validate_setting(where, key, value, options) for value in examples(domain)))


def _listed(values: Sequence[object]) -> str:
    return listed([shortened(value, 40) for value in values], MAX_VALUES_SHOWN)


def _validate_key(
    study: Study, where: str, key: object, value: object, options: Mapping[str, Option], is_complete: bool
) -> Mistake | None:
    if not isinstance(key, str):
        hint = f"put it in quotes: {str(key)!r}"
        return Mistake(where, value, f"its name must be text, not {type(key).__name__}", hint=hint)
    if not is_complete or key in options:
        return None
    takes_any = isinstance(study.workload, Workload) and study.workload.command is not None
    return unknown_option(where, value, key, options, f"; the command has no {{{key}}}" if takes_any else "")


def _validate_setting(where: str, key: Any, value: Any, options: Mapping[str, Option]) -> Mistake | None:
    if key in options:
        return validate_value(where, key, value, options[key])
    if _can_be_kept(value):
        return None
    what = str(value) if isinstance(value, float) else f"a {type(value).__name__}"
    return Mistake(where, value, f"{what} can't be kept with the results", hint=f"give {KEPT}")


def _can_be_kept(value: object) -> bool:
    """Return whether a value comes back from JSON, which has no NaN and no infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _validate_baseline(
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
            wrong, hint = "no point of a drawn range is sure to match it", "a baseline needs grid(...) or choice(...)"
            yield Mistake(where, value, wrong, hint=hint)
        elif not any(_is_same(value, v) for v in domain.values):
            valid = [v for v in domain.values if _validate_setting(where, key, v, options) is None]
            hint = f"take one of {_listed(valid)}" if valid else ""
            if _validate_setting(where, key, value, options) is None:
                hint = f"{hint}, or add it to the space" if hint else "add it to the space"
            yield Mistake(where, value, "matches no point", hint=hint)


def _is_same(one: Any, other: Any) -> bool:
    # True == 1 in Python; and what an array is equal to, is no bool.
    return isinstance(one, bool) == isinstance(other, bool) and bool(one is other or (one == other) is True)


def _validate_size(study: Study) -> list[Mistake]:
    """Return the mistake of more trials than anyone can run, alone: to validate all points would take as long."""
    num_points = math.prod(len(domain.values) for domain in study.space.values() if isinstance(domain, Grid))
    if num_points > MAX_TRIALS:
        hint = "narrow the grids, or search with choice/uniform and num_trials"
        return [Mistake("space", f"{num_points:,} points", f"is more than {MAX_TRIALS:,}", hint=hint)]
    key = "num_trials" if study.is_search else "max_repeats" if study.until else "num_repeats"
    num_trials = num_points * getattr(study, key)
    if num_trials > MAX_TRIALS:
        wrong = f"makes {num_trials:,} trials of {num_points:,} points, more than {MAX_TRIALS:,}"
        return [Mistake(key, getattr(study, key), wrong, hint=f"narrow the grids, or lower {key}")]
    return []


def _validate_points(study: Study) -> list[Mistake]:
    chosen = {**study.config, **study.space}
    if "cpus_per_worker" in chosen and "cpu_affinity" in chosen:
        affinity = chosen["cpu_affinity"]
        values = examples(affinity) if isinstance(affinity, DOMAINS) else (affinity,)
        if counts := [value for value in values if affinity_width(value, 1) is not None]:
            wrong = f"is given beside cpu_affinity={counts[0]!r}, which sets the number of cores too"
            hint = 'leave cpus_per_worker out, or set cpu_affinity="spread" or "compact"'
            return [Mistake("cpus_per_worker", chosen["cpus_per_worker"], wrong, hint=hint)]
    mistakes: dict[str, Mistake] = {}
    drawn = {key: examples(domain)[0] for key, domain in study.space.items() if not isinstance(domain, Grid)}
    if study.workload.command is not None:
        # Each value that may be drawn, with the first of the others.
        first = {**study.config, **drawn, **study.points()[0]}
        for key in drawn:
            for value in examples(study.space[key])[1:]:
                if wrong := study.workload.command.problem(resolve(study.workload, {**first, key: value})):
                    mistakes.setdefault(wrong, _unfillable(f"{point_label({key: value})}.", study.workload, wrong))
    for point in study.points():
        config = resolve(study.workload, {**study.config, **drawn, **point})
        for mistake in validate(config, study.workload, where=point_label(point), swept=study.space):
            mistakes.setdefault(str(mistake), mistake)
        if len(mistakes) > MAX_SHOWN:
            hint = "fix these first: others may follow from the same value"
            last = Mistake("space", f"{len(study.points()):,} points", "more of them can't run", hint=hint)
            return [*list(mistakes.values())[:MAX_SHOWN], last]
    return list(mistakes.values())
