"""Names and texts that MLflow and file systems accept: safe characters, limited length, marked cuts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from raypar.study.space import Value
from raypar.study.trial import point_label

# Limits of MLflow, lowered a little because some versions count bytes and others characters.
MAX_TAG_LENGTH = 7_900
MAX_PARAM_LENGTH = 5_900
MAX_KEY_LENGTH = 250
MAX_NAME_LENGTH = 500  # for experiments, runs and data sets
MAX_EXPERIMENT_TAG_LENGTH = 19_000
MAX_TAG_PARTS = 16

_MAX_FILE_NAME_LENGTH = 80
NOTE = "mlflow.note.content"  # tag with the Markdown that MLflow's pages show
DESCRIPTION = "raypar.description"  # tag with an execution's description, where the note differs from it
_PACKED = "zlib;"
_MAX_UNPACKED_BYTES = 32 * 2**20


def short_hash(text: str) -> str:
    """Return 8 hex digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def safe_name(text: str) -> str:
    """Return a safe file name without folders; if it differs from the text, it ends in a hash of the text."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip(".")[:_MAX_FILE_NAME_LENGTH]
    return safe if safe and safe == text else f"{safe}-{short_hash(text)}"


def experiment_name(study: str) -> str:
    """Return the name of a study's MLflow experiment: the study's name, if MLflow accepts it."""
    clean = "".join(c if c.isprintable() else "_" for c in study).strip()
    return study if clean == study and 0 < len(study) <= MAX_NAME_LENGTH else _hashed(clean, study, MAX_NAME_LENGTH)


def short_label(point: Mapping[str, Value]) -> str:
    """Return ``bs=64 w=2`` for a column of names: initials of words, unless two hyperparameters share them."""
    shorts = {key: _initials(key) for key in point}
    counts = Counter(shorts.values())
    shown = {key if counts[short] > 1 else short: point[key] for key, short in shorts.items()}
    return point_label(shown)


def _initials(key: str) -> str:
    words = key.removeprefix("num_").split("_")
    return key if len(words) == 1 and not key.startswith("num_") else "".join(word[:1] for word in words)


def _hashed(name: str, original: str, limit: int) -> str:
    return f"{name[: limit - 9]}-{short_hash(original)}"


def key_name(text: str) -> str:
    """Return a metric, param or tag key that MLflow accepts."""
    parts = re.sub(r"[^\w\-. :/]", "_", text, flags=re.ASCII).split("/")
    key = "/".join(part for part in parts if part.strip(". "))
    return key if key and len(key) <= MAX_KEY_LENGTH else _hashed(key, text, MAX_KEY_LENGTH)


def key_names(texts: Iterable[str]) -> dict[str, str]:
    """Map each text to its key. If two texts have the same key, the second gets a hash."""
    keys: dict[str, str] = {}
    # Texts that need no change come first, so that they keep their name.
    for text in sorted(dict.fromkeys(texts), key=lambda t: key_name(t) != t):
        key = key_name(text)
        keys[text] = _hashed(key, text, MAX_KEY_LENGTH) if key in keys.values() else key
    return keys


def clip(text: str, limit: int) -> str:
    """Return the text without NUL and lone surrogates, which databases refuse; cut with "…" if too long."""
    text = text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def tag_text(value: Any) -> str:
    """Return a value as a readable tag: strings unchanged, others as JSON."""
    return clip(value if isinstance(value, str) else json.dumps(value, default=str), MAX_TAG_LENGTH)


def split_tag(key: str, text: str) -> dict[str, str] | None:
    """Return a text as one tag if it fits, else compressed over `key`, `key.1` …; None if too long for that."""
    if len(text) <= MAX_TAG_LENGTH and clip(text, MAX_TAG_LENGTH) == text and not text.startswith(_PACKED):
        return {key: text}
    packed = _PACKED + base64.b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 6)).decode()
    pieces = [packed[i : i + MAX_TAG_LENGTH] for i in range(0, len(packed), MAX_TAG_LENGTH)]
    if len(pieces) > MAX_TAG_PARTS:
        return None
    return {f"{key}.{i}" if i else key: piece for i, piece in enumerate(pieces)}


def join_tag(tags: Mapping[str, str], key: str) -> str | None:
    """Return the text that was given to `split_tag`; None if the tag is missing or damaged."""
    text = tags.get(key)
    if text is None or not text.startswith(_PACKED):
        return text
    for i in range(1, MAX_TAG_PARTS):
        text += tags.get(f"{key}.{i}", "")
    unpacker = zlib.decompressobj()
    try:
        # Limited: a few packed kilobytes can expand to gigabytes.
        content = unpacker.decompress(base64.b64decode(text[len(_PACKED) :]), _MAX_UNPACKED_BYTES)
        return content.decode("utf-8", "surrogatepass") if unpacker.eof else None
    except (ValueError, zlib.error):
        return None
