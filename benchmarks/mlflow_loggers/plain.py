"""Trains a line, and logs to MLflow's active run as MLflow's first pages do."""

import argparse

import mlflow
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

torch.manual_seed(0)
model, inputs = torch.nn.Linear(4, 1), torch.randn(64, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
mlflow.log_param("momentum", 0.0)
for epoch in range(3):
    for batch in inputs.split(8):
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    mlflow.log_metric("val_loss", loss.item(), step=epoch)
mlflow.log_text("trained", "notes.txt")
