"""cluster.yaml is what Ray's cluster launcher takes, and opens nothing to the world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).parents[2] / "cluster.yaml"


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def test_ray_accepts_the_cluster_file(cluster: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(cluster))


def test_no_command_listens_to_the_world(cluster: dict[str, Any]) -> None:
    assert "0.0.0.0" not in FILE.read_text()
    assert any("--dashboard-host=127.0.0.1" in command for command in cluster["head_start_ray_commands"])
    assert "security_group" not in cluster["provider"]


def test_the_head_trains_nothing_and_workers_come_with_and_without_gpu(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    assert types[cluster["head_node_type"]]["resources"]["CPU"] == 0
    workers = {name: t for name, t in types.items() if name != cluster["head_node_type"]}
    assert {bool(t["resources"].get("GPU")) for t in workers.values()} == {True, False}


def test_every_worker_type_is_bounded_and_none_costs_while_idle(cluster: dict[str, Any]) -> None:
    for node_type in cluster["available_node_types"].values():
        assert node_type["min_workers"] == 0
        assert 0 <= node_type["max_workers"] <= cluster["max_workers"]
    assert cluster["idle_timeout_minutes"] > 0
    assert not cluster["provider"]["cache_stopped_nodes"]


def test_every_node_installs_raypar_from_the_repository(cluster: dict[str, Any]) -> None:
    assert cluster["file_mounts"] == {"~/raypar": "."}
    assert any("pip install" in c and "~/raypar" in c for c in cluster["setup_commands"])
    assert "docker" not in cluster
