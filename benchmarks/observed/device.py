"""Training on a device that copies each batch from pageable memory and reads each loss, and times itself."""

import json
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_WARMUP_STEPS = 11
device = torch.device(sys.argv[1])
on_gpu = device.type == "cuda"
torch.manual_seed(0)
width = 4096 if on_gpu else 128
data = TensorDataset(torch.randn(6400, width), torch.randint(0, 10, (6400,)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)


model = Network().to(device)
if "--compile" in sys.argv:
    model.compile()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def mark():
    """Return a moment: of the GPU, which the host runs ahead of, or of the host."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first, second) -> float:
    return first.elapsed_time(second) / 1e3 if on_gpu else second - first


ends_s, marks = [], []
for _ in range(2):
    for x, y in DataLoader(data, 64):
        of_step = [mark()]
        x, y = x.to(device), y.to(device)
        of_step.append(mark())
        loss = nn.functional.cross_entropy(model(x), y)
        of_step.append(mark())
        loss.backward()
        of_step.append(mark())
        optimizer.step()
        of_step.append(mark())
        optimizer.zero_grad()
        loss.item()
        ends_s.append(time.perf_counter())
        marks.append(of_step)
counted = marks[NUM_WARMUP_STEPS:]
result = {
    "step_s": (ends_s[-1] - ends_s[NUM_WARMUP_STEPS - 1]) / len(counted),
    "parts": {
        part: sum(between(*of_step[i : i + 2]) for of_step in counted) / len(counted)
        for i, part in enumerate(("copy_to_device", "forward", "backward", "optimizer"))
    },
}
if "--compile" in sys.argv:
    result["num_graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print("@@ " + json.dumps(result))
