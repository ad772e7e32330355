"""Status of a hanging gang on GPUs, as NCCL describes it.

Since 2.24, NCCL has a thread in each process of a job that answers clients over TCP, also while the GPU waits in a
collective operation: its RAS (reliability, availability, serviceability). It knows which ranks have begun which
operations. By default, it listens at ``localhost:28028`` on every node, together with all other jobs there, so raypar
gives each rank its own port.

The protocol is lines of text, as in NCCL's client ``ncclras`` (``src/ras/client.cc``) and
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from raypar.train.job import RankContext

ADDRESS, ENABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
ASK_S = 2.0  # for the whole answer
PEERS_S = 1  # that NCCL waits for the other processes
MAX_BYTES = 10**6
HEAD = "NCCL's RAS, asked before this rank was killed:"


@contextlib.contextmanager
def listening(context: RankContext, device: str, environment: Mapping[str, str]) -> Iterator[RankContext]:
    """Reserve a port for the RAS of a rank on a GPU during the block; yield the rank's context with it.

    Args:
        environment: variables that the rank inherits; an address of the user's is kept.
    """
    if device != "cuda" or ADDRESS in environment or environment.get(ENABLE) == "0":
        yield context
        return
    with socket.socket() as reserved:  # NCCL binds to the same port, which it opens for reuse
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            reserved.setsockopt(socket.SOL_SOCKET, option, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        yield replace(context, environment={**context.environment, ADDRESS: address})


def status(address: str, limit_s: float = ASK_S) -> str:
    """Return what the RAS at an address says about its job; empty if none answers in time.

    Args:
        address: ``host:port``, as in NCCL_RAS_ADDR.
    """
    host, _, port = address.rpartition(":")
    until_s = time.monotonic() + limit_s
    text = b""
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host, int(port)), limit_s) as connection:
        # An answer that was cut short, as another process is lost, still tells something.
        for request, is_last in (("CLIENT PROTOCOL 2", False), (f"TIMEOUT {PEERS_S}", False), ("VERBOSE STATUS", True)):
            connection.sendall(f"{request}\n".encode())
            answer = b""
            while is_last or not answer.endswith(b"\n"):
                connection.settimeout(max(0.001, until_s - time.monotonic()))
                received = connection.recv(65536)
                answer += received
                text = answer if is_last else b""
                if not received or len(answer) > MAX_BYTES:
                    break
    return text[:MAX_BYTES].decode(errors="replace").strip()


def note_status(context: RankContext, environment: Mapping[str, str], log_path: Path) -> None:
    """Append the status of a rank's job to its log, if it has one. Never fails."""
    address = {**environment, **context.environment}.get(ADDRESS, "")
    if address and (text := status(address)):
        with contextlib.suppress(OSError), log_path.open("a", encoding="utf-8") as log:
            log.write(f"\n{HEAD}\n{text}\n")
