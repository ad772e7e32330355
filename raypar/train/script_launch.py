"""Start of a command's script as forks of this rank, which has imported torch and the packages that the script imports.

A new interpreter takes seconds to import torch, in every trial and on every worker. The forks get what the processes
of ``python`` or ``torchrun`` would have: arguments, environment, search path, folder, unseeded generators and threads.
Where that is not certain, such as with options of torchrun for several machines, the command itself is started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from raypar.train.script_rank import ScriptRank, run

STOP_GRACE_S = 5.0  # for the other ranks to end after one has failed
HOST = "127.0.0.1"
# Variables that Python, libc, OpenMP or torch read when they start.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH", "PYTORCH", "ATEN_")
_READ_LATER = "TORCH_NCCL_"
_PLAIN_OPTIONS = {"nproc_per_node", "standalone", "training_script", "training_script_args"}  # of torchrun


@dataclass(frozen=True)
class Launch:
    """Processes that a command would start.

    Attributes:
        interpreter_words: words of each process before the script: the interpreter and its options.
        argv: the script as given, and its arguments.
        num_ranks: processes that torchrun starts; None: Python alone.
    """

    interpreter_words: tuple[str, ...]
    argv: tuple[str, ...]
    num_ranks: int | None

    def environment(self, local_rank: int, port: int, run_id: str, folder: Path) -> dict[str, str]:
        """Return the variables that torchrun sets (``LocalElasticAgent._start_workers``); none without it.

        Args:
            folder: of this rank's files.
        """
        if self.num_ranks is None:
            return {}
        ranks = {f"{group}RANK": str(local_rank) for group in ("", "LOCAL_", "ROLE_")}
        sizes = {f"{group}WORLD_SIZE": str(self.num_ranks) for group in ("", "LOCAL_", "ROLE_")}
        return {
            **ranks,
            **sizes,
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }


def launch_of(words: Sequence[str], path: str, folder: Path, changes: Mapping[str, str]) -> Launch | None:
    """Return the processes that a command would start, if forks of this process can stand in for them; else None.

    Args:
        words: the command line.
        path: its ``PATH``.
        folder: in which it runs.
        changes: variables of the run, beyond those that this process was started with.
    """
    program = _own_program(words[0], path)
    rest, num_ranks, python = list(words[1:]), None, tuple[str, ...]()
    if program == "python" and rest[:2] == ["-m", "torch.distributed.run"]:
        program, rest = "torchrun", rest[2:]
    if program == "torchrun":
        num_ranks, rest = _read_torchrun(rest)
        python = (sys.executable, "-u")
    elif program == "python":
        python = (words[0], *(word for word in rest[:1] if word == "-u"))
        rest = rest[len(python) - 1 :]
    if program is None or not rest or not rest[0] or rest[0][0] == "-":
        return None
    script = folder / rest[0]
    if not script.is_file() or _starts_otherwise(changes) or _hides_imported(script.resolve().parent):
        return None
    if importlib.util.find_spec("threadpoolctl") is None:
        return None
    return Launch(python, tuple(rest), num_ranks)


def _own_program(word: str, search_path: str) -> str | None:
    """Return "python" or "torchrun" if a word names that of this process's environment."""
    path = shutil.which(word, path=search_path)
    if path is None or Path(path).parent.resolve() != Path(sys.executable).parent.resolve():
        return None
    if Path(path).name == "torchrun":
        return "torchrun"
    return "python" if Path(path).resolve() == Path(sys.executable).resolve() else None


