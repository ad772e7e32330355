"""GPT-2: problems become blocks of tokens; a new or given model learns from them, is kept and writes."""

import importlib.util
import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from workload_parts import REAL_DATA, needs, trained

from raypar.errors import DataError, RayparError
from raypar.study.options import resolve
from workloads.gpt2_code import MBPP, generate, gpt2_code, load_tokenizer, next_token_loss, prepare, prompted, texts

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not here: pip install 'raypar[text]'"
)
END = 256  # of a text, in the small tokenizer
PROBLEMS = [{"text": f"Add {i}. ", "code": f"def f(x):\r\n  return x + {i}\r\n"} for i in range(20)]


SMALL = {"init": "scratch", "size": "tiny", "block_size": 16, "dropout": 0.0}


def config(**chosen):
    return resolve(gpt2_code, {**SMALL, **chosen})


def small_tokenizer(folder):
    """GPT-2's two files for a vocabulary of bytes: nothing is merged."""
    from tokenizers.pre_tokenizers import ByteLevel

    folder.mkdir(parents=True)
    words = [*sorted(ByteLevel.alphabet()), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path / "named"))


@pytest.fixture
def few(tmp_path, monkeypatch):
    """Twenty problems and a small tokenizer in a named data folder."""
    named = tmp_path / "named"
    small_tokenizer(named / "gpt2-tokenizer")
    (named / "mbpp").mkdir()
    path = named / "mbpp" / "mbpp.jsonl"
    path.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    file = replace(MBPP.files[0], num_bytes=path.stat().st_size)
    monkeypatch.setitem(prepare.__globals__, "MBPP", replace(MBPP, files=(file,)))
    return named


def problem_of(chosen):
    with pytest.raises(DataError) as caught:
        prepare(chosen)
    assert caught.value.hint
    return str(caught.value)


def train(num_steps, **chosen):
    """Return a model after some steps on all blocks, and its losses."""
    model, _, losses = trained(gpt2_code, num_steps, **{**SMALL, "lr": 0.003, "batch_size": 1000, **chosen})
    return model, losses


@needs_transformers
def test_blocks_are_the_texts_joined_with_every_tenth_problem_kept_for_validation(few):
    data = gpt2_code.data(config())
    problems = texts(few / "mbpp" / "mbpp.jsonl")
    assert problems[3] == "Add 3.\ndef f(x):\n  return x + 3" and problems[3].startswith(prompted("Add 3."))
    lengths = [len(text) + 1 for text in problems]
    in_val, in_train = sum(lengths[9::10]), sum(lengths) - sum(lengths[9::10])
    assert [p.inputs.shape for p in (data.val, data.train)] == [(in_val // 16, 16), (in_train // 16, 16)]
    assert data.train.inputs.dtype == torch.int64 and torch.equal(data.train.inputs, data.train.targets)
    assert data.train.inputs.flatten().tolist().index(END) == lengths[0] - 1


@needs_transformers
def test_tokens_are_made_once_whatever_the_model(few, monkeypatch):
    gpt2_code.data(config())
    monkeypatch.setitem(prepare.__globals__, "blocks", None)
    gpt2_code.data(config(size="mini", lr=0.1))
    with pytest.raises(TypeError):
        gpt2_code.data(config(block_size=8))


def test_the_loss_is_the_mean_over_the_tokens_that_follow_another():
    outputs, targets = torch.randn(3, 5, 11), torch.randint(11, (3, 5))
    expected = cross_entropy(outputs[:, :-1].reshape(-1, 11), targets[:, 1:].reshape(-1))
    parts = [next_token_loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(3)]
    assert torch.allclose(next_token_loss(outputs, targets), expected)
    assert torch.allclose(torch.stack(parts).mean(), expected)


@needs_transformers
def test_a_new_model_starts_from_chance_and_learns(few):
    _, losses = train(12)
    assert losses[0] == pytest.approx(math.log(257), rel=0.05) and losses[-1] < 0.8 * losses[0]


@needs_transformers
def test_a_kept_model_is_loaded_again_and_writes_what_it_would_have_written(few, tmp_path):
    model, _ = train(3, block_size=48)
    gpt2_code.save(model, config(block_size=48), tmp_path / "kept")
    found = generate(tmp_path / "kept", "Add 1.", 5)
    tokenizer = load_tokenizer(tmp_path / "kept")
    tokens = tokenizer(prompted("Add 1."))["input_ids"]
    given = len(tokens)
    with torch.inference_mode():
        for _ in range(5):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert found == tokenizer.decode(tokens[given:], skip_special_tokens=True)


@needs_transformers
def test_writing_ends_at_the_last_position_and_a_prompt_that_leaves_none_is_refused(few, tmp_path):
    gpt2_code.save(gpt2_code.model(config()), config(), tmp_path / "kept")
    assert len(generate(tmp_path / "kept", "Add 1.", 500).encode()) <= 16 * 3
    with pytest.raises(RayparError, match="31 tokens, the model 16 positions"):
        generate(tmp_path / "kept", "x" * 30, 5)


@needs_transformers
def test_a_folder_of_a_kept_model_is_fine_tuned_with_its_own_tokenizer(few, tmp_path):
    model, _ = train(2)
    gpt2_code.save(model, config(), tmp_path / "kept")
    for file in (few / "gpt2-tokenizer").iterdir():
        file.unlink()
    pretrained = config(init="pretrained", size=None, pretrained_model=str(tmp_path / "kept"))
    prepare(pretrained)
    again = gpt2_code.model(pretrained).eval()
    tokens = torch.randint(256, (2, 16))
    assert torch.allclose(again(tokens), model(tokens), atol=1e-5)


@needs_transformers
def test_what_is_missing_is_reported_with_its_fix(few, monkeypatch):
    import huggingface_hub

    def snapshot_download(*_, **__):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    message = problem_of(config(init="pretrained", size=None))
    assert "pretrained weights gpt2" in message and "Name or service not known" in message
    assert "--set init=scratch --set size=tiny" in message and "--set pretrained_model=FOLDER" in message

    (few / "gpt2-tokenizer" / "merges.txt").unlink()
    message = problem_of(config())
    assert "gpt2-tokenizer" in message and "--set tokenizer=FOLDER" in message and "--data-dir" in message
    assert "holds neither" in problem_of(config(tokenizer=str(few)))
    assert "holds no config.json" in problem_of(config(init="pretrained", size=None, pretrained_model=str(few)))
    assert "no effect on a pretrained model" in problem_of(config(init="pretrained"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "pip install 'raypar[text]'" in problem_of(config())
    (few / "mbpp" / "mbpp.jsonl").unlink()
    assert "mbpp.jsonl: no such file" in problem_of(config())


@needs("mbpp")
@needs("gpt2-tokenizer")
@needs_transformers
def test_the_real_problems_are_cut_into_blocks_of_gpt2s_tokens(monkeypatch):
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(REAL_DATA))
    chosen = config(block_size=128)
    prepare(chosen)
    data = gpt2_code.data(chosen)
    assert data.train.inputs.shape == (731, 128) and data.val.inputs.shape == (78, 128)
    assert (data.train.inputs == 50_256).sum() == pytest.approx(877, abs=2)
