"""GPT-2: problems become blocks of tokens, a new or a given model learns from them, is kept and writes."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from workload_parts import REAL_DATA, needs

from raypar.errors import DataError, RayparError
from raypar.study.options import resolve
from raypar.workloads import gpt2_code
from raypar.workloads.gpt2_code import MBPP, generate, next_token_loss, prepare, prompted, texts

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not here: pip install 'raypar[text]'"
)
END = 256  # of a text, in the small tokenizer
PROBLEMS = [{"text": f"Add {i}. ", "code": f"def f(x):\r\n  return x + {i}\r\n"} for i in range(20)]


def config(**chosen: Any) -> dict[str, Any]:
    return resolve(gpt2_code, {"init": "scratch", "size": "tiny", "block_size": 16, **chosen})


def small_tokenizer(folder: Path) -> Path:
    """GPT-2's two files for a vocabulary of bytes: nothing is merged."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder.mkdir(parents=True)
    words = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path / "named"))


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twenty problems and a small tokenizer in a named data folder."""
    named = tmp_path / "named"
    small_tokenizer(named / "gpt2-tokenizer")
    (named / "mbpp").mkdir()
    path = named / "mbpp" / "mbpp.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    file = replace(MBPP.files[0], num_bytes=path.stat().st_size)
    monkeypatch.setitem(prepare.__globals__, "MBPP", replace(MBPP, files=(file,)))
    return named


def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot_download(*_: object, **__: object) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def told(chosen: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        prepare(chosen)
    assert caught.value.hint
    return str(caught.value)


def train(chosen: dict[str, Any], num_steps: int) -> tuple[torch.nn.Module, list[float]]:
    """A model after some steps on the same blocks, and its losses."""
    assert gpt2_code.model is not None and gpt2_code.data is not None
    data = gpt2_code.data(chosen)
    assert data.train is not None
    torch.manual_seed(0)
    model = gpt2_code.model(chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    losses = []
    for _ in range(num_steps):
        loss = next_token_loss(model(data.train.inputs), data.train.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses


def test_a_prompt_stands_before_a_solution_as_in_training(few: Path) -> None:
    every = texts(few / "mbpp" / "mbpp.jsonl")
    assert every[3] == "Add 3.\ndef f(x):\n  return x + 3" and every[3].startswith(prompted("Add 3."))


@needs_transformers
def test_blocks_are_the_texts_joined_with_every_tenth_problem_kept_for_validation(few: Path) -> None:
    assert gpt2_code.data is not None
    data = gpt2_code.data(config())
    assert data.train is not None and data.val is not None
    lengths = [len(text) + 1 for text in texts(few / "mbpp" / "mbpp.jsonl")]
    in_val = sum(lengths[9::10])
    assert data.val.inputs.shape == (in_val // 16, 16) and data.train.inputs.shape == (
        (sum(lengths) - in_val) // 16,
        16,
    )
    assert data.train.inputs.dtype == torch.int64 and torch.equal(data.train.inputs, data.train.targets)
    assert data.train.inputs.flatten().tolist().index(END) == lengths[0] - 1


@needs_transformers
def test_tokens_are_made_once_whatever_the_model(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpt2_code.data is not None
    gpt2_code.data(config())
    monkeypatch.setitem(prepare.__globals__, "blocks", None)
    gpt2_code.data(config(size="mini", lr=0.1))
    with pytest.raises(TypeError):
        gpt2_code.data(config(block_size=8))


def test_the_loss_is_the_mean_over_the_tokens_that_follow_on_another() -> None:
    outputs, targets = torch.randn(3, 5, 11), torch.randint(11, (3, 5))
    expected = cross_entropy(outputs[:, :-1].reshape(-1, 11), targets[:, 1:].reshape(-1))
    assert torch.allclose(next_token_loss(outputs, targets), expected)


def test_the_loss_of_a_batch_is_the_mean_of_its_parts_losses() -> None:
    outputs, targets = torch.randn(4, 5, 11), torch.randint(11, (4, 5))
    parts: list[Tensor] = [next_token_loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(4)]
    assert torch.allclose(next_token_loss(outputs, targets), torch.stack(parts).mean())


@needs_transformers
def test_a_new_model_starts_from_chance_and_learns(few: Path) -> None:
    _, losses = train(config(dropout=0.0), num_steps=12)
    assert losses[0] == pytest.approx(math.log(257), rel=0.05) and losses[-1] < 0.8 * losses[0]


@needs_transformers
def test_a_kept_model_is_loaded_again_and_writes_what_it_would_have_written(few: Path, tmp_path: Path) -> None:
    chosen = config(block_size=48, dropout=0.0)
    model, _ = train(chosen, num_steps=3)
    assert gpt2_code.save is not None
    gpt2_code.save(model, chosen, tmp_path / "kept")
    found = generate(tmp_path / "kept", "Add 1.", 5)
    from raypar.workloads.gpt2_code import load_tokenizer

    tokenizer = load_tokenizer(tmp_path / "kept")
    tokens = tokenizer(prompted("Add 1."))["input_ids"]
    given = len(tokens)
    with torch.inference_mode():
        for _ in range(5):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert found == tokenizer.decode(tokens[given:], skip_special_tokens=True)


@needs_transformers
def test_writing_ends_at_the_last_position_and_a_prompt_that_leaves_none_is_told(few: Path, tmp_path: Path) -> None:
    chosen = config(block_size=16)
    assert gpt2_code.save is not None and gpt2_code.model is not None
    gpt2_code.save(gpt2_code.model(chosen), chosen, tmp_path / "kept")
    assert len(generate(tmp_path / "kept", "Add 1.", 500).encode()) <= 16 * 3
    with pytest.raises(RayparError, match="31 tokens, the model 16 positions"):
        generate(tmp_path / "kept", "x" * 30, 5)


@needs_transformers
def test_a_folder_of_a_kept_model_is_fine_tuned_with_its_own_tokenizer(few: Path, tmp_path: Path) -> None:
    chosen = config(dropout=0.0)
    model, _ = train(chosen, num_steps=2)
    assert gpt2_code.save is not None and gpt2_code.model is not None
    gpt2_code.save(model, chosen, tmp_path / "kept")
    for file in (few / "gpt2-tokenizer").iterdir():
        file.unlink()
    pretrained = config(init="pretrained", size=None, pretrained_model=str(tmp_path / "kept"), dropout=0.0)
    prepare(pretrained)
    again = gpt2_code.model(pretrained).eval()
    tokens = torch.randint(256, (2, 16))
    assert torch.allclose(again(tokens), model(tokens), atol=1e-5)


@needs_transformers
def test_offline_the_ways_to_a_model_are_named(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_hub(monkeypatch)
    message = told(config(init="pretrained", size=None))
    assert "pretrained weights gpt2" in message and "Name or service not known" in message
    assert "--set init=scratch --set size=tiny" in message and "--set pretrained_model=FOLDER" in message


@needs_transformers
def test_without_a_tokenizer_the_ways_to_one_are_named(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_hub(monkeypatch)
    (few / "gpt2-tokenizer" / "merges.txt").unlink()
    message = told(config())
    assert "gpt2-tokenizer" in message and "--set tokenizer=FOLDER" in message and "--data-dir" in message
    assert "holds neither" in told(config(tokenizer=str(few)))


@needs_transformers
def test_a_folder_without_weights_is_told(few: Path) -> None:
    assert "holds no config.json" in told(config(init="pretrained", size=None, pretrained_model=str(few)))


@needs_transformers
def test_a_size_that_would_do_nothing_is_told(few: Path) -> None:
    assert "no effect on a pretrained model" in told(config(init="pretrained"))


def test_without_transformers_the_extra_is_named(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "pip install 'raypar[text]'" in told(config())


def test_absent_problems_are_told(tmp_path: Path) -> None:
    (tmp_path / "named").mkdir()
    assert "mbpp.jsonl: no such file" in told(config())


@needs("mbpp")
@needs("gpt2-tokenizer")
@needs_transformers
def test_the_real_problems_are_cut_into_blocks_of_gpt2s_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(REAL_DATA))
    chosen = config(block_size=128)
    prepare(chosen)
    assert gpt2_code.data is not None
    data = gpt2_code.data(chosen)
    assert data.train is not None and data.val is not None
    assert data.train.inputs.shape == (731, 128) and data.val.inputs.shape == (78, 128)
    assert (data.train.inputs == 50_256).sum() == pytest.approx(877, abs=2)
