"""Training that is observed in every second block of steps, to measure what observing a step costs.

The observer replaces functions of torch by its own. This script switches between these and the original ones after each
block of steps, so that changes in the machine's speed affect both alike. The observer writes its events once a second.
The script times these writes directly, at its end, while all steps are observed.
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
parser.add_argument("--block", type=int, required=True, help="steps of a block")
parser.add_argument("--pairs", type=int, required=True, help="pairs of blocks")
args = parser.parse_args()
NUM_WARMUP_STEPS = 20
observer = sys.modules["raypar_observer.events"]

torch.set_num_threads(1)
torch.manual_seed(0)
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
data = TensorDataset(torch.randn(12_800, 784), torch.randint(0, 10, (12_800,)))
loader = DataLoader(data, 64 // world, sampler=DistributedSampler(data, world, rank))
model = nn.Sequential(nn.Linear(784, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 10))
if world > 1:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
writes_s: list[float] = []
write = observer.EventRecorder.write


def timed_write(recorder):
    start_s = time.perf_counter()
    write(recorder)
    writes_s.append(time.perf_counter() - start_s)


def batches():
    while True:
        yield from loader


def steps(num):
    """Train, and return the time of each step, less that of writing."""
    times_s, last_s = [], time.perf_counter()
    for _ in range(num):
        num_writes = len(writes_s)
        x, y = next(endless)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now_s = time.perf_counter()
        times_s.append(now_s - last_s - sum(writes_s[num_writes:]))
        last_s = now_s
    return times_s


def replaced():
    """Return where the observer has replaced a function: owner, name, its own function, the original one."""
    owners = (torch.autograd, dataloader._BaseDataLoaderIter, type(model), type(optimizer))  # what each step calls
    return [
        (owner, name, value, value.__wrapped__)
        for owner in owners
        for name, value in vars(owner).items()
        if getattr(value, "__globals__", {}).get("__name__", "").startswith("raypar_observer")
    ]


def switch(is_on):
    """Observe the next steps, or don't."""
    for owner, name, own, original in functions:
        setattr(owner, name, own if is_on else original)
    if world > 1:  # DDP times each step for the observer, and every hundredth without
        model._set_ddp_runtime_logging_sample_rate(1 if is_on else 100)


observer.EventRecorder.write = timed_write
endless = batches()
steps(NUM_WARMUP_STEPS)
functions = replaced()
pairs = []
for i in range(args.pairs):
    medians = {}
    for is_on in (i % 2 == 0, i % 2 == 1):
        switch(is_on)
        medians[is_on] = statistics.median(steps(args.block))
    pairs.append(medians)
switch(True)
writes_s.clear()
num_last = max(200, args.pairs // 2) * args.block
steps(num_last)
writing_s = statistics.median(writes_s) * len(writes_s) / num_last
result = {
    "rank": rank,
    "step_s": statistics.median(medians[False] for medians in pairs),
    "cost_s": statistics.median(medians[True] - medians[False] for medians in pairs) + writing_s,
    "writing_s": writing_s,
    "pid": os.getpid(),
    "num_observed": NUM_WARMUP_STEPS + args.pairs * args.block + num_last,
}
print(f"@@ {json.dumps(result)}\n", end="", flush=True)  # in one piece: ranks share the output
