"""Command that recommends a configuration."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raypar.cli import common
from raypar.cli.flags import words_of
from raypar.errors import RayparError
from raypar.execution.flags import RunFlags
from raypar.study.quantity import BUILT_IN, COST, UpperLimit, limited
from raypar.units import DURATIONS_S

if TYPE_CHECKING:
    from raypar.analysis.question import Question
    from raypar.analysis.recommend import Settling
    from raypar.analysis.time_to_target import Target
    from raypar.execution.stored import StoredStudy
    from raypar.study.metric import Metric
    from raypar.study.space import Value


_limit = partial(typer.Option, rich_help_panel="Limits")


def _with_limits(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each quantity with a limit, after ``--max-time``.

    If an installed package's quantity is faulty, only built-in quantities have one; reading results reports the fault.
    """

    def parameter(option: UpperLimit) -> inspect.Parameter:
        kind: Any = str | None if option.scales else float | None
        annotation = Annotated[kind, _limit(option.flag, metavar=option.metavar, help=option.help)]
        return inspect.Parameter(
            option.parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation
        )

    options = [quantity.limit for quantity in BUILT_IN if quantity.limit is not None]
    with contextlib.suppress(RayparError):
        options = list(limited().values())
    signature = inspect.signature(function, eval_str=True)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    place = [p.name for p in parameters].index("max_time") + 1
    parameters[place:place] = map(parameter, options)
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


@_with_limits
def recommend(
    name: common.StudyName,
    target: Annotated[
        str | None,
        typer.Option(metavar="METRIC=VALUE", help="Good enough: accuracy=0.99. (default: as good as the best)"),
    ] = None,
    start: Annotated[
        Literal["first-step", "launch"],
        typer.Option(help="Start of the time to the target: the first timed step, or the start of the trial."),
    ] = "first-step",
    min_metric: Annotated[
        float | None,
        typer.Option(metavar="X", help="The study's metric at the end: at least X, or at most X if less is better."),
    ] = None,
    metric_margin: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Accepted difference from the best metric. (default: half a percentage point, else 1 %)",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Use only points with this value, or A,B."),
    ] = None,
    since: common.Since = None,
    price: common.Price = None,
    max_time: Annotated[str | None, _limit(metavar="TIME", help="Maximum time: 90s, 10min, 2h.")] = None,
    min_efficiency: Annotated[
        float | None, _limit(metavar="SHARE", help="Minimum parallel efficiency, for example 0.7.")
    ] = None,
    gpu_memory: Annotated[
        str | None, _limit(metavar="SIZE", help="Memory of a GPU that workers have to fit into: 24GB.")
    ] = None,
    tracking_uri: common.TrackingUri = None,
    as_json: common.AsJson = False,
    **of_quantities: str | float | None,
) -> None:
    """Recommend a configuration of a study, with the reason.

    If the choice is still open, it also shows the trials that would settle it.

    Example:  raypar recommend strong_scaling --target accuracy=0.97 --min-efficiency 0.7
    """
    from raypar import units
    from raypar.analysis.recommend import Constraints
    from raypar.analysis.recommend import recommend as recommended
    from raypar.analysis.time_to_target import Start
    from raypar.execution.stored import read_study
    from raypar.reporting.recommend import RecommendView, print_recommendation

    common.check_positive("--price", price)
    _check(target, start, min_efficiency, min_metric, metric_margin)
    only = common.chosen_values(settings or ())
    max_time_s = common.parse_quantity("--max-time", max_time, DURATIONS_S, "time", "90s, 10min or 2h")
    limits, gpu_bytes = _limits(of_quantities), common.gpu_bytes(gpu_memory)
    study = read_study(name, common.uri_of(tracking_uri), Path.cwd(), price_per_node_hour=price, since=since)
    question = study.question
    if min_metric is not None:
        _check_unit("--min-metric ", question.with_unit(study.results).judged_by, min_metric)
    if COST.key in limits and question.price_per_node_hour is None:
        raise RayparError("--max-cost needs a price", hint="add --price 2.5, or price_per_node_hour to the study")
    constraints = Constraints(
        target=_target(target, study) if target is not None else None,
        start=Start(start),
        max_time_s=max_time_s,
        limits=limits,
        gpu_bytes=gpu_bytes,
        min_efficiency=min_efficiency,
        min_metric=min_metric,
        metric_margin=metric_margin,
        only=only,
    )
    recommendation = recommended(question, study.results, constraints)
    text, is_command = "", False
    if (settling := recommendation.settling) is not None and settling.num_repeats is not None:
        text, is_command = _next_step(study, name, settling)
    view = RecommendView(recommendation, text, is_command, study.scope)
    if as_json:
        common.print_json(view)
        return
    if study.scope:
        common.say(common.stdout(), f"{name}: {units.counted(len(study.results), 'trial')} {study.scope}")
    print_recommendation(common.stdout(), view)


