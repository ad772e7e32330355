"""README: short, and its install commands name what exists; its study is run in tests/real/test_readme.py."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short():
    assert len(README.splitlines()) <= 130


def test_it_installs_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {name for group in re.findall(r"'\.\[([\w,]+)\]'", README) for name in group.split(",")}
    assert named and named <= set(project["optional-dependencies"])


@pytest.mark.parametrize("command", re.findall(r"^(uv (?:tool install)|uvx) (.*?)(?:  +#.*)?$", README, re.MULTILINE))
def test_its_flags_of_uv_exist(command):
    if shutil.which("uv") is None:
        pytest.skip("uv is not here: its flags can't be looked up")
    verb = command[0].split() if command[0] != "uvx" else ["uv", "tool", "run"]
    shown = subprocess.run([*verb, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(flag in shown for flag in re.findall(r"--[\w-]+", command[1]))
