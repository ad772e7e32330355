"""Recognition of secrets, and texts without them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

MASK = "***"
# Shorter values are words and numbers that a text may hold for other reasons.
MIN_SECRET_LENGTH = 8
_WORDS = frozenset(
    {
        *("apikey", "auth", "authorization", "credential", "credentials", "key", "keys", "pass", "passphrase"),
        *("passwd", "password", "pat", "pw", "secret", "secrets", "token", "tokens"),
    }
)
# AUTH_TOKEN_PATH says where the secret is, AUTH_MODE whether there is one.
_NO_SECRET_AT_THE_END = frozenset({"path", "file", "dir", "folder", "home", "sock", "mode", "url", "uri"})
# A user and a password before the host; a password may hold an @, and a port is none.
# (The lookbehind: tried at every letter of a long word, which an error may quote, the search would take hours.)
_USER_INFO = re.compile(r"(?P<start>(?<![\w+.-])[\w+.-]+://[^\s/?#@:'\"<>]*:)(?!\d+(?:[/?#]|$))[^\s'\"<>]*@")
# A token in the place of a user; git@ is none.
_LONE_USER = re.compile(r"(?P<start>(?<![\w+.-])[\w+.-]+://)[^\s/?#@:'\"<>]{16,}@")
_PARAMETER = re.compile(
    r"(?i)(?P<start>[?&;](?:password|passwd|pwd|token|access_token|api_?key|secret|sig|signature|accountkey)=)"
    r"[^\s&;'\"<>]+"
)


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable looks like a secret, by its name or as an address with a password."""
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
    """Return the text with ``***`` for secrets.

    These are passwords in addresses, and what this process's environment holds as a secret of at least
    `MIN_SECRET_LENGTH` characters.
    """
    # The longest first: one may be a part of another.
    for value in sorted(secret_variables(os.environ).values(), key=len, reverse=True):
        # An address with a password is masked as such: what else is in it may be shown.
        if len(value) >= MIN_SECRET_LENGTH and _without_passwords(value) == value:
            text = text.replace(value, MASK)
    return _without_passwords(text)


def _without_passwords(text: str) -> str:
    if "://" in text:
        text = _USER_INFO.sub(rf"\g<start>{MASK}@", text)
        text = _LONE_USER.sub(rf"\g<start>{MASK}@", text)
    return _PARAMETER.sub(rf"\g<start>{MASK}", text)
