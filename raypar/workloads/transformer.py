"""A small transformer learns to sort digits: every position depends on all others, and nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypar.errors import DataError
from raypar.study.options import tensor_size
from raypar.study.workload import Config, Data, Split, Workload, whole_number
from raypar.workloads.transformer_layers import TENSOR_PLAN, blocks, embedding, head

if TYPE_CHECKING:
    from torch import Tensor, nn

TRAIN_SEED, VAL_SEED = 1, 2


def build(config: Config) -> nn.Module:
    """Embedding, blocks and head in a row: tokens ``(batch, T)`` to scores ``(batch, T, num_tokens)``."""
    from torch import nn

    width, num_tokens = config["width"], config["num_tokens"]
    return nn.Sequential(
        embedding(num_tokens, config["sequence_length"], width),
        *blocks(config["num_blocks"], width, config["num_heads"]),
        head(width, num_tokens),
    )


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """The linear layers of every block; the embedding and the head stay whole."""
    names = [name for name, _ in model.named_modules()]
    return {name: TENSOR_PLAN[layer] for name in names if (layer := name.rpartition(".")[2]) in TENSOR_PLAN}


def data(config: Config) -> Data:
    """Sequences of evenly drawn tokens, ``(num_samples, T)``, int64; the targets are the same tokens in order.

    The same every time. ``val`` has a quarter as many sequences as ``train``, drawn on their own: with the usual
    lengths (10 to the power of 16 sequences are possible by default) none is in both.
    """
    num_train = config["num_sequences"]
    return Data(
        train=_sequences(num_train, config, TRAIN_SEED),
        val=_sequences(-(-num_train // 4), config, VAL_SEED),
    )


def _sequences(num_samples: int, config: Config, seed: int) -> Split:
    import torch

    shape = (num_samples, config["sequence_length"])
    tokens = torch.randint(config["num_tokens"], shape, generator=torch.Generator().manual_seed(seed))
    return Split(tokens, tokens.sort(dim=1).values)


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, the mean over all positions of all sequences.

    Args:
        outputs: shape ``(batch, T, num_tokens)``.
        targets: token numbers, shape ``(batch, T)``.
    """
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def token_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per sequence, the share of positions whose highest score is the target's; shape ``(batch,)``."""
    return (outputs.argmax(-1) == targets).float().mean(1)


def sequence_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per sequence, 1.0 where every position is right; shape ``(batch,)``."""
    return (outputs.argmax(-1) == targets).all(1).float()


def prepare(config: Config) -> None:
    width, num_heads = config["width"], config["num_heads"]
    if width % num_heads:
        raise DataError(
            f"width={width} can't be shared out among num_heads={num_heads}",
            hint=f"say --set width={-(-width // num_heads) * num_heads}, or another multiple of num_heads",
        )
    if num_heads % (splits := tensor_size(config)):
        raise DataError(
            f"num_heads={num_heads} can't be shared out among the {splits} workers that split each layer",
            hint=f"say --set num_heads={splits}, or another multiple of it that divides width={width}",
        )


def num_train_sequences(config: Config) -> int:
    return int(config["num_sequences"])


transformer = Workload(
    name="transformer",
    model=build,
    data=data,
    num_train_samples=num_train_sequences,
    loss=token_loss,
    metrics={"accuracy": token_accuracy, "sequence_accuracy": sequence_accuracy},
    options={
        "num_blocks": whole_number(4, "attention and perceptron, one after the other"),
        "num_heads": whole_number(4, "of attention; has to divide width"),
        "width": whole_number(64, "features of a token; four times as many in the perceptron"),
        "sequence_length": whole_number(16, "tokens of a sample", at_least=2),
        "num_tokens": whole_number(10, "different tokens", at_least=2),
        "num_sequences": whole_number(8192, "samples for training; a quarter as many are made for validation"),
    },
    defaults={"optimizer": "adamw", "lr": 0.001, "batch_size": 64, "epochs": 4},
    prepare=prepare,
    tensor_plan=tensor_plan,
    description="transformer that learns to sort digits",
    dataset="made-up sequences of 16 digits, 8,192 + 2,048, embedded",
)
