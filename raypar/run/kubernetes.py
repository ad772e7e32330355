"""A study as a job of KubeRay: the manifest of a `RayJob`, which starts a Ray cluster for the study and ends it.

The fields are those of KubeRay 1.7, and what its operator refuses beyond the schema is in its `validation.go`:
https://github.com/ray-project/kuberay
"""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar import __version__
from raypar.errors import RayparError
from raypar.run.cluster import Cluster
from raypar.run.jobs import excluded_files, words_on_head
from raypar.units import counted, size

MAX_FILES_BYTES = 1000**2  # a ConfigMap holds 1 MiB, with the script that starts the study
MAX_NAME = 47  # of a RayJob, to whose name KubeRay adds parts
MAX_LABEL, MAX_SUBDOMAIN = 63, 253  # characters of a namespace, of a claim's name
DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
# https://github.com/distribution/reference
IMAGE = re.compile(
    r"([A-Za-z0-9.-]+(:\d+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(:\w[\w.-]{0,127})?"
    r"(@[a-z0-9]+:[0-9a-f]{32,})?"
)
MEMORY = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)(|[kMGT]|[KMGT]i)")
SCALES = {"": 1.0, **{letter: 10.0 ** (3 * i) for i, letter in enumerate("kMGT", 1)}}
SCALES |= {f"{letter}i": 1024.0**i for i, letter in enumerate("KMGT", 1)}
MIN_MEMORY_BYTES = 1024**3  # of Ray's processes, torch and a small model
HEAD = {"cpu": "2", "memory": "8Gi"}
NUM_RETRIES = 2  # each in a new cluster, after a lost head
USER = 1000  # of the Dockerfile: the group that may write to the claim
NODE = "kubernetes.io/hostname"
JOB, GROUP = "raypar/job", "raypar/group"  # labels of pods

