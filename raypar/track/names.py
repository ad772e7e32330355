"""Names and texts as MLflow and file systems take them: safe characters, bounded lengths, nothing lost silently."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

# MLflow's own limits, a little below where it counts bytes in one version and characters in another.
MAX_TAG_LENGTH = 7_900
MAX_PARAM_LENGTH = 5_900
MAX_KEY_LENGTH = 250
MAX_EXPERIMENT_NAME_LENGTH = 500
MAX_EXPERIMENT_TAG_LENGTH = 19_000
MAX_TAG_PARTS = 16

_MAX_FILE_NAME_LENGTH = 80
_PACKED = "zlib;"
_MAX_UNPACKED_BYTES = 32 * 2**20


def short_hash(text: str) -> str:
    """8 hex digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def safe_name(text: str) -> str:
    """A file name that stays in its folder; with a hash of the original appended where it had to change."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".")[:_MAX_FILE_NAME_LENGTH]
    return safe if safe and safe == text else f"{safe}-{short_hash(text)}"


def experiment_name(study: str) -> str:
    """The name of a study's MLflow experiment: the study's own unless MLflow can't hold it."""
    clean = "".join(c if c.isprintable() else "_" for c in study).strip()
    if clean == study and 0 < len(study) <= MAX_EXPERIMENT_NAME_LENGTH:
        return study
    return f"{clean[: MAX_EXPERIMENT_NAME_LENGTH - 9]}-{short_hash(study)}"


def key_name(text: str) -> str:
    """A metric, param or tag key that MLflow takes."""
    parts = re.sub(r"[^\w\-. :/]", "_", text, flags=re.ASCII).split("/")
    key = "/".join(part for part in parts if part.strip(". "))
    return key if key and len(key) <= MAX_KEY_LENGTH else f"{key[: MAX_KEY_LENGTH - 9]}-{short_hash(text)}"


def key_names(texts: Iterable[str]) -> dict[str, str]:
    """Text to key; two texts that would become one key are told apart by a hash."""
    keys: dict[str, str] = {}
    taken: set[str] = set()
    # What needs no change comes first, so it keeps its name.
    for text in sorted(dict.fromkeys(texts), key=lambda t: key_name(t) != t):
        key = key_name(text)
        if key in taken:
            key = f"{key[: MAX_KEY_LENGTH - 9]}-{short_hash(text)}"
        taken.add(key)
        keys[text] = key
    return keys


def clip(text: str, limit: int) -> str:
    """The text as every database takes it (no NUL, no lone surrogate), ended by "…" where it is too long."""
    text = text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def tag_text(value: Any) -> str:
    """A value as a readable tag: strings as they are, the rest as JSON."""
    return clip(value if isinstance(value, str) else json.dumps(value, default=str), MAX_TAG_LENGTH)


def split_tag(key: str, text: str) -> dict[str, str] | None:
    """A text as one tag where it fits, else compressed and spread over `key`, `key.1`, `key.2` …

    None where even that would not hold it.
    """
    if len(text) <= MAX_TAG_LENGTH and clip(text, MAX_TAG_LENGTH) == text and not text.startswith(_PACKED):
        return {key: text}
    packed = _PACKED + base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 6)).decode()
    pieces = [packed[i : i + MAX_TAG_LENGTH] for i in range(0, len(packed), MAX_TAG_LENGTH)]
    if len(pieces) > MAX_TAG_PARTS:
        return None
    return {f"{key}.{i}" if i else key: piece for i, piece in enumerate(pieces)}


def join_tag(tags: Mapping[str, str], key: str) -> str | None:
    """What `split_tag` was given; None where the tag is absent or damaged."""
    text = tags.get(key)
    if text is None or not text.startswith(_PACKED):
        return text
    for i in range(1, MAX_TAG_PARTS):
        text += tags.get(f"{key}.{i}", "")
    unpacker = zlib.decompressobj()
    try:
        # A few kilobytes can be packed to become gigabytes.
        found = unpacker.decompress(base64.b64decode(text[len(_PACKED) :]), _MAX_UNPACKED_BYTES)
        return found.decode("utf-8", "surrogatepass") if unpacker.eof else None
    except (ValueError, zlib.error):
        return None
