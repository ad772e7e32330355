"""Trains lines on folds of the data, and logs each fold to a run of its own below a named run."""

import argparse

import mlflow
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(64, 4)
with mlflow.start_run(run_name="folds"):
    losses = []
    for fold in range(2):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        with mlflow.start_run(run_name=f"fold {fold}", nested=True):
            for epoch in range(3):
                for batch in inputs[32 * fold : 32 * (fold + 1)].split(8):
                    optimizer.zero_grad()
                    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                    loss.backward()
                    optimizer.step()
                mlflow.log_metric("fold_loss", loss.item(), step=epoch)
        losses.append(loss.item())
    mlflow.log_metric("val_loss", sum(losses) / len(losses))
