"""How long `raypar list` and `raypar report` take on a store of 10,000 trials, in processes of their own.

One trial of `digits` is run; its result is varied into those of all others, which raypar's own recorder puts into an
embedded MLflow database and its folder: files one by one, rows all at once (`store_rows.py`). The trials are those of
several studies: one of 5,000 (500 points, 10 repeats), a search of 2,500 (points drawn, each run once), five of 500.
With --hard there is one study of 10,000 (1,000 points, 10 repeats), with --remote everything is asked over HTTP of an
`mlflow server` on this machine. Commands are run in turns, in random order, and `import mlflow` alone beside them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from common import Figure, begin, interleaved, judge, local_trial, parser_for, progress, scratch, tell, times
from store_rows import RowWriter

from raypar import Study, grid, units
from raypar.analysis.analyse import pair_speedups
from raypar.analysis.question import question_of
from raypar.study.space import loguniform, randint
from raypar.study.trial import TrialResult, TrialSpec
from raypar.track.recorder import Execution, Recorder
from raypar.workloads import digits

MAX_LIST_S = 2.0
MAX_REPORT_S = 15.0
MAX_PAGE_BYTES = 2e6
NUM_SMALL, NUM_REPEATS = 5, 10
SERVER_START_S = 60.0


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--hard", action="store_true", help="all trials in one study")
    parser.add_argument("--remote", action="store_true", help="over HTTP, of an MLflow server")
    parser.add_argument("--rounds", type=int, default=3, help="[default: 3]")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="build the store there, or use the one that is there"
    )
    args = begin(parser)
    num_trials = 1000 if args.quick else 10_000
    with contextlib.ExitStack() as stack:
        project: Path = args.keep or stack.enter_context(scratch())
        studies = [_grid_study("one", num_trials)] if args.hard else _studies(num_trials)
        if not (project / "mlflow.db").exists():
            project.mkdir(parents=True, exist_ok=True)
            build(project, studies)
        uri = stack.enter_context(_server(project)) if args.remote else f"sqlite:///{project}/mlflow.db"
        measure(project, uri, studies, 1 if args.quick else args.rounds)


# ---- the store


def _studies(num_trials: int) -> list[Study]:
    small = [_grid_study(f"small_{i}", num_trials // 4 // NUM_SMALL, (1, 2)) for i in range(NUM_SMALL)]
    return [_grid_study("grid", num_trials // 2), _search_study("search", num_trials // 4), *small]


def _grid_study(name: str, num_trials: int, workers: Sequence[int] = (1, 2, 4, 8)) -> Study:
    """Points of three hyperparameters, 10 repeats, against one worker."""
    batch_sizes = (32, 64, 128, 256, 512)
    num_rates = max(1, num_trials // NUM_REPEATS // len(workers) // len(batch_sizes))
    rates = [0.001 * 1.02**i for i in range(num_rates)]
    return Study(
        workload=digits,
        name=name,
        space={
            "num_workers": grid(*workers),
            "batch_size": grid(*batch_sizes),
            "lr": grid(*(float(f"{rate:.4g}") for rate in rates)),
        },
        baseline={"num_workers": 1},
        num_repeats=NUM_REPEATS,
    )


def _search_study(name: str, num_trials: int) -> Study:
    return Study(
        workload=digits,
        name=name,
        space={"lr": loguniform(1e-4, 1.0), "hidden_size": randint(8, 512), "batch_size": randint(8, 512)},
        num_trials=num_trials,
    )


def _specs(study: Study) -> Sequence[TrialSpec]:
    if not study.is_search:
        return study.trials()
    drawn = random.Random(0)
    assert study.num_trials is not None
    points = [
        {
            "lr": 10 ** drawn.uniform(-4, 0),
            "hidden_size": drawn.randrange(8, 512),
            "batch_size": drawn.randrange(8, 512),
        }
        for _ in range(study.num_trials)
    ]
    return [study.trial(point, 0, order=i) for i, point in enumerate(points)]


def build(project: Path, studies: Sequence[Study]) -> None:
    """Write every trial of the studies into ``mlflow.db`` and ``mlartifacts`` of the folder."""
    begun_s = time.perf_counter()
    real = local_trial("digits", {"epochs": 3, "num_workers": 1}, project / "log")
    uri = f"sqlite:///{project}/mlflow.db"
    writer = RowWriter(uri, project)
    count, num_bytes = 0, 0
    for study in studies:
        results = [_varied(real, spec) for spec in _specs(study)]
        _record(project, uri, writer, study, results)
        count += len(results)
        progress(f"{study.name}: {len(results)} trials")
    num_bytes = (project / "mlflow.db").stat().st_size
    tell(
        "trials; building the store; its database",
        f"{count}; {time.perf_counter() - begun_s:.0f} s; {units.size(num_bytes)}",
    )


def _record(project: Path, uri: str, writer: RowWriter, study: Study, results: Sequence[TrialResult]) -> None:
    """As an execution of the study does."""
    question = json.dumps(asdict(question_of(study)), separators=(",", ":"))
    execution = Execution(
        f"{study.name}-1",
        study.name,
        started_at=results[0].started_at,
        params={"workload": study.workload.name, "num_repeats": str(study.num_repeats)},
        tags={"raypar.question": question, "host": "here", "cores": "2"},
        description="How large may a store be?",
        study_source="# made up\n",
    )
    recorder = Recorder(execution, tracking_uri=uri, project_dir=project, writer=writer)
    recorder.start()
    for result in results:
        recorder.record(result)
    speedups = pair_speedups(question_of(study), results)
    recorder.record_trial_metrics({identity: {"speedup": speedup} for identity, speedup in speedups.items()})
    if recorder.close("finished"):
        raise SystemExit(f"{study.name} was not recorded: {recorder.outage}")
    writer.flush()


def _varied(real: TrialResult, spec: TrialSpec) -> TrialResult:
    """What the trial of this spec could have come to: times and scores follow from its point, with noise."""
    noise = random.Random(spec.identity)
    workers, batch, rate = (spec.config[key] for key in ("num_workers", "batch_size", "lr"))
    assert isinstance(workers, int) and isinstance(batch, int) and isinstance(rate, float)
    factor = (0.1 + 0.9 / workers + 4 / batch) * math.exp(noise.gauss(0, 0.05))
    score = min(1.0, max(0.0, 0.97 - 0.04 * abs(math.log10(rate / 0.02)) + noise.gauss(0, 0.004)))
    steps = tuple(
        tuple(t * factor * math.exp(noise.gauss(0, 0.1)) for t in real.step_times_s[0]) for _ in range(workers)
    )
    assert real.train_time_s is not None and real.wall_s is not None and real.throughput_samples_per_s is not None
    reports = tuple(
        {**report, "accuracy": score * (1 - 0.2 / (i + 1)), "train_time_s": report["train_time_s"] * factor}
        for i, report in enumerate(real.reports)
    )
    shares = {key: [0.01 + 0.01 * noise.random()] * workers for key in ("cpu_wait_share", "foreign_cpu_share")}
    return replace(
        real,
        spec=spec,
        started_at=1.75e9 + 5.0 * spec.order,
        wall_s=real.wall_s + real.train_time_s * (factor - 1),
        train_time_s=real.train_time_s * factor,
        throughput_samples_per_s=real.throughput_samples_per_s / factor,
        reports=reports,
        step_times_s=steps,
        environment={**real.environment, **shares, "cores": [[core] for core in range(workers)]},
    )


# ---- the commands


def measure(project: Path, uri: str, studies: Sequence[Study], num_rounds: int) -> None:
    page = project / "page.html"
    commands: dict[str, Sequence[str]] = {
        "python -c 'import mlflow'": (sys.executable, "-c", "import mlflow"),
        "raypar list": (*RAYPAR, "list", "--tracking-uri", uri),
    }
    for study in studies[:2]:
        commands[f"raypar report {study.name}"] = (*RAYPAR, "report", study.name, "--tracking-uri", uri)
    widest = studies[0].name
    commands[f"raypar report {widest} --html"] = (*commands[f"raypar report {widest}"], "--html", str(page))
    found = interleaved({name: partial(_run, words, project) for name, words in commands.items()}, num_rounds)
    bars = {"raypar list": MAX_LIST_S, **{f"raypar report {study.name}": MAX_REPORT_S for study in studies[:2]}}
    importing = "python -c 'import mlflow'"
    for name, seconds in found.items():
        if name in bars:
            judge(name, Figure.of(seconds), _seconds, at_most=bars[name])
        else:
            tell(name, Figure.of(seconds).show(_seconds))
        if name != importing:
            tell("    / import mlflow", Figure.ratio(seconds, found[importing]).show(times))
    judge(f"size of the page of {widest}", Figure.of([page.stat().st_size]), units.size, at_most=MAX_PAGE_BYTES)


RAYPAR = (sys.executable, "-c", "from raypar.cli import main; main()")


def _run(command: Sequence[str], project: Path) -> float:
    """Seconds from start to end of a process."""
    begun_s = time.perf_counter()
    done = subprocess.run(
        command, cwd=project, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=_environment()
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command[3:])} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return time.perf_counter() - begun_s


def _environment() -> Mapping[str, str]:
    return {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


@contextlib.contextmanager
def _server(project: Path) -> Iterator[str]:
    """An MLflow server on the store; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{project}/mlflow.db", "--serve-artifacts"]
    with (project / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=project,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(),
            start_new_session=True,
        )
        try:
            end_s = time.monotonic() + SERVER_START_S
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                if process.poll() is not None or time.monotonic() > end_s:
                    raise SystemExit(
                        f"the MLflow server did not start:\n{(project / 'server.log').read_text()[-2000:]}"
                    )
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


if __name__ == "__main__":
    main()
