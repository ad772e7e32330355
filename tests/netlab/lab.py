"""Start and end of a lab's hosts, and commands on them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from netlab.shape import Shape, limit_command, unlimit_command
from netlab.ssh import home_of, prepare

NET = "10.77.0"
MAX_HOSTS = 10  # an address's last number is 1 and the host's digit
START_TIMEOUT_S = 20.0
POLL_S = 0.02
END_TIMEOUT_S = 10.0
HERE = Path(__file__).resolve().parent
NAMESPACES = ("-m", "-n", "-p", "-u", "-i")


class Lab:
    """Hosts 0 … num_hosts - 1, called node0 …, each with a link to one switch.

    Args:
        num_hosts: from 1 to `MAX_HOSTS`.
        with_ssh: each host has a home, and a daemon that admits root with the key `folder`/key.

    Raises:
        RuntimeError: it did not start; `why_not` (with ssh also `why_no_ssh`) may return the reason.
    """

    def __init__(self, num_hosts: int, *, with_ssh: bool = False) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"num_hosts={num_hosts}: must be from 1 to {MAX_HOSTS}")
        self.num_hosts = num_hosts
        self.folder = Path(tempfile.mkdtemp(prefix="netlab-"))
        self._relay: subprocess.Popen[str] | None = None
        if with_ssh:
            prepare(self.folder, num_hosts)
        names = "".join(f"{self.address(i)} node{i}\n" for i in range(num_hosts))
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
        with (self.folder / "log").open("wb") as log:
            # A kill cascades: this process ends the outer unshare, that the switch, that the hosts.
            self._outer = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", *NAMESPACES, "--fork", "--kill-child"),
                    *("bash", str(HERE / "switch.sh"), str(self.folder), str(num_hosts), NET),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_until_ready()
            self._switch = psutil.Process(self._outer.pid).children()[0]
            self._hosts = [self._first_process_of(i) for i in range(num_hosts)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def address(self, host: int) -> str:
        return f"{NET}.1{host}"

    def home(self, host: int) -> Path:
        """Return root's home on a host with SSH."""
        return home_of(self.folder, host)

    def host_pid(self, host: int) -> int:
        """Return the process id, on this machine, of a host's PID 1."""
        return int(self._hosts[host].pid)

    def popen(self, host: int | None, command: Sequence[str | Path], **how: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, or (None) on the switch; `how` is for `subprocess.Popen`.

        It gets a new process group, since this process's group is unknown there; to end it, kill the group.
        """
        first = self._switch if host is None else self._hosts[host]
        entered = ["nsenter", "-t", str(first.pid), *NAMESPACES, f"--wd={Path.cwd()}", *map(str, command)]
        return subprocess.Popen(entered, start_new_session=True, **{"stdin": subprocess.DEVNULL, **how})

    def run(
        self,
        host: int | None,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> str:
        """Run a command on a host, or (None) on the switch, and return what it prints.

        Raises:
            RuntimeError: it failed, and `check` is set.
        """
        process = self.popen(host, command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed: str = process.communicate()[0]
        if check and process.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))} on host {host}: {process.returncode}\n{printed}")
        return printed

    def switch_off(self, host: int) -> None:
        """Kill all processes of a host, as a power cut would; its link falls silent."""
        self._hosts[host].kill()
        self._hosts[host].wait(END_TIMEOUT_S)

    def shape(self, shape: Shape) -> None:
        """Give all links this shape, in place of their previous one."""
        self._stop_relay()
        ports = [f"port{i}" for i in range(self.num_hosts)]
        for host, port in enumerate(ports):
            for where, device in ((None, port), (host, "eth0")):
                if shape.rate_bit_per_s is None:
                    self.run(where, unlimit_command(device), check=False)  # there may be no limit
                else:
                    self.run(where, limit_command(device, shape.rate_bit_per_s))
            via = ["nomaster"] if shape.delay_s else ["master", "br0"]
            self.run(None, ["ip", "link", "set", port, *via])
        if shape.delay_s:
            self._start_relay(shape.delay_s, ports)

    def close(self) -> None:
        """End every process, namespace and link of the lab, and wait for it."""
        ours = psutil.Process(self._outer.pid).children(recursive=True) if self._outer.poll() is None else []
        self._outer.kill()
        self._outer.wait()
        psutil.wait_procs(ours, timeout=END_TIMEOUT_S)
        if self._relay:
            self._relay.wait()
            self._relay = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_relay(self, delay_s: float, ports: Sequence[str]) -> None:
        command = [sys.executable, HERE / "relay.py", str(delay_s * 1e3), *ports]
        with (self.folder / "relay.log").open("ab") as log:
            self._relay = self.popen(None, command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise RuntimeError(f"the relay did not start: {(self.folder / 'relay.log').read_text()}")

    def _stop_relay(self) -> None:
        if self._relay:
            for process in psutil.Process(self._relay.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._relay.wait()
            assert self._relay.stdout is not None
            self._relay.stdout.close()
            self._relay = None

    def _wait_until_ready(self) -> None:
        awaited = [self.folder / "switch.ready", *(self.folder / f"host{i}.ready" for i in range(self.num_hosts))]
        until_s = time.monotonic() + START_TIMEOUT_S
        while not all(path.exists() for path in awaited):
            if self._outer.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the hosts did not start: {(self.folder / 'log').read_text()}")
            time.sleep(POLL_S)

    def _first_process_of(self, host: int) -> psutil.Process:
        ending = [str(HERE / "host.sh"), str(self.folder), str(host)]
        (outer,) = [p for p in self._switch.children() if p.cmdline()[0] == "unshare" and p.cmdline()[-3:] == ending]
        return outer.children()[0]
