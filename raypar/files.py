"""Files that raypar keeps: synced to disk, private to their user, and sent in pieces."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PIECE_BYTES = 8 * 2**20


def cache_dir() -> Path:
    """Return the folder for what can be made again, such as downloads: ``~/.cache/raypar``, or below XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "raypar"


def make_private_folder(path: Path) -> Path:
    """Make a folder and its missing parents, private to this user; return it. Raises OSError."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    close_to_others(path)
    return path


def close_to_others(path: Path) -> None:
    """Remove the rights of group and others from a path of this user; ignore missing and foreign paths."""
    with contextlib.suppress(OSError):
        status = path.stat()
        if status.st_uid == os.geteuid() and status.st_mode & 0o077:
            path.chmod(stat.S_IMODE(status.st_mode) & ~0o077)


def open_private(path: Path, flag: int) -> int:
    """Open a file for writing, private to this user if it is new; return the descriptor. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk, which new and renamed files need to survive a crash. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class FilePiece:
    """Bytes of a file in a folder: its path relative to the folder (with slashes), and their offset in the file."""

    path: str
    offset: int
    content: bytes


def pieces(folder: Path, max_bytes: int = PIECE_BYTES) -> Iterator[FilePiece]:
    """Yield a folder's files, except links, piece by piece; an empty file is one empty piece. Raises OSError."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        with path.open("rb") as file:
            is_first = True
            while (content := file.read(max_bytes)) or is_first:
                yield FilePiece(name, file.tell() - len(content), content)
                is_first = False


def append_piece(folder: Path, piece: FilePiece) -> None:
    """Append a piece, possibly from another machine, to its file in the folder.

    Raises:
        ValueError: its path leads out of the folder, or its offset is not the file's end.
        OSError: the file can't be written.
    """
    path = PurePosixPath(piece.path)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{piece.path!r} is not the name of a file below its folder")
    make_private_folder((folder / path).parent)
    with os.fdopen(open_private(folder / path, os.O_APPEND | os.O_NOFOLLOW), "ab") as file:
        if (size := os.fstat(file.fileno()).st_size) != piece.offset:
            raise ValueError(f"{piece.path}: bytes {size} to {piece.offset} are missing or were sent twice")
        file.write(piece.content)
