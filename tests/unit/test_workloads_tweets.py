"""Tweets become word numbers once, the same for every trial; the network learns from them."""

from dataclasses import replace

import pytest
import torch
from workload_parts import REAL_DATA, accuracy, needs, trained

from raypar.study.options import resolve
from raypar.workloads.datasets import cache_dir
from workloads.tweets import TWEETS, numbered, tweets

needs_tweets = needs("tweeteval/emoji")
TEXTS = {
    "train": ["The sun @ Venice, the sun!", "so cold \ufe0f \ufe0f", "the\u2028snow", "#sun"],
    "val": ["The moon"],
    "test": ["sun"] * 3,
}


def config(**chosen):
    return resolve(tweets, chosen)


@pytest.fixture
def few(tmp_path, monkeypatch):
    """A handful of tweets in TweetEval's layout; returns the named data folder."""
    folder = tmp_path / "named" / "tweeteval" / "emoji"
    folder.mkdir(parents=True)
    for part, lines in TEXTS.items():
        (folder / f"{part}_text.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        (folder / f"{part}_labels.txt").write_text("".join(f"{i % 20}\n" for i in range(len(lines))))
    files = [replace(file, num_bytes=(folder / file.name).stat().st_size) for file in TWEETS.files]
    monkeypatch.setitem(numbered.__globals__, "TWEETS", replace(TWEETS, files=tuple(files)))
    monkeypatch.setitem(numbered.__globals__, "NUM_OF_TEST_TRAINED_ON", 2)
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "named"


def test_words_are_numbered_by_their_frequency_in_the_training_part(few):
    data = tweets.data(config())
    assert data.train.inputs.shape == (4, 32) and data.train.inputs.dtype == torch.int64
    # the: 3 times, sun: 2, then by the alphabet: ! #sun , @ cold snow so venice
    assert data.train.inputs[0, :9].tolist() == [2, 3, 7, 11, 6, 2, 3, 4, 0]
    assert data.train.inputs[2, :3].tolist() == [2, 9, 0]  # one tweet, though Unicode would end a line in it
    assert data.train.inputs[1, :3].tolist() == [10, 8, 0]  # the rest of a removed emoji is not a word
    assert data.val.inputs[0, :3].tolist() == [2, 1, 0]  # "moon" is unknown
    assert tweets.model(config(embedding_size=8, hidden_size=4))(data.train.inputs).shape == (4, 20)
    assert data.train.targets.tolist() == [0, 1, 2, 3] and len(data.test) == 3
    assert tweets.data(config(vocabulary_size=4)).train.inputs.unique().tolist() == [0, 1, 2, 3]  # rare: unknown


def test_the_large_split_trains_on_most_of_the_test_part_and_keeps_the_rest_for_testing(few):
    data = tweets.data(config(split="large"))
    assert (len(data.train), len(data.val), len(data.test)) == (6, 1, 1)


def test_numbers_are_made_once_and_kept_only_in_the_cache(few, monkeypatch):
    before = sorted(few.rglob("*"))
    first = tweets.data(config())
    monkeypatch.setitem(numbered.__globals__, "numbered", None)
    again = tweets.data(config(lr=0.5))
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert sorted(few.rglob("*")) == before and len(list((cache_dir() / "prepared").glob("*.pt"))) == 1
    with pytest.raises(TypeError):
        tweets.data(config(vocabulary_size=5))  # other options, so they are made again


def test_other_contents_or_a_damaged_cache_are_numbered_again(few):
    tweets.data(config())
    (kept,) = (cache_dir() / "prepared").glob("*.pt")
    kept.write_bytes(b"half")
    assert tweets.data(config()).val.targets.tolist() == [0]
    (few / "tweeteval" / "emoji" / "val_labels.txt").write_text("7\n")
    assert tweets.data(config()).val.targets.tolist() == [7]


def test_an_unwritable_cache_is_not_needed(few, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(tweets.data(config()).train) == 4


@needs_tweets
def test_the_real_tweets_are_complete_and_the_network_beats_the_majority_class(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPAR_DATA_DIR", str(REAL_DATA))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = {"vocabulary_size": 5_000, "embedding_size": 64, "hidden_size": 32, "lr": 0.003}
    model, data, _ = trained(tweets, num_steps=120, **small)
    assert (len(data.train), len(data.val), len(data.test)) == (45_000, 5_000, 50_000)
    assert float((data.val.targets == 0).float().mean()) == pytest.approx(0.211, abs=0.001)
    assert accuracy(model, data, 5_000) > 0.23
