"""Training that times what the observer adds to each of its steps.

The observer replaces functions of torch by its own, which call the original ones. The time of an own function, less
that of the original within it, is what observing costs, with caches as cold as they are in a step. The stopwatches' own
time is that without the observer's function between them, in every second block of steps. Differences of whole steps
are too noisy for microseconds. DDP also times each step for the observer, and every hundredth without. That takes the
same time in every model, so it is the difference between blocks of short steps. The observer writes its events once a
second. The script times these writes directly.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, dataloader

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--ddp-pairs", type=int, default=0, help="only DDP's timers, in this number of pairs of blocks")
args = parser.parse_args()
NUM_WARMUP_STEPS, NUM_OF_BLOCK, NUM_OF_DDP_BLOCK = 20, 10, 40
observer = sys.modules["raypar_observer.events"]

torch.set_num_threads(1)
torch.manual_seed(0)
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1 or args.ddp_pairs:
    dist.init_process_group("gloo", **({} if world > 1 else {"rank": 0, "world_size": 1, "store": dist.HashStore()}))
data = TensorDataset(torch.randn(12_800, 784), torch.randint(0, 10, (12_800,)))
loader = DataLoader(data, 64 // world, sampler=DistributedSampler(data, world, rank))
model = nn.Sequential(nn.Linear(784, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 10))
if dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
added_s = []  # by the observer, to each step: calls of its functions, less writes
writes_s = []
is_observed = True  # the observer's functions are called
write = observer.EventRecorder.write


def timed_write(recorder):
    start_s = time.perf_counter()
    write(recorder)
    writes_s.append(time.perf_counter() - start_s)
    added_s[-1] -= writes_s[-1]


def batches():
    while True:
        yield from loader


def steps(num):
    """Train, and return the time of each step."""
    times_s, last_s = [], time.perf_counter()
    for _ in range(num):
        added_s.append(0.0)
        x, y = next(endless)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now_s = time.perf_counter()
        times_s.append(now_s - last_s)
        last_s = now_s
    return times_s


def time_observer():
    """Time the observer's functions that each step calls, from now on."""
    for owner in (torch.autograd, dataloader._BaseDataLoaderIter, type(model), type(optimizer)):
        for name, value in list(vars(owner).items()):
            if getattr(value, "__globals__", {}).get("__name__", "").startswith("raypar_observer"):
                setattr(owner, name, timed(value, value.__wrapped__))


def timed(own, original):
    """Return the observer's function with stopwatches around it, and around the original one within it."""
    (cell,) = (each for each in own.__closure__ if each.cell_contents is original)
    inside_s = 0.0

    def inner(*args, **kwargs):
        nonlocal inside_s
        start_s = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            inside_s += time.perf_counter() - start_s

    def outer(*args, **kwargs):
        nonlocal inside_s
        inside_s = 0.0
        start_s = time.perf_counter()
        try:
            return (own if is_observed else inner)(*args, **kwargs)
        finally:
            added_s[-1] += time.perf_counter() - start_s - inside_s

    cell.cell_contents = inner
    return outer


endless = batches()
if args.ddp_pairs:
    steps(NUM_WARMUP_STEPS)
    differences_s = []
    for i in range(args.ddp_pairs):
        medians = {}
        for is_each in (i % 2 == 0, i % 2 == 1):
            model._set_ddp_runtime_logging_sample_rate(1 if is_each else 100)
            medians[is_each] = statistics.median(steps(NUM_OF_DDP_BLOCK))
        differences_s.append(medians[True] - medians[False])
    result = {"rank": rank, "ddp_s": statistics.median(differences_s)}
else:
    observer.EventRecorder.write = timed_write
    steps(NUM_WARMUP_STEPS)
    time_observer()
    added_s.clear()
    writes_s.clear()
    times_s, by_block = [], {True: [], False: []}
    num_pairs = max(1, args.steps // (2 * NUM_OF_BLOCK))
    for i in range(num_pairs):
        for is_observed in (i % 2 == 0, i % 2 == 1):
            added_s.clear()
            times = steps(NUM_OF_BLOCK)
            if is_observed:
                times_s += times
            by_block[is_observed] += added_s
    num = num_pairs * NUM_OF_BLOCK
    writing_s = statistics.median(writes_s) * len(writes_s) / num if writes_s else 0.0
    result = {
        "rank": rank,
        "step_s": statistics.median(times_s),
        "cost_s": statistics.median(by_block[True]) - statistics.median(by_block[False]) + writing_s,
        "pid": os.getpid(),
        "num_observed": NUM_WARMUP_STEPS + num,
    }
print(f"@@ {json.dumps(result)}\n", end="", flush=True)  # in one piece: ranks share the output
