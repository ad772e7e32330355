"""Generator and discriminator that take turns, each with its own optimizer."""

import sys

import torch
from timing import Stopwatch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(12_800, 512))
generator = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512))
critic = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-4)
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-4)
watch = Stopwatch("--by-hand" in sys.argv)
watch.resume()
for (real,) in DataLoader(data, 128, shuffle=True):
    watch.part("data_wait")
    made = generator(torch.randn(len(real), 32))
    loss = critic(made.detach()).mean() - critic(real).mean()
    watch.part("forward")
    loss.backward()
    watch.part("backward")
    watch.batch(loss.item(), len(real))
    watch.part("other")
    for_critic.step()
    watch.part("optimizer")
    for_critic.zero_grad()
    watch.part("other")
    loss = -critic(generator(torch.randn(len(real), 32))).mean()
    watch.part("forward")
    loss.backward()
    watch.part("backward")
    watch.batch(loss.item())
    watch.part("other")
    for_generator.step()
    watch.part("optimizer")
    for_generator.zero_grad()
    watch.part("other")
    watch.step()
watch.report(0)
