"""Scripts as forks of their rank: they see, train and end as the processes of `python` and `torchrun` do."""

import contextlib
import json
import signal

import psutil
import pytest
from harness import RunEvents, settings_at

from raypar import Study, Workload, grid
from raypar.run.local import LocalRunner
from raypar.study.trial import TrialState

PROCESS = """
import gc, json, os, random, resource, signal, sys, tempfile, threading
import numpy, torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

class Here:
    pass

streams = [
    [s.encoding, s.errors, s.name, type(s.buffer).__name__, s.write_through, s.line_buffering]
    for s in (sys.stdout, sys.stderr)
]
facts = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "file": __file__, "folder": os.getcwd(),
    "main": sorted(vars(sys.modules["__main__"])), "of_main": Here.__module__, "package": __package__,
    "finders": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path], "streams": streams,
    "environment": dict(os.environ), "cores": sorted(os.sched_getaffinity(0)), "umask": os.umask(0o22),
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
    "group": os.getpgid(0) == os.getpgid(os.getppid()), "gc": [gc.isenabled(), gc.get_threshold()],
    "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)],
    "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS)],
    "tempdir": tempfile.gettempdir(), "recursion": sys.getrecursionlimit(), "dtype": str(torch.get_default_dtype()),
    "hooks": [hasattr(f, "__wrapped__") for f in (dist.all_reduce, dist.broadcast, torch.save)],
    "is_one_function": dist.all_reduce is distributed_c10d.all_reduce,
    "stdin": os.readlink("/proc/self/fd/0"), "files": len(os.listdir("/proc/self/fd")),
    "deterministic": torch.are_deterministic_algorithms_enabled(),
}
drawn = [random.random(), numpy.random.rand(), torch.rand(1).item()]
with open(f"{sys.argv[1]}-{os.environ.get('RANK', 0)}", "w") as file:
    json.dump([facts, drawn, "raypar.train.script_rank" in sys.modules], file)
"""
TRAINING = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

def main():
    torch.manual_seed(3)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    size = dist.get_world_size() if dist.is_initialized() else 1
    data = TensorDataset(torch.randn(512, 64), torch.randint(0, 4, (512,)))
    sampler = DistributedSampler(data) if dist.is_initialized() else None
    loader = DataLoader(data, 16, sampler=sampler, shuffle=sampler is None, num_workers=int(sys.argv[1]),
        multiprocessing_context=sys.argv[2] if len(sys.argv) > 2 else None)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 4))
    model = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters())
    ballast = torch.ones(30_000_000)
    for epoch in range(2):
        total = torch.zeros(())
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"loss: {total.item() / size / len(loader):.9f}")
    if dist.is_initialized():
        dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
# Variables that differ: names of one start, its MLflow run and private store, and the loopback address.
OF_ONE_START = {
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "RAYPAR_OBSERVE"),
    *("RAYPAR_OBSERVE_SETTINGS", "RAYPAR_REPORT_FILE", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "PET_LOG_DIR"),
}
TORCHRUN = "torchrun --standalone --nproc-per-node={num_workers}"


def run(tmp_path, command, *, fresh, points=None, **parts):
    """Run a command once per point; return the results."""
    workload = Workload.from_command(command, fresh_process=fresh, **parts)
    study = Study(workload=workload, name="s", space=points or {}, num_repeats=1, max_retries=0)
    events = RunEvents()
    preload = ("torch", "numpy", "torch.utils.data")
    settings = settings_at(tmp_path / f"{fresh}", sys_path=(str(tmp_path),), preload=preload, is_command=True)
    with LocalRunner(settings) as runner:
        runner.run(study, study.trials(), events.events.append)
    return events.results


def log_of(tmp_path, result, fresh):
    return (tmp_path / f"{fresh}" / "logs" / result.spec.identity / "attempt1-rank0.log").read_text()


@pytest.mark.parametrize(
    ("command", "num_ranks", "num_cores"), [("python train.py", 1, 2), (f"{TORCHRUN} train.py", 2, 1)]
)
def test_a_fork_sees_what_a_new_process_sees(tmp_path, monkeypatch, command, num_ranks, num_cores):
    monkeypatch.setenv("MY_SETTING", "kept")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    (tmp_path / "train.py").write_text(PROCESS)
    seen = {}
    for fresh in (True, False):
        points = {"num_workers": grid(num_ranks), "cpus_per_worker": grid(num_cores)}
        (result,) = run(tmp_path, f"{command} {tmp_path}/{fresh}-facts", fresh=fresh, points=points)
        assert result.state is TrialState.FINISHED, log_of(tmp_path, result, fresh)
        seen[fresh] = [json.loads((tmp_path / f"{fresh}-facts-{rank}").read_text()) for rank in range(num_ranks)]
    for (new, new_drawn, of_new), (fork, fork_drawn, of_fork) in zip(seen[True], seen[False], strict=True):
        assert of_fork and not of_new  # it was a fork
        of_new, of_fork = new.pop("environment"), fork.pop("environment")
        assert of_fork["MY_SETTING"] == "kept"
        assert {
            name for name in of_new.keys() | of_fork.keys() if of_new.get(name) != of_fork.get(name)
        } <= OF_ONE_START
        for facts, fresh in ((new, True), (fork, False)):
            assert facts["argv"].pop() == f"{tmp_path}/{fresh}-facts" == facts["orig_argv"].pop()
        assert fork == new
        assert fork["threads"][0] == num_cores and fork["hooks"] == [True, True, True] and fork["is_one_function"]
        assert not set(new_drawn) & set(fork_drawn)
    drawn = [tuple(drawn) for ranks in seen.values() for _, drawn, _ in ranks]
    assert len({number for each in drawn for number in each}) == 3 * len(drawn)  # no two processes draw the same


