"""Golden outputs: everything that raypar prints or writes about three stored studies.

    python -m tests.golden          rewrite these files after an intended change; then read the diff

The input is the study of `raypar demo`, a run of the quick start, and ``studies/*.json.gz``: executions and results as
an older raypar stored them. ``scaling`` (two batch sizes on 1 to 16 workers, one trial failed, one retried) and
``search`` (two random hyperparameters, trials stopped early) are invented. ``<study>/*`` is the output of a command
(`COMMANDS`): of all commands for ``scaling``, and of those for the others that show something new. ``cases/*`` are
reports on small invented studies. A change in ``identities.json`` (`TrialSpec.identity` of all trials of the shipped
studies) means that stored results are no longer recognised. Two files are never rewritten: ``journal.jsonl``, with a
record of every kind, and ``store.tar.gz``, a store written by MLflow 3.17 and an older raypar.

``kubernetes.yaml`` is what `raypar cluster kubernetes` prints, but for the machine that it ran on.
``init/*`` are the studies that `raypar init` writes for ``scripts/*``.

Commands run in this process, in a folder that has the studies' journals and no database, 80 columns wide, in UTC.
`page.readable` omits the parts that all pages share, and drawings, whose specs are in the page as well.
"""

import contextlib
import gzip
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from typer.testing import CliRunner

from raypar import __version__
from raypar.cli.app import app
from raypar.cli.demo import put_demo
from raypar.run.kubernetes import RayJob, manifest
from raypar.study.loader import load_study
from raypar.study.trial import result_from_json
from raypar.track.client import Unreachable
from raypar.track.recorder import Execution, Recorder
from raypar.track.store import Store

from . import cases
from .page import pretty, readable

HERE = Path(__file__).parent
STUDY_FILES = sorted((HERE.parents[1] / "studies").glob("*.py"))
STORE = HERE / "store.tar.gz"
IDENTITIES = "identities.json"
RESULTS = "store/results.json"
QUICKSTART, RERUN = "quickstart", "quickstart_rerun"
NUM_ROWS = 4  # of a table that is written to a file
FILE = "FILE"  # placeholder for a file that the command writes and that is then read

NETWORK = ("--workers", "64", "--nodes-of", "8", "--network", "100Gbit", "--parameters", "25.6M")
COMMANDS = {
    "list.txt": ("list",),
    **{f"{study}/report.txt": ("report", study) for study in ("quickstart", "scaling", "search")},
    "quickstart/report.json": ("report", "quickstart", "--json"),
    "quickstart/compare.txt": ("store", "compare", "quickstart", RERUN, "--fail-if-slower", "5%"),
    "scaling/report_verbose.txt": ("report", "scaling", "--verbose"),
    "scaling/report.html": ("report", "scaling", "--html", FILE),
    "scaling/trials.txt": ("store", "show", "scaling"),
    **{f"scaling/{name}": ("store", "export", "scaling", FILE) for name in ("trials.csv", "trials.json", "summary.md")},
    "scaling/recommend.txt": ("recommend", "scaling"),
    "scaling/recommend.json": ("recommend", "scaling", "--json"),
    "scaling/recommend_target.txt": ("recommend", "scaling", "--target", "accuracy=0.9", "--min-efficiency", "0.5"),
    "scaling/fit.txt": ("model", "fit", "scaling"),
    "scaling/predict.txt": ("model", "predict", "scaling", *NETWORK, "--set", "batch_size=512"),
    "search/fit.txt": ("model", "fit", "search"),
    "search/summary.md": ("store", "export", "search", FILE),
}
SCRIPTS = sorted((HERE / "scripts").glob("*.py"))
DRAFTS = {f"init/{path.stem}.txt": ("init", path.name, "--output", "-") for path in SCRIPTS}
DRAFTS["init/starter.txt"] = ("init", "--output", "-")
MANIFEST = "kubernetes.yaml"
STORED = {
    "store/list.txt": ("list",),
    "store/trials.txt": ("store", "show", "digits"),
    "store/report.txt": ("report", "digits"),
}


def outputs():
    """Yield the name of each golden file, and its current content."""
    with studies() as folder:
        yield from ((name, output(folder, name, args)) for name, args in COMMANDS.items())
    with unpacked_store() as folder:
        yield from ((name, output(folder, name, args)) for name, args in STORED.items())
        yield RESULTS, pretty(stored_results(folder)) + "\n"
    with scripts() as folder:
        yield from ((name, output(folder, name, args)) for name, args in DRAFTS.items())
    yield MANIFEST, kubernetes_job()
    for name, text in cases.texts():
        yield name, same_everywhere(text)
    everything = {path.stem: identities_of(path) for path in STUDY_FILES}
    yield IDENTITIES, json.dumps(everything, indent=1) + "\n"


