"""Batch file of a study for Slurm, and its submission. The job itself is in `raypar.run.slurm`."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypar.errors import ClusterError, RayparError
from raypar.files import make_private_folder
from raypar.run.cluster import Cluster
from raypar.units import DAY_S, DURATIONS_S, HOUR_S, MINUTE_S, counted, parsed

FOLDER = Path(".raypar/slurm")  # in the folder of the study's store
MIN_TIME_S = 2 * MINUTE_S  # Ray's start takes up to a minute of it
MIN_LEAD_S, LEAD_SHARE, MAX_LEAD_S = 30, 0.1, 120  # a stopping study stores its records and writes a report
SUBMIT_TIMEOUT_S = 120.0
TIME_HINT = "write 90m, 2h, 1d, or Slurm's D-HH:MM:SS"
MEMORY_HINT = "write 64G, or 512M; 0 for all memory of a node"
OWN_OPTIONS = {
    "time": "--time",
    "nodes": "--nodes",
    "partition": "--partition",
    "account": "--account",
    "qos": "--qos",
    "constraint": "--constraint",
    "gpus-per-node": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-node",
    "mem": "--mem",
    "requeue": "--until-done",
    "no-requeue": "--until-done",
    "array": "--jobs",
}
FIXED_OPTIONS = ("ntasks", "ntasks-per-node", "signal", "no-kill", "chdir", "output", "open-mode", "wrap")
TEXT = """\
#!/bin/bash
# Study {name} on {nodes}, written by `raypar cluster slurm`.
# Submit it with `sbatch {file}`; again, it runs what is missing.
# `scancel --batch --signal=TERM JOB` stops it with a report.
{options}
set -e
{setup}exec {command}
"""


def parse_time_s(text: str) -> int:
    """Return the seconds of 90m, 2h, 1d or Slurm's own forms (minutes, H:M:S, D-H:M:S). Raises RayparError."""
    seconds = _slurm_time_s(text.strip()) or _with_units_s(text)
    if not seconds or not math.isfinite(seconds):
        raise RayparError(f"--time {text}: must be a duration", hint=TIME_HINT)
    if seconds < MIN_TIME_S:
        raise RayparError(f"--time {text}: must be at least 2 minutes", hint="Ray's start alone may take one")
    return math.ceil(seconds / MINUTE_S) * MINUTE_S  # Slurm's resolution


def _slurm_time_s(text: str) -> float | None:
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None or len(numbers) == 3:  # D-H[:M[:S]] or H:M:S
        scales = (HOUR_S, MINUTE_S, 1)
    else:  # M[:S]
        scales = (MINUTE_S, 1, 0)
    return int(days or 0) * DAY_S + sum(number * scale for number, scale in zip(numbers, scales, strict=False))


def _with_units_s(text: str) -> float | None:
    """Return the seconds of 90m or 1h30m; None if a part has no unit or an unknown one."""
    if not re.fullmatch(r"(?:[\d.]+[a-z]+\s*)+", text.strip().lower()):
        return None
    parts = [parsed(part, DURATIONS_S) for part in re.findall(r"[\d.]+[a-z]+", text.lower())]
    return None if None in parts else sum(part for part in parts if part is not None)


def slurm_time(seconds: int) -> str:
    """Return a duration as Slurm writes it: ``1-12:00:00``, ``02:00:00``."""
    days, rest = divmod(seconds, DAY_S)
    text = f"{rest // HOUR_S:02d}:{rest % HOUR_S // MINUTE_S:02d}:{rest % MINUTE_S:02d}"
    return f"{days}-{text}" if days else text


def lead_s(time_s: int) -> int:
    """Return how long before its end a job stops: a tenth of its time, from 30 s to two minutes."""
    return round(min(max(LEAD_SHARE * time_s, MIN_LEAD_S), MAX_LEAD_S))


def problems(
    *,
    nodes: int,
    jobs: int,
    cpus_per_node: int | None,
    gpus_per_node: str | None,
    mem: str | None,
    options: Sequence[str],
) -> Iterator[RayparError]:
    """Yield what is wrong with the resources that a job asks for."""
    if nodes < 1:
        yield RayparError(f"--nodes {nodes}: must be at least 1", hint="write --nodes 4")
    if jobs < 1:
        yield RayparError(f"--jobs {jobs}: must be at least 1", hint="write --jobs 4")
    if cpus_per_node is not None and cpus_per_node < 1:
        yield RayparError(f"--cpus-per-node {cpus_per_node}: must be at least 1", hint="write --cpus-per-node 64")
    if gpus_per_node is not None and not re.fullmatch(r"([\w.-]+:)?[1-9]\d*", gpus_per_node):
        yield RayparError(f"--gpus-per-node {gpus_per_node}: must be a number", hint="write 8, or a100:8 for a type")
    if mem is not None and not re.fullmatch(r"\d+[KMGT]?", mem, re.IGNORECASE):
        yield RayparError(f"--mem {mem}: must be the memory of a node", hint=MEMORY_HINT)
    for option in options:
        name = option.removeprefix("--").partition("=")[0].split(" ")[0]
        if not option.startswith("-") or "\n" in option:
            yield RayparError(f"--option {option}: must be an option of sbatch", hint="write --option=--exclusive")
        elif name in OWN_OPTIONS:
            yield RayparError(f"--option {option}: raypar sets it", hint=f"use {OWN_OPTIONS[name]}")
        elif name in FIXED_OPTIONS:
            yield RayparError(f"--option {option}: raypar sets it", hint="leave it out, or edit what --print prints")


