"""Training with one planted bottleneck, or without it (--fixed)."""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

# Width and depth of the network, and steps of an epoch: the bottleneck takes about half of the time.
SHAPES = {
    "loader": (1024, 2, 150),
    "threads": (1024, 4, 80),
    "optimizer": (32, 60, 400),
    "bucket size": (128, 40, 250),
    "evaluation": (512, 3, 300),
}
BATCH = 32
SKIPPED = 11  # first steps, as many as raypar leaves out; a change may take time once, such as for compilation
parser = argparse.ArgumentParser()
parser.add_argument("--bottleneck", choices=SHAPES, required=True)
parser.add_argument("--fixed", action="store_true")
parser.add_argument("--processes", type=int, default=1, help="of the loader, once it is fixed")
args = parser.parse_args()
slow = "" if args.fixed else args.bottleneck
width, depth, num_steps = SHAPES[args.bottleneck]
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Samples(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(num_steps * BATCH, 256, generator=generator)
        self.y = torch.randint(0, 10, (num_steps * BATCH,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        if args.bottleneck == "loader":
            time.sleep(1e-4)  # waiting for a disk
        return self.x[index], self.y[index]


torch.manual_seed(0)
torch.set_num_threads(16 if slow == "threads" else max(1, len(os.sched_getaffinity(0)) // world))
if world > 1:
    dist.init_process_group("gloo")
layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(nn.Linear(256, width), *layers, nn.Linear(width, 10))
if world > 1:
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01 if slow == "bucket size" else 25)
processes = args.processes if args.bottleneck == "loader" and args.fixed else 0
loader = DataLoader(Samples(), BATCH, num_workers=processes, persistent_workers=bool(processes))
options = {"foreach": False} if slow == "optimizer" else {"fused": True} if args.bottleneck == "optimizer" else {}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, **options)
began_s = 0.0
for epoch in range(2):
    for step, (x, y) in enumerate(loader):
        if epoch == 0 and step == SKIPPED:
            began_s = time.perf_counter()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for _ in range(5 if slow == "evaluation" else 0):
            for x, _ in loader:
                model(x)
    model.train()
result = {"seconds": time.perf_counter() - began_s, "loss": loss.item()}
print(f"@@ {json.dumps(result)}\n", end="", flush=True)  # in one piece: ranks share the output
