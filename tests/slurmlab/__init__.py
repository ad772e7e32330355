"""Slurm on one Linux machine: a login host with the controller, and compute nodes, each in namespaces of its own.

    if (why := why_not()) is None:
        with SlurmLab(3) as lab:
            lab.run("srun -N3 hostname")                 # alice, on the login host
            lab.run("ls /tmp", user="bob", node=2)
            lab.power_off(3); lab.power_on(3)

Each host has its own network (10.78.0.0/24, without a route to anywhere else), process table, host name, /tmp and
/dev/shm. The users alice and bob share /home. The nodes share the machine's cores: core 0 is the same for all of them.
Everything ends with the `SlurmLab`, or with the process that made it, even if that is killed.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

NET = "10.78.0"
USERS = {"root": 0, "alice": 2001, "bob": 2002}
NAMESPACES = ("-m", "-n", "-p", "-u", "-i")
TOOLS = ("ip", "unshare", "nsenter", "setpriv", "mount", "hostname", "slurmctld", "slurmd", "munged", "srun")
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
START_TIMEOUT_S = 60.0
CONFIG = """\
ClusterName=lab
SlurmctldHost=login({net}.1)
AuthType=auth/munge
SlurmUser=root
StateSaveLocation=/var/spool/slurm/ctld
SlurmdSpoolDir=/var/spool/slurm/d
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=2000
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
MailProg=/bin/true
SchedulerParameters=sched_min_interval=100000,bf_interval=5
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName=node{i} NodeAddr={net}.1{i} Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=6000 State=UNKNOWN"
# Nothing uses cgroups here, but slurmd looks for them, and `ip netns exec` shows it an empty /sys/fs/cgroup.
CGROUP_CONFIG = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def why_not():
    """Return the reason why no lab can be made here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm of several hosts needs Linux and root, to make namespaces"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)} (Debian: iproute2, util-linux, slurm-wlm, munge)"
    return None


class SlurmLab:
    """Login host, and nodes 1 … num_nodes that claim two CPUs each. `folder` holds its files, the logs among them.

    Raises:
        RuntimeError: it did not start.
    """

    def __init__(self, num_nodes):
        self.num_nodes = num_nodes
        self.folder = Path(tempfile.mkdtemp(prefix="slurmlab-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        self._write_files()
        # A kill cascades: this process ends the outer unshare, that the login host, that the nodes.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "--fork", "--kill-child", "bash"]
        command += [str(self.folder / "scripts" / "login.sh"), str(self.folder), str(num_nodes), NET]
        with (self.folder / "lab.log").open("wb") as log:
            self._outer = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._wait(lambda: (self.folder / "ready").exists(), "the login host")
            self.wait_for_nodes()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def home(self, user):
        return self.folder / "home" / user

    def popen(self, command, *, user="alice", node=None, **how):
        """Start a line of bash on a node, or (None) on the login host, in the user's home and a clean environment."""
        home = "/root" if user == "root" else f"/home/{user}"
        uid, python_bin = USERS[user], Path(sys.executable).parent
        variables = {
            "HOME": home,
            "USER": user,
            "LOGNAME": user,
            "LANG": "C.UTF-8",
            "SHELL": "/bin/bash",
            "TERM": "dumb",
            "PATH": f"{python_bin}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        words = ["nsenter", "-t", str(self._first_process(node)), *NAMESPACES, f"--wdns={home}"]
        words += ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "env", "-i"]
        words += [*(f"{key}={value}" for key, value in variables.items()), "bash", "-c", command]
        return subprocess.Popen(words, start_new_session=True, **{"stdin": subprocess.DEVNULL, **how})

    def run(self, command, *, user="alice", node=None, check=True):
        """Run a line of bash as `popen` does; return its output. Raises RuntimeError if it fails and `check`."""
        process = self.popen(command, user=user, node=node, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed = process.communicate()[0]
        if check and process.returncode:
            raise RuntimeError(f"{command} as {user}: {process.returncode}\n{printed}")
        return printed

    def jobs(self, job_id, field):
        """Return a field of ``scontrol show job``, of each job of an array: JobState, Restarts, ExitCode, …."""
        printed = self.run(f"scontrol show job {shlex.quote(job_id)}", user="root", check=False)
        values = (word.partition("=") for word in printed.split())
        return [value for key, _, value in values if key == field]

    def power_off(self, node):
        """Kill a node with all its processes."""
        psutil.Process(self._first_process(node)).kill()

    def power_on(self, node):
        (self.folder / f"boot.{node}").touch()
        self.wait_for_nodes()

    def wait_for_nodes(self):
        """Wait until all nodes answer."""

        def all_answer():
            states = self.run("sinfo -h -N -o %T", user="root", check=False).split()
            return len(states) == self.num_nodes and {*states} <= {"idle", "mixed", "allocated"}

        self._wait(all_answer, "the nodes")

    def logs(self):
        """Return the end of each log."""
        texts = ((log.name, log.read_text(errors="replace")[-1500:]) for log in sorted(self.folder.glob("*.log")))
        return "".join(f"== {name}\n{text}\n" for name, text in texts)

    def close(self):
        """End every process of the lab, and remove its files."""
        processes = self._outer.children(recursive=True) if self._outer.poll() is None else []
        self._outer.kill()
        self._outer.wait()
        psutil.wait_procs(processes, timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self, condition, what):
        until_s = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if self._outer.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"timed out waiting for {what}\n{self.logs()}")
            time.sleep(0.1)

    def _first_process(self, node):
        """Return the process id, on this machine, of PID 1 of a node, or (None) of the login host."""
        (login,) = self._outer.children()
        if node is None:
            return login.pid
        for outer in login.children():
            with contextlib.suppress(psutil.Error):
                if outer.cmdline()[0] == "unshare" and outer.cmdline()[-1] == str(node):
                    return outer.children()[0].pid
        raise ProcessLookupError(f"node {node} is off")

    def _write_files(self):
        for name in ("etc", "home", "munge", "scripts"):
            (self.folder / name).mkdir()
        for script in HERE.glob("*.sh"):
            shutil.copy(script, self.folder / "scripts")
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        numbers = range(1, self.num_nodes + 1)
        nodes = "\n".join(NODE.format(i=i, net=NET) for i in numbers)
        (self.folder / "etc" / "slurm.conf").write_text(CONFIG.format(net=NET, nodes=nodes))
        (self.folder / "etc" / "cgroup.conf").write_text(CGROUP_CONFIG)
        hosts = [f"{NET}.1 login", *(f"{NET}.1{i} node{i}" for i in numbers)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        (self.folder / "resolv.conf").touch()  # no name server
        users = {name: uid for name, uid in USERS.items() if uid}
        entries = {
            "passwd": [f"{name}:x:{uid}:{uid}:{name}:/home/{name}:/bin/bash" for name, uid in users.items()],
            "group": [f"{name}:x:{uid}:" for name, uid in users.items()],
        }
        for name, lines in entries.items():
            (self.folder / name).write_text(Path(f"/etc/{name}").read_text() + "\n".join([*lines, ""]))
        for name, uid in users.items():
            self.home(name).mkdir(mode=0o700)
            os.chown(self.home(name), uid, uid)
        # This environment and this repository, also if they are in folders that the hosts hide.
        software = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, REPOSITORY))
        (self.folder / "software").write_text("".join(f"{path}\n" for path in software))
