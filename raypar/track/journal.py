"""The journal: what is to reach the store is first a line in a local file, on disk, and stays until it is there.

One spool file per execution, one JSON object per line. Beside it lie an ack file (how far which store has it) and a
lock that the writing process holds as long as it lives, so that whoever uploads a left-over knows that it is one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.fsync import sync_folder
from raypar.track.names import safe_name

if TYPE_CHECKING:
    from filelock import BaseFileLock


SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Line:
    """One line of a spool.

    Attributes:
        start: where it begins, in bytes.
        end: where the next one begins.
        record: what it says; None where it is damaged.
        problem: what is wrong with it, file and line named; empty where nothing is.
    """

    start: int
    end: int
    record: dict[str, Any] | None
    problem: str = ""


def spool_dir(project_dir: Path) -> Path:
    return project_dir / ".raypar" / "spool"


def spool_path(project_dir: Path, study: str, execution_uid: str) -> Path:
    """Inside the spool folder whatever the study is called."""
    return spool_dir(project_dir) / f"{safe_name(study)}-{safe_name(execution_uid)}{SUFFIX}"


def spools(project_dir: Path) -> tuple[Path, ...]:
    """All spool files, oldest first."""
    found = []
    for path in spool_dir(project_dir).glob(f"*{SUFFIX}"):
        try:
            found.append((path.stat().st_mtime_ns, path))
        except FileNotFoundError:  # just uploaded by someone else
            continue
    return tuple(path for _, path in sorted(found))


class Journal:
    """Appends lines to a spool file; a line is on disk when `append` returns.

    Raises:
        OSError: if the file can't be created or opened.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        # It may hold a store's address with a password: for the owner only.
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        size = os.fstat(self._fd).st_size
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        sync_folder(path.parent)

    def append(self, text: str) -> int:
        """Where the line begins. A line that was cut off before it is ended first, so it can't swallow this one.

        Raises:
            OSError: if it can't be written; nothing of it is left then, or it is a damaged line of its own.
        """
        before = os.fstat(self._fd).st_size
        start = before + self._is_torn
        view = memoryview(b"\n" * self._is_torn + text.encode("utf-8", "surrogatepass") + b"\n")
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except BaseException as e:
            # Ctrl-C in the middle leaves half a line as well; after the whole line, only the sync is missing.
            if view or isinstance(e, OSError):
                self._undo(before)
            raise
        self._is_torn = False
        return start

    def _undo(self, size: int) -> None:
        try:
            os.ftruncate(self._fd, size)
        except OSError:
            self._is_torn = True

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path, start: int = 0, *, is_ended: bool = False) -> Iterator[Line]:
    """The lines from an offset on, the damaged ones included; a last line without an end only if `is_ended`."""
    with path.open("rb") as file:
        file.seek(start)
        while raw := file.readline():
            if not raw.endswith(b"\n") and not is_ended:
                return
            end = start + len(raw)
            if raw.strip():
                yield _parse(path, start, end, raw)
            start = end


def _parse(path: Path, start: int, end: int, raw: bytes) -> Line:
    try:
        record = json.loads(raw)
        if isinstance(record, dict) and isinstance(record.get("kind"), str):
            return Line(start, end, record)
        problem = "is not a record"
    except (ValueError, RecursionError):
        problem = "is damaged"
    return Line(start, end, None, f"{path}, line {_line_number(path, start)}: {problem}, skipped")


def _line_number(path: Path, start: int) -> int:
    with path.open("rb") as file:
        return file.read(start).count(b"\n") + 1


def _ack_path(spool: Path) -> Path:
    return spool.with_suffix(".ack")


def read_ack(spool: Path, tracking_uri: str) -> int:
    """Up to which offset this store has the spool; 0 for any other store than the one last uploaded to."""
    try:
        ack = json.loads(_ack_path(spool).read_text())
        return int(ack["offset"]) if ack["tracking_uri"] == tracking_uri else 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0  # at worst something is sent twice, and recognised


def target(spool: Path) -> str | None:
    """The store that a spool is meant for; None if that is lost."""
    try:
        return str(json.loads(_ack_path(spool).read_text())["tracking_uri"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_ack(spool: Path, tracking_uri: str, offset: int) -> None:
    """Replaces the ack in one go. Not synced: an older one only means that something is sent twice."""
    draft = spool.with_suffix(".ack-new")
    # Created as the spool is: for the owner only.
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"tracking_uri": tracking_uri, "offset": offset}, file)
    draft.replace(_ack_path(spool))


def kept_folder(project_dir: Path, named: object) -> Path | None:
    """The folder of what a trial has kept, as a record names it. None where it is gone, or not one of this project's:
    a spool that somebody else has written can't have other folders sent to a store."""
    if not isinstance(named, str) or not named or "\0" in named:
        return None
    folder = Path(named)
    is_own = folder.resolve().is_relative_to((project_dir / ".raypar").resolve())
    return folder if is_own and folder.is_dir() else None


def keep_rejected(spool: Path, record: dict[str, Any], reason: str) -> Path:
    """Sets a record aside that the store will never take."""
    path = spool.with_suffix(".rejected")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
        file.write(json.dumps({"reason": reason, "record": record}) + "\n")
    return path


def remove(spool: Path) -> None:
    """Deletes a spool that is in the store as a whole. To be called under `upload_lock`."""
    for path in (spool, _ack_path(spool), _owner_lock_path(spool)):
        path.unlink(missing_ok=True)


def upload_lock(project_dir: Path) -> BaseFileLock:
    """Held by whoever uploads from this project."""
    return _lock(spool_dir(project_dir) / "upload.lock")


def owner_lock(spool: Path) -> BaseFileLock:
    """Held by the process that writes the spool, as long as it lives."""
    return _lock(_owner_lock_path(spool))


def _owner_lock_path(spool: Path) -> Path:
    return spool.with_suffix(".owner")


def _lock(path: Path) -> BaseFileLock:
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, thread_local=False)
