"""Check that this machine allows networks of hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
    "bash": "bash",
}
# A lab in small; nothing remains, as the namespaces end with the shell.
TRIAL = """
mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs tmpfs /run && mkdir /run/netns &&
ip netns add trial && ip link add br0 type bridge && ip link add port0 type veth peer name eth0 netns trial &&
tc qdisc add dev port0 root tbf rate 1gbit burst 256kb latency 20ms
"""


def why_not() -> str | None:
    """Return the reason why no lab can be made here, or None."""
    if sys.platform != "linux":
        return "a network of hosts needs Linux namespaces"
    if os.geteuid() != 0:
        return "a network of hosts needs root, to make namespaces and links"
    missing = {tool: package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if missing:
        return f"a network of hosts needs {', '.join(missing)} (Debian: {' '.join(sorted(set(missing.values())))})"
    tried = subprocess.run(
        ["unshare", "-n", "-p", "-m", "-u", "-i", "--fork", "bash", "-c", TRIAL],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return f"this machine allows no network of hosts: {tried.stderr.strip()}"
    return None
