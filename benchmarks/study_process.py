"""Studies that a benchmark runs as a user would, in a process, and their results in the store."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

from common import RAYPAR, user_environment

from raypar import units
from raypar.study.trial import TrialResult, TrialState
from raypar.track.client import connect
from raypar.track.store import Store, default_tracking_uri

ROW = "{:<36} {:<40} {:>9} {:>9} {:>5} {:>10}"


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `raypar` in a folder, in a new process group; its output goes to the files `output` reads."""
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        return subprocess.Popen(
            [*RAYPAR, *arguments],
            cwd=folder,
            env=user_environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )


def output(folder: Path) -> str:
    """Return the standard output and standard error so far."""
    return (folder / "stdout").read_text() + (folder / "stderr").read_text()


def results(folder: Path, study: str) -> tuple[TrialResult, ...]:
    """Return the stored results of a study, one per trial."""
    return Store(default_tracking_uri(folder), folder).results(study)


def finished(folder: Path, study: str = "faulty") -> list[TrialResult]:
    """Return the stored results of a study's finished trials."""
    return [result for result in results(folder, study) if result.state is TrialState.FINISHED]


def num_duplicates(folder: Path, study: str = "faulty") -> int:
    """Return the number of MLflow runs that repeat a finished trial."""
    client = connect(default_tracking_uri(folder))
    experiment = client.get_experiment_by_name(study)
    if experiment is None:
        return 0
    query = "tags.`raypar.kind` = 'trial' and attributes.status = 'FINISHED'"
    runs: Counter[str] = Counter()
    token = None
    while True:
        page = client.search_runs([experiment.experiment_id], query, max_results=1000, page_token=token)
        runs.update(run.data.tags["raypar.identity"] for run in page)
        token = page.token
        if not token:
            return sum(count - 1 for count in runs.values())


# ---- a table of faults


def print_header() -> None:
    print(ROW.format("fault", "outcome", "noticed", "recovered", "lost", "duplicates"), flush=True)


def print_fault(
    name: str, outcome: str, noticed_s: float | None, recovered_s: float, num_lost: int, num_duplicates: int
) -> None:
    """Print a fault's row: times since it happened, then the trials that the store lacks and has twice."""
    noticed = "" if noticed_s is None else units.seconds(noticed_s)
    print(ROW.format(name, outcome, noticed, units.seconds(recovered_s), num_lost, num_duplicates), flush=True)


def describe(result: TrialResult | None) -> str:
    """Describe the outcome of the trial that a fault hit."""
    if result is None:
        return "nothing in the store"
    if result.failure is not None:
        return f"failed: {result.failure.kind.value}, not tried again"
    return "finished" if result.attempts == 1 else f"finished in attempt {result.attempts}"
