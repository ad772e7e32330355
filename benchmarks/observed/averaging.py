"""Processes under torchrun that average their gradients themselves, in one collective, instead of by DDP."""

import sys

import torch
import torch.distributed as dist
from timing import Stopwatch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.randn(6400, 784), torch.randint(0, 10, (6400,)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 64 // world, sampler=sampler)
model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
watch = Stopwatch("--by-hand" in sys.argv)
for epoch in range(2):
    sampler.set_epoch(epoch)
    watch.resume()
    batches = iter(loader)
    for _ in range(len(loader)):
        x, y = next(batches)
        watch.part("data_wait")
        loss = cross_entropy(model(x), y)
        watch.part("forward")
        loss.backward()
        watch.part("backward")
        watch.batch(loss.item(), len(x))
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = torch.cat([each.view(-1) for each in gradients])
        watch.part("other")
        dist.all_reduce(flat)
        watch.part("exposed_communication")
        for each, mean in zip(gradients, flat.div_(world).split([each.numel() for each in gradients]), strict=True):
            each.copy_(mean.view_as(each))
        watch.part("other")
        optimizer.step()
        watch.part("optimizer")
        optimizer.zero_grad()
        watch.part("other")
        watch.step()
watch.report(rank)
