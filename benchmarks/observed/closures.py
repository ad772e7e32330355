"""Regression by LBFGS, whose closure computes the loss several times a step, with a loader process and checkpoints."""

import sys
import tempfile
from pathlib import Path

import torch
from timing import Stopwatch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
x, y = torch.randn(12_800, 128), torch.randn(12_800, 1)
loader = DataLoader(TensorDataset(x, y), 256, shuffle=True, num_workers=1, persistent_workers=True)
held_out = DataLoader(TensorDataset(x[:1024], y[:1024]), 256)
model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=5)
watch = Stopwatch("--by-hand" in sys.argv)


def closure():
    watch.part("optimizer")
    optimizer.zero_grad()
    watch.part("other")
    loss = mse_loss(model(x), y)
    watch.part("forward")
    loss.backward()
    watch.part("backward")
    watch.batch(loss.item())
    watch.part("other")
    return loss


def evaluate():
    model.eval()
    with torch.no_grad():
        for x, y in held_out:
            mse_loss(model(x), y)
    model.train()


with tempfile.TemporaryDirectory() as folder:
    for _ in range(2):
        watch.resume()
        batches = iter(loader)
        for i in range(len(loader)):
            x, y = next(batches)
            watch.part("data_wait")
            watch.num_samples += len(x)
            optimizer.step(closure)
            watch.part("optimizer")
            watch.step()
            if i % 20 == 19:
                torch.save(model.state_dict(), Path(folder, "model.pt"))
                evaluate()
                watch.resume()
watch.report(0)
