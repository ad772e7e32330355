"""GPT-2 learns to solve programming problems: MBPP's statements, each followed by its solution."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.study.workload import Config, Data, Option, Split, Workload, one_of
from raypar.workloads.files import DataFile, FileSet, ensure_files
from raypar.workloads.gpt2 import (
    DEFAULT_SIZE,
    MAX_BLOCK_SIZE,
    SIZES,
    build_gpt2,
    ensure_gpt2,
    generate_text,
    load_tokenizer,
    next_token_loss,
    save_gpt2,
    tokenizer_files,
    tokenizer_folder,
)
from raypar.workloads.prepared import prepared

if TYPE_CHECKING:
    from torch import Tensor

ONE_IN_VAL = 10

MBPP = FileSet(
    "MBPP",
    "mbpp",
    (
        DataFile(
            "mbpp.jsonl",
            563_743,
            "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/mbpp.jsonl",
            "ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f",
        ),
    ),
)


def data(config: Config) -> Data:
    """Blocks of token numbers, ``(num_blocks, block_size)``, int64; the targets are the same blocks.

    Every tenth problem is in ``val``, by its place in the file: no problem is in both parts (it is not MBPP's own
    split). The texts of a part, each with an end of text behind it, are joined and cut into blocks; what doesn't fill
    the last one is left out. So every sample has as many tokens as any other, and a mean over samples is the mean
    over tokens, however a batch is shared out among workers.
    """
    file = ensure_files(MBPP) / MBPP.files[0].name
    folder, block_size = tokenizer_folder(config), config["block_size"]
    tensors = prepared(
        "gpt2_code",
        [file, *tokenizer_files(folder)],
        {"block_size": block_size, "one_in_val": ONE_IN_VAL, "way": 1},
        lambda: blocks(texts(file), folder, block_size),
    )
    train, val = (Split(tensors[part], tensors[part]) for part in ("train", "val"))
    return Data(train=train, val=val)


def texts(file: Path) -> list[str]:
    """Each problem's statement and solution as one text."""
    problems = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    # Part of the file has Windows' line ends: a carriage return before each would be one more token to learn.
    return [prompted(problem["text"]) + problem["code"].replace("\r\n", "\n").strip() for problem in problems]


def prompted(statement: str) -> str:
    """A statement as it stands before a solution."""
    return statement.strip() + "\n"


def blocks(every_text: list[str], tokenizer_in: Path, block_size: int) -> dict[str, Tensor]:
    """``train`` and ``val``, each of shape ``(num_blocks, block_size)``."""
    import torch

    tokenizer = load_tokenizer(tokenizer_in)
    joined: dict[str, list[int]] = {"train": [], "val": []}
    for number, tokens in enumerate(tokenizer(every_text)["input_ids"]):
        joined["train" if (number + 1) % ONE_IN_VAL else "val"] += [*tokens, tokenizer.eos_token_id]
    found = {}
    for part, stream in joined.items():
        num_blocks = len(stream) // block_size
        found[part] = torch.tensor(stream[: num_blocks * block_size]).view(num_blocks, block_size)
    return found


def prepare(config: Config) -> None:
    ensure_files(MBPP)
    ensure_gpt2(config)


def generate(folder: Path, prompt: str, max_new_tokens: int) -> str:
    """A solution for the statement `prompt`."""
    return generate_text(folder, prompted(prompt), max_new_tokens)


def _block_size_problem(value: object) -> str | None:
    fine = isinstance(value, int) and 2 <= value <= MAX_BLOCK_SIZE
    return None if fine else f"must be from 2 to {MAX_BLOCK_SIZE}"


OPTIONS = {
    "init": one_of(
        "pretrained", ("pretrained", "scratch"), "pretrained: fine-tune published weights; scratch: new ones"
    ),
    "pretrained_model": Option("gpt2", str, "a GPT-2 on Hugging Face's hub, or a folder that holds one"),
    "size": Option(
        None,
        str,
        f"of a new model: {', '.join(SIZES)}; None: {DEFAULT_SIZE}",
        lambda v: None if v in SIZES else f"must be one of {', '.join(SIZES)}",
        optional=True,
    ),
    "block_size": Option(128, int, "tokens of a sample", _block_size_problem),
    "dropout": Option(
        0.1,
        float,
        "share of the features that a training step leaves out; 0: the same losses on any number of workers",
        lambda v: None if isinstance(v, (int, float)) and 0 <= v < 1 else "must be from 0 to below 1",
    ),
    "tokenizer": Option(
        None,
        str,
        "folder of a tokenizer; None: the pretrained model's, or gpt2-tokenizer in the data folder",
        optional=True,
    ),
}

gpt2_code = Workload(
    name="gpt2_code",
    model=build_gpt2,
    data=data,
    loss=next_token_loss,
    metrics={},
    metric="val_loss",
    mode="min",
    options=OPTIONS,
    # For fine-tuning; a new model wants an lr of about 0.001.
    defaults={
        "optimizer": "adamw",
        "lr": 5e-5,
        "weight_decay": 0.01,
        "lr_schedule": "linear",
        "clip_grad_norm": 1.0,
        "batch_size": 8,
        "epochs": 3,
        "eval_every_steps": 50,
        "eval_batch_size": 8,
        "num_warmup_steps": 2,
        "keep_model": True,
    },
    prepare=prepare,
    preload=("transformers.models.gpt2.modeling_gpt2",),
    description="GPT-2 fine-tuned on programming problems and their solutions",
    dataset="MBPP, 974 problems",
    save=save_gpt2,
    generate=generate,
)
