"""Network on images in memory, one process or several under torchrun, with an evaluation after each epoch."""

import argparse
import os
import time
from contextlib import nullcontext
from itertools import repeat

import torch
import torch.distributed as dist
from timing import Stopwatch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=1024)
parser.add_argument("--batch-size", type=int, default=60)  # the last batch of an epoch is smaller
parser.add_argument("--samples", type=int, default=6400)
parser.add_argument("--delay-us", type=float, default=0, help="time to read a sample")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--by-hand", action="store_true")
parser.add_argument("--no-loading", action="store_true")
parser.add_argument("--no-synchronisation", action="store_true")
args = parser.parse_args()


class Images(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(args.samples, 784, generator=generator)
        self.y = torch.randint(0, 10, (args.samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        if args.delay_us:
            time.sleep(args.delay_us / 1e6)
        return self.x[index], self.y[index]


torch.set_num_threads(1)
torch.manual_seed(0)
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
data = Images()
sampler = DistributedSampler(data) if world > 1 else None
loader = DataLoader(data, args.batch_size // world, shuffle=sampler is None, sampler=sampler)
model = nn.Sequential(nn.Linear(784, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 10))
if world > 1:
    model = nn.parallel.DistributedDataParallel(model)
alone = model.no_sync if args.no_synchronisation else nullcontext
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
first = next(iter(loader)) if args.no_loading else None
watch = Stopwatch(args.by_hand)
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    model.train()
    watch.resume()
    batches = repeat(first) if args.no_loading else iter(loader)
    for i in range(len(loader) // args.accumulate * args.accumulate):
        x, y = next(batches)
        watch.part("data_wait")
        with alone():
            loss = cross_entropy(model(x), y) / args.accumulate
            watch.part("forward")
            loss.backward()
        watch.part("backward")
        watch.batch(loss.item(), len(x))
        watch.part("other")
        if (i + 1) % args.accumulate == 0:
            optimizer.step()
            watch.part("optimizer")
            optimizer.zero_grad()
            watch.part("other")
            watch.step()
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            cross_entropy(model(x), y)
watch.report(rank)