# Folders in the pods.
MOUNTED, CODE, RESULTS, DATA = "/raypar", "/study", "/results", "/data"
START = "start.sh"
# A sidecar submits the job as soon as the head is up. `raypar study` waits minutes for nodes, an image may take longer.
SCRIPT = """\
# KubeRay runs this on the head.
set -eu
export {variables}
python - <<'END'
import time
import ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")
while (num := sum(node["Alive"] for node in ray.nodes())) < {num_nodes}:
    print(f"waiting for pods: {{num}} of {num_nodes}", flush=True)
    time.sleep(10)
END
mkdir -p {folder} && cd {folder}
exec raypar study {words}
"""
COMMENT = """\
# Study {study} as a job of KubeRay, on {pods}. Printed by raypar {raypar}.
#
#   kubectl create -f FILE               start it (not apply, which limits the size of a ConfigMap)
#   kubectl logs -f -l raypar/job={name},raypar/group=head -c ray-job-submitter{namespace}      follow it
#   kubectl replace --force -f FILE      start it again: finished trials are kept, the others run
#   kubectl delete -f FILE               stop it: its pods are killed, finished trials are kept
#
# The image must have Ray {ray} with the extra default, torch and raypar {raypar}: see Dockerfile.
# Results {results}.
"""


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """Study on Kubernetes: names, image, and the shape of its worker pods, each a Ray node.

    Attributes:
        name: of the `RayJob` and its ConfigMap; empty: not chosen yet.
        namespace: empty: that of `kubectl`.
        image: for all pods.
        memory_per_worker: a quantity of Kubernetes, ``64Gi``.
        workers_per_node: worker pods on each node of Kubernetes.
        volume: claim of the volume for results; empty: they end with the head's pod.
        data_volume: claim of a volume with data sets; empty: none.
        ttl_s: seconds until the pods are deleted after the end.
    """

    name: str
    namespace: str
    image: str
    num_workers: int
    gpus_per_worker: int
    cpus_per_worker: int
    memory_per_worker: str
    workers_per_node: int
    volume: str
    data_volume: str
    ttl_s: int

    def mistakes(self) -> Iterator[RayparError]:
        """Yield what Kubernetes or KubeRay would refuse, by option of the command line."""
        if not self.image:
            hint = "give an image with Ray, torch and raypar; docs/clusters.md describes it"
            yield RayparError("--image: missing", hint=hint)
        elif not IMAGE.fullmatch(self.image):
            yield RayparError(f"--image {self.image}: must be an image's name", hint="write registry/path:tag")
        for word, name, pattern, most in (
            ("--name", self.name, DNS_LABEL, MAX_NAME),
            ("--namespace", self.namespace, DNS_LABEL, MAX_LABEL),
            ("--volume", self.volume, DNS_SUBDOMAIN, MAX_SUBDOMAIN),
            ("--data-volume", self.data_volume, DNS_SUBDOMAIN, MAX_SUBDOMAIN),
        ):
            if name and not (pattern.fullmatch(name) and len(name) <= most):
                hint = f"use lower-case letters, digits and hyphens, a letter first, at most {most} characters"
                yield RayparError(f"{word} {name}: must be a name of Kubernetes", hint=hint)
        for word, number, least in (
            ("--workers", self.num_workers, 1),
            ("--gpus-per-worker", self.gpus_per_worker, 0),
            ("--cpus-per-worker", self.cpus_per_worker, 1),
            ("--workers-per-node", self.workers_per_node, 1),
            ("--ttl", self.ttl_s, 0),
        ):
            if number < least:
                yield RayparError(f"{word} {number}: must be at least {least}", hint=f"write {word} {least} or more")
        if self.num_workers >= 1 <= self.workers_per_node and self.num_workers % self.workers_per_node:
            problem = f"--workers {self.num_workers} can't be divided among nodes of {self.workers_per_node}"
            rounded = math.ceil(self.num_workers / self.workers_per_node) * self.workers_per_node
            yield RayparError(problem, hint=f"write --workers {rounded}, or another --workers-per-node")
        if (memory_bytes := bytes_of(self.memory_per_worker)) is None:
            problem = f"--memory-per-worker {self.memory_per_worker}: must be a quantity of Kubernetes"
            yield RayparError(problem, hint="write 64Gi, 512Mi or 64G")
        elif memory_bytes < MIN_MEMORY_BYTES:
            problem = f"--memory-per-worker {self.memory_per_worker}: must be at least 1Gi"
            yield RayparError(problem, hint="Ray and torch need that much themselves")

    @property
    def cluster(self) -> Cluster:
        """The cluster that the job will have; its head trains nothing."""
        worker: dict[str, float] = {"CPU": self.cpus_per_worker}
        if self.gpus_per_worker:
            worker["GPU"] = self.gpus_per_worker
        remedy = "raise --workers, --cpus-per-worker or --gpus-per-worker"
        return Cluster(({"CPU": 0}, *[worker] * self.num_workers), is_own=False, remedy=remedy)


def bytes_of(memory: str) -> float | None:
    """Return the bytes of a quantity of Kubernetes; None if it is none."""
    quantity = MEMORY.fullmatch(memory)
    return float(quantity[1]) * SCALES[quantity[2]] if quantity else None


def name_for(study: str) -> str:
    """Return a `RayJob`'s name for a study."""
    plain = re.sub(r"[^a-z0-9]+", "-", study.lower()).strip("-") or "study"
    return (plain if plain[0].isalpha() else f"study-{plain}")[:MAX_NAME].rstrip("-")


