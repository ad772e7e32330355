"""Trains a line, and logs to an experiment and an address of the script's own."""

import argparse
import os

import mlflow
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

mlflow.set_tracking_uri(os.environ.get("TEAM_STORE", "sqlite:///team.db"))
mlflow.set_experiment("lines of my team")
torch.manual_seed(0)
model, inputs = torch.nn.Linear(4, 1), torch.randn(64, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
with mlflow.start_run():
    mlflow.log_params(vars(args) | {"optimizer_class": "Adam"})
    for epoch in range(3):
        for batch in inputs.split(8):
            optimizer.zero_grad()
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
        mlflow.log_metrics({"val_loss": loss.item(), "weight": model.weight.mean().item()}, step=epoch)
