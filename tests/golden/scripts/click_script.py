"""Options by click, and a metric that is printed in several arguments."""

import click


@click.command()
@click.argument("dataset")
@click.option("--epochs", default=2, show_default=True)
@click.option("--momentum", type=float, required=True)
@click.option("--verbose/--quiet", default=False)
def main(dataset, epochs, momentum, verbose):
    for epoch in range(epochs):
        print("Epoch", epoch, "Loss:", 1.0 / (epoch + 1), "on", dataset, "with", momentum)


if __name__ == "__main__":
    main()
