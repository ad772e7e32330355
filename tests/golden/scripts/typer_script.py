"""Options by typer, metrics as JSON lines."""

import json
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def train(
    data: Annotated[str, typer.Option(help="folder of the data")],
    lr: Annotated[float, typer.Option("--learning-rate")] = 0.1,
    batch_size: int = 16,
    shuffle: bool = True,
) -> None:
    print(json.dumps({"step": 1, "val_accuracy": 0.5, "lr": lr, "data": data}))


@app.command()
def export(path: str) -> None:
    print(path)


if __name__ == "__main__":
    app()
