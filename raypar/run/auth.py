"""Token authentication of Ray: a token for a private one, and the user's for a cluster.

Ray's own rules (https://docs.ray.io/en/latest/ray-security/token-auth.html): the token is in RAY_AUTH_TOKEN, in the
file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token, and is looked for in this order; it is sent with
RAY_AUTH_MODE=token only.
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
# Ray's limits of the first contact, in seconds. By default they add up to 40.
FIRST_CONTACT = {"RAY_gcs_rpc_server_connect_timeout_s": "1", "RAY_py_gcs_connect_timeout_s": "3"}


@contextlib.contextmanager
def own_token(folder: Path) -> Iterator[None]:
    """Make a random token for a Ray that this process starts; its processes inherit the path, not the token.

    What the user has set for a cluster is put aside meanwhile.

    Args:
        folder: for the token, which is removed at the end.
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
    """Let Ray calls inside connect to the cluster at the address, with the user's token where it asks for one.

    Args:
        address: ``host:port``, where somebody listens.
        connect: raises Ray's AuthenticationError where the cluster refuses us for lack of the right token; None: as
            Ray itself does.

    Yields whether the cluster takes everybody, without a token.

    Raises:
        ClusterError: it refuses us.
        Exception: whatever else `connect` raises.
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
        lacking = f"{TOKEN_PATH}={path}: there is no token in it"
        lacking = lacking if path else f"{MODE}=token asks for a token, and there is none"
        raise ClusterError(f"--address {address}: {lacking}", hint=GIVE_TOKEN)
    with _environment({}):
        refused = is_refused()
        if refused and source is not None and not mode:
            mode = "token"
            _set({MODE: mode})
            refused = is_refused()
        if refused:
            wrong, hint = "the cluster asks for a token, and you have given none", GIVE_TOKEN
            if mode == "token":
                wrong = f"the cluster doesn't take the token from {source}"
            elif source is not None:
                wrong = "the cluster asks for a token"
                hint = f"leave {MODE}={os.environ[MODE]} out: it keeps back the token from {source}"
            raise ClusterError(f"--address {address}: {wrong}", hint=hint)
        yield mode != "token"


def _connect(address: str) -> None:
    """Let Ray connect to a cluster, briefly: `ray.init` would try for minutes.

    Raises:
        AuthenticationError: the cluster refuses us.
        TimeoutError: whoever listens there doesn't answer.
    """
    from ray.exceptions import RpcError

    raylet: Any = importlib.import_module("ray._raylet")
    try:
        with _environment(dict(FIRST_CONTACT)), _silenced():
            raylet.GcsClient(address=address)
    except RpcError as error:
        raise TimeoutError("it accepts connections, but does not answer as a Ray does") from error


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discard standard error: Ray's core logs there that it was refused."""
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
    """Return where Ray finds the user's token; None where there is none."""
    if os.environ.get(TOKEN, "").strip():
        return TOKEN
    name = os.environ.get(TOKEN_PATH)
    path = Path(name or "~/.ray/auth_token").expanduser()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.read_text().strip():
            return f"{TOKEN_PATH}={name}" if name else str(path)
    return None


def token_file() -> Path:
    """Return the file that holds the user's token. Raises ClusterError where it is in no file."""
    if token_source() == TOKEN:
        hint = f"write it to ~/.ray/auth_token, for you alone to read, and unset {TOKEN}"
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
    # Ray has read its variables when it was imported. First the mode: a thread of a Ray that ends may ask for the token
    # meanwhile, and without one Ray would end this process.
    raylet.Config.initialize("")
    if os.environ.get(MODE, "").lower() != "token" or token_source() is not None:
        raylet.AuthenticationTokenLoader.instance().reset_cache()
