"""GPT-2 by Hugging Face's transformers: the network, pretrained or new, its tokenizer, and text from a trained one."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import DataError, RayparError
from raypar.study.workload import Config
from raypar.workloads.files import data_dir

if TYPE_CHECKING:
    from torch import Tensor, nn

# Layers, width, attention heads. small and medium are the published 124M and 355M.
SIZES = {"tiny": (2, 128, 2), "mini": (4, 256, 4), "small": (12, 768, 12), "medium": (24, 1024, 16)}
DEFAULT_SIZE = "small"
MAX_BLOCK_SIZE = 1024  # what the published models can look back on
TOKENIZER_FOLDER = "gpt2-tokenizer"  # below the data folder
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
MODEL_FILES = ("config.json", "model.safetensors", *TOKENIZER_FILES)
WITHOUT_WEIGHTS = "train a new one: --set init=scratch --set size=tiny"
WAYS_TO_WEIGHTS = (
    "connect once and they are downloaded; or name a folder that holds config.json and model.safetensors: "
    f"--set pretrained_model=FOLDER; or {WITHOUT_WEIGHTS}"
)
WAYS_TO_TOKENIZER = (
    f"put vocab.json and merges.txt of GPT-2 into {TOKENIZER_FOLDER} in the data folder (--data-dir DIR), "
    "or name a folder that holds them: --set tokenizer=FOLDER; or connect once"
)


def ensure_gpt2(config: Config) -> None:
    """Make sure that transformers, the tokenizer and, for a pretrained model, its weights are there; may download.

    Raises:
        DataError: with the ways out.
    """
    if importlib.util.find_spec("transformers") is None:
        raise DataError("transformers is not in this environment", hint="pip install 'raypar[text]'")
    if config["init"] == "pretrained":
        if config["size"] is not None:
            hint = "leave size out, or add --set init=scratch"
            raise DataError(f"size={config['size']} has no effect on a pretrained model", hint=hint)
        _pretrained_folder(config, may_download=True)
    tokenizer_folder(config, may_download=True)


def build_gpt2(config: Config) -> nn.Module:
    """From token numbers of shape ``(batch, block)`` to scores of the next one, ``(batch, block, vocabulary)``.

    A new model has positions for one block only: no training step would see those behind it.
    """
    from torch import nn
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config["dropout"])
    tokenizer = load_tokenizer(tokenizer_folder(config))
    if config["init"] == "pretrained":
        with _no_talk():
            gpt2 = GPT2LMHeadModel.from_pretrained(_pretrained_folder(config), **dropouts)
        if len(tokenizer) > gpt2.config.vocab_size:
            message = f"the tokenizer's {len(tokenizer)} tokens are more than the model's {gpt2.config.vocab_size}"
            raise DataError(message, hint="give the model's own with --set tokenizer=FOLDER")
    else:
        num_layers, width, num_heads = SIZES[config["size"] or DEFAULT_SIZE]
        end = tokenizer.eos_token_id
        gpt2 = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(tokenizer),
                n_positions=config["block_size"],
                n_layer=num_layers,
                n_embd=width,
                n_head=num_heads,
                bos_token_id=end,
                eos_token_id=end,
                **dropouts,
            )
        )

    class NextTokenScores(nn.Module):
        """transformers' model with a plain tensor as its output."""

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
        targets: the tokens themselves, ``(batch, block)``; the first of a block is given, not guessed.
    """
    from torch.nn.functional import cross_entropy, pad

    # The targets are moved, not the scores cut: those are a thousand times larger, and a cut would copy them.
    following = pad(targets[:, 1:], (0, 1), value=-100)
    return cross_entropy(outputs.flatten(0, 1), following.flatten(), ignore_index=-100)


def save_gpt2(model: nn.Module, config: Config, folder: Path) -> None:
    """The model and its tokenizer, as transformers' ``from_pretrained(folder)`` reads them."""
    with _no_talk():
        model.gpt2.save_pretrained(folder)  # type: ignore[operator, union-attr]
        load_tokenizer(tokenizer_folder(config)).save_pretrained(folder)


