"""Processes of ranks, their fork servers, and the kinds and causes of their failures."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from results import make_spec

from raypar.errors import ClusterError
from raypar.run import ranks
from raypar.run.gang import gpus_of_gang
from raypar.run.ranks import ForkClient, ForkServer, RankEnd, RankProcess, cause, supervise
from raypar.run.runner import is_retried
from raypar.signals import is_running
from raypar.study.trial import Failure, FailureKind
from raypar.train import worker
from raypar.train.job import RankContext, RankOutcome, RunSettings, TrialJob
from raypar.train.requests import Request
from raypar.train.worker import failure_kind


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="no waitid here, which waits for an end and leaves it to others")
def test_a_zombie_has_ended():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert is_running(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process.returncode is None and not is_running(process.pid)
        process.wait()
        assert not is_running(process.pid)


def test_a_fork_server_is_ready_after_its_imports(tmp_path):
    (tmp_path / "comes_last.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    server = ForkServer(("comes_last",), (str(tmp_path),))
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address)) as client:
        client.wait_until_ready()
        assert (tmp_path / "imported").exists()
        client.fork(tmp_path / "log").kill()


def test_files_beside_a_study_hide_no_imports_of_fork_server_and_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = {name for name in sys.stdlib_module_names if find_spec(name)}  # the list has other systems' modules too
    names = {*here, "torch", "numpy", "psutil", "cloudpickle", "packaging"} - {"antigravity", "this"}
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'a').write({name!r})")
    (tmp_path / "utils.py").touch()
    server = ForkServer(("utils",), (str(tmp_path),))
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address)) as client:
        client.wait_until_ready()
        rank = client.fork(tmp_path / "log")
        code = f"import cmd, utils, turtledemo; open({str(tmp_path / 'seen')!r}, 'w').write(utils.__file__)"
        rank.connection.send(Runs(code))
        assert rank.join(60) is not None
    assert (tmp_path / "seen").read_text() == str(tmp_path / "utils.py"), (tmp_path / "log").read_text()
    assert not (tmp_path / "mark").exists(), (tmp_path / "mark").read_text()


def test_a_fork_server_starts_with_a_tmpdir_too_long_for_a_socket(tmp_path, monkeypatch):
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    server = ForkServer(base_preload=())
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address)) as client:
        client.wait_until_ready()
    assert not Path(server.address).parent.exists() and list(long.iterdir()) == []


def test_a_waiting_check_is_forked_before_the_late_import(tmp_path, monkeypatch):
    os.mkfifo(gate := tmp_path / "gate")
    (tmp_path / "waits.py").write_text(f"open({str(gate)!r}).read()")
    sent, send_handle = [], ranks.send_handle

    def open_after_the_request(*args):
        send_handle(*args)
        sent.append(args)
        if len(sent) == 1:
            gate.write_text("")

    monkeypatch.setattr(ranks, "send_handle", open_after_the_request)
    server = ForkServer(("waits",), (str(tmp_path),))
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address)) as client:
        for is_check in (True, False):
            process = client.fork(tmp_path / "log", is_check=is_check)
            seen = tmp_path / f"seen-{is_check}"
            process.connection.send(
                Runs(f"import sys; open({str(seen)!r}, 'w').write(str('torch._dynamo' in sys.modules))")
            )
            assert process.join(60) is not None
            assert seen.read_text() == str(not is_check), (tmp_path / "log").read_text()


def test_sigterm_ends_a_fork_server_and_its_ranks(tmp_path):
    server = ForkServer(base_preload=())
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address)) as client:
        rank = client.fork(tmp_path / "log")
        os.kill(server.pid, signal.SIGTERM)
        assert rank.join(60) is not None and not is_running(rank.pid)
        assert not Path(server.address).parent.exists()


def test_a_rank_ends_when_its_client_closes(tmp_path):
    server = ForkServer(base_preload=())
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address)) as client:
        rank = client.fork(tmp_path / "log")
        client.close()
        assert rank.join(60) == -signal.SIGKILL


# Prints the rank's pid, and the ports at which it listens.
LISTENING = """
import os, psutil
print(os.getpid(), *(each.laddr.port for each in psutil.Process().net_connections() if each.status == "LISTEN"))
"""


def test_a_process_forked_ahead_becomes_the_next_rank_with_its_files(tmp_path):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(ForkServer(base_preload=())))
        client = stack.enter_context(contextlib.closing(ForkClient(server.address, forks_ahead=True)))
        seen, asleep = {}, []
        for i in range(3):
            listen = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            rank = client.fork(tmp_path / f"log{i}", listen)
            rank.connection.send(Runs(LISTENING))
            assert rank.join(60) is not None
            seen[tmp_path / f"log{i}"] = f"{rank.pid} {listen.getsockname()[1]}"
            assert asleep in ([], [rank.pid]), "each process forked ahead becomes a rank"
            while client._asleep is None:
                client._receive()
            asleep = [client._asleep.pid]
            assert [child.pid for child in psutil.Process(server.pid).children()] == asleep
    assert {path: path.read_text().splitlines()[0] for path in seen} == seen


def test_a_process_forked_ahead_that_was_killed_is_replaced(tmp_path):
    server = ForkServer(base_preload=())
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address, forks_ahead=True)) as client:
        client.fork(tmp_path / "first")
        client._receive()
        asleep = client._asleep.pid
        os.kill(asleep, signal.SIGKILL)
        client._receive()  # its end
        rank = client.fork(tmp_path / "log")
        rank.connection.send(Runs("print('here')"))
        assert rank.pid != asleep and rank.join(60) is not None
    assert (tmp_path / "log").read_text().startswith("here")


def test_a_fork_ahead_gives_way_to_other_requests(tmp_path):
    os.mkfifo(gate := tmp_path / "gate")
    (tmp_path / "waits.py").write_text(f"open({str(gate)!r}).read()")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(ForkServer(("waits",), (str(tmp_path),))))
        client, other = (stack.enter_context(contextlib.closing(ForkClient(server.address))) for _ in range(2))
        client._request(Request.AHEAD)
        other._request(Request.RANK)
        gate.write_text("")  # the server sees both requests at once
        process, ahead = other._next_process(), client._next_process()
        assert psutil.Process(process.pid).create_time() < psutil.Process(ahead.pid).create_time()


def test_a_process_forked_ahead_ends_with_its_client(tmp_path):
    with contextlib.closing(ForkServer(base_preload=())) as server:
        with contextlib.closing(ForkClient(server.address, forks_ahead=True)) as client:
            client.fork(tmp_path / "first")
            client._receive()
            asleep = psutil.Process(client._asleep.pid)
        asleep.wait(60)
        with contextlib.closing(ForkClient(server.address)) as other:
            other.fork(tmp_path / "log").kill()


@pytest.mark.parametrize("wants_a_rank", [False, True])
def test_a_fork_server_survives_a_client_that_closes_before_its_answer(tmp_path, wants_a_rank):
    with contextlib.closing(ForkServer(base_preload=())) as server:
        with contextlib.closing(ForkClient(server.address)) as hasty:  # while the server starts
            hasty._connection.send((Request.RANK if wants_a_rank else Request.READY, (), int(wants_a_rank)))
            if wants_a_rank:
                ranks.send_handle(hasty._connection, sys.__stdout__.fileno(), 0)
        with contextlib.closing(ForkClient(server.address)) as client:
            client.wait_until_ready()
            client.fork(tmp_path / "log").kill()


# Fake of NVIDIA's library with one card, which makes a fork server avoid CUDA.
ONE_CARD = """
from types import SimpleNamespace
NVML_DEVICE_MIG_ENABLE = 1
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return "card"
def nvmlDeviceGetUUID(handle): return "GPU-0"
def nvmlDeviceGetPciInfo(handle): return SimpleNamespace(busId="00000000:3B:00.0")
def nvmlDeviceGetMigMode(handle): return (0, 0)
"""
# Code of a rank that writes down what it inherited from its fork server.
LOOK = """
import json, os, sys, torch
seen = {"bad_fork": torch.cuda._is_in_bad_fork(), "check": os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")}
seen["imported"] = [name for name in ("before", "touches", "after") if name in sys.modules]
seen["variable"] = os.environ.get("OF_A_MODULE")
open(%r, "w").write(json.dumps(seen))
"""
needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA has no bad forks")


class Runs:
    """Code that runs when this is unpickled."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return exec, (self.code, {})


def seen_by_a_rank(folder, modules, pynvml=ONE_CARD):
    """Return what a rank inherits from a server that imports these modules of a folder, and the server's notice."""
    (installed := folder / "installed").mkdir()
    (installed / "pynvml.py").write_text(pynvml)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH")])))
        server = ForkServer(modules, (str(folder),))
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address)) as client:
        notice = client.wait_until_ready()
        rank = client.fork(folder / "log")
        rank.connection.send(Runs(LOOK % str(folder / "seen")))
        assert rank.join(60) is not None
    return json.loads((folder / "seen").read_text()), notice


