"""Main function of a fork server, and of the ranks that it becomes.

Processes that a rank starts end with it. A process group covers most of them, but not those in a new session. On
Linux, these become children of their rank when their parent ends, and children of the server when the rank has ended.
So every child of the server that is not a rank was left behind by one. On other systems they keep running.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from raypar.gpus import all_gpus
from raypar.run.shared_files import SharedFiles
from raypar.search_path import put_first
from raypar.signals import child_pids
from raypar.trace import mark
from raypar.train.requests import Request

# Makes torch.cuda.is_available() use NVML, if present, without initialising CUDA.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
TOUCHED_CUDA = (
    "{} touched CUDA when imported; ranks import it (and the modules after it) themselves, which delays every trial"
)


# A rank asks for shared data sooner than this after its start, and does not wait for the fork of the next one.
IDLE_S = 0.01

# Variable for a fork server: top folders of a working tree and of the checkout that replaces it.
REPLACED_ROOT = "RAYPAR_REPLACED_ROOT"


def replace_root(repository: Path, checkout: Path) -> None:
    """Make this process import from a checkout instead of a working tree, for example for an editable install.

    Entries of ``sys.path`` and folders of editable installs below the repository are replaced by those of the checkout,
    or removed if it has no such folder. Those of installed packages (an environment below the repository) stay.
    """
    sys.path[:] = [path for entry in sys.path if (path := replaced(entry, repository, checkout)) is not None]
    for finder in list(sys.meta_path):
        mapping = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", None)
        if isinstance(mapping, dict):  # setuptools' editable installs
            mapping |= {
                name: str(checkout / Path(folder).relative_to(repository))
                for name, folder in mapping.items()
                if isinstance(folder, str) and name != "raypar" and _is_replaced(Path(folder), repository)
            }
    sys.path_importer_cache.clear()


def replaced(entry: str, repository: Path, checkout: Path) -> str | None:
    """Return the checkout's folder that replaces an entry of ``sys.path``; None if there is none."""
    folder = Path(entry or os.curdir).absolute()
    if not _is_replaced(folder, repository):
        return entry
    there = checkout / folder.resolve().relative_to(repository)
    return str(there) if there.exists() else None


def _is_replaced(folder: Path, repository: Path) -> bool:
    """Return whether a folder of modules is part of the repository's own code."""
    real = folder.resolve()
    if not real.is_relative_to(repository) or {"site-packages", "dist-packages"} & {*folder.parts, *real.parts}:
        return False
    prefixes = {Path(prefix).absolute() for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)}
    return not any(
        prefix != repository and each.is_relative_to(prefix) for each in (folder, real) for prefix in prefixes
    )


def command(
    listener: int,
    owner: int,
    modules: Sequence[str],
    notice: str = "",
    *,
    python: str = "",
    folders: Sequence[str] = (),
    late: str = "",
) -> list[str]:
    """Return the command line of a fork server.

    Args:
        listener: descriptor of the socket that clients connect to.
        owner: descriptor of a pipe that the owner keeps open as long as it lives.
        modules: modules to import, in this order.
        late: module that ranks need but workload checks don't. Waiting checks are forked before it is imported.
        notice: message for the user about modules that it does not import.
        python: interpreter; empty: this one.
        folders: folders that come first on the import path.
    """
    main = "from raypar.run.forkserver import serve; serve()"
    # Without the current folder in front, whose modules would hide Python's and torch's.
    words = [python or sys.executable, "-P", "-c", main, str(listener), str(owner), notice, json.dumps([*folders])]
    return [*words, late, *modules]


