"""``--set key=value`` and the other flags that change a study, on top of what its file says."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from raypar.errors import Mistake, StudyError
from raypar.study.options import OPTIONS
from raypar.study.price import prices_of
from raypar.study.space import DOMAINS, MAKERS, Domain, Grid, Value, examples, problem
from raypar.study.study import WHOLE_NUMBERS, Study, options_of, whole_number_mistake
from raypar.study.validation import unknown_option, validate_value


@dataclass(frozen=True)
class FieldFlag:
    """Flag of the command line that changes a field of a study.

    Attributes:
        field: the study's field.
        word: ``--repeats``.
        value: the given value; None: not given.
        needs_until: it only applies to a study that runs until it is settled.
    """

    field: str
    word: str
    value: object = None
    needs_until: bool = False


def with_flags(study: Study, settings: Sequence[str] = (), flags: Sequence[FieldFlag] = ()) -> Study:
    """Return the study with the flags applied.

    Args:
        settings: ``key=value``. A fixed value removes its key from the space; several values sweep it.
        flags: all flags that change a field of a study.

    Raises:
        StudyError: with every mistake of every flag.
    """
    given, chosen, mistakes = _checked(study, settings, flags)
    changes: dict[str, Any] = {flag.field: flag.value for flag in given} | _merged(study, chosen)
    try:
        made = replace(study, **changes)
    except StudyError as error:
        words = {flag.field: flag.word for flag in given}
        mistakes += (replace(mistake, field=words.get(mistake.field, mistake.field)) for mistake in error.mistakes)
    if mistakes:
        raise StudyError(mistakes)
    return made


def flag_mistakes(study: Study | None, settings: Sequence[str], flags: Sequence[FieldFlag]) -> list[Mistake]:
    """Return the mistakes of flags that can be found without a valid study.

    Args:
        study: the faulty study; None: nothing is known of it.
        settings, flags: as for `with_flags`.
    """
    return _checked(study, settings, flags)[-1]


def _checked(
    study: Study | None, settings: Sequence[str], flags: Sequence[FieldFlag]
) -> tuple[list[FieldFlag], dict[str, Value | Domain], list[Mistake]]:
    """Return the valid flags that were given, the values of hyperparameters, and all mistakes."""
    mistakes: list[Mistake] = []
    given = [flag for flag in flags if flag.value is not None]
    runs_until_settled = study is None or bool(study.until) or any(flag.field == "until" for flag in given)
    for flag in [*given]:
        wrong = whole_number_mistake(flag.field, flag.word, flag.value) if flag.field in WHOLE_NUMBERS else None
        if flag.needs_until and not runs_until_settled:
            hint = "add --until settled, or leave it out"
            wrong = Mistake(flag.word, flag.value, "is for a study that runs until it is settled", hint=hint)
        if wrong:
            given.remove(flag)
            mistakes.append(wrong)
    chosen: dict[str, Value | Domain] = {}
    for setting in settings:
        try:
            key, value = _parse(study, setting, {flag.field: flag.word for flag in flags})
        except StudyError as error:
            mistakes += error.mistakes
            continue
        if key in chosen:
            mistakes.append(Mistake(f"--set {key}", setting, "is given twice", f"to sweep it, write --set {key}=A,B"))
        chosen[key] = value
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
    merged = {"space": space, "config": config, "baseline": baseline}
    if "node_label" in chosen:
        value = chosen["node_label"]
        labels = examples(value) if isinstance(value, DOMAINS) else (value,)
        merged["price_per_node_hour"] = prices_of(study.price_per_node_hour, labels)
    return merged


def split_setting(setting: str) -> tuple[str, str]:
    """Return key and text of a ``--set``. Raises ValueError if one of them is missing."""
    key, equals, text = (part.strip() for part in setting.partition("="))
    if not (key and equals and text):
        missing = "`=`" if not equals else "a key before the `=`" if not key else "a value after the `=`"
        raise ValueError(f"lacks {missing}")
    return key, text


def _parse(study: Study | None, setting: str, words: Mapping[str, str]) -> tuple[str, Value | Domain]:
    """Return key and value of a ``--set``. Raises StudyError with its mistakes.

    Args:
        words: field of the study to the flag that changes it.
    """
    try:
        key, text = split_setting(setting)
    except ValueError as error:
        raise StudyError([Mistake("--set", setting, str(error), hint="write --set key=value: --set lr=0.1")]) from None
    where = f"--set {key}"
    options, is_complete = options_of(study) if study else (OPTIONS, False)
    if key not in options and key in {f.name for f in fields(Study)}:
        hint = f"use {words[key]} {text}" if key in words else "change it in the study's file"
        raise StudyError([Mistake(where, text, f"`{key}` is a field of the study, not a hyperparameter", hint=hint)])
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
