"""Passwords and keys are masked in texts."""

import os

import pytest

from raypar.masking import is_secret, masked, secret_variables


@pytest.fixture(autouse=True)
def no_secret_of_this_machine(monkeypatch):
    for name in secret_variables(os.environ):
        monkeypatch.delenv(name)


SHOWN = {
    "postgresql+psycopg://me:secret@db:5432/x": "postgresql+psycopg://me:***@db:5432/x",
    "redis://:secret@db:6379": "redis://:***@db:6379",
    "at http://me:p@ss/w?rd@head:5000 now": "at http://me:***@head:5000 now",
    "https://ghp_0123456789abcdefghij@github.com/x": "https://***@github.com/x",
    "postgresql://db/x?user=me&password=secret&a=b": "postgresql://db/x?user=me&password=***&a=b",
    "s3://b/k?X-Amz-Date=1&sig=abc": "s3://b/k?X-Amz-Date=1&sig=***",
    "raypar study f.py --tracking-uri 'http://a:b@c'": "raypar study f.py --tracking-uri 'http://a:***@c'",
    "http://u:one@h and http://u:two@h": "http://u:***@h and http://u:***@h",
}
HARMLESS = (
    *("http://head:5000", "http://head:5000/#/experiments/3?to=a@b", "sqlite:////home/me/mlflow.db"),
    *("ssh://git@github.com/x", "no password here: me@example.org", "a.py:12: password=wrong"),
)


@pytest.mark.parametrize(("text", "shown"), [*SHOWN.items(), *((text, text) for text in HARMLESS)])
def test_only_the_password_of_an_address_is_masked(text, shown):
    assert masked(text) == shown
    assert is_secret("ANY_NAME", text) is (text != shown)


SECRETS = (
    *("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "MYSQL_PWD", "OPENAI_API_KEY", "RAY_AUTH_TOKEN"),
    "token",
)
OTHERS = (
    *("PATH", "PWD", "OLDPWD", "HOME", "SSH_AUTH_SOCK", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "LD_PRELOAD"),
    *("TOKENIZERS_PARALLELISM", "RAYPAR_DATA_DIR", "PYTHONPATH", "KEYBOARD", "AWS_WEB_IDENTITY_TOKEN_FILE"),
)


@pytest.mark.parametrize("name", [*SECRETS, *OTHERS])
def test_secret_variables_are_recognised_by_their_names(name):
    assert is_secret(name, "/some/where") is (name in SECRETS)
    assert not is_secret(name, "")


def test_secrets_of_the_environment_are_masked_in_any_text(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("OTHER_TOKEN", "hf_0123456789abc")  # the longer one as a whole
    monkeypatch.setenv("SHORT_KEY", "lr")  # a word
    assert masked("401 for hf_0123456789 or hf_0123456789abc: lr") == "401 for *** or ***: lr"
