"""Lines of a journal are synced, complete or absent, and private."""

import errno
import json
import os
import stat

import pytest

from raypar.track import journal
from raypar.track.journal import Journal, journal_dir, journal_path, read_ack, read_lines, write_ack
from raypar.track.names import safe_name

HOSTILE = ["../../x", "a/b", "..", ".", "", "/etc/passwd", "naïve 研究", "x" * 300, "a\0b", "new\nline", "~", "\udcff"]


def record(n):
    return json.dumps({"kind": "trial", "n": n})


def numbers(path, start=0, **kwargs):
    return [line.record["n"] for line in read_lines(path, start, **kwargs) if line.record]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "study-uid.jsonl"


@pytest.fixture
def writer(path):
    """A journal with the record 0."""
    made = Journal(path)
    made.append(record(0))
    return made


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_study_name_stays_in_the_journal_folder(name, tmp_path):
    path = journal_path(tmp_path, name, "uid")
    assert path.resolve().parent == journal_dir(tmp_path).resolve() and len(path.name) < 255


def test_safe_names_stay_distinct():
    assert len({safe_name(name) for name in [*HOSTILE, "a_b", "a b", "a.b", "b"]}) == len(HOSTILE) + 4
    assert safe_name("mnist_speedup-2.1") == "mnist_speedup-2.1"


def test_appended_lines_are_read_back_in_order(path, writer):
    starts = [0, writer.append(record(1)), writer.append(record(2))]
    assert [line.start for line in read_lines(path)] == starts
    assert (numbers(path), numbers(path, starts[2])) == ([0, 1, 2], [2])


def test_a_line_is_synced_to_disk_before_append_returns(path, monkeypatch):
    writer = Journal(path)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path.read_text()))
    writer.append(record(1))
    assert synced == [record(1) + "\n"]


def test_files_are_private_and_rejected_records_outlive_the_journal(path, writer):
    write_ack(path, "http://user:secret@host", 0)
    journal.keep_rejected(path, {"kind": "trial"}, "too odd")
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()} == {0o600}
    journal.remove(path)
    assert [p.suffix for p in path.parent.iterdir()] == [".rejected"]
    assert json.loads(path.with_suffix(".rejected").read_text())["reason"] == "too odd"


def test_a_half_written_last_line_does_not_swallow_the_next_one(path, writer):
    with path.open("a") as file:
        file.write('{"kind": "trial", "n"')
    start = Journal(path).append(record(1))
    lines = list(read_lines(path))
    assert [line.record and line.record["n"] for line in lines] == [0, None, 1]
    assert (lines[2].start, lines[1].problem) == (start, f"{path}, line 2: is damaged, skipped")
    with path.open("a") as file:
        file.write(record(2))  # it may still grow
    assert (numbers(path), numbers(path, is_ended=True)) == ([0, 1], [0, 1, 2])


DEEP = (b"{" * 5000, b"[" * 100_000, b'{"kind":' * 50_000, b"9" * 10_000)
NO_RECORDS = (b"\xff\xfe\x00", b"[1, 2]", b'{"no": "kind"}', b"null", b'{"kind": 3}', b'{"kind": []}', b'"\\ud800"')


@pytest.mark.parametrize("junk", [*DEEP, *NO_RECORDS], ids=len)
def test_a_damaged_line_is_skipped_and_named(path, writer, junk):
    with path.open("ab") as file:
        file.write(junk + b"\n")
    writer.append(record(1))
    assert numbers(path) == [0, 1]
    (problem,) = [line.problem for line in read_lines(path) if line.problem]
    assert problem.startswith(f"{path}, line 2: ")


def fail(*_):
    raise OSError(errno.EIO, "Input/output error")


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing(path, writer, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]) if len(data) > 9 else fail())
    with pytest.raises(OSError, match="Input/output"):
        writer.append(record(1))
    monkeypatch.undo()
    assert path.read_text() == record(0) + "\n"
    writer.append(record(2))
    assert numbers(path) == [0, 2]


def test_a_torn_line_is_ended_before_the_next(path, writer, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError, match="Input/output"):
        writer.append('{"half')
    monkeypatch.undo()
    writer.append(record(1))
    assert numbers(path) == [0, 1]


@pytest.mark.parametrize(("interrupted", "kept"), [("write", [0, 2]), ("fsync", [0, 1, 2])])
def test_an_interrupt_leaves_a_complete_line_or_none(path, writer, monkeypatch, interrupted, kept):
    write = os.write

    def interrupt(fd, *data):
        if data and len(data[0]) > 10:
            return write(fd, data[0][:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, interrupted, interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.append(record(1))
    monkeypatch.undo()
    writer.append(record(2))
    assert numbers(path) == kept
    assert not [line.problem for line in read_lines(path) if line.problem]


def test_an_ack_applies_to_its_store_and_a_damaged_one_is_ignored(path, writer):
    start = writer.append(record(1))
    write_ack(path, "sqlite:///a", start)
    assert read_ack(path) == ("sqlite:///a", start)
    assert [len(list(journal.pending_lines(path, f"sqlite:///{name}"))) for name in "ab"] == [1, 2]
    for text in ("", "nonsense", "{}", "[]", '{"tracking_uri": "u", "offset": "x"}'):
        path.with_suffix(".ack").write_text(text)
        assert read_ack(path) == (None, 0)
