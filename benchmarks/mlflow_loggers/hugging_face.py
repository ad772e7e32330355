"""Trains a line with Hugging Face's Trainer, which logs to MLflow."""

import argparse
import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainingArguments


class Line(torch.nn.Module):
    """Linear model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        outputs = self.layer(inputs)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

torch.manual_seed(0)
samples = [{"inputs": each, "labels": each.sum(0, keepdim=True)} for each in torch.randn(64, 4)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        learning_rate=args.lr,
        per_device_train_batch_size=8,
        num_train_epochs=3,
        logging_steps=4,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=["mlflow"],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    Trainer(model=Line(), args=arguments, train_dataset=samples, eval_dataset=samples).train()
