"""Names, keys, texts and addresses that MLflow accepts, and long texts spread over several tags."""

import base64
import random
import string
import zlib
from pathlib import Path

import pytest
from test_track_journal import HOSTILE

from raypar.track.client import artifact_root, local_folder, sqlite_path
from raypar.track.names import (
    MAX_NAME_LENGTH,
    MAX_TAG_LENGTH,
    MAX_TAG_PARTS,
    clip,
    experiment_name,
    join_tag,
    key_name,
    key_names,
    short_label,
    split_tag,
)
from raypar.track.store import default_tracking_uri


def noise(length):
    return "".join(random.Random(length).choices(string.printable, k=length))


@pytest.mark.parametrize("name", HOSTILE)
def test_every_study_has_a_valid_experiment_name(name):
    experiment = experiment_name(name)
    assert 0 < len(experiment) <= MAX_NAME_LENGTH
    assert experiment.isprintable() and experiment.strip() == experiment
    assert experiment == name or name not in ("a/b", "naïve 研究")


@pytest.mark.parametrize(
    ("text", "key"),
    [("train/loss", "train/loss"), ("acc@1", "acc_1"), ("../up", "up"), ("/abs//x", "abs/x")]
    + [(text, None) for text in ("", "..", "/", "é" * 300, "k" * 400)],
)
def test_every_key_is_valid_and_keeps_what_it_can(text, key):
    from mlflow.utils.validation import _validate_metric_name

    assert key_name(text) == (key or key_name(text))
    assert 0 < len(key_name(text)) <= 250
    _validate_metric_name(key_name(text))


def test_keys_are_unique_and_valid_texts_keep_their_name():
    keys = key_names(["acc@1", "acc_1", "acc:1", "acc#1", "acc_1"])
    assert keys["acc_1"] == "acc_1" and len(keys) == len(set(keys.values())) == 4


LONG = (*map(noise, (MAX_TAG_LENGTH, MAX_TAG_LENGTH + 1, 100_000)), "x\0" * 100_000)


@pytest.mark.parametrize("text", ['{"a":1}', "zlib;not really", *LONG], ids=len)
def test_a_text_is_restored_from_its_tags(text):
    tags = split_tag("k", text)
    assert tags is not None and all(len(value) <= MAX_TAG_LENGTH for value in tags.values())
    assert join_tag({"other": "x", **tags}, "k") == text
    if text.startswith("{"):
        assert tags == {"k": text}  # readable


def test_texts_too_long_incomplete_or_too_large_unpacked_are_none():
    assert split_tag("k", noise(MAX_TAG_LENGTH * MAX_TAG_PARTS * 2)) is None
    tags = split_tag("k", noise(50_000))
    assert tags is not None and tags.pop("k.1")
    assert join_tag(tags, "k") is None
    bomb = "zlib;" + base64.b64encode(zlib.compress(b"a" * 10**8, 9)).decode()
    assert join_tag({"t": bomb[:7900], **{f"t.{i}": bomb[7900 * i :][:7900] for i in range(1, 16)}}, "t") is None


def test_a_clipped_text_has_no_characters_that_databases_refuse():
    assert clip("a\0b\udcff" + "x" * 10, 8) == "a�b?xxx…"


# ---- addresses


def test_the_default_store_is_in_the_folder_or_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert default_tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://head:5000")
    assert default_tracking_uri(tmp_path) == "http://head:5000"


PROJECT = Path("/project")


@pytest.mark.parametrize(
    ("path_of", "address", "path"),
    [
        (lambda uri: artifact_root(uri, PROJECT), "sqlite:////data/mlflow.db", "/data/mlartifacts"),
        (lambda uri: artifact_root(uri, PROJECT), "postgresql://db/x", "/project/mlartifacts"),
        (lambda uri: artifact_root(uri, PROJECT), "http://head:5000", None),
        (local_folder, "file:///a%20b/c", "/a b/c"),
        (local_folder, "/a/b", "/a/b"),
        (local_folder, "s3://bucket/x", None),
        (local_folder, "mlflow-artifacts:/1/x", None),
        (sqlite_path, "sqlite:////a/b.db", "/a/b.db"),
        (sqlite_path, "sqlite:///b.db", "b.db"),
        (sqlite_path, "postgresql://host/b", None),
    ],
)
def test_addresses_give_paths(path_of, address, path):
    assert path_of(address) == (path and Path(path))


POINTS = {
    "the only point": {},
    "bs=768 w=2": {"batch_size": 768, "num_workers": 2},
    "lr=0.001 optimizer=adam hs=(64,32)": {"lr": 0.001, "optimizer": "adam", "hidden_size": (64, 32)},
    "num_workers=2 w=3": {"num_workers": 2, "w": 3},
    "batch_size=64 block_size=128 t=1": {"batch_size": 64, "block_size": 128, "num_threads": 1},
}


@pytest.mark.parametrize("label", POINTS)
def test_short_labels_are_unique_initials(label):
    assert short_label(POINTS[label]) == label
