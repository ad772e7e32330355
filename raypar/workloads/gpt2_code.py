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
from raypar.workloads.datasets import DataFile, FileSet, data_dir, ensure_files, prepared

if TYPE_CHECKING:
    from torch import Tensor, nn
if TYPE_CHECKING:
    from torch import Tensor


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
