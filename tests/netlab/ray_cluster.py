"""Ray cluster on a lab's hosts, started by `ray up` from cluster-local.yaml."""

import os
import re
import sys
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER_FILE = REPOSITORY / "cluster-local.yaml"
HEAD = 0
# Shorter waits: by default a node without a head ends after a minute, and the launcher polls every five seconds.
GIVE_UP_EARLY = "RAY_gcs_rpc_server_reconnect_timeout_s=10"
LOOK_OFTEN = "AUTOSCALER_UPDATE_INTERVAL_S=1 AUTOSCALER_NODE_SSH_INTERVAL_S=1"


class RayCluster:
    """Cluster with host 0 as head and hosts 1 … num_workers as nodes. The last host is the client and has the key.

    It differs from the users' file in the addresses, the key, two CPUs and labels per node, and shorter waits. It uses
    this environment and the copied code, in place of an installation on each machine.
    """

    def __init__(self, lab):
        self.lab = lab
        self.client = lab.num_hosts - 1
        self.num_workers = lab.num_hosts - 2
        self.head_address = lab.address(HEAD)
        self.file = lab.home(self.client) / "cluster-local.yaml"
        self.file.write_text(yaml.safe_dump(self._config()))

    def make_token(self):
        """Create the token as the users' file describes, and return its path."""
        (line,) = re.findall(r"\(umask 077 && ray get-auth-token --generate [^)]*\)", CLUSTER_FILE.read_text())
        self.run(self.client, line)
        return self.lab.home(self.client) / ".ray" / "auth_token"

    def up(self):
        """Run `ray up`, which returns before the nodes have joined."""
        self.run(self.client, f"cd {REPOSITORY} && {LOOK_OFTEN} ray up -y --no-config-cache {self.file}")

    def run(self, host, command, *, check=True, **environment):
        """Run a shell command on a host, in its user's environment, and return its output.

        Raises:
            RuntimeError: it failed, and `check` is set.
        """
        return self.lab.run(host, self._on(host, command, **environment), check=check)

    def start(self, host, command):
        """Start a shell command as the leader of a process group."""
        return self.lab.popen(host, self._on(host, command))

    def _on(self, host, command, **environment):
        everything = {
            "HOME": str(self.lab.home(host)),
            "USER": "root",
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }
        given = [f"{key}={value}" for key, value in everything.items()]
        return ["env", "-i", "-C", str(self.lab.home(host)), *given, "bash", "-c", command]

    def _config(self):
        config = yaml.safe_load(CLUSTER_FILE.read_text())
        config["cluster_name"] = self.lab.folder.name  # by which Ray names files that it shares among clusters
        config["provider"]["head_ip"] = self.head_address
        config["provider"]["worker_ips"] = [self.lab.address(i + 1) for i in range(self.num_workers)]
        config["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.lab.folder / "key")}
        config["setup_commands"] = [
            "ln -sfn " + sys.prefix + " ~/venv" if "pip install" in command else command
            for command in config["setup_commands"]
            if "-m venv" not in command
        ] + ["echo 'export PYTHONPATH=~/raypar RAY_USAGE_STATS_ENABLED=0' >> ~/.bashrc"]
        config["head_setup_commands"] = [c for c in config["head_setup_commands"] if "pip install" not in c]
        flags = "ray start --object-store-memory=100000000"
        for role, variables, more in (
            ("worker", GIVE_UP_EARLY, " --num-cpus=2 --labels host=$(hostname),raypar-machine=$(hostname)"),
            ("head", LOOK_OFTEN, ""),
        ):
            config[f"{role}_start_ray_commands"] = [
                command.replace("RAY_AUTH_MODE", f"{variables} RAY_AUTH_MODE").replace("ray start", flags + more)
                for command in config[f"{role}_start_ray_commands"]
            ]
        return config
