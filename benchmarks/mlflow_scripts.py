"""Scripts that log to MLflow in their own ways: is all of it in the runs of the trials, once, and nothing elsewhere?

Each script of ``mlflow_loggers/`` runs alone with an MLflow of its own, which is the truth, and then as the study
``raypar study SCRIPT --grid lr=0.05,0.1``. A value is right if the trial's run has it at the same step, and no other
value there (Lightning logs some values twice). Stray runs are those in any store that are not raypar's. Scripts whose
library is not installed are left out. ``--server`` uses an MLflow server for the study, instead of the embedded store.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from common import FOLDER, RAYPAR, begin, failure, parser_for, print_bar, print_row, scratch, user_environment

from raypar.track.server import start_server
from raypar.track.store import default_tracking_uri

SCRIPTS = {
    "plain": "mlflow",
    "autolog": "sklearn",
    "lightning_logger": "lightning",
    "hugging_face": "accelerate",
    "own_experiment": "mlflow",
    "own_runs": "mlflow",
}
LRS = (0.05, 0.1)
OF_CLOCK = ("runtime", "per_second")  # ends of metrics that differ from run to run
TOLERANCE = 1e-5
Values = dict[str, dict[int, list[float]]]  # by key and step


def values_of(database: Path, where: str = "1") -> dict[tuple[str, str], Values]:
    """Return the metrics of all runs of a store, by id and name of the run."""
    runs: dict[tuple[str, str], Values] = {}
    with contextlib.closing(sqlite3.connect(database)) as opened:
        rows = opened.execute(f"SELECT run_uuid, name FROM runs WHERE {where} ORDER BY start_time, rowid").fetchall()
        for uid, name in rows:
            runs[uid, name] = defaultdict(lambda: defaultdict(list))
            query = "SELECT key, step, value FROM metrics WHERE run_uuid = ?"
            for key, step, value in opened.execute(query, (uid,)).fetchall():
                runs[uid, name][key][step].append(value)
    return runs


def truth(script: Path, lr: float, folder: Path) -> Values:
    """Return what a script logs without raypar, in all of its runs. Keys that an earlier run has get the run's name."""
    folder.mkdir()
    address = f"sqlite:///{folder}/truth.db"
    environment = {**user_environment(), "MLFLOW_TRACKING_URI": address, "TEAM_STORE": address, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, "--lr", str(lr)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise failure(script.name, done.returncode, done.stdout + done.stderr)
    expected: Values = {}
    for (_, name), run in values_of(folder / "truth.db").items():
        expected |= {f"{name}/{key}" if key in expected else key: steps for key, steps in run.items()}
    return expected


def is_right(key: str, expected: dict[int, list[float]], found: dict[int, list[float]]) -> bool:
    """Return whether a run has exactly the expected values of a metric."""
    if found.keys() != expected.keys() or any(len(found[step]) > len(values) for step, values in expected.items()):
        return False
    pairs = [(value, values[0]) for step, values in expected.items() for value in found[step]]
    return key.endswith(OF_CLOCK) or all(abs(mine - value) <= TOLERANCE * max(1, abs(value)) for mine, value in pairs)


def num_strays(folder: Path) -> int:
    """Return the number of runs below a folder that are not raypar's."""
    mine = "EXISTS (SELECT 1 FROM tags t WHERE t.run_uuid = runs.run_uuid AND t.key = 'raypar.kind')"
    databases = [path for path in folder.rglob("*.db") if path.is_file()]
    return sum(len(values_of(path, f"NOT {mine}")) for path in databases) + len([*folder.rglob("meta.yaml")])


@contextlib.contextmanager
def store_at(folder: Path, *, server: bool) -> Iterator[list[str]]:
    """Yield the options of `raypar study` for a store in the folder."""
    if not server:
        yield []
        return
    served = folder / "served"
    served.mkdir()
    with start_server(default_tracking_uri(served), served) as started:
        yield ["--tracking-uri", started.url]


def check(name: str, folder: Path, *, server: bool, quick: bool) -> tuple[bool, int]:
    """Run a script as a study; return whether all trials' runs have its metrics, and the number of stray runs."""
    folder.mkdir()
    script = Path(shutil.copy(FOLDER / "mlflow_loggers" / f"{name}.py", folder))
    expected = {lr: truth(script, lr, folder.with_name(f"{name}-{lr}")) for lr in LRS}
    with store_at(folder, server=server) as options:
        swept = ["--grid", f"lr={','.join(map(str, LRS))}"]
        ray = ["--no-ray"] if quick else []
        command = [*RAYPAR, "study", script.name, *swept, "--repeats", "1", *ray, *options]
        done = subprocess.run(command, cwd=folder, env=user_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise failure(name, done.returncode, done.stdout + done.stderr)
    database = folder / ("served/mlflow.db" if server else "mlflow.db")
    trial = (
        "EXISTS (SELECT 1 FROM tags t WHERE t.run_uuid = runs.run_uuid AND t.value = 'trial' AND key = 'raypar.kind')"
    )
    runs = values_of(database, trial)
    right = len(runs) == len(LRS)
    for (uid, _), found in runs.items():
        with contextlib.closing(sqlite3.connect(database)) as opened:
            query = "SELECT value FROM params WHERE run_uuid = ? AND key = 'lr'"
            lr = float(opened.execute(query, (uid,)).fetchone()[0])
        wrong = [key for key, steps in expected[lr].items() if not is_right(key, steps, found.get(key, {}))]
        num_values = sum(map(len, expected[lr].values()))
        lost = f"; WRONG: {', '.join(wrong)}" if wrong else ""
        print_row(f"  {name}, lr={lr}", f"{len(expected[lr])} metrics, {num_values} values{lost}")
        right &= not wrong and bool(expected[lr])
    return right, num_strays(folder)


def main() -> None:
    """Print the figures."""
    parser = parser_for(__doc__)
    parser.add_argument("--server", action="store_true", help="with an MLflow server")
    parser.add_argument("--only", choices=SCRIPTS, help="this script alone")
    args = begin(parser)
    names = [name for name in SCRIPTS if args.only in (None, name)]
    missing = [name for name in names if importlib.util.find_spec(SCRIPTS[name]) is None]
    for name in missing:
        print_row(f"  {name}", f"left out: {SCRIPTS[name]} is not installed")
    os.environ.pop("MLFLOW_RUN_ID", None)
    with scratch() as folder:
        done = [
            check(each, folder / each, server=args.server, quick=args.quick) for each in names if each not in missing
        ]
    num_right, num_stray = sum(right for right, _ in done), sum(strays for _, strays in done)
    print_bar(
        "scripts whose metrics are all in the trials' runs, once", num_right, "{:.0f}".format, at_least=len(names)
    )
    print_bar("stray runs", num_stray, "{:.0f}".format, at_most=0)


if __name__ == "__main__":
    main()
