"""Journal of an execution: every record is first a line on local disk, and stays there until the store has it.

A journal is a file of JSON lines, one per execution. Beside it are an ack file (the offset up to which a store has the
records) and a lock that the writing process holds until it ends: a journal whose lock is free has no writer.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.files import make_private_folder, open_private, sync_folder
from raypar.track.names import safe_name

if TYPE_CHECKING:
    from filelock import BaseFileLock

SUFFIX = ".jsonl"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JournalLine:
    """Line of a journal, from offset `start` to `end`.

    Attributes:
        record: its content; None if damaged.
        problem: description of the damage with file and line; empty if there is none.
    """

    start: int
    end: int
    record: dict[str, Any] | None
    problem: str = ""


def journal_dir(project_dir: Path) -> Path:
    return project_dir / ".raypar" / "spool"


def journal_path(project_dir: Path, study: str, execution_uid: str) -> Path:
    """Return the path of an execution's journal, which is in `journal_dir` for every name of a study."""
    return journal_dir(project_dir) / f"{safe_name(study)}-{safe_name(execution_uid)}{SUFFIX}"


def journal_paths(project_dir: Path, tracking_uri: str | None = None) -> tuple[Path, ...]:
    """Return a project's journals for a store, oldest first; None: for all stores."""
    by_age = []
    for path in journal_dir(project_dir).glob(f"*{SUFFIX}"):
        if tracking_uri is not None and read_ack(path)[0] != tracking_uri:
            continue
        with suppress(FileNotFoundError):  # just uploaded by another process
            by_age.append((path.stat().st_mtime_ns, path))
    return tuple(path for _, path in sorted(by_age))


def study_of(path: Path) -> str:
    """Return the study of a journal, from its first readable record; empty if there is none."""
    with suppress(OSError):
        return next((str(line.record.get("study", "")) for line in read_lines(path) if line.record), "")
    return ""


class Journal:
    """Writer of a journal file. A line is on disk when `append` returns. Raises OSError."""

    def __init__(self, path: Path) -> None:
        make_private_folder(path.parent)
        self.path = path
        # Private: it may contain a store's address with a password.
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        size = self.size
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        sync_folder(path.parent)

    def append(self, text: str) -> int:
        """Append a line and return its offset. A torn line before it is ended first.

        Raises OSError if the line can't be written. It then leaves nothing, or a separate damaged line.
        """
        before = self.size
        start = before + self._is_torn
        view = memoryview(b"\n" * self._is_torn + text.encode("utf-8", "surrogatepass") + b"\n")
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except BaseException as e:
            # Ctrl-C may leave half a line too. After a complete line, only the sync is missing.
            if view or isinstance(e, OSError):
                try:
                    os.ftruncate(self._fd, before)
                except OSError:
                    self._is_torn = True
            raise
        self._is_torn = False
        return start

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path, start: int = 0, *, is_ended: bool = False) -> Iterator[JournalLine]:
    """Yield the lines from an offset on, including damaged ones; an unterminated last line only if `is_ended`."""
    with path.open("rb") as file:
        file.seek(start)
        while raw := file.readline():
            if not raw.endswith(b"\n") and not is_ended:
                return
            end = start + len(raw)
            if raw.strip():
                yield _parse(path, start, end, raw)
            start = end


def _parse(path: Path, start: int, end: int, raw: bytes) -> JournalLine:
    try:
        record = json.loads(raw)
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            return JournalLine(start, end, record)
        problem = "is not a record"
    except (ValueError, RecursionError):
        problem = "is damaged"
    with path.open("rb") as file:
        number = file.read(start).count(b"\n") + 1
    return JournalLine(start, end, None, f"{path}, line {number}: {problem}, skipped")


def pending_lines(path: Path, tracking_uri: str, *, is_ended: bool = False) -> Iterator[JournalLine]:
    """Yield the lines that this store has not acknowledged; see `read_lines`."""
    uri, offset = read_ack(path)
    return read_lines(path, offset if uri == tracking_uri else 0, is_ended=is_ended)


def pending_records(project_dir: Path, tracking_uri: str) -> Iterator[dict[str, Any]]:
    """Yield a project's records for this store that are not in it yet; log damaged lines."""
    for path in journal_paths(project_dir, tracking_uri):
        with suppress(OSError):  # uploaded and removed by now
            for line in pending_lines(path, tracking_uri):
                if line.record is None:
                    log.warning("%s", line.problem)
                elif {"study", "execution", "at", "totals"} <= line.record.keys():
                    yield line.record


def num_pending(path: Path, tracking_uri: str) -> int:
    """Count the records of a journal that this store has not acknowledged."""
    with suppress(FileNotFoundError):
        return sum(line.record is not None for line in pending_lines(path, tracking_uri))
    return 0


def read_ack(path: Path) -> tuple[str | None, int]:
    """Return the address of a journal's store, and the offset up to which the store has it."""
    try:
        ack = json.loads(path.with_suffix(".ack").read_text())
        return str(ack["tracking_uri"]), int(ack["offset"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None, 0  # at worst, records are sent twice, which the upload recognises


def write_ack(path: Path, tracking_uri: str, offset: int) -> None:
    """Replace the ack atomically. It is not synced: with an older one, records are only sent twice."""
    draft = path.with_suffix(".ack-new")
    with os.fdopen(open_private(draft, os.O_TRUNC), "w") as file:
        json.dump({"tracking_uri": tracking_uri, "offset": offset}, file)
    draft.replace(path.with_suffix(".ack"))


def keep_rejected(path: Path, record: dict[str, Any], reason: str) -> Path:
    """Append a record that the store refuses to a file beside the journal; return that file."""
    rejected = path.with_suffix(".rejected")
    with os.fdopen(open_private(rejected, os.O_APPEND), "w") as file:
        file.write(json.dumps({"reason": reason, "record": record}) + "\n")
    return rejected


def remove(path: Path) -> None:
    """Delete a journal that is completely in the store. Call it under `upload_lock`."""
    for suffix in (SUFFIX, ".ack", ".owner"):
        path.with_suffix(suffix).unlink(missing_ok=True)


def kept_folder(project_dir: Path, recorded: object) -> Path | None:
    """Return the folder of a trial's files named in a record; None if it is missing or outside of this project.

    A foreign journal must not get other folders uploaded to a store.
    """
    if not isinstance(recorded, str) or not recorded or "\0" in recorded:
        return None
    folder = Path(recorded)
    is_inside = folder.resolve().is_relative_to((project_dir / ".raypar").resolve())
    return folder if is_inside and folder.is_dir() else None


def is_abandoned(path: Path) -> bool:
    """Return True if a journal's writing process has ended. Raises OSError if its lock can't be tried."""
    if not path.exists():
        return False
    with suppress(TimeoutError), owner_lock(path).acquire(timeout=0):
        return True
    return False


def upload_lock(project_dir: Path) -> BaseFileLock:
    """Return the lock that an upload from this project holds."""
    return owner_lock(journal_dir(project_dir) / "upload", ".lock")


def owner_lock(path: Path, suffix: str = ".owner") -> BaseFileLock:
    """Return the lock that a journal's writing process holds until it ends."""
    from filelock import FileLock

    make_private_folder(path.parent)
    return FileLock(path.with_suffix(suffix), thread_local=False)
