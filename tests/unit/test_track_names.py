"""Names, keys and texts that MLflow accepts, and long texts spread over several tags."""

from __future__ import annotations

import base64
import random
import string
import zlib

import pytest
from test_track_journal import HOSTILE

from raypar.track.names import (
    MAX_NAME_LENGTH,
    MAX_TAG_LENGTH,
    MAX_TAG_PARTS,
    clip,
    experiment_name,
    join_tag,
    key_name,
    key_names,
    split_tag,
)


def noise(length: int) -> str:
    return "".join(random.Random(length).choices(string.printable, k=length))


@pytest.mark.parametrize("name", HOSTILE)
def test_every_study_name_has_an_experiment_name_that_mlflow_accepts(name):
    experiment = experiment_name(name)
    assert 0 < len(experiment) <= MAX_NAME_LENGTH
    assert experiment.isprintable() and experiment.strip() == experiment


def test_an_experiment_is_called_as_its_study():
    assert [experiment_name(name) for name in ("mnist", "a/b", "naïve 研究")] == ["mnist", "a/b", "naïve 研究"]


@pytest.mark.parametrize(
    ("text", "key"),
    [("val_loss", "val_loss"), ("train/loss", "train/loss"), ("acc@1", "acc_1"), ("../up", "up"), ("/abs//x", "abs/x")],
)
def test_a_key_keeps_what_mlflow_accepts(text, key):
    assert key_name(text) == key


@pytest.mark.parametrize("text", ["", "..", "/", "é" * 300, "k" * 400])
def test_every_key_is_one_that_mlflow_accepts(text):
    from mlflow.utils.validation import _validate_metric_name

    key = key_name(text)
    assert 0 < len(key) <= 250
    _validate_metric_name(key)


def test_two_texts_never_share_a_key_and_the_good_one_keeps_its_name():
    keys = key_names(["acc@1", "acc_1", "acc:1", "acc#1"])
    assert keys["acc_1"] == "acc_1"
    assert len(set(keys.values())) == 4
    assert key_names(["speedup", "speedup"]) == {"speedup": "speedup"}


@pytest.mark.parametrize(
    "text",
    ['{"a":1}', "zlib;not really", *map(noise, (MAX_TAG_LENGTH, MAX_TAG_LENGTH + 1, 100_000)), "x\0" * 100_000],
    ids=len,
)
def test_a_text_comes_back_from_its_tags_whole(text):
    tags = split_tag("k", text)
    assert tags is not None and all(len(value) <= MAX_TAG_LENGTH for value in tags.values())
    assert join_tag({"other": "x", **tags}, "k") == text


def test_a_short_text_is_one_readable_tag_and_one_beyond_all_tags_is_none():
    assert split_tag("k", '{"a":1}') == {"k": '{"a":1}'}
    assert split_tag("k", noise(MAX_TAG_LENGTH * MAX_TAG_PARTS * 2)) is None


def test_a_tag_with_a_part_lost_is_nothing_rather_than_wrong():
    tags = split_tag("k", noise(50_000))
    assert tags is not None
    del tags["k.1"]
    assert join_tag(tags, "k") is None


def test_a_text_that_unpacks_into_gigabytes_is_not_unpacked():
    bomb = "zlib;" + base64.b64encode(zlib.compress(b"a" * 10**8, 9)).decode()
    assert join_tag({"t": bomb[:7900], **{f"t.{i}": bomb[7900 * i :][:7900] for i in range(1, 16)}}, "t") is None


def test_a_clipped_text_holds_nothing_that_a_database_refuses():
    assert clip("a\0b\udcff" + "x" * 10, 8) == "a�b?xxx…"
