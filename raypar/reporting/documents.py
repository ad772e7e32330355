"""JSON that ``--json`` prints for each verb, and its schema.

A view is a dataclass beside its printer. It holds the computed values and makes each sentence once. Terminal, page,
Markdown, MLflow, notebooks and JSON render it. The keys of its JSON are in its ``shown``, those of types from other
folders in `SHOWN`; any other dataclass has its fields as keys. Empty texts and NaN become null.

docs/json.md describes the format. docs/schema.json is its JSON Schema, which ``python -m raypar.reporting.documents``
prints: pydantic makes it from the annotations, and the descriptions are those of the docstrings. Within a version of
the format, keys and the values of enumerations are only added.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, cached_property, reduce
from inspect import cleandoc, getattr_static, getdoc
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from raypar.reporting.text import as_utf8
from raypar.study.quantity import Quantity, View, of_view
from raypar.study.trial import TrialResult


class Document:
    """Output of a verb, which can also be printed as JSON.

    Attributes:
        schema: version of the format.
        kind: the verb.
        shown: keys of its JSON, as in `SHOWN`; empty: the fields.
    """

    schema: ClassVar[int] = 1
    kind: ClassVar[str]
    shown: ClassVar[str] = ""


# Keys of the JSON of a type, by the type's name. "key=path" names the attribute if its name differs from the key. In a
# path, "#" is the number of entries and "+1" counts from 1. A path through a sequence gives a list. "*POINTS" stands
# for the quantities of that view.
SHOWN: Mapping[str, str] = {
    "BaselineComparison": "point=point.point compared=who baseline=base setting outcome speedup=point.speedup "
    "efficiency=point.efficiency",
    "Calibration": "fixed_s per_sample_s variation is_variation_measured layers",
    "Candidate": "point num_workers num_trials=results.# num_finished=samples.# time_s metric efficiency *CHOICE "
    "to_target=to_target.trials exclusion is_close_call is_metric_worse is_on_front fit",
    "CheckResult": "name detail is_ok fix=advice",
    "Finding": "check summary=subject detail advice values",
    "Change": "point settings outcome=comparison.outcome speedup=comparison.estimate has_same_losses start_s "
    "pays_off_after_s failure is_recommended",
    "Fit": "name=law.name formula=law.formula symbols=law.parameters parameters holds residuals cv_errors extrapolated "
    "limit peak_num_workers=peak peak_speedup",
    "LayerWork": "kind is_of_macs forward by_weights by_inputs",
    "MatchedPoint": "point difference=time.outcome ratio=time.estimate metric_change=metric.estimate num_finished "
    "num_diverged outcomes times_s metrics execution_changes",
    "Expected": "num_workers num_nodes efficiency speedup rate time_s at_best measured_rate=measured measured_time_s",
    "PointAnalysis": "point num_workers is_baseline num_trials=results.# num_finished=samples.# outcome time_s speedup "
    "efficiency metric *POINTS step_time_median_s step_time_p95_s",
    "PointWhy": "point num_workers step_s parts train_s eval_s save_s samples_per_step what_ifs",
    "Prediction": "num_workers batch_size step_time_s parts=step throughput_samples_per_s speedup efficiency epoch_s "
    "training_s limit measured_step_time_s=measured extrapolated",
    "Recommendation": "decision chosen runner_up lead rivals=rivals.point settling",
    "Refused": "name=law.name formula=law.formula reason",
    "RevisionPoint": "point change=time.outcome ratio=time.estimate num_pairs num_disturbed_pairs=num_disturbed "
    "num_more_blocks=num_more metric_result=metric.outcome metric_change=metric.estimate has_equal_losses",
    "ScalingPoint": "num_workers measured speedup efficiency serial_fraction why_no_fraction",
    "ScalingWhy": "point=answer.point num_workers=answer.num_workers base_num_workers=base.num_workers "
    "outcome=comparison.outcome speedup=comparison.estimate growth_s ideal_step_s excess_s",
    "Step": "start end gain worker_time_ratio=cost",
    "StudySummary": "name num_executions counts last_used_at_s=last_used_at",
    "TrialResult": "identity=spec.identity point=spec.point repeat=spec.repeat+1 order=spec.order+1 seed=spec.seed "
    "state reason failure_kind=failure.kind log_path=failure.log_path attempts started_at_s=started_at *RECORD final",
    "TrialSpec": "identity point num_workers=placement.num_workers repeat=repeat+1 order=order+1 seed",
    "WhatIf": "left_out outcome=comparison.outcome speedup=comparison.estimate",
    "TrialToTarget": "repeat=repeat+1 status time_s num_samples best num_reports",
}


def to_json(document: Document) -> str:
    """Return a document as JSON in ASCII, which any console shows."""
    text = json.dumps(_plain(document), indent=1, allow_nan=False)
    return text.replace("\x7f", r"\u007f")  # the one control character that `json` leaves as it is


def _plain(value: Any) -> Any:
    """Return a value in JSON's types: NaN and infinity become null, enumerations their values, tuples arrays."""
    if keys := _keys(type(value)):
        return {key: _plain(_read(value, place)) for key, place in keys.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        # An empty hyperparameter is a value, not a missing text.
        return {as_utf8(str(_plain(key))): "" if each == "" else _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return list(map(_plain, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return as_utf8(value) or None if isinstance(value, str) else value


def _keys(cls: type) -> dict[str, str | Quantity]:
    """Return the keys of the JSON of a type, each with its path or its quantity; empty for a plain type."""
    shown = SHOWN.get(cls.__name__, "") or getattr(cls, "shown", "")
    if not shown and is_dataclass(cls):
        shown = " ".join(field.name for field in fields(cls))
    keys: dict[str, str | Quantity] = {"schema": "schema", "kind": "kind"} if issubclass(cls, Document) else {}
    for word in shown.split():
        if word.startswith("*"):
            keys |= {q.key: q for q in of_view(View[word[1:]])}
        else:
            key, _, path = word.partition("=")
            keys[key] = path or key
    return keys


def _read(value: Any, place: str | Quantity) -> Any:
    if isinstance(place, Quantity):
        return value.of(place) if hasattr(value, "of") else place.of(value)
    path, plus, _ = place.partition("+1")
    for name in path.split("."):
        if name == "#":
            value = len(value)
        elif isinstance(value, (tuple, list)):
            value = [getattr(each, name) for each in value]
        else:
            value = None if value is None else getattr(value, name)
    return value + 1 if plus else value


def schema() -> dict[str, Any]:
    """Return the JSON Schema of all documents."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
    from pydantic_core.core_schema import FloatSchema

    from raypar.reporting.ab import AbView
    from raypar.reporting.compare import CompareView
    from raypar.reporting.fit import FitView
    from raypar.reporting.fit_batch import FitBatchView
    from raypar.reporting.improve import ImproveView
    from raypar.reporting.layout import LayoutView
    from raypar.reporting.listings import DoctorView, PlanView, StudiesView, TrialsView, WorkView
    from raypar.reporting.memory import MemoryView
    from raypar.reporting.network import NetworkView
    from raypar.reporting.predict import PredictView
    from raypar.reporting.recommend import RecommendView
    from raypar.reporting.view import StudyView
    from raypar.reporting.why import WhyView

    class Schema(GenerateJsonSchema):
        def float_schema(self, schema: FloatSchema) -> JsonSchemaValue:
            return {"type": ["number", "null"]}  # null: NaN

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    _object.cache_clear()  # an earlier call may have had other quantities
    views: tuple[Any, ...] = (
        *(StudiesView, TrialsView, StudyView, RecommendView, CompareView, AbView, FitView, PredictView, PlanView),
        *(DoctorView, WorkView, FitBatchView, MemoryView, NetworkView, LayoutView, WhyView, ImproveView),
    )
    documents: Any = reduce(or_, [_object(view) for view in views])
    made = TypeAdapter(documents).json_schema(mode="serialization", schema_generator=Schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "raypar --json",
        "description": "What raypar prints with --json; docs/json.md has examples.",
        "oneOf": made["anyOf"],
        "$defs": dict(sorted(made["$defs"].items())),
    }


@cache
def _object(cls: type) -> Any:
    """Return the type of a dataclass's JSON."""
    from pydantic import Field
    from typing_extensions import TypedDict  # pydantic accepts that of `typing` only from Python 3.12 on

    from raypar.analysis.stats import Estimate

    described: dict[str, Any] = {}
    hint: Any
    for key, place in _keys(cls).items():
        if isinstance(place, Quantity):
            hint, about = (float if cls is TrialResult else Estimate) | None, place.about
        elif key in ("schema", "kind") and issubclass(cls, Document):
            hint, about = Literal[getattr(cls, key)], {"schema": "version of the format.", "kind": "the verb."}[key]
        else:
            hint, about = _attribute(cls, place)
        described[key] = Annotated[_json_type(hint), Field(description=_in_json(about) or None)]
    make: Any = TypedDict
    made = make(cls.__name__, described)
    made.__doc__ = _in_json((getdoc(cls) or "").partition("\n\nAttributes:")[0])
    return made


def _json_type(hint: Any) -> Any:
    """Return the annotation of an attribute's JSON."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if hint is str:
        return str | None
    if isinstance(hint, TypeVar):
        return float  # of `StepTime`
    if isinstance(origin, type) and _keys(origin):
        return _object(origin)
    if not args or origin is Literal:
        return hint
    if origin in (Union, UnionType):
        return reduce(or_, (each if each is str else _json_type(each) for each in args))
    if issubclass(origin, Mapping):
        return dict[args[0], args[1] if args[1] is str else _json_type(args[1])]  # type: ignore[valid-type,misc]
    if origin is tuple and args[-1] is not Ellipsis:
        return tuple[tuple(map(_json_type, args))]  # type: ignore[misc]
    return list[_json_type(args[0])]  # type: ignore[misc]


def _attribute(hint: Any, path: str) -> tuple[Any, str]:
    """Return the annotation of the attribute at the end of a path, and its description."""
    name, _, rest = path.removesuffix("+1").partition(".")
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        attributes = [_attribute(each, path) for each in args if each is not NoneType]
        types = [each for each, _ in attributes] + [None] * (NoneType in args)
        return reduce(or_, types), attributes[0][1]
    if name == "#":
        return int, ""
    if issubclass(origin, (tuple, Sequence)):
        each, about = _attribute(args[0], path)
        return list[each], about  # type: ignore[valid-type]
    attribute = getattr_static(origin, name, None)
    if isinstance(attribute, (property, cached_property)):
        function = attribute.fget if isinstance(attribute, property) else attribute.func
        each, about = get_type_hints(function, None, _names())["return"], (getdoc(function) or "").partition("\n")[0]
    else:
        each, about = get_type_hints(origin, None, _names())[name], _described(origin, name)
    return _attribute(each, rest) if rest else (each, about)


def _names() -> dict[str, Any]:
    """Return types that modules import only for annotations."""
    from raypar.track.store import StudySummary
    from raypar.train.flops import Work

    return {each.__name__: each for each in (StudySummary, Work)}


def _described(cls: type, name: str) -> str:
    """Return the description of an attribute in a class's docstring."""
    for each in cls.__mro__:
        if match := re.search(rf"^    {name}: (.*(?:\n {{8}}.*)*)", cleandoc(each.__doc__ or ""), re.MULTILINE):
            return " ".join(match[1].split())
    return ""


def _in_json(text: str) -> str:
    """Return a description with JSON's names for None, True and False, in one line."""
    for python, of_json in {"None": "null", "True": "true", "False": "false"}.items():
        text = re.sub(rf"\b{python}\b", of_json, text)
    return " ".join(text.replace("``", "`").split())


if __name__ == "__main__":
    from raypar.reporting import documents  # views derive from its `Document`, not from that of `__main__`

    print(json.dumps(documents.schema(), indent=1))