def files_of(file: Path) -> dict[str, bytes]:
    """Return what a study's folder sends to a cluster, by path in it, as a submission does.

    Args:
        file: the study's file, absolute.

    Raises:
        RayparError: as `raypar.run.jobs.excluded_files`, or it is too large for a ConfigMap.
    """
    from ray._private.runtime_env.packaging import create_package

    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "study.zip")
        logger = logging.Logger("package", logging.ERROR)  # its own reports every package
        excluded = excluded_files(file)
        create_package(str(file.parent), package, include_gitignore=True, excludes=excluded, logger=logger)
        with zipfile.ZipFile(package) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
            sizes = {info.filename: info.file_size for info in infos if not _is_output(file.parent / info.filename)}
            if (total := sum(sizes.values())) <= MAX_FILES_BYTES:
                return {name: archive.read(name) for name in sorted(sizes)}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    listed = ", ".join(f"{name} ({size(sizes[name])})" for name in largest)
    raise RayparError(
        f"{file}: the files beside it have {size(total)}, and a manifest holds {size(MAX_FILES_BYTES)}: {listed}",
        hint="name what the study doesn't import in a .rayignore; data belong into a volume (--data-volume)",
    )


def _is_output(path: Path) -> bool:
    """Return whether this command's output is redirected to a file."""
    with contextlib.suppress(OSError, ValueError):  # not a real file
        return os.path.samestat(os.fstat(sys.stdout.fileno()), path.stat())
    return False


def manifest(
    job: RayJob,
    study: str,
    file: str,
    files: Mapping[str, bytes],
    flags: Sequence[str],
    environment: Mapping[str, str],
    ray_version: str,
) -> str:
    """Return a job's manifest as YAML: a ConfigMap with the study's files, and the `RayJob`.

    Args:
        job: with a name, and without mistakes.
        file: the study's file, as a path among its files.
        files: contents by path in the study's folder.
        flags: words of the command line that apply on the head.
        environment: variables of the study.
        ray_version: that of this machine, which the image must have.
    """
    num_nodes = 1 + job.num_workers
    data = ("--data-dir", DATA) if job.data_volume and "--data-dir" not in flags else ()
    on_cluster = ("--address", "auto", "--exclusive", "--min-nodes", str(num_nodes))
    script = SCRIPT.format(
        variables=" ".join(f"{key}={words_on_head(value)}" for key, value in environment.items()),
        num_nodes=num_nodes,
        folder=words_on_head(f"{RESULTS}/{study}"),
        words=words_on_head(f"{CODE}/{file}", *on_cluster, *data, *flags),
    )
    keys = {path: f"{i}-{re.sub(r'[^A-Za-z0-9._-]', '-', path)}"[:MAX_SUBDOMAIN] for i, path in enumerate(files, 1)}
    stored: dict[str, dict[str, str]] = {"data": {}, "binaryData": {}}
    for key, content in {START: script.encode(), **{keys[path]: content for path, content in files.items()}}.items():
        text = _plain(content)
        kind, value = ("binaryData", base64.b64encode(content).decode()) if text is None else ("data", text)
        stored[kind][key] = value
    items = [{"key": START, "path": START}, *({"key": key, "path": f"study/{path}"} for path, key in keys.items())]
    named = {"name": job.name} | ({"namespace": job.namespace} if job.namespace else {})
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named}
    config_map |= {kind: values for kind, values in stored.items() if values}
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": named,
        "spec": {
            # KubeRay pastes it into a shell line of the submitter, so it has nothing that a shell would read.
            "entrypoint": f"bash {MOUNTED}/{START}",
            "submissionMode": "SidecarMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": job.ttl_s,
            "backoffLimit": NUM_RETRIES,
            "rayClusterSpec": {
                "rayVersion": ray_version,
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _head(job, items)},
                "workerGroupSpecs": [_group(job, items, number) for number in range(1, 1 + job.workers_per_node)],
            },
        },
    }
    comment = COMMENT.format(
        study=study,
        name=job.name,
        namespace=f" -n {job.namespace}" if job.namespace else "",
        pods=counted(job.num_workers, "worker pod"),
        raypar=__version__,
        ray=ray_version,
        results=f"are in the claim {job.volume}, in {study}/" if job.volume else "are in the MLflow server",
    )
    return comment + _yaml(config_map, ray_job)


