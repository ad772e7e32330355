"""Studies that a benchmark runs as a user would, as a process of its own, and what came of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from raypar import units
from raypar.study.trial import TrialResult, TrialState
from raypar.track.client import connect
from raypar.track.store import Store, default_tracking_uri

RAYPAR = Path(sys.executable).with_name("raypar")
POLL_S = 0.02
ROW = "{:<36} {:<40} {:>9} {:>9} {:>5} {:>8}"


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`raypar` in this folder, in a process group of its own; what it says goes to ``stdout`` and ``stderr`` there."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        return subprocess.Popen(
            [RAYPAR, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def said(folder: Path) -> str:
    return (folder / "stdout").read_text() + (folder / "stderr").read_text()


def wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether it came true in time."""
    give_up_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(POLL_S)
    return True


def results(folder: Path, study: str, tracking_uri: str = "") -> tuple[TrialResult, ...]:
    """What the store has of the study, one result a trial."""
    return Store(tracking_uri or default_tracking_uri(folder), folder).results(study)


def num_doubled(folder: Path, study: str, tracking_uri: str = "") -> int:
    """How many runs of MLflow's are a finished trial's second one."""
    client = connect(tracking_uri or default_tracking_uri(folder))
    experiment = client.get_experiment_by_name(study)
    if experiment is None:
        return 0
    runs: Counter[str] = Counter()
    token = None
    while True:
        page = client.search_runs(
            [experiment.experiment_id],
            "tags.`raypar.kind` = 'trial' and attributes.status = 'FINISHED'",
            max_results=1000,
            page_token=token,
        )
        runs.update(run.data.tags["raypar.identity"] for run in page)
        token = page.token
        if not token:
            return sum(count - 1 for count in runs.values())


def finished(folder: Path) -> list[TrialResult]:
    return [result for result in results(folder, "faulty") if result.state is TrialState.FINISHED]


def head_of_table() -> None:
    print(ROW.format("fault", "what came of it", "noticed", "recovered", "lost", "doubled"), flush=True)


def outcome(result: TrialResult | None) -> str:
    if result is None:
        return "nothing in the store"
    if result.failure is not None:
        return f"failed: {result.failure.kind.value}, not tried again"
    return "finished" if result.attempts == 1 else f"finished in attempt {result.attempts}"


def row(name: str, what: str, noticed_s: float | None, recovered_s: float, lost: int, doubled: int) -> None:
    noticed = "" if noticed_s is None else units.seconds(noticed_s)
    print(ROW.format(name, what, noticed, units.seconds(recovered_s), int(lost), doubled), flush=True)
