"""A folder is sent in pieces, and pieces from another machine are only written below their folder."""

import os

import pytest

from raypar.files import FilePiece, append_piece, pieces


def content_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("max_bytes", [1, 3, 4, 100])
def test_a_folder_is_sent_in_pieces_of_limited_size(tmp_path, max_bytes):
    source, target = tmp_path / "source", tmp_path / "target"
    files = {"model/weights.pt": bytes(range(12)), "model/deep/config.json": b"{}", "empty": b"", "b\xe4 \udcff": b"x"}
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    for piece in pieces(source, max_bytes):
        assert len(piece.content) <= max_bytes
        append_piece(target, piece)
    assert content_of(target) == content_of(source) == files
    assert all(path.stat().st_mode & 0o077 == 0 for path in target.rglob("*"))


@pytest.mark.parametrize("make", ["nothing", "empty folders", "links and a pipe"])
def test_only_files_are_sent(tmp_path, make):
    source = tmp_path / "source"
    if make != "nothing":
        (source / "empty").mkdir(parents=True)
    if make == "links and a pipe":
        (tmp_path / "private").write_text("a private key")
        (source / "link").symlink_to(tmp_path / "private")
        (source / "folder").symlink_to(tmp_path)
        os.mkfifo(source / "pipe")
    assert list(pieces(source)) == []


@pytest.mark.parametrize(
    "name", ["../caught", "model/../../caught", "{outside}/caught", "", ".", "a\0b", "link", "in/x"]
)
def test_a_piece_is_only_written_below_its_folder(tmp_path, name):
    folder = tmp_path / "a" / "b"
    (folder / "model").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "caught")
    (folder / "in").write_text("a file")
    with pytest.raises((ValueError, OSError)):
        append_piece(folder, FilePiece(name.format(outside=tmp_path), 0, b"x"))
    assert not list(tmp_path.rglob("caught")) and not list(tmp_path.rglob("x"))


@pytest.mark.parametrize("offset", [0, 1, 3, 10**12, -1])
def test_a_piece_out_of_order_is_refused(tmp_path, offset):
    append_piece(tmp_path, FilePiece("w", 0, b"ab"))
    with pytest.raises(ValueError, match=f"w: bytes 2 to {offset} are missing or were sent twice"):
        append_piece(tmp_path, FilePiece("w", offset, b"c"))
    append_piece(tmp_path, FilePiece("w", 2, b"c"))
    assert (tmp_path / "w").read_bytes() == b"abc"