def _read_torchrun(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the number of processes, the script and its arguments; none of these for options that are not plain."""
    from torch.distributed.run import get_args_parser

    other: tuple[None, list[str]] = None, []
    if any(name.startswith("PET_") for name in os.environ):  # torchrun's defaults
        return other
    parser = get_args_parser()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            args, defaults = (vars(parser.parse_args(each)) for each in (words, ["script"]))
            num_ranks = int(args["nproc_per_node"])
    except (SystemExit, ValueError):  # it will say what is wrong, or finds out how many there are
        return other
    if args["nnodes"] == "1":
        args["nnodes"] = defaults["nnodes"]
    if num_ranks < 1 or any(args[name] != defaults[name] for name in args.keys() - _PLAIN_OPTIONS):
        return other
    return num_ranks, [args["training_script"], *args["training_script_args"]]


def _starts_otherwise(changes: Mapping[str, str]) -> bool:
    """Return whether a new process with these variables would start in another way than this one has."""
    pairs = Path("/proc/self/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    mine = dict(pair.split("=", 1) for pair in pairs if "=" in pair)  # those of the fork server's start
    names = (name for name in changes if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER))
    return any(mine.get(name) != changes[name] for name in names)


def _hides_imported(folder: Path) -> bool:
    """Return whether a script would import a module from its folder that this process has imported from elsewhere."""
    imported = {name.partition(".")[0] for name in sys.modules} - {*sys.builtin_module_names, "__main__"}
    for path in folder.iterdir():
        name = path.name.partition(".")[0]
        file = path if path.suffix in (".py", ".so") else path / "__init__.py"
        if name in imported and file.is_file():
            # The environment may be below the folder, so only the file itself will do.
            origin = getattr(sys.modules.get(name), "__file__", None)
            if origin is None or Path(origin).resolve() != file.resolve():
                return True
    return False


class ForkedScript:
    """A script that forks run; it is used like a `subprocess.Popen`.

    Attributes:
        stdout: output of the first rank.
        returncode: 0, or how the first rank to fail ended; None: it runs.
        failed_rank: the first rank to fail.
        peak_bytes: 0: unknown. The observer knows it (`raypar.observe.modules`).

    Args:
        other_ranks: folder of the other ranks' output, like that of torchrun.
    """

    peak_bytes = 0

    def __init__(self, launch: Launch, environment: Mapping[str, str], folder: Path, other_ranks: Path) -> None:
        self.returncode: int | None = None
        self.failed_rank: int | None = None
        self._has_ended = threading.Event()
        read, write = os.pipe()
        self.stdout: Any = os.fdopen(read, "rb")
        run_id = str(uuid.uuid4())
        mapped_bytes = psutil.Process(os.getppid()).memory_info().shared
        self._ranks: dict[int, int] = {}  # by pid
        with socket.socket() as listen:
            port = 0
            if launch.num_ranks is not None:
                listen.bind((HOST, 0))
                listen.listen(1024)
                port = int(listen.getsockname()[1])
            sys.stdout.flush()
            sys.stderr.flush()
            for local_rank in range(launch.num_ranks or 1):
                rank_folder = other_ranks / "forks" / "attempt_0" / str(local_rank)
                rank_folder.mkdir(parents=True, exist_ok=True)
                rank = ScriptRank(
                    argv=launch.argv,
                    orig_argv=(*launch.interpreter_words, *launch.argv),
                    environment={**environment, **launch.environment(local_rank, port, run_id, rank_folder)},
                    folder=folder,
                    mapped_bytes=mapped_bytes,
                )
                self._fork(rank, local_rank, write if local_rank == 0 else rank_folder / "stdout.log")
            os.close(write)
            self._store = _agent_store(port, listen.detach()) if port else None
        threading.Thread(target=self._wait_for_all, daemon=True).start()

    def _fork(self, rank: ScriptRank, local_rank: int, output: int | Path) -> None:
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if isinstance(output, Path) else output
        if not (pid := os.fork()):
            run(rank, fd)
        if isinstance(output, Path):
            os.close(fd)
        self._ranks[pid] = local_rank

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of all ranks. Raises subprocess.TimeoutExpired."""
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired("script", timeout or 0)
        return self.returncode

    def send_to_all(self, number: int) -> None:
        """Send a signal to all processes."""
        for pid in [*self._ranks]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def first_failed(self, _: str) -> int | None:
        return self.failed_rank

    def _wait_for_all(self) -> None:
        code = 0
        with selectors.DefaultSelector() as running:
            for pid in self._ranks:
                running.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            while running.get_map():
                ready = running.select(STOP_GRACE_S if code else None)
                if not ready:
                    self.send_to_all(signal.SIGKILL)
                for key, _ in ready:
                    running.unregister(key.fd)
                    os.close(key.fd)
                    rank, its_code = self._ranks.pop(key.data), os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                    if its_code and not code:
                        code, self.failed_rank = its_code, rank
                        self.send_to_all(signal.SIGTERM)  # as torchrun does
        self.returncode = code
        self._has_ended.set()


def _agent_store(port: int, listen_fd: int) -> Any:
    """Return the store that torchrun's agent holds for its ranks. It has threads, so the ranks are forked before."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd
    )
