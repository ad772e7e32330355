"""Train a small network; metrics go into TensorBoard's event files, and into lines of JSON."""

import argparse
import json

import torch
from torch.utils.tensorboard import SummaryWriter


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--log-dir", default="runs")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max-steps", type=int, default=-1)
    args = parser.parse_args()
    writer = SummaryWriter(args.log_dir)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, batch in enumerate(torch.randn(128, 8).split(args.batch_size)):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.add_scalar("val/loss", loss.item(), step)
        print(json.dumps({"step": step, "train_loss": loss.item()}))
    writer.close()


if __name__ == "__main__":
    main()
