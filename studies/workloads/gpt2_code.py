"""GPT-2 on programming problems: MBPP's statements, each followed by its solution."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import DataError, RayparError
from raypar.study.workload import Config, Data, Option, Split, Workload, one_of
from raypar.workloads.activations import dropout
from raypar.workloads.datasets import DataFile, FileSet, data_dir, ensure_files, first_line, prepared

if TYPE_CHECKING:
    from torch import Tensor, nn

# Layers, width, attention heads. small and medium are the published 124M and 355M.
SIZES = {"tiny": (2, 128, 2), "mini": (4, 256, 4), "small": (12, 768, 12), "medium": (24, 1024, 16)}
DEFAULT_SIZE = "small"
WEIGHTS = ("pretrained", "scratch")
MAX_BLOCK_SIZE = 1024  # context length of the published models
TOKENIZER_FOLDER = "gpt2-tokenizer"  # below the data folder
TOKENIZER_DOC = "folder of a tokenizer; None: the pretrained model's, or gpt2-tokenizer in the data folder"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
MODEL_FILES = ("config.json", "model.safetensors", *TOKENIZER_FILES)
WITHOUT_WEIGHTS = "train a new one: --set init=scratch --set size=tiny"
WAYS_TO_WEIGHTS = (
    "connect once and they are downloaded; or name a folder with config.json and model.safetensors: "
    f"--set pretrained_model=FOLDER; or {WITHOUT_WEIGHTS}"
)
WAYS_TO_TOKENIZER = (
    f"put vocab.json and merges.txt of GPT-2 into {TOKENIZER_FOLDER} in the data folder (--data-dir DIR), "
    "or name a folder with them: --set tokenizer=FOLDER; or connect once"
)


def prepare(config: Config) -> None:
    """Check for problems, transformers, the tokenizer and the weights to start from; download what is missing."""
    ensure_files(MBPP)
    if importlib.util.find_spec("transformers") is None:
        raise DataError("transformers is not installed", hint="pip install 'raypar[text]'")
    if config["init"] == "pretrained":
        if config["size"] is not None:
            hint = "leave size out, or add --set init=scratch"
            raise DataError(f"size={config['size']} has no effect on a pretrained model", hint=hint)
        _pretrained_folder(config, may_download=True)
    tokenizer_folder(config, may_download=True)


def build_gpt2(config: Config) -> nn.Module:
    """Build GPT-2, from tokens ``(batch, block)`` to scores of the next token, ``(batch, block, vocabulary)``.

    A new model has positions for one block only, since no training step would reach those beyond it.
    """
    from torch import nn
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config["dropout"])
    tokenizer = load_tokenizer(tokenizer_folder(config))
    if config["init"] == "pretrained":
        with _quiet_transformers():
            gpt2 = GPT2LMHeadModel.from_pretrained(_pretrained_folder(config), **dropouts)
        if len(tokenizer) > gpt2.config.vocab_size:
            message = f"the tokenizer's {len(tokenizer)} tokens are more than the model's {gpt2.config.vocab_size}"
            raise DataError(message, hint="give the model's own with --set tokenizer=FOLDER")
    else:
        num_layers, width, num_heads = SIZES[config["size"] or DEFAULT_SIZE]
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.eos_token_id)
        sizes = {"n_positions": config["block_size"], "n_layer": num_layers, "n_embd": width, "n_head": num_heads}
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ends, **dropouts))

    class NextTokenScores(nn.Module):
        """GPT-2 with a plain tensor as its output."""

        def __init__(self) -> None:
            super().__init__()
            self.gpt2 = gpt2

        def forward(self, tokens: Tensor) -> Tensor:
            scores: Tensor = self.gpt2(input_ids=tokens, use_cache=False).logits
            return scores

    return NextTokenScores()


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each token given those before it.

    Args:
        outputs: ``(batch, block, vocabulary)``.
        targets: the tokens, ``(batch, block)``; the first of a block is not predicted.
    """
    from torch.nn.functional import cross_entropy, pad

    # Shift the targets, not the scores: those are a thousand times larger, and slicing would copy them.
    next_tokens = pad(targets[:, 1:], (0, 1), value=-100)
    return cross_entropy(outputs.flatten(0, 1), next_tokens.flatten(), ignore_index=-100)


def save_gpt2(model: nn.Module, config: Config, folder: Path) -> None:
    """Save model and tokenizer for transformers' ``from_pretrained(folder)``."""
    with _quiet_transformers():
        model.gpt2.save_pretrained(folder)  # type: ignore[operator, union-attr]
        load_tokenizer(tokenizer_folder(config)).save_pretrained(folder)


def generate(folder: Path, statement: str, max_new_tokens: int) -> str:
    """Write a solution greedily with a saved model, up to its end of text, `max_new_tokens` or its last position.

    Raises:
        RayparError: the statement fills all positions.
    """
    import torch
    from transformers import GPT2LMHeadModel

    tokenizer = load_tokenizer(folder)
    with _quiet_transformers():
        gpt2: Any = GPT2LMHeadModel.from_pretrained(folder, use_safetensors=True)
    gpt2.eval()
    tokens = tokenizer(prompted(statement), return_tensors="pt")
    prompt_length = tokens["input_ids"].shape[1]
    max_length = gpt2.config.n_positions - prompt_length
    if max_length < 1:
        message = f"the prompt has {prompt_length} tokens, the model {gpt2.config.n_positions} positions"
        raise RayparError(message, hint="give a shorter prompt")
    with torch.inference_mode():
        length = min(max_new_tokens, max_length)
        output = gpt2.generate(**tokens, max_new_tokens=length, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(output[0, prompt_length:], skip_special_tokens=True))


