"""Log of a script to MLflow itself: in a private store while it runs (`raypar.observe.tracking`), then in files.

The files are artifacts of the trial, from which `raypar.track` adds everything to the trial's run.
"""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from raypar.files import cache_dir
from raypar.masking import masked
from raypar.observe.events import EventRecorder
from raypar.observe.start import set_hooks
from raypar.observe.tracking import ADDRESS, EXPERIMENT, NAME, NOTES, RUN, Redirection, hooks
from raypar.scratch import scratch_folder
from raypar.study.trial import SINCE_LAUNCH
from raypar.train.job import LOGGED_FOLDER, TrialJob
from raypar.units import counted

RECORD, FILES, MODELS = "run.json", "files", "models"  # in the folder of a trial's artifacts
# MLflow's own tags that are kept; the others describe the process.
_KEPT_TAGS = ("mlflow.note.content", "mlflow.autologging", "mlflow.loggedArtifacts")
_OVERRULED = {ADDRESS: "address {}", EXPERIMENT: "experiment {!r}", RUN: "run {}"}


class LoggedPoint(NamedTuple):
    """Value of a metric, as MLflow has it."""

    key: str
    value: float
    time_ms: int
    step: int


class LoggedInput(NamedTuple):
    """Data set of a run, as MLflow has it; the last three fields are JSON."""

    context: str
    name: str
    digest: str
    source: str
    schema: str
    profile: str


class LoggedModel(NamedTuple):
    """Model of a run, whose files are in a folder of this name in `MODELS`."""

    folder: str
    name: str
    step: int
    params: Mapping[str, str]


@dataclass(frozen=True)
class LoggedRun:
    """All that the first rank of a trial logged to MLflow, in runs of whatever name.

    Attributes:
        overruled: where the script wanted it: ``experiment 'mine'``.
    """

    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    points: Sequence[LoggedPoint] = ()
    inputs: Sequence[LoggedInput] = ()
    models: Sequence[LoggedModel] = ()
    overruled: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> LoggedRun:
        """Read the record of a trial. Raises OSError, ValueError, TypeError or KeyError if it is damaged."""
        raw = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return cls(
            params={str(key): str(text) for key, text in raw["params"].items()},
            tags={str(key): str(text) for key, text in raw["tags"].items()},
            points=[LoggedPoint(str(k), float(v), int(at), int(step)) for k, v, at, step in raw["points"]],
            inputs=[LoggedInput(*map(str, each)) for each in raw["inputs"]],
            models=[LoggedModel(str(path), str(name), int(step), params) for path, name, step, params in raw["models"]],
            overruled=tuple(map(str, raw["overruled"])),
        )

    def reports(self, metric: str, launched_at: float) -> list[dict[str, float]]:
        """Return the values of a metric as reports of a trial; the last one has the last values of all metrics.

        Args:
            launched_at: Unix time.
        """
        by_step: dict[int, dict[str, float]] = {}
        for point in self.points:
            if point.key == metric:
                since_s = point.time_ms / 1000 - launched_at
                by_step[point.step] = {"step": float(point.step), metric: point.value, SINCE_LAUNCH: since_s}
        reports = [by_step[step] for step in sorted(by_step)]
        if reports:
            reports[-1] = {**{point.key: point.value for point in self.points}, **reports[-1]}
        return reports


@contextmanager
def private_store(job: TrialJob, *, is_first: bool) -> Iterator[PrivateStore]:
    """Prepare a private store for the block, and keep what was logged even if the block raises."""
    with scratch_folder() as folder:
        store = PrivateStore(folder, job, is_first=is_first)
        try:
            yield store
        finally:
            with suppress(OSError, sqlite3.Error):  # the block's error says more
                store.keep()


@contextmanager
def nothing_logged() -> Iterator[None]:
    """Throw away what this process logs in the block."""
    with scratch_folder() as folder:
        _redirect(_redirection(folder, folder, is_first=False))
        yield


