"""A small training for torchrun: a network on made-up data, data parallel, with a report per epoch."""

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import raypar

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model = nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
inputs, targets = torch.randn(8192, 256), torch.randint(10, (8192,))
mine = slice(dist.get_rank(), None, dist.get_world_size())
for epoch in range(args.epochs):
    for batch, labels in zip(inputs[mine].split(128), targets[mine].split(128), strict=True):
        loss = nn.functional.cross_entropy(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        raypar.step()
    if dist.get_rank() == 0:
        print(json.dumps({"epoch": epoch + 1, "loss": loss.item()}))
dist.destroy_process_group()
# Without what Python does at its end: rarely, threads that torch has left abort the process then.
sys.stdout.flush()
os._exit(0)