def output(folder, name, args):
    """Return the output of a command or the file that it writes, readable and the same on every machine."""
    path = folder / Path(name).name
    path.unlink(missing_ok=True)
    with _same_everywhere(folder):
        done = CliRunner().invoke(app, [path.name if arg == FILE else arg for arg in args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if FILE not in args and path.suffix == ".json":
        rounded = json.loads(done.stdout, parse_float=lambda text: float(f"{float(text):.6g}"))
        return same_everywhere(pretty(rounded))
    if FILE not in args:
        printed = done.stdout + done.stderr + (f"exit code {done.exit_code}\n" if done.exit_code else "")
        return same_everywhere(f"$ raypar {' '.join(args)}\n\n{printed}")
    assert done.exit_code == 0, done.stderr
    show = {".html": readable, ".json": _exported, ".csv": _some_lines}.get(path.suffix, str)
    return same_everywhere(show(path.read_text(encoding="utf-8")))


def kubernetes_job():
    """Return the manifest of a study with a module and a table beside it, on two GPU pods of each of two nodes."""
    job = RayJob(
        name="batch-size",
        namespace="ml",
        image="registry.example.com/raypar:0.1.0",
        num_workers=4,
        gpus_per_worker=4,
        cpus_per_worker=16,
        memory_per_worker="64Gi",
        workers_per_node=2,
        volume="results",
        data_volume="data",
        ttl_s=600,
    )
    files = {"batch_size.py": b"from net import net\n", "net.py": b"net = None\n", "table.npy": b"\x93NUMPY"}
    flags, environment = ["--set", "lr=0.1,0.2"], {"RAYPAR_SUBMITTED_AS": "raypar cluster kubernetes …"}
    return same_everywhere(manifest(job, "batch_size", "batch_size.py", files, flags, environment, "2.60.0"))


def _exported(text):
    """Return an export with the study, its first trial and a failed one."""
    whole = json.loads(text)
    trials = whole["trials"]
    failed = next(trial for trial in trials if trial["state"] == "failed")
    return pretty({**whole, "trials": [trials[0], failed], "num_trials": len(trials)})


def _some_lines(text):
    """Return a table's head, its first rows and the number of rows."""
    head, *rows = text.splitlines()
    return "\n".join([head, *rows[:NUM_ROWS], f"({len(rows)} rows)"])


def same_everywhere(text):
    lines = text.replace(f"raypar {__version__}", "raypar VERSION").splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


@contextlib.contextmanager
def studies():
    """Yield a folder with the demo, the studies of ``studies/*.json.gz`` and a second quick start."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        put_demo(folder)
        journal(folder, rerun(Store(_uri(folder), folder)))
        for path in sorted((HERE / "studies").glob("*.json.gz")):
            journal(folder, json.loads(gzip.decompress(path.read_bytes())))
        yield folder


@contextlib.contextmanager
def scripts():
    """Yield a writable folder with the training scripts of ``scripts``."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(shutil.copytree(HERE / "scripts", Path(name).resolve() / "scripts"))


@contextlib.contextmanager
def unpacked_store():
    """Yield a folder with the database and the artifacts of ``store.tar.gz``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        with tarfile.open(STORE) as tar:
            tar.extractall(folder, filter="data")
        yield folder


def journal(folder, stored):
    """Record a study as if its store couldn't be reached, so that reading it needs no MLflow."""
    execution = Execution(**stored["execution"])
    clocks = {"now": lambda: execution.started_at + 60, "clock": lambda: 0.0, "writer": _NoStore()}
    recorder = Recorder(execution, tracking_uri=_uri(folder), project_dir=folder, **clocks)
    recorder.start()
    for result in stored["results"]:
        recorder.record(result_from_json(json.dumps(result)))
    for name, text in stored.get("artifacts", {}).items():
        recorder.add_artifact(name, text)
    recorder.close("finished")


def rerun(store):
    """Return the quick start on a newer torch, a day later: 20 % slower on two workers, otherwise a little faster."""
    ((tags, description),) = store.origins(QUICKSTART)
    question = {**store.question(QUICKSTART), "study_name": RERUN}
    other = {"raypar.question": json.dumps(question), "version.torch": "2.16.0", "host": "other-host"}
    started_at = max(result.started_at for result in store.results(QUICKSTART)) + 86400
    execution = {"uid": "rerun", "study": RERUN, "started_at": started_at, "description": description}
    results = []
    for result in store.results(QUICKSTART):
        factor = 1.2 if result.spec.config["num_workers"] == 2 else 0.97
        assert result.train_time_s and result.throughput_samples_per_s
        slower = {"train_time_s": result.train_time_s * factor}
        slower["throughput_samples_per_s"] = result.throughput_samples_per_s / factor
        renamed = replace(result, spec=replace(result.spec, study=RERUN), **slower)
        results.append(json.loads(renamed.to_json()))
    return {"execution": {**execution, "tags": {**tags, **other}}, "results": results}


def identities_of(path):
    """Return the identity of each trial of a study file; only of the first repeat if there are more than 40 trials."""
    search_path = list(sys.path)
    specs = sorted(load_study(path).study.trials(), key=lambda spec: (spec.repeat, spec.order))
    sys.path[:] = search_path
    chosen = specs if len(specs) <= 40 else [spec for spec in specs if spec.repeat == 0]
    return {spec.label: spec.identity for spec in chosen}


def stored_results(folder):
    """Return the results of all trials in the folder's store by identity, with their step times."""
    store = Store(_uri(folder), folder)
    every = [result for study in store.studies() for result in store.results(study.name)]
    steps = [store.step_times(result.spec.study, result.spec.identity) for result in every]
    return {
        r.spec.identity: json.loads(replace(r, step_times_s=s).to_json()) for r, s in zip(every, steps, strict=True)
    }


def _uri(folder):
    return f"sqlite:///{folder}/mlflow.db"


@contextlib.contextmanager
def _same_everywhere(folder):
    """Make the folder the current one, and the environment independent of machine and terminal."""
    fixed = {"COLUMNS": "80", "LINES": "25", "TZ": "UTC", "NO_COLOR": "1", "TERM": "dumb"}
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, fixed),
        # Drawings and the script that draws them take seconds, and are not in the golden files.
        patch("vl_convert.vegalite_to_svg", lambda spec: "<svg></svg>"),
        patch("raypar.reporting.html.bundled", lambda script: script),
    ):
        for variable in ("MLFLOW_TRACKING_URI", "RAYPAR_DATA_DIR", "FORCE_COLOR"):
            os.environ.pop(variable, None)
        time.tzset()
        yield
    time.tzset()


class _NoStore:
    """Writer whose store never answers."""

    def forget(self):
        pass

    def __getattr__(self, name):
        raise Unreachable("no store")
