"""Train a small network; options by argparse, and one argument that is required."""

import argparse
import logging

import torch

EPOCHS = 3


def evaluate(model, inputs, targets):
    correct = (model(inputs).argmax(1) == targets).sum().item()
    print(f"\nTest set: Accuracy: {correct}/{len(targets)} ({100.0 * correct / len(targets):.0f}%)\n")


def main():
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("optimizer", choices=["sgd", "adam"])
    parser.add_argument("--learning_rate", "-l", type=float, default=1e-2)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    maker = torch.optim.SGD if args.optimizer == "sgd" else torch.optim.Adam
    optimizer = maker(model.parameters(), lr=args.learning_rate)
    inputs = torch.randn(300, 8)
    targets = inputs.argmax(1) % 3
    for epoch in range(args.epochs):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logging.info("epoch %d of %d: loss = %.5f", epoch, args.epochs, loss)
        evaluate(model, inputs, targets)


if __name__ == "__main__":
    main()