def _redirection(folder: Path, here: Path, *, is_first: bool) -> Redirection:
    """Return a private store with its database in `folder`, and its files in `here`."""
    return Redirection(
        str(folder.absolute()),
        str(here.absolute() / FILES),
        str(here.absolute() / "others"),
        uuid.uuid4().hex,
        str(cache_dir() / "mlflow"),
        is_first,
    )


def _redirect(to: Redirection) -> None:
    set_hooks([hooks(asdict(to))], EventRecorder(Path(to.folder)))


class PrivateStore:
    """Private store of a rank's script.

    Args:
        folder: for its database, on a disk of this machine.
        is_first: the rank is the trial's first. What others log is thrown away.
    """

    def __init__(self, folder: Path, job: TrialJob, *, is_first: bool) -> None:
        self._job, self._is_first = job, is_first
        here = job.folder / LOGGED_FOLDER  # a move from here to the artifacts copies nothing, usually
        self._to = _redirection(folder, here, is_first=is_first)
        if is_first:
            for earlier in (here, job.artifact_dir / LOGGED_FOLDER):  # of an attempt that was killed
                shutil.rmtree(earlier, ignore_errors=True)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the entry of the observer's settings."""
        return {NAME: asdict(self._to)}

    def redirect(self) -> None:
        """Redirect what this process logs."""
        _redirect(self._to)

    def keep(self) -> LoggedRun:
        """Move what the script logged to the trial's artifacts, and return it. Further calls find nothing."""
        mlflow = sys.modules.get("mlflow")  # of a train loop; a rank that runs a command may have imported it too
        with suppress(Exception):
            if mlflow is not None and mlflow.get_tracking_uri() == self._to.uri:
                mlflow.flush_async_logging()
        here, database = self._job.folder / LOGGED_FOLDER, self._to.database
        logged = LoggedRun()
        if self._is_first and database.exists():
            kept = self._job.artifact_dir / LOGGED_FOLDER
            shutil.rmtree(kept, ignore_errors=True)
            with closing(sqlite3.connect(database)) as opened:
                logged = _Reader(opened, self._to, kept).read()
            if logged != LoggedRun() or kept.exists():
                kept.mkdir(parents=True, exist_ok=True)
                (kept / RECORD).write_text(json.dumps(asdict(logged)), encoding="utf-8")
            database.unlink()
        shutil.rmtree(here, ignore_errors=True)
        return logged


@dataclass(frozen=True)
class _PrivateRun:
    uid: str
    name: str
    folder: Path | None


