"""Observed scripts: unchanged losses, steps and their parts, counterfactuals, settings from outside, and mistakes."""

import json
import os
import subprocess
import sys

import pytest
from harness import RunEvents, settings_at

from raypar import Study, Workload, grid, observe
from raypar.analysis.analyse import analyse
from raypar.observe.ranks import NO_STEPS, NO_TORCH, NOT_LOADED, read_ranks
from raypar.observe.settings import not_applied
from raypar.run.local import LocalRunner
from raypar.study.observation import BY_BACKWARD, BY_OPTIMIZER
from raypar.study.profile import BACKWARD, COMMUNICATION, DATA_WAIT, FORWARD, OPTIMIZER

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
data = TensorDataset(torch.randn(640, 32), torch.randint(0, 4, (640,)))
sampler = DistributedSampler(data) if world > 1 and "--same-samples" not in sys.argv else None
loader = DataLoader(data, 32 // world, sampler=sampler, shuffle=False if sampler is None else None)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
if world > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses, num_seen = [], 0
for epoch in range(2):
    model.train()
    if sampler:
        sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            model(x)
            num_seen += len(x)
result = json.dumps({"losses": losses, "num_seen": num_seen})
print(f"@@ {result}\\n", end="", flush=True)  # in one piece: ranks share the output
"""
OTHERS = {
    "accumulation": ("for part in range(2): (net(x).mean() / 2).backward()\n    opt.step()", BY_OPTIMIZER, 20, 2),
    "closure": ("opt.step(lambda: (net(x).mean().backward(), torch.zeros(()))[1])", BY_OPTIMIZER, 20, 1),
    "own optimizer": ("net(x).mean().backward()\n    w.data -= 0.1 * w.grad", BY_BACKWARD, 20, 1),
    "two optimizers": (
        "net(x).mean().backward()\n    opt.step()\n    other(x).mean().backward()\n    second.step()",
        BY_OPTIMIZER,
        20,
        2,
    ),
}
SHAPE = """
import torch
from torch import nn
torch.manual_seed(0)
net, other = nn.Linear(8, 8), nn.Linear(8, 8)
w = net.weight
opt, second = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
for step in range(20):
    x = torch.randn(4, 8)
    {step}
"""

SPAWNED = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def train(rank, where):
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, (sys.argv[1],), nprocs=2, start_method=sys.argv[2])
"""


def run_script(folder, code, *words, num_workers=1, settings=None, is_observed=True, python=(sys.executable,)):
    """Run a script; return what it printed and the observed ranks."""
    events = folder / "events"
    events.mkdir(exist_ok=True)
    (folder / "train.py").write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if is_observed:
        environment |= observe.environment(events, environment, settings or {})
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_workers}"] * (num_workers > 1)
    command = [*python, *start, str(folder / "train.py"), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    printed = [json.loads(line[3:]) for line in done.stdout.splitlines() if line.startswith("@@ ")]
    return printed, *read_ranks(events)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_observed_script_has_the_same_losses_and_its_steps_are_known(tmp_path, num_workers):
    plain, _, why_not = run_script(tmp_path, SCRIPT, num_workers=num_workers, is_observed=False)
    assert why_not == NOT_LOADED
    printed, ranks, why_not = run_script(tmp_path, SCRIPT, num_workers=num_workers)
    assert not why_not and sorted(map(str, printed)) == sorted(map(str, plain))
    assert [each.rank.rank for each in ranks] == [*range(num_workers)]
    for each in ranks:
        rank = each.rank
        assert (rank.num_ranks, rank.counted_by, rank.num_steps) == (num_workers, BY_OPTIMIZER, 40)
        assert rank.samples_per_step == 32 / num_workers and not rank.problems
        assert all(rank.breakdown.parts[part] > 0 for part in (DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER))
        assert sum(rank.breakdown.parts.values()) == pytest.approx(rank.breakdown.step_s)
        assert rank.eval_s > 0 and len(each.step_times_s) == 40 - rank.num_warmup_steps
        (loader,) = rank.loaders
        assert loader.is_trained_on and loader.num_iterations == 2 and loader.site.endswith("train.py:14")
    losses = sorted(each["losses"] for each in printed)
    observed = sorted([value.hex() for _, value in each.rank.losses] for each in ranks)
    assert observed == losses
    assert len({each.rank.parameters for each in ranks}) == 1


@pytest.mark.parametrize("shape", OTHERS)
def test_steps_of_other_shapes_are_counted(tmp_path, shape):
    step, counted_by, num_steps, num_passes = OTHERS[shape]
    _, (made,), _ = run_script(tmp_path, SHAPE.format(step=step))
    assert (made.rank.counted_by, made.rank.num_steps) == (counted_by, num_steps)
    assert made.rank.passes_per_step == num_passes and not made.rank.problems


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_ranks_that_a_script_starts_itself_are_told_apart(tmp_path, how):
    _, ranks, why_not = run_script(tmp_path, SPAWNED, str(tmp_path / "meeting"), how)
    assert not why_not and [(each.rank.rank, each.rank.num_ranks) for each in ranks] == [(0, 2), (1, 2)]
    assert [each.rank.num_steps for each in ranks] == [12, 12]


@pytest.mark.parametrize(
    ("code", "python", "why"),
    [
        ("print('no torch')", (sys.executable,), NO_TORCH),
        ("import torch; torch.ones(2).sum()", (sys.executable,), NO_STEPS),
        ("import torch", (sys.executable, "-I"), NOT_LOADED),
    ],
)
def test_a_script_that_can_not_be_observed_says_why(tmp_path, code, python, why):
    assert run_script(tmp_path, code, python=python)[1:] == ((), why)


def test_an_error_of_the_observer_does_not_reach_the_script(tmp_path):
    code = "import os, shutil\nshutil.rmtree(os.environ['RAYPAR_OBSERVE'])\n" + SCRIPT
    printed, ranks, _ = run_script(tmp_path, code)
    assert len(printed) == 1 and not ranks


def test_work_is_left_out_and_settings_change_without_a_change_of_the_script(tmp_path):
    def run(name, num_workers=1, **settings):
        (tmp_path / name).mkdir()
        printed, ranks, why_not = run_script(tmp_path / name, SCRIPT, num_workers=num_workers, settings=settings)
        assert not why_not and not ranks[0].rank.problems
        return printed[0], ranks

    plain, _ = run("plain")
    same_batch, _ = run("loading", what_if="no loading")
    assert same_batch["losses"][0] == plain["losses"][0] and same_batch["losses"][1] != plain["losses"][1]
    assert len(same_batch["losses"]) == 40 and same_batch["num_seen"] == plain["num_seen"]
    assert run("evaluation", what_if="no evaluation")[0] == {"losses": plain["losses"], "num_seen": 64}
    _, apart = run("communication", 2, what_if="no communication")
    assert len({each.rank.parameters for each in apart}) == 2
    changed, (made,) = run("loader", loader_workers=1, persistent_workers=True, prefetch_factor=3, fused_optimizer=True)
    (loader,) = made.rank.loaders
    assert changed["losses"][0] == plain["losses"][0]
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (1, True, 3)
    _, (made, _) = run("ddp", 2, bucket_cap_mb=1, gradient_as_bucket_view=True)
    assert made.rank.ddp[0].bucket_bytes == 2**20 and made.rank.ddp[0].gradient_as_bucket_view


CHANGED = """
import json, os
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
class Threads(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.tensor([float(torch.get_num_threads())])
class Own(DataLoader):
    def __init__(self, dataset, **others):
        super().__init__(dataset, 2, True, **others)
torch.backends.cudnn.benchmark = False
torch.backends.cuda.matmul.allow_tf32 = False
torch.set_float32_matmul_precision("highest")
torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.99), foreach=True)
another = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(6):
    model(torch.randn(2, 3, 8, 8)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model, "model.pt")
own = Own(Threads(), num_workers=0)
strict = DataLoader(Threads(), num_workers=2, timeout=30, multiprocessing_context="fork", persistent_workers=True)
found = {
    "cudnn_benchmark": torch.backends.cudnn.benchmark,
    "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
    "fused_optimizer": [optimizer.defaults["fused"], another.defaults["fused"], optimizer.defaults["foreach"]],
    "amp": getattr(optimizer, "_step_supports_amp_scaling", False),
    "channels_last": [model[0].weight.is_contiguous(memory_format=torch.channels_last), len(model._forward_pre_hooks)],
    "threads": torch.get_num_threads(),
    "loader": [own.num_workers, own.batch_size, own.persistent_workers],
    "threads of loader": sorted({float(t) for batch in own for t in batch.flatten()}),
    "batches": len(list(strict)),
}
print(f"@@ {json.dumps(found)}\\n", end="", flush=True)
"""


def test_settings_do_what_the_script_s_own_change_would_do(tmp_path):
    def run(**settings):
        folder = tmp_path / "-".join(settings)
        folder.mkdir()
        ((found,), (made,), _) = run_script(folder, CHANGED, settings=settings)
        assert not made.rank.problems and not not_applied(settings, folder / "events")
        return found

    switches = ("cudnn_benchmark", "tf32", "expandable_segments", "fused_optimizer", "channels_last")
    found = run(**dict.fromkeys(switches, True), threads=2, loader_workers=1, persistent_workers=True)
    assert found == {
        "cudnn_benchmark": True,
        "tf32": [True, True],
        "fused_optimizer": [True, True, None],
        "amp": True,
        "channels_last": [True, 1],
        "threads": 2,
        "loader": [1, 2, True],
        "threads of loader": [1.0],
        "batches": 8,
    }
    assert run(loader_workers=0)["batches"] == 8


SHUFFLED = """
import json
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)
loader = DataLoader(TensorDataset(torch.arange(12)), 4, shuffle=True)
orders = [[batch.tolist() for (batch,) in loader] for _ in range(3)]
print(f"@@ {json.dumps([orders, loader.persistent_workers, torch.rand(1).item()])}\\n", end="", flush=True)
"""


def test_the_order_of_samples_stays_if_the_processes_of_a_loader_persist(tmp_path):
    found = {}
    for number in (0, 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = {"loader_workers": 1, "persistent_workers": True} if number else {}
        ((found[number],), _, _) = run_script(folder, SHUFFLED, settings=settings)
    (orders, persistent, drawn), (orders_persistent, is_persistent, drawn_persistent) = found[0], found[1]
    assert not persistent and is_persistent and len({str(order) for order in orders}) == 3
    assert (orders_persistent, drawn_persistent) == (orders, drawn)


LEFT_OUT = """
import json, os
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
torch.manual_seed(0)
class Dicts(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return {"x": torch.ones(3), "i": torch.tensor(i)}
class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.tensor([float(i)]) for i in range(6)])
def ahead(loader):
    batches = iter(loader)
    current = next(batches)
    for following in batches:
        yield current
        current = following
    yield current
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
workers = {workers}
train = DataLoader(Dicts(), 2, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
test = DataLoader(Dicts(), 2, num_workers=workers, persistent_workers=workers > 0)
stream = DataLoader(Stream(), 2)
seen = {"trained": [], "tested": [], "streamed": []}
for epoch in range(3):
    model.train()
    trained = []
    for batch in {fetch}(train):
        trained += batch.pop("i").tolist()
        model(batch["x"]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen["trained"].append(trained)
    model.eval()
    with torch.set_grad_enabled({enabled}):
        tested = 0
        for batch in {fetch}(test):
            with torch.no_grad():
                model(batch["x"])
            tested += 1
    seen["tested"].append(tested)
    seen["streamed"].append([each.tolist() for each in stream])
    torch.save(model.state_dict(), f"model{epoch}.pt")
    assert len(torch.load(f"model{epoch}.pt")) == 2
seen["files"] = len({os.stat(f"model{epoch}.pt").st_ino for epoch in range(3)})
print(f"@@ {json.dumps(seen)}\\n", end="", flush=True)
"""


def fill(code, **values):
    for name, value in values.items():
        code = code.replace("{" + name + "}", str(value))
    return code


@pytest.mark.parametrize(("workers", "fetch", "enabled"), [(0, "iter", False), (1, "iter", False), (0, "ahead", True)])
def test_work_of_other_shapes_is_left_out(tmp_path, workers, fetch, enabled):
    code = fill(LEFT_OUT, workers=workers, fetch=fetch, enabled=enabled)

    def run(what_if):
        (tmp_path / what_if).mkdir()
        ((seen,), (made,), _) = run_script(tmp_path / what_if, code, settings={"what_if": what_if})
        assert not made.rank.problems and made.rank.num_steps == 18 and made.rank.samples_per_step == 2
        return seen, not not_applied(["what_if"], tmp_path / what_if / "events")

    seen, is_applied = run("no loading")
    assert is_applied and all(batch == seen["trained"][0][:2] * 6 for batch in seen["trained"])
    assert seen["streamed"] == [[[[0.0], [1.0]], [[2.0], [3.0]], [[4.0], [5.0]]], *[[[[0.0], [1.0]]] * 3] * 2]
    seen, is_applied = run("no evaluation")
    assert is_applied and seen["tested"] == [1 + (fetch == "ahead")] * 3 and seen["files"] == 3
    assert len({*seen["trained"][0]}) == 12
    seen, is_applied = run("no checkpoints")
    assert is_applied and seen["tested"] == [6] * 3 and seen["files"] == 1
    assert not run("no communication")[1]


REDUCED = """
import json, os
import torch
import torch.distributed as dist
from torch import nn
torch.manual_seed(0)
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
if {is_sharded}:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model(torch.randn(8, 64)).mean().backward()
    if not {is_sharded}:
        for each in model.parameters():
            dist.all_reduce(each.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("is_sharded", [False, True])
def test_collectives_and_fsdp_are_communication(tmp_path, is_sharded):
    _, ranks, why_not = run_script(tmp_path, fill(REDUCED, is_sharded=is_sharded), num_workers=2)
    assert not why_not and all(each.rank.breakdown.parts[COMMUNICATION] > 0 for each in ranks)
    assert [each.rank.num_steps for each in ranks] == [12, 12]


def test_a_study_of_a_script_times_its_steps_and_finds_its_mistakes(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = "torchrun --standalone --nproc-per-node={num_workers} train.py --same-samples"
    study = Study(
        workload=Workload.from_command(command),
        name="s",
        space={"num_workers": grid(1, 2)},
        baseline={"num_workers": 1},
        num_repeats=1,
    )
    events = RunEvents()
    with LocalRunner(settings_at(tmp_path, sys_path=(str(tmp_path),), preload=())) as runner:
        runner.run(study, study.trials(), events.events.append)
    for result in events.results:
        assert result.observation is not None and result.profile is not None
        assert result.train_time_s < result.wall_s / 2, "without imports and start-up"
        assert result.throughput_samples_per_s and len(result.step_times_s) == result.spec.placement.num_workers
    analysis = analyse(study, events.results)
    found = {finding.check: finding.detail for finding in analysis.warnings}
    assert "All ranks train on the same samples: loader of train.py:14 (num_workers=2)." in found.values()
    assert "includes_start_up" not in found and "reported_steps" not in found
    assert [point["num_workers"] for point, _ in analysis.profiles] == [1, 2]
