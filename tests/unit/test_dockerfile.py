"""The Dockerfile keeps to the rules of its linter and builds what the pods of KubeRay need. It is not built here."""

import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from raypar.run.kubernetes import USER

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = REPOSITORY / "Dockerfile"
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def instructions():
    """Return the Dockerfile's instructions: word and rest."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line.strip()]


def of(word):
    return [rest for name, rest in instructions() if name == word]


def test_the_linter_finds_nothing():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_is_pinned_and_nothing_is_cached():
    (base,) = of("FROM")
    defaults = dict(each.split("=", 1) for each in of("ARG"))
    assert defaults["TORCH"] == "cpu"
    image = re.sub(r"\$\{(\w+)\}", lambda name: defaults[name[1]], base)
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", image)
    for line in of("RUN"):
        assert "apt-get install" not in line or "rm -rf /var/lib/apt/lists/*" in line
        assert "pip install" not in line or "--no-cache-dir" in line


def test_the_image_runs_as_a_user_whose_group_owns_the_volumes_of_kubernetes():
    assert of("USER")[-1] == str(USER) and f"--uid {USER} --user-group" in " ".join(of("RUN"))
    assert all(f"--chown={USER}:{USER}" in line for line in of("COPY"))


def test_torch_is_in_a_layer_below_the_code():
    lines = [f"{word} {rest}" for word, rest in instructions()]
    order = [
        next(i for i, line in enumerate(lines) if part in line)
        for part in (
            "torchvision",
            "COPY --chown=1000:1000 pyproject.toml",
            ".[train",
            "1000 raypar raypar",
            "--no-deps",
        )
    ]
    assert order == sorted(order)
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", " ".join(of("RUN")))
    assert "cluster" in extras.split(",") and "client" in "".join(EXTRAS["cluster"]), "the dashboard of the head"


@pytest.mark.parametrize(
    ("torch", "index"), [("cpu", ["https://download.pytorch.org/whl/cpu"]), ("cuda", []), ("x", None)]
)
def test_the_build_argument_chooses_the_index_of_torch(tmp_path, torch, index):
    (tmp_path / "pip").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    (line,) = (line for line in of("RUN") if "torchvision" in line)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TORCH": torch}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], env=env, capture_output=True, text=True)
    if index is None:
        assert done.returncode == 1 and "write cpu or cuda" in done.stderr
        return
    words = done.stdout.splitlines()
    assert words == ["install", "--no-cache-dir", *(["--index-url", *index] if index else []), *EXTRAS["train"][:2]]


def test_what_the_image_copies_is_not_ignored_and_the_rest_is():
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    sources = [word for line in of("COPY") for word in line.split()[1:-1]]
    assert sorted(sources) == sorted(kept) and all((REPOSITORY / source).exists() for source in sources)
    assert any(fnmatch("raypar/x/__pycache__", pattern.replace("**/", "*/")) for pattern in ignored[2:])