def serve() -> None:
    """Run a fork server: import, then fork on request until the owner ends. For the arguments, see `command`.

    A request is a `Request`, its arguments, and the number of descriptors that follow. The answers to RANK, AHEAD (as
    soon as there is nothing else to do) and CHECK are pairs: a pid and None for a new rank, which waits for its files
    (log, listening socket) on the connection that came with the request; later its pid and its exit code. That to READY
    is 0 and a notice. Those to FIND, OFFER and KEEP are for a rank, which asks on a connection of its own, see
    `shared_files`. SIGTERM also ends the server and its ranks.
    """
    mark("fork server: starts")
    if roots := os.environ.get(REPLACED_ROOT):
        replace_root(*map(Path, roots.split(os.pathsep)))
    _, listener_fd, owner_fd, notice, folders_text, late, *modules = sys.argv
    listener, owner, folders = socket.socket(fileno=int(listener_fd)), int(owner_fd), json.loads(folders_text)
    put_first(folders)
    sys.path.append(str(Path.cwd()))  # a trial's own imports may need it
    _import(modules, listener.fileno(), owner, folders, late)
    mark("fork server: imported")
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    helpers = child_pids() or set()  # processes that the imports started
    if not late:
        gc.freeze()  # keeps a fork's collector from touching (and so copying) these pages
    child_ended, wake_up = os.pipe()
    os.set_blocking(wake_up, False)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clients: list[Connection] = []
    ahead: list[tuple[Connection, list[int]]] = []  # clients that request a rank ahead, with its descriptors
    owners: dict[int, Connection] = {}  # by pid of a rank: the client that requested it
    files = SharedFiles()
    server = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() == server:  # a new rank has this handler for a moment
            shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)  # its owner may have been killed
            _end_all(owners)
        os._exit(0)

    def fork(client: Connection, fds: list[int]) -> None:
        if pid := os.fork():
            owners[pid] = client
            with contextlib.suppress(OSError):  # the client has closed, which is noticed below
                client.send((pid, None))
            for fd in fds:
                os.close(fd)
        else:
            mine = (listener.fileno(), owner, child_ended, wake_up, *files.descriptors)
            of_others = (fd for _, fds in ahead for fd in fds)
            _become_rank(fds, (*mine, *of_others, *(each.fileno() for each in clients)))

    def drop(client: Connection, fds: list[int]) -> None:
        """End the ranks of a client, and forget it. `fds`: descriptors of its last request."""
        for pid in [pid for pid, owner_of in owners.items() if owner_of is client]:
            kill_group(pid)
            owners.pop(pid)
        for entry in [entry for entry in ahead if entry[0] is client]:
            ahead.remove(entry)
            fds += entry[1]
        for fd in fds:
            os.close(fd)
        clients.remove(client)
        client.close()

    signal.signal(signal.SIGTERM, end)
    while True:
        idle_s = IDLE_S if files.descriptors else 0.0
        readable = wait([listener, owner, child_ended, *clients], 0 if late else idle_s if ahead else None)
        if late and not readable:
            late = _import_late(late)
        elif ahead and not readable:
            first = ahead.pop(0)
            try:
                fork(*first)
            except OSError:  # no memory, or too many processes
                drop(*first)
        if owner in readable:
            end()
        if child_ended in readable:
            os.read(child_ended, 4096)
            _reap(owners, helpers)
        if listener in readable:
            clients.append(Connection(listener.accept()[0].detach()))
        for client in [client for client in clients if client in readable]:
            fds: list[int] = []
            try:
                request, args, num_fds = client.recv()
                while len(fds) < num_fds:
                    fds.append(recv_handle(client))
                if request is Request.FIND:
                    _send_file(client, files.find(*args))
                    continue
                if request is Request.OFFER:
                    client.send(files.accepts(*args))
                    continue
                if request is Request.KEEP:
                    scope, read = args
                    files.keep(scope, read, fds.pop())
                    client.send(True)
                    continue
                if late and request is not Request.CHECK:
                    late = _import_late(late)
                if request is Request.READY:
                    client.send((0, notice))
                elif request is Request.AHEAD:
                    ahead.append((client, fds))
                else:
                    fork(client, fds)
            except (EOFError, OSError):  # the client has closed, possibly before its answer
                drop(client, fds)


def _send_file(client: Connection, fd: int | None) -> None:
    client.send(fd is not None)
    if fd is not None:
        send_handle(client, fd, 0)


def _import(modules: Sequence[str], listener: int, owner: int, folders: Sequence[str], late: str) -> None:
    """Import the modules. If forks can't use a GPU after one, restart without it and those after it."""
    environment = dict(os.environ)
    os.environ.setdefault(NVML_CHECK, "1")
    for i, name in enumerate(modules):
        is_new = name not in sys.modules
        # If a module can't be imported, the trial that needs it fails.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
        if is_new and _has_touched_cuda():
            again = command(listener, owner, modules[:i], TOUCHED_CUDA.format(name), folders=folders, late=late)
            os.execve(sys.executable, again, environment)
    if NVML_CHECK not in environment:
        del os.environ[NVML_CHECK]


def _import_late(name: str) -> str:
    """Import the module that only ranks need; no imports remain after it."""
    with contextlib.suppress(Exception):
        importlib.import_module(name)
        if observer := sys.modules.get("raypar.observe.start"):
            observer.note_names()
    gc.freeze()  # see `serve`
    return ""


def _has_touched_cuda() -> bool:
    """Return whether forks of this process can't use a GPU. Only a fork can ask torch that."""
    version = sys.modules.get("torch.version")
    if not (getattr(version, "cuda", None) or getattr(version, "hip", None)) or not _has_gpu():
        return False
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    try:
        os._exit(int(sys.modules["torch.cuda"]._is_in_bad_fork()))
    finally:
        os._exit(0)


@functools.cache
def _has_gpu() -> bool:
    return bool(all_gpus())


def _become_rank(fds: list[int], server_fds: tuple[int, ...]) -> None:
    try:
        signal.set_wakeup_fd(-1)
        for fd in server_fds:
            os.close(fd)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        os.setpgid(0, 0)  # its own group: loader processes can be ended with the rank
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        connection = Connection(fds[0])
        try:
            num_fds = connection.recv()  # asleep, if it was forked ahead
        except EOFError:  # it is not needed
            os._exit(0)
        log, *listen = [recv_handle(connection) for _ in range(num_fds)]
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        from raypar.train.worker import main

        main(connection, *listen)
        os._exit(0)  # no finalizers: there is nothing to save, and the next trial waits
    except BaseException:  # in raypar, or from a signal handler that the trial's code has left
        with contextlib.suppress(Exception):
            os.write(2, traceback.format_exc().encode(errors="replace"))  # sys.stderr may be the trial's own
    finally:
        os._exit(70)


def _reap(owners: dict[int, Connection], helpers: set[int]) -> None:
    """Kill what ended ranks have left, then send the exit codes of these ranks."""
    exit_codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):  # no children left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            exit_codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    for pid in (child_pids() or set()) - owners.keys() - helpers:
        kill_group(pid)  # its own orphans are reaped here when it ends
    for pid in exit_codes.keys() & owners.keys():
        with contextlib.suppress(OSError):
            owners.pop(pid).send((pid, exit_codes[pid]))


def _end_all(ranks: Iterable[int]) -> None:
    """Kill the ranks and all processes that they started, and wait for their end."""
    for pid in ranks:
        kill_group(pid)
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in child_pids() or ():
                kill_group(pid)
            os.waitpid(-1, 0)


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def kill_group(pid: int) -> None:
    """Kill a process and every process of its group. Does nothing if there is none."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
