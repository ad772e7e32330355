"""Requests to a fork server, from gangs and from ranks. See `raypar.run.forkserver.serve`."""

from __future__ import annotations

from enum import StrEnum

SERVER = "RAYPAR_FORK_SERVER"  # variable of a fork server and its ranks: its address


class Request(StrEnum):
    """Kind of a request to a fork server."""

    READY = "ready"
    RANK = "rank"
    AHEAD = "ahead"
    CHECK = "check"
    FIND = "find"
    OFFER = "offer"
    KEEP = "keep"
