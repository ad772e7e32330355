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
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raypar.errors import ClusterError

MODE, TOKEN, TOKEN_PATH = VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
GIVE_TOKEN = (
    "`ray get-auth-token` on the cluster's head shows it; give it in RAY_AUTH_TOKEN, in a file that "
    "RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token"
)


@contextlib.contextmanager
def own_token() -> Iterator[Path]:
    """Make a random token for a Ray that this process starts; its processes inherit the path, not the token.

    What the user has set for a cluster is put aside meanwhile. Yields the folder of the token, which only the user can
    look into; it is removed at the end.
    """
    folder = Path(tempfile.mkdtemp(prefix="raypar-"))  # 0700
    path = folder / "token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        with _environment({MODE: "token", TOKEN: None, TOKEN_PATH: str(path)}):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def admitted(address: str, refuses: Callable[[str], bool] | None = None) -> Iterator[bool]:
    """Let Ray calls inside connect to the cluster at the address, with the user's token where it asks for one.

    Args:
        address: ``host:port``, where somebody listens.
        refuses: whether the cluster refuses us for lack of the right token; None: tried as Ray itself does.

    Yields whether the cluster takes everybody, without a token.

    Raises:
        ClusterError: it refuses us.
    """
    refuses = refuses or _refuses
    mode = os.environ.get(MODE, "").lower()
    source = token_source()
    if mode == "token" and source is None:
        # Ray would end this process.
        what = f"{MODE}=token asks for a token, and there is none"
        if os.environ.get(TOKEN_PATH):
            what = f"{TOKEN_PATH}={os.environ[TOKEN_PATH]}: there is no token in it"
        raise ClusterError(f"--address {address}: {what}", hint=GIVE_TOKEN)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment({}))
        refused = refuses(address)
        if refused and source is not None and not mode:
            stack.enter_context(_environment({MODE: "token"}))
            refused, mode = refuses(address), "token"
        if refused and mode == "token":
            raise ClusterError(
                f"--address {address}: the cluster doesn't take the token from {source}", hint=GIVE_TOKEN
            )
        if refused:
            if source is not None:
                hint = f"leave {MODE}={os.environ[MODE]} out: it keeps back the token from {source}"
                raise ClusterError(f"--address {address}: the cluster asks for a token", hint=hint)
            raise ClusterError(
                f"--address {address}: the cluster asks for a token, and you have given none", hint=GIVE_TOKEN
            )
        yield mode != "token"


def token_source() -> str | None:
    """Return where Ray finds the user's token; None where there is none."""
    if os.environ.get(TOKEN, "").strip():
        return TOKEN
    path = os.environ.get(TOKEN_PATH)
    if path:
        return f"{TOKEN_PATH}={path}" if _has_text(Path(path).expanduser()) else None
    default = Path("~/.ray/auth_token").expanduser()
    return str(default) if _has_text(default) else None


def _has_text(path: Path) -> bool:
    try:
        return bool(path.read_text().strip())
    except (OSError, UnicodeDecodeError):
        return False


@contextlib.contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    """Change Ray's variables (None: unset); restore them at the end."""
    before = {name: os.environ.get(name) for name in VARIABLES}
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


def _refuses(address: str) -> bool:
    """Return whether the cluster refuses us for lack of the right token; `ray.init` would try for half a minute."""
    from ray.exceptions import AuthenticationError

    raylet: Any = importlib.import_module("ray._raylet")
    try:
        raylet.GcsClient(address=address)
    except AuthenticationError:
        return True
    except Exception:
        return False  # something else is wrong, which `ray.init` will show
    return False
