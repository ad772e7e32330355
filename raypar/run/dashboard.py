"""The dashboard of a cluster's head: its address, and the way in."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from raypar.errors import ClusterError, cut, shortened
from raypar.masking import masked
from raypar.run.authentication import admitted

TUNNEL_HINT = (
    "the dashboard listens on the head alone: `ray attach cluster.yaml -p 8265` or "
    "`ssh -N -L 8265:127.0.0.1:8265 HEAD` brings it to http://127.0.0.1:8265"
)
OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray would take them instead of what it is given

TALKATIVE = (  # of every upload, and of the end
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)


def is_dashboard(address: str | None) -> bool:
    """Whether it is the address of a dashboard, and not of a Ray."""
    return address is not None and address.startswith(("http://", "https://"))


def check_dashboard(address: str) -> None:
    """Raises ClusterError for what is no address of a dashboard; looks for none."""
    hint = "write http://127.0.0.1:8265"
    if not is_dashboard(address):
        raise ClusterError(f"--address {shortened(masked(address))}: is no dashboard, http://host:port", hint=hint)
    try:
        parts = urlsplit(address)
        is_one = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_one = False
    if not is_one or parts.path.strip("/") or parts.query or parts.fragment:
        raise ClusterError(f"--address {shortened(masked(address))}: is no http://host:port", hint=hint)
    if parts.username is not None or parts.password is not None:
        what = "is no place for a password, since command lines can be seen"
        raise ClusterError(
            f"--address {masked(address)}: {what}", hint="give the cluster's token in RAY_AUTH_TOKEN_PATH"
        )


@contextlib.contextmanager
def job_client(address: str, notice: Callable[[str], object]) -> Iterator[Any]:
    """Ray's client for the jobs of the cluster whose dashboard is at the address.

    Args:
        notice: gets what there is to say about the cluster.

    Raises:
        ClusterError: there is none, or it doesn't take us.
    """
    check_dashboard(address)
    try:
        import aiohttp  # noqa: F401
        import requests  # noqa: F401
        from ray.job_submission import JobSubmissionClient  # noqa: F401
    except ImportError as error:
        hint = "pip install 'raypar[client]'"
        raise ClusterError(f"--address {address}: {error.name} is missing here", hint=hint) from None
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    with admitted(address, _refuses) as takes_everybody:
        try:
            client = _client(address)
        except Exception as error:
            raise ClusterError(
                f"no Ray dashboard at --address {address}: {cut(str(error))}", hint=TUNNEL_HINT
            ) from error
        if takes_everybody:
            notice(
                f"the Ray at {address} runs the code of whoever reaches it: it asks for no token "
                "(start it with RAY_AUTH_MODE=token)"
            )
        yield client


def _refuses(address: str) -> bool:
    from ray.exceptions import AuthenticationError

    try:
        _client(address).list_jobs()
    except AuthenticationError:
        return True
    except Exception:
        return False  # something else is wrong, which is told when we connect
    return False


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    hidden = {name: os.environ.pop(name) for name in OVERRIDES if name in os.environ}
    try:
        return JobSubmissionClient(address)
    finally:
        os.environ.update(hidden)
