"""Git's state in tags; edits of a study's files that count as a change of code, and others."""

import subprocess

import pytest

from raypar.provenance import changed_files, git_state, source_files

STUDY = '''
"""What it asks."""
from raypar import Study, Workload, grid
import nets
from nets.layers import hidden_layer as layer
from readers import read

WIDTH = 64  # of the hidden layer


def model(config):
    """Builds it."""
    import torch

    return torch.nn.Sequential(layer(WIDTH), nets.head())


study = Study(
    workload=Workload(name="w", model=model, data=lambda config: read(config), description="mine"),
    space={"batch_size": grid(32, 64)},
    num_repeats=2,
)
'''
FILES = {
    "nets/__init__.py": "from .heads import head\n",
    "nets/heads.py": "from . import layers\n\ndef head():\n    return layers.linear(10)\n",
    "nets/layers.py": "def linear(n):\n    return n\n\ndef hidden_layer(n):\n    return linear(n)\n",
    "readers.py": "import numpy as np\n\ndef read(config):\n    from tables import load\n    return np.zeros(load())\n",
    "tables.py": "import json, sklearn.datasets\n\ndef load():\n    return 3\n",
    "unrelated.py": "import scipy\n",
}
# Older schemes of digests.
OLD = ({"s.py: model": "0123456789ab", "s.py: study": "ba9876543210"}, {"s.py": "0123456789ab"})


def code(folder, *changes, study=STUDY):
    """Write the study after replacing (file, old, new), and return its digests."""
    texts = {"s.py": study, **FILES}
    for file, old, new in changes:
        assert texts[file].count(old) == 1
        texts[file] = texts[file].replace(old, new)
    for file, text in texts.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    return dict(source_files(folder / "s.py", texts["s.py"]).digests)


def test_imports_are_followed_through_the_folder(tmp_path):
    files = ["nets/__init__.py", "nets/heads.py", "nets/layers.py", "readers.py", "s.py", "tables.py"]
    assert list(code(tmp_path)) == files
    assert source_files(tmp_path / "s.py", STUDY).packages == ("numpy", "sklearn.datasets", "torch")


BROKEN = ("tables.py", "return 3", "return (3")  # not Python
CHANGES = [
    ("s.py", "WIDTH = 64", "WIDTH = 65"),
    ("s.py", "read(config)", "read({})"),
    ("nets/__init__.py", "head\n", "head\nSEED = 1\n"),
    ("nets/heads.py", "10", "11"),
    BROKEN,
]
# Settings, comments, docstrings and formatting.
NO_CHANGES = [
    ("s.py", "grid(32, 64)", "grid(32, 64, 128)"),
    ("s.py", "num_repeats=2", 'num_repeats=3, baseline={"num_workers": 1}, config={"epochs": 2}'),
    ("s.py", 'description="mine"', 'description="ours"'),
    ("s.py", "WIDTH = 64  # of the hidden layer", "WIDTH = (  64 )"),
    ("s.py", "What it asks.", "What it really asks."),
    ("s.py", "    import torch\n\n    return", "    # as usual\n    import torch\n    return"),
    ("nets/layers.py", "def linear(n):\n", 'def linear(n):\n    """Return n."""\n\n'),
    ("unrelated.py", "scipy", "scipy.stats"),
]


@pytest.mark.parametrize("change", [*CHANGES, *NO_CHANGES])
def test_only_relevant_changes_are_reported(tmp_path, change):
    assert changed_files(code(tmp_path), code(tmp_path, change)) == ((change[0],) if change in CHANGES else ())


def test_a_dropped_import_counts_and_a_broken_module_leaves_others_comparable(tmp_path):
    without = code(tmp_path, ("readers.py", "    from tables import load\n", ""))
    assert changed_files(code(tmp_path), without) == ("readers.py", "tables.py")
    assert changed_files(code(tmp_path, BROKEN), code(tmp_path, BROKEN, ("s.py", "64  #", "65  #"))) == ("s.py",)


@pytest.mark.parametrize("stored", [{}, *OLD, {"s.py": "py3.9:0123456789ab"}])
def test_digests_of_another_scheme_are_not_comparable(tmp_path, stored):
    now = code(tmp_path)
    assert changed_files(stored, now) == () == changed_files(now, stored)


def git(folder, *words):
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-b", "feature/x")
    (tmp_path / "s.py").write_text("study = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e@h", "commit", "-m", "first")
    return tmp_path


def standard(folder):
    """Return MLflow's own tags, by the last word of their names."""
    return {k.removeprefix("mlflow.source.git."): v for k, v in git_state(folder).items() if k.startswith("mlflow.")}


def test_git_is_described_in_the_standard_tags_of_mlflow_too(repository):
    from mlflow.utils import mlflow_tags

    git(repository, "remote", "add", "backup", "https://h/backup.git")
    git(repository, "remote", "add", "origin", "https://h/it.git")
    tags = git_state(repository)
    assert tags[mlflow_tags.MLFLOW_GIT_COMMIT] == tags["git.commit"] and len(tags["git.commit"]) == 40
    assert tags[mlflow_tags.MLFLOW_GIT_BRANCH] == "feature/x"
    assert (tags[mlflow_tags.MLFLOW_GIT_DIRTY], tags["git.dirty"]) == ("false", "no")
    assert tags[mlflow_tags.MLFLOW_GIT_REPO_URL] == "https://h/it.git"
    (repository / "s.py").write_text("study = 2\n")
    assert (standard(repository)["dirty"], git_state(repository)["git.dirty"]) == ("true", "yes")


def test_what_git_does_not_know_has_no_tag(repository, tmp_path_factory):
    git(repository, "checkout", "--detach")
    assert standard(repository).keys() == {"commit", "dirty"}
    empty = tmp_path_factory.mktemp("empty")
    assert git_state(empty) == {}
    git(empty, "init")
    assert git_state(empty) == {}  # no commit yet


@pytest.mark.parametrize(
    ("remote", "shown"),
    [
        ("https://user:pass@h/it.git", "https://h/it.git"),
        ("https://user:p@ss/word@h/it.git", "https://h/it.git"),
        ("https://ghp_0123456789abcdef@h:8443/it.git", "https://h:8443/it.git"),
        ("https://h/it.git?access_token=0123456789", "https://h/it.git?access_token=***"),
        ("ssh://git@h:22/it.git", "ssh://h:22/it.git"),
        ("git@h:org/it.git", "git@h:org/it.git"),
        ("/srv/with space/it.git", "/srv/with space/it.git"),
    ],
)
def test_the_address_of_a_repository_has_no_secret(repository, remote, shown):
    git(repository, "remote", "add", "upstream", remote)
    assert standard(repository)["repoURL"] == shown
