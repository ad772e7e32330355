"""What KubeRay accepts as a `RayJob`: the schema of its API, and what its operator refuses beyond it.

``rayjob.v1.json.gz`` is the schema of version ``v1`` in KubeRay's custom resource definition of `RayJob`, unchanged but
for its format: https://github.com/ray-project/kuberay, tag v1.7.0 (59d663aeec13760646da3db9c1cf8cfe883e30b7), file
``ray-operator/config/crd/bases/ray.io_rayjobs.yaml``. Copyright: the KubeRay authors, Apache License 2.0, as raypar's.

    python -m tests.kuberay ray.io_rayjobs.yaml         write it from another version's definition
"""

import gzip
import json
import re
from functools import cache
from pathlib import Path

from jsonschema import Draft202012Validator

SCHEMA = Path(__file__).parent / "rayjob.v1.json.gz"
DNS_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
MAX_NAME = 47
MIN_RAY_WITH_TOKEN = (2, 52)
RAY_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")


@cache
def validator():
    schema = strict(json.loads(gzip.decompress(SCHEMA.read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}  # of which the definition says nothing
    return Draft202012Validator(schema)


def strict(node):
    """Return a schema of Kubernetes as plain JSON Schema that also refuses unknown fields, as `kubectl` does."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    plain = {key: strict(each) for key, each in node.items() if not key.startswith("x-kubernetes-")}
    properties = node.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    elif isinstance(node.get("type"), str):  # else it is the schema of a field named properties
        is_open = "additionalProperties" in node or node.get("x-kubernetes-preserve-unknown-fields")
        if not is_open:
            plain["additionalProperties"] = False
    if isinstance(node.get("required"), list):  # the API server fills in defaults first
        plain["required"] = [name for name in node["required"] if "default" not in properties.get(name, {})]
    if node.get("x-kubernetes-int-or-string"):
        plain.pop("type", None)
    if isinstance(node.get("format"), str):  # int32, which JSON Schema doesn't know
        del plain["format"]
    return plain


def problems(job):
    """Yield what the API server, or KubeRay's operator, would refuse in a RayJob."""
    found = [f"{error.json_path}: {error.message[:200]}" for error in validator().iter_errors(job)]
    yield from found or refused_by_operator(job)


def refused_by_operator(job):
    """Yield what ``ray-operator/controllers/ray/utils/validation.go`` refuses, as far as raypar could meet it."""
    name, spec = job["metadata"].get("name", ""), job["spec"]
    cluster = spec.get("rayClusterSpec", {})
    if not cluster:
        yield "no cluster"
        return
    head = cluster["headGroupSpec"]
    if not re.fullmatch(DNS_LABEL, name) or len(name) > MAX_NAME:
        yield f"metadata.name {name!r} is not a DNS label of at most {MAX_NAME} characters"
    if spec.get("ttlSecondsAfterFinished", 0) < 0 or spec.get("backoffLimit", 0) < 0:
        yield "a negative number"
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        yield "ttlSecondsAfterFinished without shutdownAfterJobFinishes"
    if spec.get("submissionMode") == "SidecarMode":
        if "submitterPodTemplate" in spec or "submitterConfig" in spec or "clusterSelector" in spec:
            yield "SidecarMode with a submitter of its own, or a selector"
        if head["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield "SidecarMode with a head that restarts"
    if cluster.get("authOptions", {}).get("mode") == "token":
        version = re.match(r"(\d+)\.(\d+)", cluster.get("rayVersion", ""))
        if not version or tuple(map(int, version.groups())) < MIN_RAY_WITH_TOKEN:
            yield "token authentication without a rayVersion that has it"
    for group in (head, *cluster.get("workerGroupSpecs", ())):
        where, params = group.get("groupName", "head"), group.get("rayStartParams", {})
        if not group["template"]["spec"].get("containers"):
            yield f"{where}: no container"
        if group.get("resources") and any(key in params for key in RAY_RESOURCES):
            yield f"{where}: resources in two places"
        if "labels" in params:
            yield f"{where}: labels in rayStartParams"
        if group.get("minReplicas", 0) > group.get("maxReplicas", 2**31 - 1) or group.get("minReplicas", 0) < 0:
            yield f"{where}: minReplicas"
