"""Command that prints a study as a job for Kubernetes."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypar.cli import common
from raypar.cli.cluster import check_on_head, say
from raypar.cli.flags import takes, words_of
from raypar.cli.study import load
from raypar.cli.target import Baseline, Grids, Target, study_file
from raypar.errors import NotForTraining, RayparError, one_for_all
from raypar.execution.flags import RunFlags, all_flags
from raypar.masking import masked
from raypar.signals import handle_signals

if TYPE_CHECKING:
    from raypar.run.cluster import Cluster

# The job gives the others itself: it knows its nodes, and its cluster is nobody else's.
ON_CLUSTER = tuple(
    flag.name
    for flag in all_flags()
    if flag.is_submitted and flag.name != "address" and not (flag.with_address or flag.without_address)
)
OTHER_WAY = "give the head MLFLOW_TRACKING_URI from a Secret"


def _pods(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel="Pods")


@takes(*ON_CLUSTER)
def kubernetes(
    target: Target,
    flags: RunFlags,
    grid: Grids = None,
    baseline: Baseline = None,
    image: Annotated[str, _pods("IMAGE", "Image of all pods, with Ray, torch and raypar.")] = "",
    workers: Annotated[int, _pods("N", "Worker pods, each a Ray node.")] = 1,
    gpus_per_worker: Annotated[int, _pods("N", "NVIDIA GPUs of a worker pod.")] = 0,
    cpus_per_worker: Annotated[int, _pods("N", "CPUs of a worker pod, whole ones.")] = 4,
    memory_per_worker: Annotated[str, _pods("SIZE", "Memory of a worker pod; up to half is shared.")] = "16Gi",
    workers_per_node: Annotated[int, _pods("N", "Worker pods on each node of Kubernetes.")] = 1,
    volume: Annotated[str, _pods("CLAIM", "Claim of the volume for results, on the head.")] = "",
    data_volume: Annotated[str, _pods("CLAIM", "Claim of a volume with data sets, on all pods.")] = "",
    name: Annotated[str, _pods("NAME", "Name of the job. (default: from the study's)")] = "",
    namespace: Annotated[str, _pods("NAME", "Namespace of the job. (default: that of kubectl)")] = "",
    ttl: Annotated[int, _pods("SECONDS", "Time from the study's end to that of its pods.")] = 600,
) -> None:
    """Print a study as a KubeRay job for Kubernetes.

    The manifest has the study's file and the files beside it. The job starts its own Ray cluster, runs the study there
    and ends the cluster. Results are in the volume: the same job again runs what is missing.

    Example:  raypar cluster kubernetes FILE --image IMAGE --workers 4 --volume CLAIM | kubectl create -f -
    """
    from raypar.execution.origin import ORIGIN_VARIABLE, CodeOrigin
    from raypar.provenance import versions
    from raypar.run import kubernetes as manifests
    from raypar.run.jobs import SUBMITTED_AS

    job = manifests.RayJob(
        name=name,
        namespace=namespace,
        image=image,
        num_workers=workers,
        gpus_per_worker=gpus_per_worker,
        cpus_per_worker=cpus_per_worker,
        memory_per_worker=memory_per_worker,
        workers_per_node=workers_per_node,
        volume=volume,
        data_volume=data_volume,
        ttl_s=ttl,
    )
    with handle_signals():
        wrong = list(job.mistakes())
        if not volume and not (flags.tracking_uri or "").startswith(("http://", "https://")):
            hint = "name a claim, or an MLflow server: --tracking-uri http://…"
            wrong.append(RayparError("--volume: missing, and results would end with the head's pod", hint=hint))
        try:
            check_on_head(flags, OTHER_WAY)
        except RayparError as error:
            wrong.append(error)
        try:
            study, file = checked(study_file(target, grid, baseline, None), flags, None if wrong else job.cluster)
        except RayparError as error:
            wrong.append(error)
        if wrong:
            raise one_for_all(wrong)
        files = manifests.files_of(file)
        environment = {
            SUBMITTED_AS: masked(shlex.join(common.own_command())) + " | kubectl replace --force -f -",
            ORIGIN_VARIABLE: masked(CodeOrigin.of(file, common.uri_of(flags.tracking_uri)).to_json()),
        }
        job, words = replace(job, name=name or manifests.name_for(study)), words_of(flags)
        text = manifests.manifest(job, study, file.name, files, words, environment, versions()["ray"])
    typer.echo(text, nl=False)


def checked(file: Path, flags: RunFlags, cluster: Cluster | None) -> tuple[str, Path]:
    """Return a study's name, and the absolute path of its file.

    Args:
        cluster: the cluster that every trial must fit on; None: don't check that.

    Raises:
        RayparError: the study is invalid, or has a trial that doesn't fit.
    """
    from raypar.execution.plan import make_plan
    from raypar.study.loader import name_of

    try:
        loaded = load(file, replace(flags, data_dir=None))
        if cluster is not None:
            make_plan(loaded.study, cluster, (), where=loaded.path)
    except NotForTraining as error:
        say(f"{error.message}: the head of the cluster will check the study")
        return name_of(file), file.resolve()
    return loaded.study.name, loaded.path