@needs_cuda_build
@pytest.mark.parametrize("has_gpu", [True, False])
def test_ranks_can_use_a_gpu_after_a_preloaded_module_touched_cuda(tmp_path, monkeypatch, has_gpu):
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    (tmp_path / "before.py").touch()
    # With a real NVML, is_available() would do no harm.
    code = "import os, torch; os.environ['OF_A_MODULE'] = 'set'; torch.cuda.is_available(); raise ImportError"
    (tmp_path / "touches.py").write_text(code)
    (tmp_path / "after.py").touch()
    modules = ("before", "touches", "after")
    seen, notice = seen_by_a_rank(tmp_path, modules, ONE_CARD if has_gpu else "raise ImportError")
    if has_gpu:
        assert seen == {"bad_fork": False, "check": None, "imported": ["before"], "variable": None}
        assert notice.startswith("touches touched CUDA when imported; ranks import it")
    else:  # without a GPU, it doesn't matter
        imported = ["before", "after"]
        assert (seen["imported"], notice) == (imported, "")


@pytest.mark.parametrize("given", [None, "0"])
def test_imports_use_the_nvml_check_and_ranks_the_users_setting(tmp_path, monkeypatch, given):
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", given)
    code = "import os; os.environ['OF_A_MODULE'] = os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']"
    (tmp_path / "before.py").write_text(code)
    seen, notice = seen_by_a_rank(tmp_path, ("before",))
    expected = {"bad_fork": False, "check": given, "imported": ["before"], "variable": given or "1"}
    assert (seen, notice) == (expected, "")