def _head(job: RayJob, items: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the head's pod, which runs the study and trains nothing."""
    results = {"persistentVolumeClaim": {"claimName": job.volume}} if job.volume else {"emptyDir": {}}
    pod = _pod(job, "head", HEAD, items, {"results": (RESULTS, results)})
    pod["securityContext"] = {"fsGroup": USER}
    return {"metadata": {"labels": {JOB: job.name, GROUP: "head"}}, "spec": pod}


def _group(job: RayJob, items: Sequence[Mapping[str, str]], number: int) -> dict[str, Any]:
    """Return the group of the worker pods of which each node of Kubernetes has one. `number`: from 1.

    The pods of the other groups are on the nodes of the first one: so each node has exactly one of every group.
    """
    group, count = f"workers-{number}", job.num_workers // job.workers_per_node
    gpus = {"nvidia.com/gpu": str(job.gpus_per_worker)} if job.gpus_per_worker else {}
    # The same requests and limits, and whole CPUs: the kubelet can give each pod cores of its own.
    each = {"cpu": str(job.cpus_per_worker), "memory": job.memory_per_worker, **gpus}
    shared_bytes = (bytes_of(job.memory_per_worker) or 0) / 2
    # The default of 64 MB is too small for Ray's object store, loader processes and NCCL. It counts as memory.
    shared = {"emptyDir": {"medium": "Memory", "sizeLimit": f"{int(shared_bytes / 1024**2)}Mi"}}
    pod = _pod(job, "worker", each, items, {"shm": ("/dev/shm", shared)})

    def on_nodes_with(of_group: str) -> dict[str, Any]:
        term = {"labelSelector": {"matchLabels": {JOB: job.name, GROUP: of_group}}, "topologyKey": NODE}
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}

    pod["affinity"] = {"podAntiAffinity": on_nodes_with(group)}
    if number > 1:
        pod["affinity"]["podAffinity"] = on_nodes_with("workers-1")
    if gpus:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {
        "groupName": group,
        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), count),
        "rayStartParams": {},
        "template": {"metadata": {"labels": {JOB: job.name, GROUP: group}}, "spec": pod},
    }


def _pod(
    job: RayJob,
    container: str,
    resources: Mapping[str, str],
    items: Sequence[Mapping[str, str]],
    more: Mapping[str, tuple[str, dict[str, Any]]],
) -> dict[str, Any]:
    """Return a pod with the study's files in `CODE`.

    A ConfigMap's files are links, to another folder in every pod, and the same paths must hold everywhere: a container
    copies them before Ray starts.

    Args:
        more: further volumes by name, each with its path.
    """
    files = {"configMap": {"name": job.name, "items": [dict(item) for item in items]}}
    volumes: dict[str, tuple[str, dict[str, Any]]] = {"files": (MOUNTED, files), "study": (CODE, {"emptyDir": {}})}
    volumes |= more
    if job.data_volume:
        claim = {"claimName": job.data_volume, "readOnly": True}
        volumes["data"] = (DATA, {"persistentVolumeClaim": claim})
    mounts = [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()]
    both = {"requests": dict(resources), "limits": dict(resources)}
    copy = {
        "name": "study",
        "image": job.image,
        "command": ["sh", "-c", f"cp -RL {MOUNTED}/study/. {CODE}/"],
        "resources": {kind: {k: v for k, v in each.items() if "/" not in k} for kind, each in both.items()},
        "volumeMounts": mounts[:2],
    }
    ray = {
        "name": container,
        "image": job.image,
        "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
        "resources": both,
        "volumeMounts": mounts,
    }
    return {
        "initContainers": [copy],
        "containers": [ray],
        "volumes": [{"name": name, **volume} for name, (_, volume) in volumes.items()],
    }


def _plain(content: bytes) -> str | None:
    """Return a file's text if YAML shows it as it is; None for other files."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char in "\n\t" or char.isprintable() for char in text) else None


def _yaml(*documents: Mapping[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Dumper of texts that no reader of YAML takes for numbers or dates, and without references."""

        def ignore_aliases(self, _: object) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None if re.match("[A-Za-z/]", text) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    return "".join(
        "---\n" + yaml.dump(each, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
        for each in documents
    )
