"""Tokens of a private Ray and of clusters, and the messages of a refusal. No Ray is started here."""

import contextlib
import os
import stat
import sys
from pathlib import Path

import pytest
from ray.exceptions import AuthenticationError

from raypar import scratch
from raypar.errors import ClusterError
from raypar.run import private_ray
from raypar.run.auth import MODE, TOKEN, TOKEN_PATH, VARIABLES, admitted, own_token, token_source
from raypar.scratch import remove_abandoned


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        pytest.skip("a Ray in this process would lose its token, and end the process")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def in_file(path, text="t" * 20):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_private_rays_token_is_random_and_private(monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN, "the cluster's")
    monkeypatch.setenv(MODE, "disabled")
    tokens = set()
    for _ in range(2):
        with own_token(tmp_path):
            (file,) = tmp_path.iterdir()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            tokens.add(token := file.read_text())
            assert len(token) == 64 and token not in os.environ.values()
            assert os.environ[MODE] == "token" and os.environ[TOKEN_PATH] == str(file) and TOKEN not in os.environ
        assert not file.exists()
    assert len(tokens) == 2
    assert (os.environ[TOKEN], os.environ[MODE]) == ("the cluster's", "disabled")
    assert TOKEN_PATH not in os.environ


@pytest.mark.parametrize(("error", "is_kept"), [(None, False), (KeyboardInterrupt, False), (ClusterError, True)])
def test_a_private_rays_folder_is_private_and_kept_after_a_loss(error, is_kept, monkeypatch, tmp_path):
    parent = tmp_path / "a name too long for sockets"
    monkeypatch.setenv("RAY_TMPDIR", str(parent))
    most = len(str(parent / "raypar-12345678" / "")) + 1 + private_ray.RAY_SOCKET_LENGTH
    monkeypatch.setattr(scratch, "MAX_SOCKET_LENGTH", most)
    with contextlib.suppress(KeyboardInterrupt, ClusterError), private_ray.private_folder() as folder:
        assert folder.parent == parent and stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "ray").mkdir()
        if error is not None:
            raise error("lost")
    assert (folder / "ray").is_dir() == is_kept
    remove_abandoned(parent)  # a folder of this process isn't abandoned
    assert (folder / "ray").is_dir() == is_kept
    monkeypatch.setattr(scratch, "MAX_SOCKET_LENGTH", most - 1)
    with private_ray.private_folder() as folder:
        assert folder.parent == Path("/tmp")


def test_the_token_is_found_in_rays_order(monkeypatch, tmp_path):
    assert token_source() is None
    default = in_file(tmp_path / ".ray" / "auth_token")
    assert token_source() == str(default)
    named = in_file(tmp_path / "mine")
    monkeypatch.setenv(TOKEN_PATH, str(named))
    assert token_source() == f"{TOKEN_PATH}={named}"
    monkeypatch.setenv(TOKEN, "t" * 20)
    assert token_source() == TOKEN
    monkeypatch.delenv(TOKEN)
    named.write_text("\n")  # Ray doesn't look further
    assert token_source() is None


class Gate:
    """Stands in for a cluster that may require a token and reject it. `asked` lists the mode of each connection."""

    def __init__(self, *, wants, takes=True):
        self.wants, self.takes = wants, takes
        self.asked: list[str | None] = []

    def __call__(self, address):
        self.asked.append(os.environ.get(MODE))
        if self.wants and not (self.asked[-1] == "token" and self.takes):
            raise AuthenticationError("no")


@pytest.mark.parametrize(("wants", "modes"), [(False, [None]), (True, [None, "token"])])
def test_the_token_is_sent_only_if_the_cluster_requires_it(wants, modes, tmp_path):
    in_file(tmp_path / ".ray" / "auth_token")
    gate = Gate(wants=wants)
    with admitted("head:6379", gate) as takes_everybody:
        assert takes_everybody is not wants and os.environ.get(MODE) == modes[-1]
    assert MODE not in os.environ and gate.asked == modes


WRONG = {TOKEN: "wrong" * 5}


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({}, ("requires a token, and none was found", "RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")),
        (WRONG, ("rejects the token from RAY_AUTH_TOKEN", "ray get-auth-token")),
        (WRONG | {MODE: "token"}, ("rejects the token from RAY_AUTH_TOKEN",)),
        (WRONG | {MODE: "disabled"}, ("requires a token", "unset RAY_AUTH_MODE=disabled")),
        ({MODE: "token"}, ("RAY_AUTH_MODE=token needs a token, and there is none", "ray get-auth-token")),
        ({MODE: "token", TOKEN_PATH: "/nowhere"}, ("RAY_AUTH_TOKEN_PATH=/nowhere: the file has no token",)),
    ],
)
def test_a_refusal_has_the_reason_and_the_fix(environment, parts, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError) as refused, admitted("head:6379", Gate(wants=True, takes=False)):
        pass
    assert all(part in str(refused.value) for part in ("--address head:6379", *parts))
    assert "wrongwrong" not in str(refused.value)
    assert {name: os.environ[name] for name in VARIABLES if name in os.environ} == environment
