"""Validation of a study: every mistake at once, without those that only follow from another."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from raypar.errors import Mistake, RayparError, shortened, suggest
from raypar.study.options import (
    OPTIONS,
    check_value,
    idle,
    impossible,
    is_default,
    known_options,
    num_shares,
    resolve,
    workload_mistakes,
)
from raypar.study.placement import affinity_width, listed_cores
from raypar.study.space import DOMAINS, Choice, Grid, Value, examples, problem
from raypar.study.trial import point_label
from raypar.study.workload import Config, Option, Workload

if TYPE_CHECKING:
    from raypar.study.study import Study


def check_together(
    field: str, config: Config, workload: Workload, swept: Collection[str] = frozenset()
) -> list[Mistake]:
    """What is wrong with a complete config whose values are each fine alone.

    Args:
        swept: hyperparameters that the study varies.
    """
    found: list[Mistake] = []
    cores, workers = listed_cores(config["cpu_affinity"]), config["num_workers"]
    if cores is not None and len(cores) % workers:
        found.append(
            Mistake(
                f"{field}.cpu_affinity",
                config["cpu_affinity"],
                f"{len(cores)} cores can't be shared out evenly among num_workers={workers}",
                hint=f"list a multiple of {workers} cores",
            )
        )
    if isinstance(config["nodes"], int) and config["nodes"] > workers:
        wrong, hint = f"is more than num_workers={workers}", "ask for as many nodes as workers at most"
        found.append(Mistake(f"{field}.nodes", config["nodes"], wrong, hint=hint))
    return found if workload.is_train_loop else [*found, *_check_training(field, config, workload, swept)]


def _check_training(field: str, config: Config, workload: Workload, swept: Collection[str]) -> list[Mistake]:
    found: list[Mistake] = []
    batch, shares = config["batch_size"], num_shares(config)
    try:
        num_train_samples = workload.train_size(config)
    except RayparError:
        raise
    except Exception as error:
        wrong = f"raises {type(error).__name__}: {error}"
        return [Mistake("workload.num_train_samples", field, wrong, hint="mend that function, or leave it out")]
    if num_train_samples is not None and not isinstance(num_train_samples, int):
        wrong = f"gives a {type(num_train_samples).__name__}, not a whole number"
        return [Mistake("workload.num_train_samples", num_train_samples, wrong, hint="mend that function")]
    if batch < shares:
        found.append(
            Mistake(
                f"{field}.batch_size",
                batch,
                f"is smaller than num_workers={config['num_workers']}: some workers would get no sample",
                hint=f"use batch_size of at least {shares}, or fewer workers",
            )
        )
    wanted, size = config["num_samples"], num_train_samples
    if size is not None and wanted is not None and wanted > size:
        found.append(
            Mistake(f"{field}.num_samples", wanted, f"is more than the {size} training samples", hint="ask for fewer")
        )
    elif (available := wanted or size) is not None and batch > available:
        found.append(
            Mistake(
                f"{field}.batch_size",
                batch,
                f"is larger than the training set of {available} samples",
                hint="use a smaller batch_size" + (" or a larger num_samples" if wanted else ""),
            )
        )
    if config["loader"] not in workload.loaders:
        found.append(
            Mistake(
                f"{field}.loader",
                config["loader"],
                f"is not for workload {workload.name}",
                hint=f"it has: {', '.join(workload.loaders)}",
            )
        )
    for key, value, text, hint in (*_impossible(config), *impossible(config)):
        found.append(Mistake(f"{field}.{key}", value, text, hint=hint))
    found += [
        Mistake(f"{field}.{key}", config[key], f"has no effect {why}", hint=hint)
        for key, why, hint in (*_idle(config), *idle(config, swept))
    ]
    return found


def _impossible(config: Config) -> Iterator[tuple[str, Value, str, str]]:
    if config["checkpoint_every_epochs"] is not None:
        wrong, every = "can't be had with {}", config["checkpoint_every_epochs"]
        if config["num_workers"] > 1 and config["strategy"] == "deepspeed":
            hint = 'leave it out, or use strategy="fsdp", which shares out as much'
            yield "checkpoint_every_epochs", every, wrong.format("deepspeed: its engine keeps weights of its own"), hint
        if config["num_workers"] > 1 and config["compression"] == "powersgd":
            hint = "leave one of them out"
            yield "checkpoint_every_epochs", every, wrong.format("PowerSGD: it carries errors on in its hook"), hint
        if config["eval_every_steps"] is not None and config["loader"] == "dataloader":
            hint = 'leave one of them out, or use loader="resident"'
            yield (
                "checkpoint_every_epochs",
                every,
                wrong.format("eval_every_steps and a dataloader: it draws anew in the middle of an epoch"),
                hint,
            )
    if config["device"] == "mps":
        if config["num_workers"] > 1:
            yield "num_workers", config["num_workers"], "can't share the one MPS device", "use num_workers=1 with it"
        if config["precision"] == "fp64":
            yield "precision", "fp64", "is not to be had on MPS", 'use precision="fp32", or device="cpu"'


def _idle(config: Config) -> Iterator[tuple[str, str, str]]:
    """Options that would do nothing in this config, why, and the way out: a sweep over them would show nothing."""
    if config["loader"] != "dataloader":
        for key in ("num_loader_workers", "pin_memory"):
            if config[key]:
                yield key, f'with loader="{config["loader"]}"', f'add loader="dataloader", or leave {key} out'
    if config["prefetch_factor"] and not config["num_loader_workers"]:
        yield "prefetch_factor", "without loader processes", "add num_loader_workers of at least 1, or leave it out"
    if config["compile"] and not config["num_warmup_steps"]:
        yield (
            "num_warmup_steps",
            "but to time the compilation",
            "leave it out: the warm-up is where compile=True compiles",
        )


MAX_TRIALS = 100_000
MAX_NAME = 150  # file names are made of it
MAX_TOLD = 20  # of the points that can't be
_MAPPINGS = ("space", "config", "baseline")


def mistakes_of(study: Study) -> list[Mistake]:
    """All mistakes of a study, whatever its fields hold."""
    found = [*_field_mistakes(study)]
    for key in _MAPPINGS:
        if not isinstance(getattr(study, key), Mapping):
            hint = f'say {key}={{"batch_size": …}}'
            found.append(Mistake(key, getattr(study, key), "must be a dict of hyperparameters", hint=hint))
    is_workload = isinstance(study.workload, Workload)
    if is_workload:
        found += workload_mistakes(study.workload)
    else:
        wrong = f"is a {type(study.workload).__name__}, not a Workload"
        hint = "take one from raypar.workloads, or make a raypar.Workload"
        found.append(Mistake("workload", study.workload, wrong, hint=hint))
    known, check_unknown = _options_of(study)
    chosen = {key: _mapping(study, key) for key in _MAPPINGS}
    wrong_keys: set[str] = set()
    for mistake, key in (*_config_mistakes(study, known, check_unknown), *_space_mistakes(study, known, check_unknown)):
        found.append(mistake)
        wrong_keys.add(key)
    if isinstance(study.space, Mapping):
        found += _baseline_mistakes(chosen["baseline"], chosen["space"], wrong_keys)
    if found:
        return found
    return _size_mistakes(study) or _point_mistakes(study)


def _mapping(study: Study, key: str) -> Mapping[str, Any]:
    value = getattr(study, key)
    return value if isinstance(value, Mapping) else {}


def _field_mistakes(study: Study) -> Iterator[Mistake]:
    for key in ("name", "metric", "mode", "description"):
        if not isinstance(value := getattr(study, key), str):
            yield Mistake(key, value, f"must be text, not {type(value).__name__}", hint="put it in quotes")
    if isinstance(study.name, str) and study.name and not re.fullmatch(r"[\w][\w .-]*", study.name):
        allowed = "may hold letters, digits, space, '_', '-' and '.'"
        yield Mistake("name", study.name, allowed, hint="choose another name")
    elif isinstance(study.name, str) and len(study.name) > MAX_NAME:
        yield Mistake("name", study.name, f"is longer than {MAX_NAME} characters", hint="choose a shorter name")
    for key, low in (("num_repeats", 1), ("max_retries", 0), ("num_trials", 1), ("max_concurrent_trials", 1)):
        value = getattr(study, key)
        if value is None and key == "max_concurrent_trials":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            yield Mistake(key, value, f"must be a whole number of at least {low}", hint=f"say {key}={low}")
        elif value > MAX_TRIALS:
            yield Mistake(key, value, f"is more than {MAX_TRIALS:,}", hint=f"say {key}={low}")
    price = study.price_per_node_hour
    is_number = isinstance(price, (int, float)) and not isinstance(price, bool)
    if price is not None and not (is_number and 0 < price < math.inf):
        hint = "say price_per_node_hour=2.5, or leave it out"
        yield Mistake("price_per_node_hour", price, "must be a number greater than 0", hint=hint)
    of_workload = study.workload.mode if isinstance(study.workload, Workload) else ""  # told as the workload's
    if isinstance(study.mode, str) and study.mode not in ("max", "min", of_workload):
        yield Mistake("mode", study.mode, 'must be "max" or "min"', hint='say mode="max" for an accuracy')
    if not isinstance(study.seed, int) or isinstance(study.seed, bool) or not 0 <= study.seed < 2**32:
        yield Mistake("seed", study.seed, "must be a whole number from 0 to 4294967295", hint="say seed=0")
    for key, example in (("searcher", "OptunaSearch()"), ("scheduler", "ASHAScheduler()")):
        value = getattr(study, key)
        if isinstance(value, (str, int, float, type, Mapping, list, tuple)):
            what = "a class, not one of its objects" if isinstance(value, type) else f"a {type(value).__name__}"
            yield Mistake(key, value, f"is {what}", hint=f"give an object of ray.tune: {key}={example}")


def _options_of(study: Study) -> tuple[Mapping[str, Option], bool]:
    """What is known of hyperparameters, and whether anything else is a mistake."""
    workload = study.workload
    if not isinstance(workload, Workload):
        return OPTIONS, False
    if not isinstance(workload.options, Mapping) or not isinstance(workload.defaults, Mapping):
        return OPTIONS, False
    known = known_options(workload)
    for key, default in workload.options.items():
        if not is_default(default):  # its type isn't known: any value will do
            known[key] = Option(None, object, "", optional=True)
    return known, not workload.is_train_loop


def _config_mistakes(study: Study, known: Mapping[str, Option], check_unknown: bool) -> Iterator[tuple[Mistake, str]]:
    space, check_key = _mapping(study, "space"), _key_check(study, known, check_unknown)
    for key, value in _mapping(study, "config").items():
        where = f"config[{key!r}]"
        if key in space:
            wrong = "is also swept in `space`"
            yield Mistake(where, value, wrong, hint="say it in one of the two"), key
        if isinstance(value, DOMAINS):
            yield Mistake(where, value, "is no single value", hint=f"put it into space={{{key!r}: …}}"), key
        elif (m := check_key(where, key, value)) or (m := _value_mistake(where, key, value, known)):
            yield m, key
    both = {**_mapping(study, "config"), **space}
    if "batch_size" in both and "per_worker_batch_size" in both and check_unknown:
        hint = (
            "batch_size fixes the global batch (strong scaling), per_worker_batch_size a worker's (weak): leave one out"
        )
        wrong = "is given beside batch_size"
        yield Mistake("per_worker_batch_size", both["per_worker_batch_size"], wrong, hint=hint), "batch_size"


def _space_mistakes(study: Study, known: Mapping[str, Option], check_unknown: bool) -> Iterator[tuple[Mistake, str]]:
    check_key = _key_check(study, known, check_unknown)
    for key, domain in _mapping(study, "space").items():
        where = f"space[{key!r}]"
        if m := check_key(where, key, domain):
            yield m, key
        if not isinstance(domain, DOMAINS):
            values = domain if isinstance(domain, (list, tuple)) else (domain,)
            hint = f"write grid({_listed(values)})"
            yield Mistake(where, domain, "is not a grid, choice or range", hint=hint), key
        elif wrong := problem(domain):
            hint = "a grid needs values that differ, a range two numbers with low < high"
            if isinstance(domain, (Grid, Choice)) and len(domain.values) > MAX_TRIALS:
                hint = "narrow it, or search in a range with num_trials: uniform, loguniform or randint(low, high)"
            yield Mistake(where, domain, wrong, hint=hint), key
        elif study.searcher is not None and isinstance(domain, Grid):
            hint = f"write choice({_listed(domain.values)})"
            yield Mistake(where, domain, "is a grid, but a searcher draws every value", hint=hint), key
        else:
            for value in examples(domain):
                if m := _value_mistake(where, key, value, known):
                    yield m, key


def _listed(values: Any, most: int = 8) -> str:
    first = ", ".join(shortened(v, 40) for v in values[:most])
    return first + (", …" if len(values) > most else "")


def _key_check(
    study: Study, known: Mapping[str, Option], check_unknown: bool
) -> Callable[[str, Any, object], Mistake | None]:
    def check(where: str, key: Any, value: object) -> Mistake | None:
        if not isinstance(key, str):
            hint = f"put it in quotes: {str(key)!r}"
            return Mistake(where, value, f"its name must be text, not {type(key).__name__}", hint=hint)
        if key in known or not check_unknown:
            return None
        wrong = f"`{key}`: unknown to workload {study.workload.name}"
        return Mistake(where, value, wrong, hint=suggest(key, list(known)))

    return check


def _value_mistake(where: str, key: Any, value: Any, known: Mapping[str, Option]) -> Mistake | None:
    if key in known:
        return check_value(where, key, value, known[key])
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        hint = "give a number, text, True, False, None, or tuples or dicts of these"
        return Mistake(where, value, f"a {type(value).__name__} can't be kept with the results", hint=hint)
    return None


def _baseline_mistakes(
    baseline: Mapping[str, Any], space: Mapping[str, Any], wrong_keys: set[str]
) -> Iterator[Mistake]:
    for key, value in baseline.items():
        where = f"baseline[{key!r}]"
        if key not in space:
            if get_close_matches(str(key), [k for k in wrong_keys if k in space and isinstance(k, str)], n=1):
                continue  # what it is meant for is misspelt in the space
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
            hint = f"take one of {_listed(domain.values)}, or add it to the space"
            yield Mistake(where, value, "matches no point", hint=hint)


def _is_same(one: Any, other: Any) -> bool:
    # True == 1 in Python; and what an array is equal to, is no bool.
    return isinstance(one, bool) == isinstance(other, bool) and bool(one is other or (one == other) is True)


def _size_mistakes(study: Study) -> list[Mistake]:
    """More trials than anyone can run. Nothing is told beside: to look at all points would take as long."""
    num_points = 1
    for domain in study.space.values():
        num_points *= len(domain.values) if isinstance(domain, Grid) else 1
    if num_points > MAX_TRIALS:
        hint = "narrow the grids, or search with choice/uniform and num_trials"
        return [Mistake("space", f"{num_points:,} points", f"is more than {MAX_TRIALS:,}", hint=hint)]
    key = "num_trials" if study.is_search else "num_repeats"
    num_trials = num_points * getattr(study, key)
    if num_trials > MAX_TRIALS:
        wrong = f"makes {num_trials:,} trials of {num_points:,} points, more than {MAX_TRIALS:,}"
        return [Mistake(key, getattr(study, key), wrong, hint=f"narrow the grids, or lower {key}")]
    return []


def _point_mistakes(study: Study) -> list[Mistake]:
    """Of values that are each fine alone."""
    chosen = {**study.config, **study.space}
    if "cpus_per_worker" in chosen and "cpu_affinity" in chosen:
        taken = [v for v in _values(chosen["cpu_affinity"]) if affinity_width(v, 1) is not None]
        if taken:
            wrong = f"is given beside cpu_affinity={taken[0]!r}, which says how many cores as well"
            hint = 'leave cpus_per_worker out, or say cpu_affinity="spread" or "compact"'
            return [Mistake("cpus_per_worker", chosen["cpus_per_worker"], wrong, hint=hint)]
    found: dict[str, Mistake] = {}
    drawn = {k: examples(d)[0] for k, d in study.space.items() if not isinstance(d, Grid)}
    for point in study.points():
        config = resolve(study.workload, {**study.config, **drawn, **point})
        for m in check_together(point_label(point), config, study.workload, study.space):
            found.setdefault(str(m), m)
        if len(found) > MAX_TOLD:
            first = list(found.values())[:MAX_TOLD]
            hint = "mend these first: others may follow from the same value"
            return [*first, Mistake("space", f"{len(study.points()):,} points", "more of them can't be", hint=hint)]
    return list(found.values())


def _values(chosen: object) -> tuple[Value, ...]:
    return examples(chosen) if isinstance(chosen, DOMAINS) else (chosen,)  # type: ignore[return-value]
