"""Detection of secrets, and their masking in texts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

MASK = "***"
# Shorter values may occur in a text for other reasons.
MIN_SECRET_LENGTH = 8
_WORDS = frozenset(
    {
        *("apikey", "auth", "authorization", "credential", "credentials", "key", "keys", "pass", "passphrase"),
        *("passwd", "password", "pat", "pw", "secret", "secrets", "token", "tokens"),
    }
)
# AUTH_TOKEN_PATH and AUTH_MODE hold no secret themselves.
_NO_SECRET_AT_THE_END = frozenset({"path", "file", "dir", "folder", "home", "sock", "mode", "url", "uri"})
# User and password before the host. A password may contain an @, and a port is not a password.
# Without the lookbehind, the search takes hours on a long word, since it is tried at every letter.
_USER_INFO = re.compile(r"(?P<start>(?<![\w+.-])[\w+.-]+://[^\s/?#@:'\"<>]*:)(?!\d+(?:[/?#]|$))[^\s'\"<>]*@")
# A token in place of the user; git@ is too short to be one.
_LONE_USER = re.compile(r"(?P<start>(?<![\w+.-])[\w+.-]+://)[^\s/?#@:'\"<>]{16,}@")
_PARAMETER = re.compile(
    r"(?i)(?P<start>[?&;](?:password|passwd|pwd|token|access_token|api_?key|secret|sig|signature|accountkey)=)"
    r"[^\s&;'\"<>]+"
)


def is_secret(name: str, value: str) -> bool:
    """Return True if an environment variable looks like a secret: by its name, or as an address with a password."""
    if not value:
        return False
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if len(words) > 1 and words[-1] == "pwd":
        return True
    if words and words[-1] not in _NO_SECRET_AT_THE_END and not _WORDS.isdisjoint(words):
        return True
    return _without_passwords(value) != value


def secret_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that look like secrets."""
    return {name: value for name, value in environment.items() if is_secret(name, value)}


def masked(text: str) -> str:
    """Return the text with ``***`` in place of secrets.

    Masks passwords in addresses, and secrets in this process's environment of at least `MIN_SECRET_LENGTH` characters.
    """
    # Longest first: one may be part of another.
    for value in sorted(secret_variables(os.environ).values(), key=len, reverse=True):
        # In an address, only the password is masked.
        if len(value) >= MIN_SECRET_LENGTH and _without_passwords(value) == value:
            text = text.replace(value, MASK)
    return _without_passwords(text)


def _without_passwords(text: str) -> str:
    if "://" in text:
        text = _USER_INFO.sub(rf"\g<start>{MASK}@", text)
        text = _LONE_USER.sub(rf"\g<start>{MASK}@", text)
    return _PARAMETER.sub(rf"\g<start>{MASK}", text)
