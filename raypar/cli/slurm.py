"""Command that runs a study as a Slurm job."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from raypar.cli import common
from raypar.cli.cluster import say
from raypar.cli.flags import takes, words_of
from raypar.cli.study import load
from raypar.cli.target import Baseline, Grids, Save, Target, study_file
from raypar.errors import RayparError, one_for_all
from raypar.execution.flags import RunFlags, all_flags
from raypar.masking import MASK, masked
from raypar.signals import handle_signals
from raypar.study.part import StudyPart

JOB = "Job"  # panel of --help
# The job has its own Ray, so flags about a Ray are out of place.
_UNFIT = ("address", "fresh", "part")  # a job that continues would begin anew; jobs of an array have parts
FLAGS = [
    flag.name
    for flag in all_flags()
    if flag.is_submitted and not (flag.with_address or flag.without_address or flag.name in _UNFIT)
]
OWN = ("nodes", "time", "jobs", "partition", "account", "qos", "constraint", "gpus_per_node", "cpus_per_node", "mem")


def of_job(word: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(word, metavar=metavar, help=text, rich_help_panel=JOB)


@takes(*OWN, "setup", "option", "until_done", "only_print", *FLAGS, "grid", "baseline", "save")
def slurm(
    target: Target,
    flags: RunFlags,
    time: Annotated[str, of_job("--time", "Time limit of the job: 90m, 2h, 1d, or Slurm's form.", "TIME")],
    nodes: Annotated[int, of_job("--nodes", "Number of nodes.", "N")] = 1,
    jobs: Annotated[
        int, of_job("--jobs", "Number of jobs, each with its nodes, among which the blocks are divided.", "N")
    ] = 1,
    partition: Annotated[str | None, of_job("--partition", "Partition.", "NAME")] = None,
    account: Annotated[str | None, of_job("--account", "Account to charge.", "NAME")] = None,
    qos: Annotated[str | None, of_job("--qos", "Quality of service.", "NAME")] = None,
    constraint: Annotated[str | None, of_job("--constraint", "Features that nodes must have.", "LIST")] = None,
    gpus_per_node: Annotated[str | None, of_job("--gpus-per-node", "GPUs of a node: 8, a100:8.", "[TYPE:]N")] = None,
    cpus_per_node: Annotated[int | None, of_job("--cpus-per-node", "CPUs of a node. (default: Slurm's)", "N")] = None,
    mem: Annotated[str | None, of_job("--mem", "Memory of a node: 64G. (default: Slurm's)", "SIZE")] = None,
    setup: Annotated[
        list[str] | None, of_job("--setup", "Line of the shell before all: 'module load cuda'. Repeatable.", "LINE")
    ] = None,
    option: Annotated[
        list[str] | None, of_job("--option", "Further option of sbatch: --option=--exclusive. Repeatable.", "OPTION")
    ] = None,
    until_done: Annotated[
        bool, of_job("--until-done", "Go back into the queue when the time is over, until the study is complete.")
    ] = False,
    only_print: Annotated[bool, of_job("--print", "Only print the batch file.")] = False,
    grid: Grids = None,
    baseline: Baseline = None,
    save: Save = None,
) -> None:
    """Run a study as a Slurm job.

    The job starts a private Ray on its nodes, runs the study there, and stops in time, with a report. The folder must
    be one that all nodes see. This Python environment is active in the job.

    Examples:  raypar cluster slurm studies/batch_size.py --nodes 2 --time 2h --gpus-per-node 4
        raypar cluster slurm train.py --grid num_workers=1,2 --time 1d --cpus-per-node 16 --until-done
        raypar cluster slurm studies/batch_size.py --repeats 12 --time 1h --jobs 4
        raypar cluster slurm mine.py --time 2h --partition gpu --setup 'module load cuda' --print
    """
    with handle_signals():
        from raypar.execution.plan import make_plan
        from raypar.run.sbatch import BatchFile, cluster_of, missing_sbatch, parse_time_s, problems, submit

        errors: list[RayparError] = []
        if not only_print and (missing := missing_sbatch()):
            errors.append(missing)
        errors += problems(
            nodes=nodes,
            jobs=jobs,
            cpus_per_node=cpus_per_node,
            gpus_per_node=gpus_per_node,
            mem=mem,
            options=option or (),
        )
        if flags.tracking_uri is not None and MASK in masked(flags.tracking_uri):
            hint = "leave it out, and set MLFLOW_TRACKING_URI in the shell that submits the job"
            errors.append(RayparError(f"--tracking-uri {masked(flags.tracking_uri)}: others can see it", hint=hint))
        time_s = 0
        try:
            time_s = parse_time_s(time)
        except RayparError as error:
            errors.append(error)
        try:
            file = study_file(target, grid, baseline, save)
            loaded = load(file, flags)
            if jobs > 1:
                StudyPart(1, jobs).check(loaded.study, "--jobs {count}")
            common.uri_of(flags.tracking_uri)
            cluster = None if errors else cluster_of(nodes, cpus_per_node, gpus_per_node)
            # Which labels the nodes will have is unknown.
            if cluster is not None and "node_label" not in {**loaded.study.config, **loaded.study.space}:
                make_plan(loaded.study, cluster, (), where=loaded.path)
        except RayparError as error:
            errors.append(error)
        if errors:
            raise one_for_all(errors)
        batch = BatchFile(
            study=loaded.study.name,
            words=[common.path_from_here(loaded.path), *words_of(flags)],
            folder=Path.cwd(),
            nodes=nodes,
            time_s=time_s,
            resources={
                "cpus-per-task": str(cpus_per_node) if cpus_per_node else None,
                "gpus-per-node": gpus_per_node,
                "mem": mem,
                "partition": partition,
                "account": account,
                "qos": qos,
                "constraint": constraint,
            },
            options=option or (),
            setup=setup or (),
            continues=until_done,
            num_jobs=jobs,
        )
        if only_print:
            common.print_text(batch.text)
            return
        path = batch.write()
        job_id = submit(path, batch.folder)
    output = batch.output(job_id)
    study = shlex.quote(batch.study)
    say(f"submitted study {batch.study} as Slurm job {job_id}; its output goes to {output}")
    say(f"  follow it:    tail -F {output}, raypar report {study}, squeue --job={job_id}")
    say(f"  stop it:      scancel --batch --signal=TERM {job_id}    # with a report")
    say(f"  continue it:  sbatch {shlex.quote(str(path))}")