def test_waiting_for_a_fork_server_that_dies_raises():
    with contextlib.closing(ForkServer()) as server, contextlib.closing(ForkClient(server.address)) as client:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises((EOFError, OSError)):
            client.wait_until_ready()


class Leaves:
    """When unpickled, starts a process in a new session, writes its id into a FIFO, and waits for it."""

    def __init__(self, fifo):
        self.fifo = fifo

    def __reduce__(self):
        return os.system, (f"setsid sleep 600 & echo $! > {self.fifo}; wait",)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process adopts the orphans of its descendants")
@pytest.mark.parametrize("first", ["client", "server"])
def test_processes_of_a_rank_end_with_its_client_or_server(tmp_path, first):
    os.mkfifo(tmp_path / "fifo")
    server = ForkServer(base_preload=())
    client = ForkClient(server.address)
    rank = client.fork(tmp_path / "log")
    rank.connection.send(Leaves(tmp_path / "fifo"))
    begun = [psutil.Process(int((tmp_path / "fifo").read_text())), psutil.Process(rank.pid)]
    for end in (client, server) if first == "client" else (server, client):
        end.close()
        assert psutil.wait_procs(begun, timeout=60)[1] == []


class DistBackendError(RuntimeError):
    """Stands in for torch's error of NCCL, which not every build has."""


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77,"
NO_DEVICE_MEMORY = "DEVICE_ALLOCATION_FAILED"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("gloo"), FailureKind.ERROR),
        (RuntimeError("mat1 and mat2 shapes"), FailureKind.ERROR),
        (KeyError("memory"), FailureKind.ERROR),
        (RuntimeError(GLOO), FailureKind.PEER_LOST),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), FailureKind.PEER_LOST),
        (DistBackendError(f"{NCCL} ncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 1"), FailureKind.ERROR),
        (DistBackendError(f"{NCCL} unhandled cuda error\nCuda failure 2 'out of memory'"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError(f"CUDNN_STATUS_INTERNAL_ERROR_{NO_DEVICE_MEMORY}"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), FailureKind.ERROR),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), FailureKind.DEVICE),
        (DistBackendError(f"{NCCL} Cuda failure 214 'uncorrectable ECC error encountered'"), FailureKind.DEVICE),
        (RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"), FailureKind.DEVICE),
        (RuntimeError("CUDA error: hardware stack error"), FailureKind.DEVICE),
        (RuntimeError("Unable to determine the device handle for GPU: GPU is lost"), FailureKind.DEVICE),
        (RuntimeError("CUDA error: unspecified launch failure"), FailureKind.ERROR),
        (RuntimeError("CUDA error: device-side assert triggered"), FailureKind.ERROR),
        (ValueError("uncorrectable ECC error encountered"), FailureKind.ERROR),
        (RuntimeError("DataLoader worker (pid 31) is killed by signal: Killed. "), FailureKind.CRASH),
    ],
    ids=str,
)
def test_an_exception_has_a_kind(error, kind):
    assert failure_kind(error) is kind