def load_tokenizer(folder: Path) -> Any:
    """Load GPT-2's tokenizer from ``tokenizer.json``, or from ``vocab.json`` and ``merges.txt``."""
    from transformers import GPT2Tokenizer

    with _quiet_transformers():
        return GPT2Tokenizer.from_pretrained(folder)


def tokenizer_folder(config: Config, *, may_download: bool = False) -> Path:
    """Return the tokenizer's folder.

    In this order: the config's, beside the pretrained weights, in the data folder, in Hugging Face's cache.
    """
    named, pretrained = config["tokenizer"], config["pretrained_model"]
    if named is None:
        if config["init"] == "pretrained" and _has_tokenizer(beside := _pretrained_folder(config)):
            return beside
        if _has_tokenizer(in_data_dir := data_dir() / TOKENIZER_FOLDER):
            return in_data_dir
        if not Path(pretrained).expanduser().is_dir():
            what = f"{in_data_dir}: no such folder, and the tokenizer of {pretrained}"
            return _from_hub(pretrained, TOKENIZER_FILES, may_download, what, WAYS_TO_TOKENIZER)
    folder = Path(named or pretrained).expanduser()
    if not _has_tokenizer(folder):
        message = f"{folder}: holds neither tokenizer.json nor vocab.json and merges.txt"
        raise DataError(message, hint=WAYS_TO_TOKENIZER)
    return folder


def tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _has_tokenizer(folder: Path) -> bool:
    names = {path.name for path in tokenizer_files(folder)}
    return "tokenizer.json" in names or {"vocab.json", "merges.txt"} <= names


def _pretrained_folder(config: Config, *, may_download: bool = False) -> Path:
    local = Path(config["pretrained_model"]).expanduser()
    if not local.is_dir():
        what = f"pretrained weights {config['pretrained_model']}"
        return _from_hub(config["pretrained_model"], MODEL_FILES, may_download, what, WAYS_TO_WEIGHTS)
    if not (local / "config.json").is_file() or not [*local.glob("*.safetensors"), *local.glob("*.bin")]:
        raise DataError(f"{local}: holds no config.json and model.safetensors", hint=WAYS_TO_WEIGHTS)
    return local


def _from_hub(name: str, files: tuple[str, ...], may_download: bool, what: str, ways: str) -> Path:
    """Return the folder of a model's files in Hugging Face's cache, downloading them if allowed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files), local_files_only=not may_download))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise DataError(
            f"{what}: not on this machine, and the download failed: {first_line(error)}", hint=ways
        ) from None


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and advice."""
    from transformers.utils import logging

    log: Any = logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        log.enable_progress_bar()


ONE_IN_VAL = 10

MBPP_URL = "https://raw.githubusercontent.com/google-research/google-research/master/mbpp/mbpp.jsonl"
MBPP_SHA256 = "ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f"
MBPP = FileSet("MBPP", "mbpp", (DataFile("mbpp.jsonl", 563_743, MBPP_URL, MBPP_SHA256),))


def data(config: Config) -> Data:
    """Return blocks of tokens, ``(num_blocks, block_size)``, int64; the targets are the same blocks.

    Every tenth problem of the file is in ``val`` (this is not MBPP's own split). The texts of a split, each with an end
    of text, are joined and cut into blocks, dropping an incomplete last one. All samples have the same number of
    tokens, so that a mean over samples is the mean over tokens for any number of workers.
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
    """Return each problem's statement and solution as one text."""
    problems = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    # Part of the file has CRLF line ends, which would add a token per line.
    return [prompted(problem["text"]) + problem["code"].replace("\r\n", "\n").strip() for problem in problems]


def prompted(statement: str) -> str:
    """Return a statement as it precedes a solution."""
    return statement.strip() + "\n"


def blocks(texts: list[str], tokenizer_dir: Path, block_size: int) -> dict[str, Tensor]:
    """Tokenize into ``train`` and ``val``, each of shape ``(num_blocks, block_size)``."""
    import torch

    tokenizer = load_tokenizer(tokenizer_dir)
    joined: dict[str, list[int]] = {"train": [], "val": []}
    for number, tokens in enumerate(tokenizer(texts)["input_ids"]):
        joined["train" if (number + 1) % ONE_IN_VAL else "val"] += [*tokens, tokenizer.eos_token_id]
    parts = {}
    for part, stream in joined.items():
        num_blocks = len(stream) // block_size
        parts[part] = torch.tensor(stream[: num_blocks * block_size]).view(num_blocks, block_size)
    return parts


gpt2_code = Workload(
    name="gpt2_code",
    model=build_gpt2,
    data=data,
    loss=next_token_loss,
    metrics={},
    metric="val_loss",
    mode="min",
    options={
        "init": one_of("pretrained", WEIGHTS, "pretrained: fine-tune published weights; scratch: new ones"),
        "pretrained_model": Option("gpt2", str, "a GPT-2 on Hugging Face's hub, or a folder"),
        "size": Option(
            None,
            str,
            f"of a new model: {', '.join(SIZES)}; None: {DEFAULT_SIZE}",
            lambda v: None if v in SIZES else f"must be one of {', '.join(SIZES)}",
            optional=True,
        ),
        "block_size": Option(
            128,
            int,
            "tokens of a sample",
            lambda v: (
                None if isinstance(v, int) and 2 <= v <= MAX_BLOCK_SIZE else f"must be from 2 to {MAX_BLOCK_SIZE}"
            ),
        ),
        "dropout": dropout(0.1, "; 0: equal losses for any number of workers"),
        "tokenizer": Option(None, str, TOKENIZER_DOC, optional=True),
    },
    # For fine-tuning; a new model needs an lr of about 0.001.
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
