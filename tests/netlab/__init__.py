"""Network of hosts on one Linux machine: namespaces as hosts, links between them with a rate and a delay.

    if (why := why_not()) is None:
        with Lab(2) as lab:
            lab.shape(Shape(rate_bit_per_s=100e6, delay_s=0.001))
            lab.run(0, ["python", "-c", "…"])

Every host has its own network (eth0), process table, host name, /run and /dev/shm, and shares the machine's files. The
network is isolated. With `Lab(2, with_ssh=True)`, each host has an SSH daemon and a home. Everything ends with the
`Lab`, or with the process that made it, even if that is killed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

NET = "10.77.0"
START_TIMEOUT_S = 20.0
HERE = Path(__file__).resolve().parent
NAMESPACES = ("-m", "-n", "-p", "-u", "-i")
BURST_BYTES = 256 * 1024  # room for some of the 64 KB frames that the kernel passes between hosts
QUEUE_MS = 20  # later frames are dropped
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount", "hostname", "bash")  # Debian: iproute2, util-linux
SSH_TOOLS = ("ssh", "ssh-keygen", "/usr/sbin/sshd", "rsync")  # Debian: openssh-client, openssh-server, rsync
# A small lab. Nothing remains, since the namespaces end with the shell.
TRIAL = """
mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs tmpfs /run && mkdir /run/netns &&
ip netns add trial && ip link add br0 type bridge && ip link add port0 type veth peer name eth0 netns trial &&
tc qdisc add dev port0 root tbf rate 1gbit burst 256kb latency 20ms
"""
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


def why_not(*, with_ssh=False):
    """Return the reason why no lab can be made here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a network of hosts needs Linux and root, to make namespaces and links"
    tools = TOOLS + (SSH_TOOLS if with_ssh else ())
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"a network of hosts needs {', '.join(missing)}"
    command = ["unshare", *NAMESPACES, "--fork", "bash", "-c", TRIAL]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"this machine allows no network of hosts: {tried.stderr.strip()}" if tried.returncode else None


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


class Lab:
    """Hosts 0 … num_hosts - 1, at most 10, called node0 …, each with a link to one switch.

    Args:
        with_ssh: each host has a home, and a daemon that admits root with the key `folder`/key.

    Raises:
        RuntimeError: it did not start; `why_not` may return the reason.
    """

    def __init__(self, num_hosts, *, with_ssh=False):
        self.num_hosts = num_hosts
        self.folder = Path(tempfile.mkdtemp(prefix="netlab-"))
        self._relay: subprocess.Popen[str] | None = None
        if with_ssh:
            self._write_ssh_files()
        names = "".join(f"{self.address(i)} node{i}\n" for i in range(num_hosts))
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
        # A kill cascades: this process ends the outer unshare, that the switch, that the hosts.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "--fork", "--kill-child"]
        command += ["bash", str(HERE / "switch.sh"), str(self.folder), str(num_hosts), NET]
        with (self.folder / "log").open("wb") as log:
            self._outer = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._wait_until_ready()
            self._switch = self._outer.children()[0]
            self._hosts = [self._first_process_of(i) for i in range(num_hosts)]
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def address(self, host):
        return f"{NET}.1{host}"

    def home(self, host):
        """Return root's home on a host with SSH."""
        return self.folder / f"node{host}" / "home"

    def host_pid(self, host):
        """Return the process id, on this machine, of a host's PID 1."""
        return int(self._hosts[host].pid)

    def popen(self, host, command, **how):
        """Start a command on a host, or (None) on the switch; `how` is for `subprocess.Popen`.

        It gets a new process group, since this process's group is unknown there; to end it, kill the group.
        """
        first = self._switch if host is None else self._hosts[host]
        entered = ["nsenter", "-t", str(first.pid), *NAMESPACES, f"--wd={Path.cwd()}", *map(str, command)]
        return subprocess.Popen(entered, start_new_session=True, **{"stdin": subprocess.DEVNULL, **how})

    def run(self, host, command, *, check=True):
        """Run a command on a host, or (None) on the switch, and return what it prints.

        Raises:
            RuntimeError: it failed, and `check` is set.
        """
        process = self.popen(host, command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed = process.communicate()[0]
        if check and process.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))} on host {host}: {process.returncode}\n{printed}")
        return printed

    def shape(self, shape):
        """Give all links this shape, in place of their previous one."""
        self._stop_relay()
        ports = [f"port{i}" for i in range(self.num_hosts)]
        for host, port in enumerate(ports):
            for where, device in ((None, port), (host, "eth0")):
                if shape.rate_bit_per_s is None:
                    self.run(where, ["tc", "qdisc", "del", "dev", device, "root"], check=False)  # if there is a limit
                else:
                    limit = ("rate", f"{round(shape.rate_bit_per_s)}bit", "burst", str(BURST_BYTES))
                    tbf = ("root", "tbf", *limit, "latency", f"{QUEUE_MS}ms")
                    self.run(where, ["tc", "qdisc", "replace", "dev", device, *tbf])
            via = ["nomaster"] if shape.delay_s else ["master", "br0"]
            self.run(None, ["ip", "link", "set", port, *via])
        if shape.delay_s:
            self._start_relay(shape.delay_s, ports)

    def close(self):
        """End every process, namespace and link of the lab, and wait for it."""
        processes = self._outer.children(recursive=True) if self._outer.poll() is None else []
        self._outer.kill()
        self._outer.wait()
        psutil.wait_procs(processes, timeout=10)
        if self._relay:
            self._relay.communicate()
            self._relay = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_relay(self, delay_s, ports):
        command = [sys.executable, HERE / "relay.py", str(delay_s * 1e3), *ports]
        with (self.folder / "relay.log").open("ab") as log:
            self._relay = self.popen(None, command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise RuntimeError(f"the relay did not start: {(self.folder / 'relay.log').read_text()}")

    def _stop_relay(self):
        if self._relay:
            for process in psutil.Process(self._relay.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._relay.communicate()
            self._relay = None

    def _wait_until_ready(self):
        awaited = [self.folder / "switch.ready", *(self.folder / f"host{i}.ready" for i in range(self.num_hosts))]
        until_s = time.monotonic() + START_TIMEOUT_S
        while not all(path.exists() for path in awaited):
            if self._outer.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the hosts did not start: {(self.folder / 'log').read_text()}")
            time.sleep(0.02)

    def _first_process_of(self, host):
        ending = [str(HERE / "host.sh"), str(self.folder), str(host)]
        (outer,) = [p for p in self._switch.children() if p.cmdline()[0] == "unshare" and p.cmdline()[-3:] == ending]
        return outer.children()[0]

    def _write_ssh_files(self):
        """Write what `host.sh` mounts on each host and gives its daemon."""
        for name in ("key", "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        (self.folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=self.folder))
        (self.folder / "resolv.conf").touch()  # no name server
        users = Path("/etc/passwd").read_text().splitlines(keepends=True)
        for host in range(self.num_hosts):
            self.home(host).mkdir(parents=True)
            (self.folder / f"node{host}" / "ray").mkdir()
            root = f"root:x:0:0:root:{self.home(host)}:/bin/bash\n"
            accounts = [root if user.startswith("root:") else user for user in users]
            (self.folder / f"node{host}" / "passwd").write_text("".join(accounts))
