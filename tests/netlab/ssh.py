"""Files of hosts with SSH: for each a home, a /tmp/ray and a user, and a daemon that accepts one key."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

TOOLS = {
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "/usr/sbin/sshd": "openssh-server",
    "rsync": "rsync",
}
SSHD_CONFIG = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
PidFile none
UseDNS no
MaxStartups 100
MaxSessions 100
"""


def why_no_ssh() -> str | None:
    """Return the reason why no host with SSH can be made here, or None."""
    missing = {tool: package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if missing:
        return f"hosts with SSH need {', '.join(missing)} (Debian: {' '.join(sorted(set(missing.values())))})"
    return None


def prepare(folder: Path, num_hosts: int) -> None:
    """Write the files that `host.sh` mounts on each host and gives its daemon; `folder`/key opens all hosts."""
    for name in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
    (folder / "resolv.conf").touch()  # no name server
    users = Path("/etc/passwd").read_text().splitlines()
    for host in range(num_hosts):
        home = home_of(folder, host)
        home.mkdir(parents=True)
        (folder / f"node{host}" / "ray").mkdir()
        accounts = [f"root:x:0:0:root:{home}:/bin/bash" if user.startswith("root:") else user for user in users]
        (folder / f"node{host}" / "passwd").write_text("\n".join(accounts) + "\n")


def home_of(folder: Path, host: int) -> Path:
    return folder / f"node{host}" / "home"