@pytest.mark.parametrize("make", [torch.empty, np.empty, bytes])
def test_an_allocation_failure_is_out_of_memory(make):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        make(1 << 50)
    assert failure_kind(caught.value) is FailureKind.OUT_OF_MEMORY


LOST, CRASH, ERROR = (Failure(kind, kind) for kind in (FailureKind.PEER_LOST, FailureKind.CRASH, FailureKind.ERROR))


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ([RankEnd(failure=ERROR), RankEnd(failure=LOST)], ERROR),
        ([RankEnd(failure=LOST), RankEnd(failure=ERROR)], ERROR),
        ([RankEnd(failure=LOST), RankEnd(failure=CRASH)], CRASH),
        ([RankEnd(failure=LOST), RankEnd(failure=CRASH, was_killed=True)], LOST),
        ([RankEnd(failure=ERROR), RankEnd(failure=CRASH, was_killed=True)], ERROR),
        ([RankEnd(failure=LOST), RankEnd()], LOST),
        ([RankEnd(), RankEnd()], None),
    ],
)
def test_the_rank_that_failed_first_explains_the_trials_failure(ends, why):
    failure = None
    for end in ends:
        failure = cause(failure, end)
    assert failure is why


@pytest.mark.parametrize("kind", FailureKind)
def test_failures_of_the_infrastructure_are_retried(kind):
    final = ("error", "does_not_fit", "out_of_memory", "refused", "skipped", "invalid")
    is_final = kind in final
    assert is_retried(Failure(kind, ""), attempt=1, max_retries=1) is not is_final
    own = kind.traits.own_retries
    assert not is_retried(Failure(kind, ""), attempt=2 if own is None else own + 1, max_retries=1)


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


LONG = "starts, " + "x" * 8_000_000 + " at http://me:secret@host, ends"


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        (ValueError(LONG), "ValueError", r"starts, x+ … 8.00 MB omitted … x+ at http://me:\*\*\*@host, ends"),
        (Unprintable(), "Unprintable", r"\(no message: its __str__ raised ValueError\)"),
    ],
    ids=["long", "unprintable"],
)
def test_a_failure_has_its_exceptions_type_and_a_shortened_message(error, name, message, monkeypatch, capfd):
    def fail(*_):
        raise error

    monkeypatch.setattr(worker, "run_rank", fail)
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send(("job", "context"))
        worker.main(theirs)
        word, kind, shown, text, traceback = ours.recv()
    assert (word, kind, shown) == ("error", FailureKind.ERROR, name)
    assert re.fullmatch(message, text) and len(text) < 2100
    assert traceback.startswith("Traceback (most recent call last):\n") and name in traceback and len(traceback) < 21000


def answer_of_a_rank(folder, job):
    """Return the last message of a rank that gets this job, and its exit code."""
    server = ForkServer(base_preload=())
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address)) as client:
        rank = client.fork(folder / "log")
        rank.connection.send((job, RankContext(0, 1, 0, 1, 0, ("", 0), 0.0)))
        return rank.connection.recv(), rank.join(60)


def test_an_unpickling_error_in_a_rank_is_reported(tmp_path):
    answer, code = answer_of_a_rank(tmp_path, Runs("import no_such_module"))
    assert answer[:4] == ("error", FailureKind.ERROR, "ModuleNotFoundError", "No module named 'no_such_module'")
    assert code == 0 and "no_such_module" in (tmp_path / "log").read_text()


LOADER = """
import os
from types import SimpleNamespace
from torch.utils.data import DataLoader
from raypar.train import worker

class Exits:
    def __len__(self):
        return 40
    def __getitem__(self, i):
        import torch
        if i == 20:
            os._exit(3)
        return torch.zeros(3)

worker.run_rank = lambda *_: list(DataLoader(Exits(), num_workers=NUM))
"""


@pytest.mark.parametrize("num_workers", ["1", "3"])
def test_a_loader_process_that_exits_is_a_crash(tmp_path, num_workers):
    answer, _ = answer_of_a_rank(tmp_path, Runs(LOADER.replace("NUM", num_workers)))
    assert answer[:3] == ("error", FailureKind.CRASH, "RuntimeError")
    assert re.search(r"DataLoader worker .* exited unexpectedly", answer[3])


