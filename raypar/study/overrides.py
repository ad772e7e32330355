"""``--set key=value`` and the other flags that change a study, on top of what its file says."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from raypar.errors import Mistake, StudyError
from raypar.study.options import OPTIONS
from raypar.study.space import DOMAINS, MAKERS, Domain, Grid, Value, examples, problem
from raypar.study.study import MAX_TRIALS, Study, options_of
from raypar.study.validation import unknown_option, validate_value
from raypar.study.workload import Option

# Flags that change a field of a study.
FLAGS = {field: f"--{field.replace('_', '-')}" for field in ("seed", "until", "margin", "max_repeats", "budget")}
FLAGS["num_repeats"] = "--repeats"
BOUNDS = {"num_repeats": (1, MAX_TRIALS), "seed": (0, 2**32 - 1)}
NO_CHANGES: Mapping[str, Any] = {}


def with_flags(study: Study, settings: Sequence[str] = (), changes: Mapping[str, Any] = NO_CHANGES) -> Study:
    """Return the study with the flags applied.

    Args:
        settings: ``key=value``. A fixed value removes its key from the space; several values sweep it.
        changes: values of the study's fields in `FLAGS`; None: keep the file's value.

    Raises:
        StudyError: with every mistake of every flag.
    """
    changed, chosen, mistakes = _checked(study, settings, changes)
    try:
        made = replace(study, **changed, **_merged(study, chosen))
    except StudyError as error:
        as_flags = {field: FLAGS[field] for field in changed if field not in BOUNDS}
        mistakes += (replace(mistake, field=as_flags.get(mistake.field, mistake.field)) for mistake in error.mistakes)
    if mistakes:
        raise StudyError(mistakes)
    return made


def flag_mistakes(
    study: Study | None, settings: Sequence[str] = (), changes: Mapping[str, Any] = NO_CHANGES
) -> list[Mistake]:
    """Return the mistakes of flags that can be found without a valid study.

    Args:
        study: the faulty study; None: nothing is known of it.
        settings, changes: as for `with_flags`.
    """
    return _checked(study, settings, changes)[-1]


def _checked(
    study: Study | None, settings: Sequence[str], changes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Value | Domain], list[Mistake]]:
    """Return changes of a study's fields, values of hyperparameters, and the mistakes of the flags."""
    mistakes: list[Mistake] = []
    given = {field: value for field, value in changes.items() if value is not None}
    for field, (low, high) in BOUNDS.items():
        if (number := given.get(field)) is not None and not low <= number <= high:
            given[field] = min(max(number, low), high)
            bound = f"must be at least {low}" if number < low else f"must be at most {high}"
            hint = f"give {FLAGS[field]} from {low} to {high}"
            mistakes.append(Mistake(FLAGS[field], number, bound, hint=hint))
    chosen: dict[str, Value | Domain] = {}
    for setting in settings:
        try:
            key, value = _parse(*(options_of(study) if study else (OPTIONS, False)), setting)
        except StudyError as error:
            mistakes += error.mistakes
            continue
        if key in chosen:
            mistakes.append(Mistake(f"--set {key}", setting, "is given twice", f"to sweep it, write --set {key}=A,B"))
        chosen[key] = value
    for field in ("margin", "max_repeats"):
        if field in given and not (study is None or study.until or "until" in given):
            problem, hint = "is for a study that runs until it is settled", "add --until settled, or leave it out"
            mistakes.append(Mistake(FLAGS[field], given[field], problem, hint=hint))
    return given, chosen, mistakes


def _merged(study: Study, chosen: Mapping[str, Value | Domain]) -> dict[str, Any]:
    space, config, baseline = dict(study.space), dict(study.config), dict(study.baseline)
    for key, value in chosen.items():
        if isinstance(value, DOMAINS):
            config.pop(key, None)
            space[key] = value
        else:
            space.pop(key, None)
            baseline.pop(key, None)
            config[key] = value
    return {"space": space, "config": config, "baseline": baseline}


def split_setting(setting: str) -> tuple[str, str]:
    """Return key and text of a ``--set``. Raises ValueError if one of them is missing."""
    key, equals, text = (part.strip() for part in setting.partition("="))
    if not (key and equals and text):
        missing = "`=`" if not equals else "a key before the `=`" if not key else "a value after the `=`"
        raise ValueError(f"lacks {missing}")
    return key, text


def _parse(options: Mapping[str, Option], is_complete: bool, setting: str) -> tuple[str, Value | Domain]:
    """Return key and value of a ``--set``. Raises StudyError with what is wrong with them.

    Args:
        options: options of the study.
        is_complete: there are no other options.
    """
    try:
        key, text = split_setting(setting)
    except ValueError as error:
        raise StudyError([Mistake("--set", setting, str(error), hint="write --set key=value: --set lr=0.1")]) from None
    where = f"--set {key}"
    if key not in options and key in {f.name for f in fields(Study)}:
        hint = f"use {FLAGS[key]} {text}" if key in FLAGS else "change it in the study's file"
        raise StudyError([Mistake(where, text, f"`{key}` belongs to the study, it is no hyperparameter", hint=hint)])
    if key not in options and is_complete:
        raise StudyError([unknown_option(where, text, key, options)])
    try:
        value = parse_value(text)
    except ValueError as error:
        hint = f"write --set {key}=A, {key}=A,B or {key}=grid(A,B)"
        raise StudyError([Mistake(where, text, str(error), hint=hint)]) from None
    if isinstance(value, DOMAINS) and (wrong := problem(value)):
        raise StudyError([Mistake(where, text, wrong, hint=f"give each value once: --set {key}=A,B")])
    values = examples(value) if isinstance(value, DOMAINS) else (value,)
    checked = [validate_value(where, key, v, options[key]) for v in values] if key in options else []
    if mistakes := [mistake for mistake in checked if mistake]:
        raise StudyError(mistakes)
    return key, value


def parse_value(text: str) -> Value | Domain:
    """Return ``0.1``, ``adam``, ``true`` as values, ``1,2`` and ``grid(1,2)`` as a grid, ``uniform(0,1)`` as a range.

    Raises ValueError if the text looks like a domain but is not valid.
    """
    try:
        node: ast.expr | None = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: nested too deeply for Python
        node = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
        name = node.func.id
        if node.keywords:
            raise ValueError(f"{name}(...) takes plain values, no names")
        values = tuple(_value_of(arg, text) for arg in node.args)
        try:
            domain: Domain = MAKERS[name](*values)
            problem(domain)
        except TypeError:
            raise ValueError(f"{name}(...) takes two numbers, low and high") from None
        return domain
    if isinstance(node, ast.Tuple) and not text.startswith("("):
        return Grid(tuple(_value_of(item, text) for item in node.elts))
    if node is None and "," in text and "(" not in text:
        return Grid(tuple(_value_of(None, part.strip()) for part in text.split(",")))
    return _value_of(node, text)


def _value_of(node: ast.expr | None, text: str) -> Value:
    """Return a Python literal's value; anything else is text, so that ``optimizer=adam`` needs no quotes."""
    if node is None:
        return text
    word = ast.get_source_segment(text, node) or text
    if word in ("true", "false"):
        return word == "true"
    try:
        value: Value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return word
    return value
