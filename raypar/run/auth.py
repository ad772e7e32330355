"""Ray's token authentication, with a random token for a private Ray and the user's token for a cluster.

Ray's rules (https://docs.ray.io/en/latest/ray-security/token-auth.html): Ray looks for the token in RAY_AUTH_TOKEN,
then in the file that RAY_AUTH_TOKEN_PATH names, then in ~/.ray/auth_token. It sends it only with RAY_AUTH_MODE=token.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raypar.errors import ClusterError
from raypar.signals import redirected_stderr

MODE, TOKEN, TOKEN_PATH = VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
GIVE_TOKEN = (
    "`ray get-auth-token` on the cluster's head shows it; give it in RAY_AUTH_TOKEN, in a file that "
    "RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token"
)
# Ray's timeouts for the first contact, in seconds. The defaults add up to 40.
FIRST_CONTACT = {"RAY_gcs_rpc_server_connect_timeout_s": "1", "RAY_py_gcs_connect_timeout_s": "3"}


@contextlib.contextmanager
def own_token(folder: Path) -> Iterator[None]:
    """Create a random token for a Ray that this process starts. Its processes inherit the path, not the token.

    The user's settings for a cluster are disabled until the context ends.

    Args:
        folder: where the token is written. It is removed at the end.
    """
    path = folder / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        with _environment({MODE: "token", TOKEN: None, TOKEN_PATH: str(path)}):
            yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def admitted(address: str, connect: Callable[[str], object] | None = None) -> Iterator[bool]:
    """Let Ray calls inside the context connect to the cluster, with the user's token if the cluster requires one.

    Args:
        address: ``host:port`` of a listening server.
        connect: raises Ray's AuthenticationError if the cluster rejects the token; None: connect as Ray does.

    Yields:
        True if the cluster accepts clients without a token.

    Raises:
        ClusterError: the cluster refuses the connection.
        Exception: any other error of `connect`.
    """
    from ray.exceptions import AuthenticationError

    def is_refused() -> bool:
        try:
            (connect or _connect)(address)
        except AuthenticationError:
            return True
        return False

    mode, source = os.environ.get(MODE, "").lower(), token_source()
    if mode == "token" and source is None:  # Ray would end this process
        path = os.environ.get(TOKEN_PATH)
        lacking = f"{TOKEN_PATH}={path}: the file has no token"
        lacking = lacking if path else f"{MODE}=token needs a token, and there is none"
        raise ClusterError(f"--address {address}: {lacking}", hint=GIVE_TOKEN)
    with _environment({}):
        refused = is_refused()
        if refused and source is not None and not mode:
            mode = "token"
            _set({MODE: mode})
            refused = is_refused()
        if refused:
            wrong, hint = "the cluster requires a token, and none was found", GIVE_TOKEN
            if mode == "token":
                wrong = f"the cluster rejects the token from {source}"
            elif source is not None:
                wrong = "the cluster requires a token"
                hint = f"unset {MODE}={os.environ[MODE]}, which withholds the token from {source}"
            raise ClusterError(f"--address {address}: {wrong}", hint=hint)
        yield mode != "token"


def _connect(address: str) -> None:
    """Let Ray connect to a cluster, with a short timeout: `ray.init` would try for minutes.

    Raises:
        AuthenticationError: the cluster refuses the connection.
        TimeoutError: the server doesn't answer.
    """
    from ray.exceptions import RpcError

    raylet: Any = importlib.import_module("ray._raylet")
    try:
        with _environment(dict(FIRST_CONTACT)), _silenced():
            raylet.GcsClient(address=address)
    except RpcError as error:
        raise TimeoutError("it accepts connections but does not answer like Ray") from error


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discard standard error, where Ray's core logs the refusal."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        with redirected_stderr(saved):
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def token_source() -> str | None:
    """Return where Ray finds the user's token; None if there is no token."""
    if os.environ.get(TOKEN, "").strip():
        return TOKEN
    name = os.environ.get(TOKEN_PATH)
    path = Path(name or "~/.ray/auth_token").expanduser()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text().strip():
            return f"{TOKEN_PATH}={name}" if name else str(path)
    return None


def token_file() -> Path:
    """Return the file that holds the user's token. Raises ClusterError if the token is not in a file."""
    if token_source() == TOKEN:
        hint = f"write it to ~/.ray/auth_token, readable only by you, and unset {TOKEN}"
        raise ClusterError(f"the token is in {TOKEN}, from which no other machine can copy it", hint=hint)
    return Path(os.environ.get(TOKEN_PATH) or "~/.ray/auth_token").expanduser()


@contextlib.contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    """Change Ray's variables (None: unset); restore them at the end."""
    before = {name: os.environ.get(name) for name in (*VARIABLES, *changes)}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    raylet: Any = importlib.import_module("ray._raylet")
    # Ray read its variables at import. Set the mode first: a thread of a stopping Ray may ask for the token meanwhile,
    # and Ray ends the process if there is none.
    raylet.Config.initialize("")
    if os.environ.get(MODE, "").lower() != "token" or token_source() is not None:
        raylet.AuthenticationTokenLoader.instance().reset_cache()
