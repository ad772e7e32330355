from __future__ import annotations

import random
import string
from pathlib import Path

import pytest

from raypar.track.journal import journal_dir, journal_path
from raypar.track.names import (
    MAX_NAME_LENGTH,
    MAX_TAG_LENGTH,
    MAX_TAG_PARTS,
    clip,
    experiment_name,
    join_tag,
    key_name,
    key_names,
    safe_name,
    split_tag,
)

HOSTILE = ["../../x", "a/b", "..", ".", "", "/etc/passwd", "naïve 研究", "x" * 300, "a\0b", "new\nline", "~", "\udcff"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_study_name_stays_in_the_spool_folder(name, tmp_path):
    path = journal_path(tmp_path, name, "uid")
    assert path.parent == journal_dir(tmp_path)
    assert path.resolve().parent == journal_dir(tmp_path).resolve()
    assert len(path.name) < 255


def test_an_ordinary_name_is_its_own_file_name():
    assert safe_name("mnist_speedup-2.1") == "mnist_speedup-2.1"


def test_names_that_look_alike_once_safe_are_told_apart():
    assert len({safe_name(name) for name in [*HOSTILE, "a_b", "a b", "a.b", "b"]}) == len(HOSTILE) + 4


@pytest.mark.parametrize("name", HOSTILE)
def test_every_study_name_has_an_experiment_name_that_mlflow_takes(name):
    known = experiment_name(name)
    assert 0 < len(known) <= MAX_NAME_LENGTH
    assert known.isprintable() and known.strip() == known


def test_an_experiment_is_called_as_its_study_is():
    assert [experiment_name(name) for name in ("mnist", "a/b", "naïve 研究")] == ["mnist", "a/b", "naïve 研究"]


@pytest.mark.parametrize(
    ("text", "key"),
    [("val_loss", "val_loss"), ("train/loss", "train/loss"), ("acc@1", "acc_1"), ("../up", "up"), ("/abs//x", "abs/x")],
)
def test_a_key_keeps_what_mlflow_takes(text, key):
    assert key_name(text) == key


@pytest.mark.parametrize("text", ["", "..", "/", "é" * 300, "k" * 400])
def test_every_key_is_one_that_mlflow_takes(text):
    from mlflow.utils.validation import _validate_metric_name

    key = key_name(text)
    assert 0 < len(key) <= 250
    _validate_metric_name(key)


def test_two_texts_never_share_a_key_and_the_good_one_keeps_its_name():
    keys = key_names(["acc@1", "acc_1", "acc:1", "acc#1"])
    assert keys["acc_1"] == "acc_1"
    assert len(set(keys.values())) == 4


def test_a_short_text_is_one_readable_tag():
    assert split_tag("k", '{"a":1}') == {"k": '{"a":1}'}


@pytest.mark.parametrize("length", [MAX_TAG_LENGTH, MAX_TAG_LENGTH + 1, 50_000, 100_000])
def test_a_long_text_comes_back_from_its_tags_whole(length):
    text = "".join(random.Random(length).choices(string.printable, k=length))
    tags = split_tag("k", text)
    assert tags is not None and all(len(value) <= MAX_TAG_LENGTH for value in tags.values())
    assert join_tag({"other": "x", **tags}, "k") == text


def test_a_text_that_only_looks_compressed_comes_back_as_it_was():
    tags = split_tag("k", "zlib;not really")
    assert tags is not None
    assert join_tag(tags, "k") == "zlib;not really"


def test_a_text_beyond_all_tags_is_refused():
    noise = "".join(random.Random(0).choices(string.printable, k=MAX_TAG_LENGTH * MAX_TAG_PARTS * 2))
    assert split_tag("k", noise) is None


def test_a_tag_with_a_part_lost_is_nothing_rather_than_wrong():
    tags = split_tag("k", "".join(random.Random(1).choices(string.printable, k=50_000)))
    assert tags is not None
    del tags["k.1"]
    assert join_tag(tags, "k") is None


def test_a_clipped_text_holds_nothing_that_a_database_refuses():
    assert clip("a\0b\udcff" + "x" * 10, 8) == "a�b?xxx…"
    assert Path(safe_name("a\0b")).name.startswith("a_b-")


def test_a_text_asked_for_twice_has_one_key():
    assert key_names(["speedup", "speedup"]) == {"speedup": "speedup"}
