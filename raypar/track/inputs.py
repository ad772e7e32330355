"""What a trial was trained and judged on, as MLflow's data set inputs. Pure: no store, no mlflow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypar.track.names import clip

NO_DIGEST = "none"
# MLflow's own limits.
_MAX_NAME_LENGTH, _MAX_DIGEST_LENGTH = 500, 36


@dataclass(frozen=True)
class Input:
    """One split of a data set.

    Attributes:
        context: "train", "val" or "test".
        source, schema, profile: JSON, as MLflow's page reads them.
    """

    context: str
    name: str
    digest: str
    source: str
    schema: str
    profile: str


def inputs_of(data: Mapping[str, Any], contexts: Sequence[str]) -> tuple[Input, ...]:
    """The splits of a `TrialResult.data`, of these contexts; those that it doesn't tell of are left out."""
    splits = data.get("splits", {})
    return tuple(_input(data, context, splits[context]) for context in contexts if context in splits)


def _input(data: Mapping[str, Any], context: str, split: Mapping[str, Any]) -> Input:
    digest = split.get("digest")
    # A data set is known by name and digest: without one, splits must not be taken for each other.
    name = data["name"] if digest else f"{data['name']}, {context}"
    profile = {"num_rows": split["num_samples"]}
    return Input(
        context,
        clip(name, _MAX_NAME_LENGTH),
        clip(digest or NO_DIGEST, _MAX_DIGEST_LENGTH),
        json.dumps({"tags": {"mlflow.source.type": "LOCAL", "mlflow.source.name": data["source"]}}),
        _schema(split),
        json.dumps(profile),
    )


def _schema(split: Mapping[str, Any]) -> str:
    def tensor(name: str) -> str:
        known = split[name]
        spec = {"dtype": known["dtype"], "shape": [-1, *known["shape"]]}
        return json.dumps([{"name": name, "type": "tensor", "tensor-spec": spec}])

    if not {"inputs", "targets"} <= split.keys():
        return ""
    return json.dumps({"mlflow_tensorspec": {"features": tensor("inputs"), "targets": tensor("targets")}})
