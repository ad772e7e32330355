"""cluster.yaml and cluster-local.yaml are what Ray's cluster launcher takes, and open nothing to the world."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
NAMES = ("cluster.yaml", "cluster-local.yaml")


def loaded(name: str) -> dict[str, Any]:
    cluster: dict[str, Any] = yaml.safe_load((REPOSITORY / name).read_text())
    return cluster


@pytest.fixture
def aws() -> dict[str, Any]:
    return loaded("cluster.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_ray_accepts_the_cluster_file(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(loaded(name)))


@pytest.mark.parametrize("name", NAMES)
def test_no_command_listens_to_the_world(name: str) -> None:
    cluster = loaded(name)
    assert "0.0.0.0" not in (REPOSITORY / name).read_text()
    assert any("--dashboard-host=127.0.0.1" in command for command in cluster["head_start_ray_commands"])
    assert "security_group" not in cluster["provider"]


@pytest.mark.parametrize("name", NAMES)
def test_every_start_of_ray_asks_for_the_token_which_every_node_is_given(name: str) -> None:
    cluster = loaded(name)
    assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    starts = [
        command
        for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"])
        for command in commands
        if "ray start" in command
    ]
    assert len(starts) == 2
    assert all(re.search(r"RAY_AUTH_MODE=token (\S+=\S+ )*~/venv/bin/ray start", command) for command in starts)
    assert any("RAY_AUTH_MODE=token" in c and ".bashrc" in c for c in cluster["setup_commands"])
    assert "chmod 700 ~/.ray && chmod 600 ~/.ray/auth_token" in cluster["setup_commands"]


@pytest.mark.parametrize("name", NAMES)
def test_the_head_alone_has_mlflow_and_tells_studies_where(name: str) -> None:
    cluster = loaded(name)
    assert cluster["head_start_ray_commands"][-1] == "~/venv/bin/python -m raypar.track.server"
    assert any("MLFLOW_TRACKING_URI=http://127.0.0.1:5000" in c for c in cluster["head_setup_commands"])
    assert not any("mlflow" in c.lower() for c in [*cluster["setup_commands"], *cluster["worker_start_ray_commands"]])


@pytest.mark.parametrize("name", NAMES)
def test_every_node_installs_raypar_from_the_repository(name: str) -> None:
    cluster = loaded(name)
    assert cluster["file_mounts"]["~/raypar"] == "."
    for commands, package in (
        ("setup_commands", "~/raypar[train,client]"),
        ("head_setup_commands", "~/raypar[cluster]"),
    ):
        (installed,) = [c for c in cluster[commands] if "pip install" in c]
        words = shlex.split(installed)
        assert package in words
        assert f"'{package}" not in installed  # a shell would leave a ~ in quotes as it is
    assert "docker" not in cluster


def test_the_head_trains_nothing_and_workers_come_with_and_without_gpu(aws: dict[str, Any]) -> None:
    types = aws["available_node_types"]
    assert types[aws["head_node_type"]]["resources"]["CPU"] == 0
    workers = {name: t for name, t in types.items() if name != aws["head_node_type"]}
    assert {bool(t["resources"].get("GPU")) for t in workers.values()} == {True, False}


def test_every_worker_type_is_bounded_and_none_costs_while_idle(aws: dict[str, Any]) -> None:
    for node_type in aws["available_node_types"].values():
        assert node_type["min_workers"] == 0
        assert 0 <= node_type["max_workers"] <= aws["max_workers"]
    assert aws["idle_timeout_minutes"] > 0
    assert not aws["provider"]["cache_stopped_nodes"]