def test_an_error_that_a_rank_cant_report_is_in_its_log(tmp_path):
    code = "from raypar.train import worker; worker.cut = None; worker.run_rank = None"
    server = ForkServer(base_preload=())
    with contextlib.closing(server), contextlib.closing(ForkClient(server.address)) as client:
        rank = client.fork(tmp_path / "log")
        rank.connection.send((Runs(code), None))
        with pytest.raises(EOFError):
            rank.connection.recv()
        assert rank.join(60) == 70
    assert "TypeError: 'NoneType' object is not callable" in (tmp_path / "log").read_text()


LOUD = """
import os
os.write(1, b"first" + b"x" * 10_000_000)
os.write(2, b"y" * 10_000_000 + b"last")
os._exit(3)
"""


def test_a_long_log_keeps_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "LOG_HEAD_BYTES", 1_000_000)
    monkeypatch.setattr(ranks, "LOG_TAIL_BYTES", 2_000_000)
    job = TrialJob(make_spec({}), 1, b"", RunSettings(tmp_path))
    log = job.log_path(0)
    log.parent.mkdir()
    ours, theirs = socket.socketpair()
    with theirs, log.open("ab") as out:
        how = {"pass_fds": [theirs.fileno()], "stdout": out, "stderr": out, "start_new_session": True}
        child = subprocess.Popen([sys.executable, "-c", LOUD], **how)
    context = RankContext(0, 1, 0, 1, 0, ("", 0), 0.0)
    end = supervise(RankProcess(child.pid, ours, child.wait), job, context, lambda *_: True, [].append)
    assert end.failure.message == "rank 0 ended with exit code 3" and end.failure.traceback.endswith("ylast")
    text = log.read_text()
    assert re.fullmatch("firstx+\n… 17.0 MB omitted …\ny+last", text)
    assert len(text) == pytest.approx(3_000_000, abs=100)


def test_a_ranks_outcome_does_not_wait_for_the_end_of_its_process(tmp_path):
    job = TrialJob(make_spec({}), 1, b"", RunSettings(tmp_path))
    ours, theirs = socket.socketpair()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        process = RankProcess(child.pid, ours, child.wait)
        Connection(theirs.detach()).send(("done", RankOutcome(train_time_s=1.5)))
        end = supervise(process, job, RankContext(0, 1, 0, 1, 0, ("", 0), 0.0), lambda *_: True, [].append)
        assert end.outcome == RankOutcome(train_time_s=1.5) and child.poll() is None
        child.communicate(b"\n")
        assert ranks.await_end(process, job.log_path(0)) == 0


def test_a_rank_that_does_not_end_when_killed_is_reported(tmp_path):
    job = TrialJob(make_spec({}), 1, b"", RunSettings(tmp_path))
    ours, theirs = socket.socketpair()
    theirs.close()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        process = RankProcess(child.pid, ours, lambda _: None)
        end = supervise(process, job, RankContext(0, 1, 0, 1, 0, ("", 0), 0.0), lambda *_: True, [].append)
    assert end.failure.message == "rank 0 did not end when it was killed" and end.was_killed


def test_artifacts_are_sent_unless_the_node_can_write_to_the_drivers_folder(tmp_path, monkeypatch):
    driver_dir, logs = tmp_path / "driver", tmp_path / "logs"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job = TrialJob(make_spec({}), 1, b"", RunSettings(Path("/of/the/driver/logs"), driver_dir=driver_dir))
    here = job.on_this_node()
    assert here.sends_artifacts and here.artifact_dir == logs / job.spec.identity / "artifacts"
    driver_dir.mkdir()
    here = job.on_this_node()
    assert not here.sends_artifacts and here.artifact_dir == driver_dir / job.spec.identity / "artifacts"
    assert here.log_path(0).is_relative_to(logs)
    here = TrialJob(make_spec({}), 1, b"", RunSettings(logs)).on_this_node()  # on the driver's machine
    assert not here.sends_artifacts and here.artifact_dir == logs / job.spec.identity / "artifacts"


