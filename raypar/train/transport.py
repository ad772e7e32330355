"""Transport between the ranks of a gang, as gloo is set up and as NCCL logs it."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Lines of NCCL_DEBUG=INFO. The network that connects nodes:
#   NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
#   NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
# and the channels between ranks, also those of a node:
#   NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
#   NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/0/GDRDMA
_NCCL_NETWORK = re.compile(r"NCCL INFO NET/(\S+) : Using (\[\d+\]\S+?)(?:<\d+>|[ ;\n]|$)", re.MULTILINE)
_NCCL_CHANNEL = re.compile(r"NCCL INFO Channel \S+ : .* via ([\w/]+)")
_TRAILING_NUMBERS = re.compile(r"(/\d+)+(?=/|$)")


def transport_of(device_type: str, log: Path) -> str:
    """Return what carries the messages of this rank's process group, for people.

    ``gloo, TCP sockets on eth0``; ``NCCL, P2P/CUMEM``; ``NCCL, NET/IB on mlx5_0:1/RoCE``.

    Args:
        device_type: "cuda" for NCCL.
        log: output of this rank, which has NCCL's lines if NCCL_DEBUG is INFO.
    """
    if device_type != "cuda":
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        return f"gloo, TCP sockets on {interface}" if interface else "gloo, TCP sockets"
    try:
        return nccl_transport(log.read_text(errors="replace"))
    except OSError:
        return "NCCL"


def nccl_transport(log: str) -> str:
    """Return the transports that NCCL's log names, with the interface if one is a network.

    Without channels in the log, the network that NCCL found counts.
    """
    networks = {kind: device.partition("]")[2] for kind, device in _NCCL_NETWORK.findall(log)}
    ways = list(dict.fromkeys(_TRAILING_NUMBERS.sub("", way) for way in _NCCL_CHANNEL.findall(log)))
    texts = []
    for way in ways or [f"NET/{kind}" for kind in networks]:
        of = way.split("/")
        device = networks.get(of[1]) if of[0] == "NET" and len(of) > 1 else None
        texts.append(f"{way} on {device}" if device else way)
    return ", ".join(["NCCL", *texts])
