from __future__ import annotations

import errno
import json
import os
import stat

import pytest

from raypar.track import journal
from raypar.track.journal import Journal, read_ack, read_lines, write_ack


def record(n: int) -> str:
    return json.dumps({"kind": "trial", "n": n})


def numbers(path, start=0, **kwargs):
    return [line.record["n"] for line in read_lines(path, start, **kwargs) if line.record]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "study-uid.jsonl"


def test_what_is_appended_is_read_back_in_order(path):
    journal = Journal(path)
    starts = [journal.append(record(n)) for n in range(3)]
    assert [line.start for line in read_lines(path)] == starts
    assert numbers(path) == [0, 1, 2]
    assert numbers(path, starts[2]) == [2]


def test_a_line_is_synced_to_disk_before_append_returns(path, monkeypatch):
    journal = Journal(path)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(path.read_text()))
    journal.append(record(1))
    assert synced == [record(1) + "\n"]


def test_a_spool_is_for_its_owner_only(path):
    Journal(path)
    write_ack(path, "http://user:secret@host", 0)
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()} == {0o600}


def test_a_half_written_last_line_does_not_swallow_the_next_one(path):
    Journal(path).append(record(0))
    with path.open("a") as file:
        file.write('{"kind": "trial", "n"')
    journal = Journal(path)
    start = journal.append(record(1))
    lines = list(read_lines(path))
    assert [line.record and line.record["n"] for line in lines] == [0, None, 1]
    assert lines[2].start == start
    assert lines[1].problem == f"{path}, line 2: is damaged, skipped"


def test_a_last_line_that_may_still_grow_is_not_read(path):
    Journal(path).append(record(0))
    with path.open("a") as file:
        file.write(record(1))
    assert numbers(path) == [0]
    assert numbers(path, is_ended=True) == [0, 1]


@pytest.mark.parametrize("junk", [b"\xff\xfe\x00", b"[1, 2]", b'{"no": "kind"}', b"null", b"{" * 5000, b'{"kind": 3}'])
def test_a_damaged_line_is_told_with_file_and_line_and_skipped(path, junk):
    journal = Journal(path)
    journal.append(record(0))
    with path.open("ab") as file:
        file.write(junk + b"\n")
    journal.append(record(1))
    assert numbers(path) == [0, 1]
    (problem,) = [line.problem for line in read_lines(path) if line.problem]
    assert problem.startswith(f"{path}, line 2: ")


def test_nothing_is_left_of_a_line_that_did_not_fit_on_the_disk(path, monkeypatch):
    journal = Journal(path)
    journal.append(record(0))
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space left"):
        journal.append(record(1))
    monkeypatch.undo()
    assert path.read_text() == record(0) + "\n"
    journal.append(record(2))
    assert numbers(path) == [0, 2]


def test_a_line_cut_off_that_can_not_be_undone_is_ended_before_the_next(path, monkeypatch):
    journal = Journal(path)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError, match="Input/output"):
        journal.append('{"half')
    monkeypatch.undo()
    journal.append(record(1))
    assert numbers(path) == [1]


def test_an_ack_counts_for_its_own_store_only(path):
    Journal(path)
    write_ack(path, "sqlite:///a", 17)
    assert read_ack(path, "sqlite:///a") == 17
    assert read_ack(path, "sqlite:///b") == 0
    assert journal.target(path) == "sqlite:///a"


@pytest.mark.parametrize("text", ["", "nonsense", "{}", "[]", '{"tracking_uri": "u", "offset": "x"}'])
def test_a_damaged_ack_means_from_the_start(path, text):
    Journal(path)
    path.with_suffix(".ack").write_text(text)
    assert read_ack(path, "u") == 0


def test_removing_a_spool_leaves_what_the_store_refused(path):
    Journal(path)
    write_ack(path, "u", 0)
    journal.keep_rejected(path, {"kind": "trial"}, "too odd")
    journal.remove(path)
    assert [p.suffix for p in path.parent.iterdir()] == [".rejected"]
    assert json.loads(path.with_suffix(".rejected").read_text())["reason"] == "too odd"


@pytest.mark.parametrize(("interrupted", "kept"), [("write", [0, 2]), ("fsync", [0, 1, 2])])
def test_an_interrupt_leaves_a_whole_line_or_none(path, monkeypatch, interrupted, kept):
    journal = Journal(path)
    journal.append(record(0))
    write = os.write

    def interrupt(fd: int, *data: bytes) -> int:
        if data and len(data[0]) > 10:
            return write(fd, data[0][:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, interrupted, interrupt)
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        journal.append(record(1) if interrupted == "fsync" else '{"kind": "x"}')
    monkeypatch.undo()
    journal.append(record(2))
    assert numbers(path) == kept
    assert not [line.problem for line in read_lines(path) if line.problem]