@pytest.fixture
def variables(monkeypatch):
    """Environment variables of a rank, empty at first."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", variables)
    return variables


def a_rank(rank=0, size=2, *, local_rank=0, local_size=1, node_ip="10.0.0.7", **fields):
    return RankContext(rank, size, local_rank, local_size, rank, ("10.0.0.7", 5), 0.0, node_ip=node_ip, **fields)


@pytest.mark.parametrize(
    ("num_gpus", "given", "message"),
    [
        (
            0,
            {"CUDA_VISIBLE_DEVICES": ""},
            "local rank 1 sees no GPU: CUDA_VISIBLE_DEVICES is ''; this machine has no GPU",
        ),
        (0, {}, "local rank 1 sees no GPU: CUDA_VISIBLE_DEVICES is not set; this machine has no GPU"),
        (1, {"CUDA_VISIBLE_DEVICES": "3"}, "sees 1 GPU: CUDA_VISIBLE_DEVICES is '3'; each worker needs its own GPU"),
        (
            1,
            {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"},
            "CUDA_VISIBLE_DEVICES is '3', HIP_VISIBLE_DEVICES is '3'; each worker",
        ),
    ],
)
def test_a_rank_without_a_gpu_names_its_visible_gpus(monkeypatch, variables, num_gpus, given, message):
    variables.update(given)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(worker, "torch_problem", lambda _: None if num_gpus else "this machine has no GPU")
    with pytest.raises(ClusterError, match="raypar doctor") as caught:
        worker._device({"device": "cuda"}, a_rank(1, local_rank=1, local_size=2))
    assert message in caught.value.message


def test_the_local_rank_numbers_a_ranks_gpu(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    devices = [worker._device({"device": "cuda"}, a_rank(i, 4, local_rank=i, local_size=4)) for i in range(4)]
    assert devices == chosen == [torch.device("cuda", i) for i in range(4)]


def test_ranks_share_gpus_if_nccl_allows_it(monkeypatch, variables):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    variables[worker.SHARED_GPU] = "1"
    devices = [worker._device({"device": "cuda"}, a_rank(i, 4, local_rank=i, local_size=4)) for i in range(4)]
    assert devices == [torch.device("cuda", i) for i in (0, 1, 0, 1)]


ADDRESSES = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth1": ["10.0.0.7", "fe80::7%eth1"]}


@pytest.mark.parametrize(
    ("context", "given", "interfaces"),
    [
        (a_rank(), {}, {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}),
        (a_rank(node_ip="fe80::7"), {}, {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}),
        (a_rank(), {"GLOO_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=eth1"}),
        (a_rank(node_ip="203.0.113.1"), {}, {}),  # of a gateway
        (a_rank(node_ip=""), {}, {}),
        (a_rank(local_size=2), {}, {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}),
        (a_rank(size=1), {}, {}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_ranks_on_several_nodes_use_rays_interface(monkeypatch, variables, context, given, interfaces, device):
    joined = []
    listed = {name: [SimpleNamespace(address=each) for each in all_of] for name, all_of in ADDRESSES.items()}
    monkeypatch.setattr(worker.psutil, "net_if_addrs", lambda: listed)
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *_, **__: "store")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **how: joined.append(how))
    variables.update(given)
    with worker._process_group(context, torch.device(device), None):
        assert {name: value for name, value in variables.items() if name.endswith("_SOCKET_IFNAME")} == interfaces
    assert (variables["NODE_RANK"], variables["GROUP_RANK"], variables["ACCELERATE_TORCH_DEVICE"]) == ("0", "0", device)
    of_device = {"cpu": {"backend": "gloo"}, "cuda:1": {"backend": "nccl", "device_id": torch.device("cuda:1")}}
    how = of_device[device] | {"store": "store", "rank": 0, "world_size": 2, "timeout": timedelta(seconds=1800)}
    assert joined == ([how] if context.world_size > 1 else [])


@pytest.mark.parametrize(
    ("of_worker", "of_rank"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, {"CUDA_VISIBLE_DEVICES": "0,2"}),
        # On AMD's nodes Ray sets HIP's variable, which takes precedence, and Ray Train shares only CUDA's.
        (
            {"CUDA_VISIBLE_DEVICES": "0,2", "HIP_VISIBLE_DEVICES": "2"},
            {"CUDA_VISIBLE_DEVICES": "0,2", "HIP_VISIBLE_DEVICES": "0,2"},
        ),
        ({"HIP_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "2"}),
    ],
)
def test_a_rank_sees_its_gangs_gpus(of_worker, of_rank):
    assert gpus_of_gang({**of_worker, "PATH": "/bin"}) == of_rank
