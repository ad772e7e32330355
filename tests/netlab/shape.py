"""Rate and delay of a lab's links."""

from __future__ import annotations

from dataclasses import dataclass

BURST_BYTES = 256 * 1024  # holds some of the 64 KB frames that the kernel passes between hosts
QUEUE_MS = 20  # of frames; more are dropped


@dataclass(frozen=True)
class Shape:
    """Rate and delay of every host's link.

    Attributes:
        rate_bit_per_s: of a link, each way, headers included (by the kernel's token bucket filter: accurate from 0.1
            to 2 Gbit/s); None: unlimited.
        delay_s: of a frame from one host to another, one way; a round trip takes twice as long.
    """

    rate_bit_per_s: float | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rate_bit_per_s is not None and not self.rate_bit_per_s > 0:
            raise ValueError(f"rate_bit_per_s={self.rate_bit_per_s}: must be greater than 0")
        if not self.delay_s >= 0:
            raise ValueError(f"delay_s={self.delay_s}: must be 0 or more")


def limit_command(device: str, rate_bit_per_s: float) -> list[str]:
    """Return the command that limits the rate at which a device sends."""
    filter_ = ["tbf", "rate", f"{round(rate_bit_per_s)}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
    return ["tc", "qdisc", "replace", "dev", device, "root", *filter_]


def unlimit_command(device: str) -> list[str]:
    return ["tc", "qdisc", "del", "dev", device, "root"]