def _check(
    target: str | None,
    start: str,
    min_efficiency: float | None,
    min_metric: float | None,
    metric_margin: float | None,
) -> None:
    """Raise RayparError for an invalid flag, before the store is read."""
    if target is not None and metric_margin is not None:
        raise RayparError("--metric-margin and --target exclude each other", hint="the target sets what is good enough")
    if target is None and start != "first-step":
        raise RayparError(f"--start {start} needs a target", hint="add --target accuracy=0.99")
    if target is not None:
        _parts(target)
    if min_efficiency is not None and not 0 < min_efficiency <= 2:
        hint = "it is a share: write --min-efficiency 0.7"
        raise RayparError(f"--min-efficiency {min_efficiency:g}: must be between 0 and 2", hint=hint)
    if min_metric is not None and not math.isfinite(min_metric):
        raise RayparError(f"--min-metric {min_metric}: must be a finite number", hint="write --min-metric 0.97")
    if metric_margin is not None and not 0 <= metric_margin < math.inf:
        hint = "write --metric-margin 0.005 for half a point of accuracy"
        raise RayparError(f"--metric-margin {metric_margin:g}: must be 0 or more", hint=hint)


def _limits(given: Mapping[str, str | float | None]) -> dict[str, float]:
    """Return the limits by quantity. Raises RayparError unless each is a value of its quantity greater than 0.

    Args:
        given: values of the options: texts with a unit, or numbers.
    """
    limits = {}
    for quantity, option in limited().items():
        match given.get(option.parameter):
            case str(text):
                value = common.parse_quantity(option.flag, text, option.scales, option.noun, option.examples)
            case value:
                common.check_positive(option.flag, value)
        if value is not None:
            limits[quantity.key] = value
    return limits


def _parts(text: str) -> tuple[str, float]:
    metric, equals, value = (part.strip() for part in text.partition("="))
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (metric and equals and math.isfinite(number)):
        raise RayparError(f"--target {text}: must be METRIC=VALUE", hint="write --target accuracy=0.99")
    return metric, number


def _target(text: str, study: StoredStudy) -> Target:
    from raypar.analysis.time_to_target import Target, metric_of

    name, value = _parts(text)
    metric = metric_of(study.question, name, study.results)
    _check_unit(f"--target {name}=", metric, value)
    return Target(name, value, metric.mode, metric.unit)


def _check_unit(flag: str, metric: Metric, value: float) -> None:
    """Raise RayparError for a value that is not in the metric's range; the hint converts shares and percentages."""
    from raypar.study.metric import PERCENT, SHARE

    if metric.unit == SHARE and not 0 <= value <= 1:
        hint = f"write {flag}{value / 100 if 1 < value <= 100 else 0.99:g}"
        raise RayparError(f"{flag}{value:g}: {metric.name} is a share from 0 to 1", hint=hint)
    if metric.unit == PERCENT and not 1 < value <= 100:
        hint = f"write {flag}{100 * value if 0 < value <= 1 else 99:g}"
        raise RayparError(f"{flag}{value:g}: {metric.name} is a percentage from 0 to 100", hint=hint)


def _next_step(study: StoredStudy, name: str, settling: Settling) -> tuple[str, bool]:
    """Return the command for the trials that would settle the choice and True, or another advice and False."""
    from raypar.execution.options import ResumeFlags

    question = study.question
    if any(result.conditions.is_imported for result in study.results):
        return "These runs were imported: import them again, together with further ones.", False
    if question.is_search:
        return "A search runs each point once. Make a study of these points with repeats.", False
    try:
        last = ResumeFlags.from_stored(name, study.store.resume_info(name))
    except RayparError:
        return "The store has no record of the study's file: increase num_repeats in it and run it again.", False
    flags = last.flags
    fixed = {setting.partition("=")[0].strip(): setting for setting in flags.set}
    fixed.update(_narrowing(question, settling))
    data_dir, num_repeats = flags.data_dir, settling.num_repeats or 0
    again = RunFlags(
        set=tuple(fixed.values()),
        repeats=None if flags.until else num_repeats,
        seed=flags.seed or None,
        log_model=flags.log_model,  # changes the trials' identity, as the next does
        log_all_models=flags.log_all_models,
        no_ray=flags.no_ray,
        address=flags.address,
        data_dir=data_dir if str(data_dir or "") != os.environ.get("RAYPAR_DATA_DIR") else None,
        isolation=flags.isolation,
        until=flags.until,
        margin=flags.margin if flags.until else None,
        max_repeats=max(flags.max_repeats or 0, num_repeats) if flags.until else None,
    )
    return shlex.join(["raypar", "study", common.path_from_here(Path(last.file)), *words_of(again)]), True


def _narrowing(question: Question, settling: Settling) -> dict[str, str]:
    """Return ``--set`` texts by key that leave only the points to repeat and the baseline; empty if none are left out.

    Even a single value is a grid, so that the key stays swept and its trials belong to the same points.
    """
    chosen: dict[str, list[Value]] = {}
    for key in question.space_keys:
        values = [*(point[key] for point in settling.points if key in point)]
        if key in question.baseline:
            values.append(question.baseline[key])
        chosen[key] = list(dict.fromkeys(values))
    if math.prod(map(len, chosen.values())) >= len(question.points):
        return {}
    swept = {key: list(dict.fromkeys(p[key] for p in question.points if key in p)) for key in chosen}
    return {
        key: f"{key}=grid({','.join(repr(v) for v in swept[key] if v in values)})"
        for key, values in chosen.items()
        if len(values) < len(swept[key])
    }
