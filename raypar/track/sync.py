"""Bring what is still in spools into the store: after an outage, or after a study was killed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypar.errors import StoreError
from raypar.masking import masked
from raypar.track import journal as spool
from raypar.track.store import default_tracking_uri
from raypar.track.uploader import Replay, RunWriter, Uploader, num_pending, replay

LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SyncReport:
    """What a sync did.

    Attributes:
        num_uploaded: records that are in the store now.
        num_left: records that are still in spools only.
        num_rejected: records that the store will never take; they are kept beside the spool.
        problems: what went wrong, one line each, for people.
    """

    num_uploaded: int = 0
    num_left: int = 0
    num_rejected: int = 0
    problems: tuple[str, ...] = ()


def sync(project_dir: Path, tracking_uri: str | None = None, *, lock_timeout_s: float = LOCK_TIMEOUT_S) -> SyncReport:
    """Uploads every pending spool. Safe to repeat, beside a running study, and beside another sync.

    Args:
        project_dir: the folder that the studies were run in.
        tracking_uri: where to; None: each to the store it was meant for.
        lock_timeout_s: how long another upload is waited for.

    Raises:
        StoreError: if the spools can't be read or written, or another upload takes too long.
    """
    if not spool.spools(project_dir):
        return SyncReport()
    try:
        with spool.upload_lock(project_dir).acquire(timeout=lock_timeout_s):
            return _sync(project_dir, tracking_uri)
    except TimeoutError as e:
        raise StoreError(
            f"Another upload from {project_dir} is taking long", hint="wait for it to end, then try again"
        ) from e
    except OSError as e:
        raise StoreError(
            f"The spools in {spool.spool_dir(project_dir)} can't be read or written: {e.strerror or e}",
            hint="make the folder writable, then try again",
        ) from e


def _sync(project_dir: Path, tracking_uri: str | None) -> SyncReport:
    uploaders: dict[str, Uploader] = {}
    outages: dict[str, str] = {}
    num_uploaded = num_left = num_rejected = 0
    problems: list[str] = []
    for path in spool.spools(project_dir):
        uri = tracking_uri or spool.target(path) or default_tracking_uri(project_dir)
        if uri not in outages:
            uploader = uploaders.setdefault(uri, Uploader(RunWriter(uri, project_dir)))
            done = _sync_one(path, uploader, uri)
            num_uploaded += done.num_uploaded
            num_rejected += done.num_rejected
            problems += done.problems
            if done.outage:
                outages[uri] = done.outage
        num_left += num_pending(path, uri)
    problems += [f"{masked(uri)} can't be reached: {reason}" for uri, reason in outages.items()]
    return SyncReport(num_uploaded, num_left, num_rejected, tuple(problems))


def _sync_one(path: Path, uploader: Uploader, tracking_uri: str) -> Replay:
    owner = spool.owner_lock(path)
    try:
        owner.acquire(timeout=0)
    except TimeoutError:  # its study is running
        return replay(path, uploader, tracking_uri)
    try:
        done = replay(path, uploader, tracking_uri, is_ended=True)
        if not done.outage:
            last = _last_record(path)
            if last is not None and last["kind"] != "close":
                _end_killed(path, last)
                end = replay(path, uploader, tracking_uri)
                done.outage = end.outage
            if not done.outage:
                spool.remove(path)
        return done
    finally:
        owner.release()


def _last_record(path: Path) -> dict[str, Any] | None:
    last = None
    for line in spool.read_lines(path, is_ended=True):
        last = line.record or last
    return last


def _end_killed(path: Path, last: dict[str, Any]) -> None:
    """The execution's process was killed: without this its run would count as running for ever."""
    keys = ("study", "execution", "at", "totals")
    journal = spool.Journal(path)
    try:
        journal.append(json.dumps({**{k: last.get(k) for k in keys}, "kind": "close", "status": "KILLED"}))
    finally:
        journal.close()