def generate_text(folder: Path, prompt: str, max_new_tokens: int) -> str:
    """What a saved model takes to follow on `prompt`: the likeliest token each time, up to the end of text, to
    `max_new_tokens` or to the model's last position.

    Raises:
        RayparError: the prompt leaves no position free.
    """
    import torch
    from transformers import GPT2LMHeadModel

    tokenizer = load_tokenizer(folder)
    with _no_talk():
        gpt2: Any = GPT2LMHeadModel.from_pretrained(folder, use_safetensors=True)
    gpt2.eval()
    tokens = tokenizer(prompt, return_tensors="pt")
    num_given = tokens["input_ids"].shape[1]
    room = gpt2.config.n_positions - num_given
    if room < 1 or not num_given:
        message = f"the prompt has {num_given} tokens, the model {gpt2.config.n_positions} positions"
        raise RayparError(message, hint="give a shorter prompt" if num_given else "give a prompt")
    with torch.inference_mode():
        found = gpt2.generate(
            **tokens,
            max_new_tokens=min(max_new_tokens, room),
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(found[0, num_given:], skip_special_tokens=True))


def load_tokenizer(folder: Path) -> Any:
    """GPT-2's tokenizer from ``tokenizer.json``, or from ``vocab.json`` and ``merges.txt``."""
    from transformers import GPT2Tokenizer

    with _no_talk():
        return GPT2Tokenizer.from_pretrained(folder)


def tokenizer_folder(config: Config, *, may_download: bool = False) -> Path:
    """Where the tokenizer is: where the config says, else beside the pretrained weights, else in the data folder, else
    where transformers keeps the one that belongs to the pretrained model's name."""
    if config["tokenizer"] is not None:
        return _with_tokenizer(Path(config["tokenizer"]).expanduser())
    if config["init"] == "pretrained" and _has_tokenizer(beside := _pretrained_folder(config)):
        return beside
    if _has_tokenizer(own := data_dir() / TOKENIZER_FOLDER):
        return own
    local = Path(config["pretrained_model"]).expanduser()
    if local.is_dir():
        return _with_tokenizer(local)
    what = f"{own}: no such folder, and the tokenizer of {config['pretrained_model']}"
    return _from_hub(config["pretrained_model"], TOKENIZER_FILES, may_download, what, WAYS_TO_TOKENIZER)


def tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _has_tokenizer(folder: Path) -> bool:
    names = {path.name for path in tokenizer_files(folder)}
    return "tokenizer.json" in names or {"vocab.json", "merges.txt"} <= names


def _with_tokenizer(folder: Path) -> Path:
    if not _has_tokenizer(folder):
        message = f"{folder}: holds neither tokenizer.json nor vocab.json and merges.txt"
        raise DataError(message, hint=WAYS_TO_TOKENIZER)
    return folder


def _pretrained_folder(config: Config, *, may_download: bool = False) -> Path:
    local = Path(config["pretrained_model"]).expanduser()
    if not local.is_dir():
        what = f"pretrained weights {config['pretrained_model']}"
        return _from_hub(config["pretrained_model"], MODEL_FILES, may_download, what, WAYS_TO_WEIGHTS)
    if not (local / "config.json").is_file() or not [*local.glob("*.safetensors"), *local.glob("*.bin")]:
        raise DataError(f"{local}: holds no config.json and model.safetensors", hint=WAYS_TO_WEIGHTS)
    return local


def _from_hub(name: str, files: tuple[str, ...], may_download: bool, what: str, ways: str) -> Path:
    """The folder of a model's files in Hugging Face's cache; downloaded to there if they are not in it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files), local_files_only=not may_download))
    except (OSError, ValueError, HfHubHTTPError) as error:
        why = str(error).strip().splitlines()[0]
        raise DataError(f"{what}: not on this machine, and can't be downloaded: {why}", hint=ways) from None


@contextlib.contextmanager
def _no_talk() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the screen."""
    from transformers.utils import logging

    talk: Any = logging
    verbosity = talk.get_verbosity()
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        yield
    finally:
        talk.set_verbosity(verbosity)
        talk.enable_progress_bar()