@pytest.mark.parametrize(
    ("command", "num_ranks"),
    [("python train.py 0", 1), ("python train.py 2", 1), ("python train.py 1 spawn", 1), (f"{TORCHRUN} train.py 0", 2)],
)
def test_a_fork_trains_like_a_new_process(tmp_path, command, num_ranks):
    (tmp_path / "train.py").write_text(TRAINING)
    of = {}
    for fresh in (True, False):
        points = {"num_workers": grid(num_ranks)}
        (of[fresh],) = run(tmp_path, command, fresh=fresh, points=points, metrics={"loss": r"loss: ([\d.]+)"})
    new, fork = of[True], of[False]
    assert [report["loss"] for report in fork.reports] == [report["loss"] for report in new.reports]
    assert len(fork.reports) == 2
    memory = [result.conditions.ranks[0].peak_rss_bytes for result in (fork, new)]
    assert memory[0] == pytest.approx(memory[1], rel=0.15)
    ranks = [[(r.rank, r.num_ranks, r.num_steps, r.optimizers, r.losses) for r in of[f].observation.ranks] for f in of]
    assert ranks[0] == ranks[1] and len(ranks[0]) == num_ranks
    loaders = [[(each.num_workers, each.num_iterations) for each in of[f].observation.ranks[0].loaders] for f in of]
    assert loaders[0] == loaders[1]


ENDS = {
    "an exception": "raise ValueError('wrong ' + 'number')",
    "a text": "sys.exit('the data are ' + 'missing')",
    "a number": "sys.exit(300)",
    "a signal": "os.kill(os.getpid(), signal.SIGSEGV)",
    "os._exit": "print('last words', flush=True); os._exit(7)",
    "an interrupt": "signal.raise_signal(signal.SIGINT)",
    "nothing": "atexit.register(print, 'the end'); threading.Timer(0.1, print, ['a thread']).start()",
    "exit": "exit()",
}


@pytest.mark.parametrize("fresh", [True, False])
def test_a_fork_ends_like_a_new_process(tmp_path, fresh):
    lines = [f"    case {name!r}:\n        {code}" for name, code in ENDS.items()]
    script = "import atexit, os, signal, sys, threading\nimport torch\nmatch sys.argv[1]:\n" + "\n".join(lines)
    (tmp_path / "train.py").write_text(script)
    results = run(tmp_path, "python train.py {how}", fresh=fresh, points={"how": grid(*ENDS)})
    found = {result.spec.point["how"]: result for result in results}
    messages = {name: result.failure.message if result.failure else "" for name, result in found.items()}
    assert messages["an exception"].startswith("CommandFailed: python train.py 'an exception' ended with exit code 1: ")
    assert messages["an exception"].splitlines()[0].endswith(": ValueError: wrong number")
    traceback = [line for line in messages["an exception"].splitlines() if line.startswith("  File")]
    assert traceback == [f'  File "{tmp_path}/train.py", line 5, in <module>']
    assert "ended with exit code 1: the data are missing" in messages["a text"]
    assert "ended with exit code 44: it printed nothing" in messages["a number"]
    assert "was killed by SIGSEGV: " in messages["a signal"]
    assert "ended with exit code 7: last words" in messages["os._exit"]
    assert "KeyboardInterrupt" in messages["an interrupt"]
    assert not messages["nothing"] and not messages["exit"]
    log = log_of(tmp_path, found["nothing"], fresh).splitlines()
    assert log[-2:] == ["a thread", "the end"]


FAILS_LATER = """
import os, sys, time, subprocess
import torch
print("rank", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "1":
    raise RuntimeError("rank 1 can't " + "go on")
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("fresh", [True, False])
def test_the_rank_that_fails_first_is_reported_and_ends_the_others(tmp_path, fresh):
    (tmp_path / "train.py").write_text(FAILS_LATER)
    (result,) = run(tmp_path, f"{TORCHRUN} train.py", fresh=fresh, points={"num_workers": grid(2)})
    assert "ended with exit code 1" in result.failure.message
    assert "[local rank 1] RuntimeError: rank 1 can't go on" in result.failure.message
    log = log_of(tmp_path, result, fresh)
    if "pids" in log:  # it may not have come that far
        pids = next(line for line in log.splitlines() if line.startswith("pids")).split()[1:]
        assert not any(psutil.pid_exists(int(pid)) for pid in pids)


KILLS_ITS_RANK = """
import os, signal, subprocess, sys, time
import torch
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(sys.argv[1], "w") as file:
    print(os.getpid(), child.pid, file=file)
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(600)
"""


def test_forks_end_with_their_rank(tmp_path):
    (tmp_path / "train.py").write_text(KILLS_ITS_RANK)
    (result,) = run(tmp_path, f"python train.py {tmp_path}/pids", fresh=False)
    assert f"was killed by {signal.SIGKILL.name}" in result.failure.message
    for pid in (tmp_path / "pids").read_text().split():
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(pid)).wait(30)
        assert not psutil.pid_exists(int(pid))