def cluster_of(nodes: int, cpus_per_node: int | None, gpus_per_node: str | None) -> Cluster | None:
    """Return the cluster that a job will have; None if only Slurm knows how many CPUs."""
    if cpus_per_node is None:
        return None
    num_gpus = (gpus_per_node or "0").rpartition(":")[2]
    node = {"CPU": cpus_per_node, "GPU": int(num_gpus)}
    return Cluster((node,) * nodes, is_own=False, remedy="raise --nodes, --cpus-per-node or --gpus-per-node")


@dataclass(frozen=True, kw_only=True)
class BatchFile:
    """Batch file of a study.

    Attributes:
        study: name of the study.
        words: words after `raypar study`, without an address.
        folder: folder of its store, where it runs; absolute.
        resources: options of sbatch and their values; None: not given.
        options: further options of sbatch, as they are.
        setup: lines of the shell that precede everything.
        continues: it goes back into the queue until the study is complete.
        num_jobs: number of jobs among which the study's blocks are divided.
    """

    study: str
    words: Sequence[str]
    folder: Path
    nodes: int
    time_s: int
    resources: dict[str, str | None]
    options: Sequence[str] = ()
    setup: Sequence[str] = ()
    continues: bool = False
    num_jobs: int = 1

    @property
    def path(self) -> Path:
        """Path in the folder."""
        return FOLDER / f"{self.study}.sbatch"

    def output(self, job_id: str) -> str:
        """Return the file with a job's output in the folder, as a word of a shell; for several jobs, a pattern."""
        return shlex.quote(str(FOLDER / f"{self.study}-{job_id}")) + (".out" if self.num_jobs == 1 else "_*.out")

    @property
    def text(self) -> str:
        lead = lead_s(self.time_s)
        number = "%j" if self.num_jobs == 1 else "%A_%a"
        given = {
            "job-name": self.study,
            "chdir": str(self.folder),
            "output": f"{str(self.folder / FOLDER / self.study).replace('%', '%%')}-{number}.out",
            "array": None if self.num_jobs == 1 else f"1-{self.num_jobs}",
            "open-mode": "append",
            "nodes": str(self.nodes),
            "ntasks-per-node": "1",
            **self.resources,
            "time": slurm_time(self.time_s),
            "signal": f"B:USR1@{lead}",
        }
        options = [f"--{key}={shlex.quote(value)}" for key, value in given.items() if value is not None]
        options += ["--no-kill", "--requeue" if self.continues else "--no-requeue", *self.options]
        bin_folder = Path(sys.executable).parent
        setup = [*self.setup, f'export PATH={shlex.quote(str(bin_folder))}:"$PATH"']
        command = [Path(sys.executable).name, "-P", "-m", "raypar.run.slurm", "study", "--file", str(self.path)]
        command += ["--lead", str(lead), *(["--until-done"] if self.continues else []), "--", *self.words]
        # Of a job array, each job has a part of the study.
        part = "" if self.num_jobs == 1 else f' --part "$SLURM_ARRAY_TASK_ID/{self.num_jobs}"'
        nodes = counted(self.nodes, "node")
        return TEXT.format(
            name=self.study,
            nodes=nodes if self.num_jobs == 1 else f"{self.num_jobs} times {nodes}",
            file=shlex.quote(str(self.path)),
            options="\n".join(f"#SBATCH {option}" for option in options),
            setup="".join(f"{line}\n" for line in setup),
            command=shlex.join(command) + part,
        )

    def write(self) -> Path:
        """Write it into the folder, private to this user; return its path there. Raises RayparError."""
        try:
            make_private_folder(self.folder / FOLDER.parent)
            make_private_folder(self.folder / FOLDER)
            (self.folder / self.path).touch(mode=0o600)
            (self.folder / self.path).write_text(self.text)
        except OSError as error:
            hint = "run in a folder that you may write to, and that all nodes see"
            raise RayparError(f"{self.folder / self.path}: can't be written: {error.strerror}", hint=hint) from None
        return self.path


def latest_job(study: str, folder: Path) -> tuple[str, Path] | None:
    """Return the id and the output file of a study's latest Slurm job that has begun; None: there is none."""
    name = re.compile(re.escape(study) + r"-(\d+)(?:_\d+)?\.out")
    files = folder.joinpath(FOLDER).glob("*.out")
    jobs = [(int(match[1]), FOLDER / file.name) for file in files if (match := name.fullmatch(file.name))]
    return next(((str(number), path) for number, path in sorted(jobs, reverse=True)), None)


def missing_sbatch() -> RayparError | None:
    """Return the error that this machine can't submit to Slurm, if so."""
    if shutil.which("sbatch"):
        return None
    hint = "run this on the cluster's login node; --print only prints the batch file"
    return RayparError("sbatch is not on the PATH of this machine", hint=hint)


def submit(path: Path, folder: Path) -> str:
    """Submit a batch file; return the job's id. Raises ClusterError with Slurm's reason."""
    # In a job, Slurm's variables describe that job.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    command = ["sbatch", "--parsable", str(path)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SUBMIT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        hint = "`squeue --me` shows whether the job is there"
        raise ClusterError(f"sbatch has not answered within {SUBMIT_TIMEOUT_S:g} s", hint=hint) from None
    if done.returncode:
        reason = " ".join(done.stderr.replace("sbatch: error: ", "").split())
        hint = "`sinfo` lists the partitions; change the options, and submit again"
        raise ClusterError(f"Slurm refuses the job: {reason}", hint=hint)
    return done.stdout.strip().partition(";")[0]
