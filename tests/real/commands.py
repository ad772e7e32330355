"""The real command line in a folder of its own, and what it leaves running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from telling import until

RAYPAR = Path(sys.executable).with_name("raypar")
MARK = "RAYPAR_TEST_MARK"
TIMEOUT_S = 200
# The last three are those of the tests' own Ray.
UNSET = (
    *("MLFLOW_TRACKING_URI", "RAYPAR_DATA_DIR", "RAY_ADDRESS"),
    *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
)


@dataclass(frozen=True)
class Cli:
    """`raypar` as a user runs it, standard output into a pipe."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [RAYPAR, *arguments],
            cwd=self.folder,
            env=self._environment(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """In a process group of its own, as a shell does it; output into files that `run` would have returned."""
        with (
            (self.folder / "stdout").open("w") as stdout,
            (self.folder / "stderr").open("w") as stderr,
            signals_not_ignored(),
        ):
            return subprocess.Popen(
                [RAYPAR, *arguments],
                cwd=self.folder,
                env=self._environment({}),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def wait_for_its_processes(self) -> None:
        """Until nothing is left of what was started here, whoever its parent is by now."""
        until(lambda: not self.processes(), lambda: f"the end of {self.processes()}", 30)

    def processes(self) -> dict[int, str]:
        """Every process that inherited the mark."""
        wanted = f"{MARK}={self.mark}".encode()
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:  # it ended meanwhile, or is another user's
                continue
        return found

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def _environment(self, changes: Mapping[str, str]) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key not in UNSET}
        return {**kept, MARK: self.mark, "COLUMNS": "120", **changes}


@contextlib.contextmanager
def signals_not_ignored() -> Iterator[None]:
    """What is started inside hears Ctrl-C, even where these tests themselves run in a shell's background or under
    nohup: an ignored signal stays ignored in whatever is started."""
    ignored = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def runs_of(folder: Path, study: str, kind: str) -> list[Any]:
    """The MLflow runs of a study, as whoever knows nothing of raypar finds them; kind: execution or trial."""
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(study)
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], f"tags.`raypar.kind` = '{kind}'")
    return list(found)


def report_in(output: str) -> str:
    """The report's part of an output: from its title on, without the last line, which is no part of it."""
    lines = output.splitlines()
    first = next(i for i, line in enumerate(lines) if " points, " in line or " point, " in line)
    return "\n".join(line for line in lines[first:] if not line.startswith(("`raypar ui`", "interrupted;")))