class _Reader:
    """Reader of a private store, which moves its files.

    The run that stands for the trial's comes first, and the others follow by their start. What an earlier one has too
    gets the run's name in front: ``fold 2/loss``.
    """

    def __init__(self, database: sqlite3.Connection, to: Redirection, kept: Path) -> None:
        self._database, self._to, self._kept = database, to, kept
        self._tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def read(self) -> LoggedRun:
        params, tags = dict[str, str](), dict[str, str]()
        points, inputs, models = list[LoggedPoint](), list[LoggedInput](), list[LoggedModel]()
        num_others = 0
        for run in self._runs():
            its_params = dict(self._rows("SELECT key, value FROM params WHERE run_uuid = ? ORDER BY rowid", run.uid))
            its_tags = dict(self._rows("SELECT key, value FROM tags WHERE run_uuid = ? ORDER BY rowid", run.uid))
            its_tags = {k: v for k, v in its_tags.items() if v and (k in _KEPT_TAGS or not k.startswith("mlflow."))}
            its_points = self._points(run)
            its_inputs, its_models = self._inputs(run), list(self._models(run))
            has_files = self._move_files(run)
            if not (its_params or its_tags or its_points or its_inputs or its_models or has_files):
                continue
            num_others += run.uid != self._to.run_id
            params |= _free(its_params, params, run.name)
            tags |= _free(its_tags, tags, run.name)
            taken = {point.key for point in points}
            points += [p._replace(key=f"{run.name}/{p.key}") if p.key in taken else p for p in its_points]
            inputs += its_inputs
            models += its_models
        overruled = self._overruled()
        if num_others:
            overruled.append(f"{counted(num_others, 'run')} that it started")
        return LoggedRun(params, tags, points, inputs, models, tuple(overruled))

    def _rows(self, query: str, *values: object) -> list[Any]:
        return self._database.execute(query, values).fetchall()

    def _runs(self) -> Iterator[_PrivateRun]:
        query = "SELECT run_uuid, name, artifact_uri FROM runs WHERE lifecycle_stage = 'active'"
        for uid, name, uri in self._rows(f"{query} ORDER BY run_uuid != ?, start_time, rowid", self._to.run_id):
            yield _PrivateRun(uid, name or uid, _folder(uri))

    def _points(self, run: _PrivateRun) -> list[LoggedPoint]:
        query = "SELECT key, value, is_nan, timestamp, step FROM metrics WHERE run_uuid = ? ORDER BY rowid"
        rows = self._rows(query, run.uid)
        return [LoggedPoint(key, math.nan if is_nan else v, at_ms, step) for key, v, is_nan, at_ms, step in rows]

    def _inputs(self, run: _PrivateRun) -> list[LoggedInput]:
        query = (
            "SELECT t.value, d.name, d.digest, d.dataset_source, d.dataset_schema, d.dataset_profile "
            "FROM inputs i JOIN datasets d ON d.dataset_uuid = i.source_id "
            "LEFT JOIN input_tags t ON t.input_uuid = i.input_uuid AND t.name = 'mlflow.data.context' "
            "WHERE i.destination_id = ? AND i.destination_type = 'RUN' AND i.source_type = 'DATASET'"
        )
        return [LoggedInput(*(text or "" for text in row)) for row in self._rows(query, run.uid)]

    def _models(self, run: _PrivateRun) -> Iterator[LoggedModel]:
        if "logged_models" not in self._tables:  # before MLflow 3
            return
        query = (
            "SELECT m.model_id, m.name, m.artifact_location, max(coalesce(o.step, 0)) FROM logged_models m "
            "LEFT JOIN inputs o ON o.destination_id = m.model_id AND o.source_id = m.source_run_id "
            "WHERE m.source_run_id = ? AND m.lifecycle_stage = 'active' GROUP BY m.model_id ORDER BY m.rowid"
        )
        for uid, name, uri, step in self._rows(query, run.uid):
            folder = _folder(uri)
            if folder is None or not (folder / "MLmodel").is_file():
                continue
            (self._kept / MODELS).mkdir(parents=True, exist_ok=True)
            shutil.move(folder, self._kept / MODELS / uid)
            params = self._rows("SELECT param_key, param_value FROM logged_model_params WHERE model_id = ?", uid)
            yield LoggedModel(uid, name, step, dict(params))

    def _move_files(self, run: _PrivateRun) -> bool:
        """Move a run's artifacts; return whether it has any."""
        if run.folder is None:
            return False
        paths = [path for path in sorted(run.folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        names = {path: path.relative_to(run.folder) for path in paths}
        is_taken = any((self._kept / FILES / name).exists() for name in names.values())
        to = self._kept / FILES / (run.name.replace("/", "_") if is_taken else "")
        for path, name in names.items():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, to / name)
        return bool(paths)

    def _overruled(self) -> list[str]:
        notes = Path(self._to.folder, NOTES)
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else []
        texts = (_OVERRULED[kind].format(masked(value)) for kind, value in map(json.loads, lines))
        return list(dict.fromkeys(texts))


def _free(values: Mapping[str, str], taken: Iterable[str], name: str) -> dict[str, str]:
    """Return values by keys that are free: those that are taken get a name in front."""
    return {f"{name}/{key}" if key in taken else key: value for key, value in values.items()}


def _folder(uri: str) -> Path | None:
    """Return the folder of an artifact URI; None if there is none."""
    parts = urlsplit(uri)
    folder = Path(unquote(parts.path))
    return folder if parts.scheme in ("", "file") and folder.is_absolute() and folder.is_dir() else None
