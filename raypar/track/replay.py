"""From spool to store: upload what is pending, in order, and remember how far it got."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from raypar.track import spool
from raypar.track.client import Rejected, Unreachable
from raypar.track.upload import Uploader

log = logging.getLogger(__name__)


@dataclass
class Replay:
    """What one pass over a spool did.

    Attributes:
        problems: damaged and rejected records, file and line named.
        outage: why it stopped; empty if it went to the end.
    """

    num_uploaded: int = 0
    num_rejected: int = 0
    problems: list[str] = field(default_factory=list)
    outage: str = ""


def replay(
    path: Path, uploader: Uploader, tracking_uri: str, *, new_from: int | None = None, is_ended: bool = False
) -> Replay:
    """Uploads the pending records of a spool. To be called under `spool.upload_lock`.

    Args:
        path: the spool.
        uploader: to the store of `tracking_uri`.
        tracking_uri: which store's ack counts.
        new_from: the offset from which on no record can be in the store yet.
        is_ended: nobody writes the spool any more, so that a half-written last line will never be whole.

    Raises:
        OSError: if the spool can't be read, or the ack not be written.
    """
    done = Replay()
    for line in spool.read_lines(path, spool.read_ack(path, tracking_uri), is_ended=is_ended):
        if line.record is None:
            done.problems.append(line.problem)
            log.warning("%s", line.problem)
        else:
            try:
                uploader.apply(line.record, is_new=new_from is not None and line.start >= new_from)
                done.num_uploaded += 1
            except Unreachable as e:
                done.outage = str(e) or "no answer"
                return done
            except Rejected as e:
                kept = spool.keep_rejected(path, line.record, str(e))
                done.num_rejected += 1
                done.problems.append(f"a {line.record['kind']} record was refused by the store, kept in {kept}: {e}")
                log.warning("%s", done.problems[-1])
        spool.write_ack(path, tracking_uri, line.end)
    return done


def num_pending(path: Path, tracking_uri: str) -> int:
    """How many records of a spool this store has not got."""
    try:
        return sum(line.record is not None for line in spool.read_lines(path, spool.read_ack(path, tracking_uri)))
    except FileNotFoundError:
        return 0
